"""One frame of a dashboard: what every widget of it shows, as strings. Parts whose data stand still are drawn once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_notebook.notebook.dashboard import orders, panels, parts, svg

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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

    def reasons(self) -> str:
        """Why buttons are off, for those who can not point at them."""
        return parts.reasons([button.tooltip for card in self.cards for button in card.buttons if not button.enabled])


class Drawer:
    """Draws frames one after the other; belongs to one thread."""

    def __init__(self) -> None:
        self._chart = ""
        self._chart_of: tuple[object, ...] = ()
        self._chart_s = float("-inf")
        self._cards: dict[int, tuple[tuple[object, ...], Card]] = {}
        self._host = _Kept("host memory", parts.host)
        self._devices = _Kept("the devices", parts.devices)
        self._log = _Kept("the log of answers", parts.log_html)
        self._reclaimed = _Kept("reclaimed memory", parts.reclaimed)

    def draw(self, view: View, *, last: bool = False) -> Frame:
        """The frame of a view."""
        status, log = view.status, view.log
        return Frame(
            view=view,
            last=last,
            head=_tried("the head", lambda: parts.head(status, view.trouble)),
            cards=tuple(self._card(stage, view) for stage in status.stages),
            reclaimed=self._reclaimed.drawn(log, log.count),
            host=self._host.drawn(status.stages, status.stages),
            devices=self._devices.drawn(view.devices, view.devices),
            log=self._log.drawn(log, log.count),
            chart=self._draw_chart(view),
        )

    def _card(self, stage: StageStatus, view: View) -> Card:
        closed, note = view.status.closed, view.notes.get(stage.stage_id, Note())
        facts = stage, closed, note
        known = self._cards.get(stage.stage_id)
        if known is None or known[0] != facts:
            below = _tried("the line", lambda: parts.below(stage, note.text, wrong=note.wrong, closed=closed))
            text = _tried("the stage", lambda: parts.card(stage, closed=closed))
            card = Card(stage, text, orders.buttons(stage, closed=closed), below)
            known = self._cards[stage.stage_id] = facts, card
        return known[1]

    def _draw_chart(self, view: View) -> str:
        shape = (view.window.keys, view.window.values[:, -1:].tobytes(), view.log.count, len(view.window.times) > 1)
        if shape == self._chart_of and 0 <= view.at_s - self._chart_s < REDRAW_S:
            return self._chart
        self._chart_of, self._chart_s = shape, view.at_s
        drawn = _tried("the chart", lambda: svg.chart_html(panels.chart(view.window, view.status, view.log)))
        self._chart = parts.dash(drawn, drawn_ms=round(1e3 * time.time()))
        return self._chart


class _Kept:
    """A part that is drawn again only when what it was drawn from has changed."""

    def __init__(self, name: str, draw: Callable[[Any], str]) -> None:
        self._name = name
        self._draw = draw
        self._facts: object = None
        self._text = ""

    def drawn(self, source: Any, facts: object) -> str:
        """`draw(source)`, made anew where `facts` are others than the last time."""
        if self._facts is None or self._facts != facts:
            self._facts, self._text = facts, _tried(self._name, lambda: self._draw(source))
        return self._text


def _tried(name: str, draw: Callable[[], str]) -> str:
    """A part, or the line that says why it could not be drawn: the others go on."""
    try:
        return draw()
    except Exception as error:  # noqa: BLE001  (what a rank answered may be anything)
        return parts.notice(f"✗ {name} could not be drawn: {type(error).__name__}: {error}")
