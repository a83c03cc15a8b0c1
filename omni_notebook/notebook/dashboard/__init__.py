"""The live dashboard: cards and buttons a stage, memory over time, answers; and its still pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.errors import ArgumentError
from omni_notebook.verbs.session import session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from omni_notebook.notebook.dashboard.widget import Dashboard
    from omni_notebook.protocol import OmniACK
    from omni_notebook.verbs.engine_api import Engine

__all__ = ["dashboard", "plot_timeline"]


def dashboard(engine: Engine | None = None) -> Dashboard:
    """Cards, buttons and charts of an engine, live; None = the one that `%omni start` started.

    Shown by a cell that ends with it; `close()` frees it.

    Raises:
        EngineClosedError: no engine is running.
    """
    from omni_notebook.notebook.dashboard.widget import Dashboard  # noqa: PLC0415  (ipywidgets: loaded when used)

    return Dashboard(session().engine if engine is None else engine)


def plot_timeline(source: Dashboard | Sequence[OmniACK] | None = None) -> Figure:
    """Device memory of each rank over time, with sleeps and wakes; of ACKs, the phases that each rank's order took.

    Args:
        source: a dashboard (also a closed one), or ACKs; None = the dashboard that was opened last in this process.

    Raises:
        ArgumentError: None was given and no dashboard was opened.
    """
    from omni_notebook.notebook.dashboard import figures, sampler, still  # noqa: PLC0415  (numpy: loaded when used)

    if source is None:
        frame = sampler.latest_frame()
        if frame is None:
            msg = "there are no samples: open a dashboard first (%omni dashboard), or give ACKs: plot_timeline(acks)"
            raise ArgumentError(msg)
        return still.figure(frame)
    return still.figure(source.frame) if hasattr(source, "frame") else figures.phases_figure(source)
