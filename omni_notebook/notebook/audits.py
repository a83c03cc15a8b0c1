"""How a cell shows an audit: text, the report, and a still picture."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from omni_notebook import units
from omni_notebook.notebook.results import figure_png
from omni_notebook.verbs.auditing import report
from omni_notebook.verbs.auditing.drawing import MOMENTS, chosen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from omni_notebook.verbs.auditing.record import ProcessLine
    from omni_notebook.verbs.auditing.result import AuditResult

_HATCHES = ("", "///", "..")
_MOST_ROWS = 6


def audit_bundle(result: AuditResult) -> dict[str, Any]:
    """An audit as text, HTML and a still picture."""
    return {
        "text/plain": repr(result),
        "text/html": report.fragment(result),
        "image/png": figure_png(plot_audit(result)),
    }


def plot_audit(result: AuditResult) -> Figure:
    """What each process held before, asleep and awake again, cycle by cycle, beside the first and the last image."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (a heavy import: only when a figure is made)

    processes = chosen(result.cycles)[:_MOST_ROWS]
    pictures = [(name, files[0]) for name, files in result.pictures.items()]
    rows = max(len(processes), 1)
    figure = Figure(figsize=(10, 0.9 + 1.5 * rows), dpi=100, layout="constrained", facecolor="white")
    figure.suptitle(result.headline(), fontsize=10, x=0.01, ha="left")
    grid = figure.add_gridspec(rows, 4)
    for row, lines in enumerate(processes):
        _draw(figure.add_subplot(grid[row, : 4 - len(pictures)]), lines)
    for place, (name, png) in enumerate(pictures):
        _show(figure.add_subplot(grid[:, 4 - len(pictures) + place]), name, png)
    if processes:
        figure.legend(*_handles(), loc="outside lower left", ncols=3, fontsize=8, frameon=False)
    return figure


def _draw(axes: Axes, lines: Sequence[ProcessLine]) -> None:
    most = max((getattr(line, m.field) or 0 for line in lines for m in MOMENTS), default=0)
    unit, name = units.scale(most)
    for place, (moment, hatch) in enumerate(zip(MOMENTS, _HATCHES, strict=True)):
        values = [(getattr(line, moment.field) or 0) / unit for line in lines]
        at = [cycle + (place - 1) * 0.27 for cycle in range(len(lines))]
        axes.bar(at, values, width=0.25, color=moment.colour, hatch=hatch, edgecolor="black", lw=0.4)
    axes.set_xticks(range(len(lines)), [f"cycle {n + 1}" if len(lines) < 8 else str(n + 1) for n in range(len(lines))])
    axes.tick_params(labelsize=8)
    axes.set_ylabel(name, fontsize=8)
    axes.set_title(f"process {lines[0].pid} · {', '.join(lines[0].ranks)}", fontsize=8, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _show(axes: Axes, name: str, png: bytes) -> None:
    from PIL import Image  # noqa: PLC0415  (loaded when used)

    axes.imshow(Image.open(io.BytesIO(png)).convert("RGB"), interpolation="nearest")
    axes.set_title(name, fontsize=8)
    axes.set_axis_off()


def _handles() -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch  # noqa: PLC0415

    looks = zip(MOMENTS, _HATCHES, strict=True)
    patches = [Patch(facecolor=moment.colour, hatch=hatch, edgecolor="black") for moment, hatch in looks]
    return patches, [moment.word for moment in MOMENTS]
