"""One frame of a dashboard: what every widget of it shows, as strings. Parts whose data stand still are drawn once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from omni_notebook.notebook.dashboard import orders, panels, parts, svg

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_notebook.notebook.dashboard.devices import Device
    from omni_notebook.notebook.dashboard.log import Log
    from omni_notebook.notebook.dashboard.series import Window
    from omni_notebook.protocol import EngineStatus, StageStatus

REDRAW_S = 1.0
"""A chart whose values stand still moves on its time axis no more often than this."""


class Note(NamedTuple):
    """What became of a press."""

    text: str = ""
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """All that a frame is drawn from; `at_s` is the chart's time of the newest sample."""

    status: EngineStatus
    window: Window
    log: Log
    devices: tuple[Device, ...]
    notes: Mapping[int, Note]
    trouble: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Card:
    """What a stage's card shows."""

    stage: StageStatus
    html: str
    buttons: tuple[orders.Button, ...]
    below: str


@dataclass(frozen=True, slots=True)
class Frame:
    """What a dashboard shows; `view` is what it was drawn from, `last` whether no other follows."""

    view: View
    last: bool
    head: str
    cards: tuple[Card, ...]
    chart: str
    reclaimed: str
    host: str
    devices: str
    log: str

    def table(self) -> str:
        """The charts' numbers as a table; made only when someone looks."""
        return parts.table(self.view.status)


class Drawer:
    """Draws frames one after the other; belongs to one thread."""

    def __init__(self) -> None:
        self._chart = ""
        self._chart_of: tuple[object, ...] = ()
        self._chart_s = float("-inf")
        self._log = self._reclaimed = ""
        self._log_of = -1

    def draw(self, view: View, *, last: bool = False) -> Frame:
        """The frame of a view."""
        closed = view.status.closed
        cards = tuple(
            Card(
                stage,
                parts.card(stage, closed=closed),
                orders.buttons(stage, closed=closed),
                parts.below(stage, note.text, wrong=note.wrong, closed=closed),
            )
            for stage in view.status.stages
            for note in (view.notes.get(stage.stage_id, Note()),)
        )
        if view.log.count != self._log_of:
            self._log_of = view.log.count
            self._log, self._reclaimed = parts.log_html(view.log), parts.reclaimed(view.log)
        self._draw_chart(view)
        return Frame(
            view,
            last,
            parts.head(view.status, view.trouble),
            cards,
            self._chart,
            self._reclaimed,
            parts.host(view.status),
            parts.devices(view.devices),
            self._log,
        )

    def _draw_chart(self, view: View) -> None:
        shape = (view.window.keys, view.window.values[:, -1:].tobytes(), view.log.count, len(view.window.times) > 1)
        if shape == self._chart_of and 0 <= view.at_s - self._chart_s < REDRAW_S:
            return
        self._chart_of, self._chart_s = shape, view.at_s
        self._chart = parts.dash(svg.chart_html(panels.chart(view.window, view.status, view.log)))
