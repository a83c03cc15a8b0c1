"""The dashboard as widgets: core ipywidgets whose texts the sampler's thread sets, and buttons that give orders."""

from __future__ import annotations

import functools
import uuid
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
from IPython.core.getipython import get_ipython
from IPython.display import display

from omni_notebook.notebook.dashboard import looks, parts, pressing, still
from omni_notebook.notebook.dashboard import sampler as sampling
from omni_notebook.notebook.dashboard.kernelwatch import WAITS, watch_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.figure import Figure

    from omni_notebook.notebook.dashboard.drawing import Card, Frame
    from omni_notebook.notebook.dashboard.orders import Press
    from omni_notebook.verbs.engine_api import Engine

_ALIVE = "(the dashboard is live while its kernel runs; below is its last state)"
_ASKED = ("The numbers of the charts as a table", "Why buttons are off")
VIEW = "application/vnd.jupyter.widget-view+json"
_SETTLED_S, _KEEP_MOVED_S, _KEEP_STILL_S = 1.0, 10.0, 30.0
_LIVE = """
.NAME-still { display: none; }
.NAME.jupyter-widgets-disconnected { display: none !important; }
body:has(.NAME.jupyter-widgets-disconnected) .NAME-still { display: block; }
body:has(.NAME.jupyter-widgets-disconnected) .NAME-still::before
  { content: "The kernel has ended; this is the last state that it showed."; font-style: italic; }
"""
"""The widget hides its still picture; once the page marks it as cut off from its kernel, they change places."""
_WRAP = {"display": "flex", "flex_flow": "row wrap", "width": "100%", "overflow": "visible"}


class StageCard(widgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """One stage: what it is, its buttons, and under them what became of the last press."""

    def __init__(self, card: Card, press: Callable[[int, Press], None]) -> None:
        self._text, self._below = widgets.HTML(card.html), widgets.HTML(card.below)
        self._buttons = {
            button.press: widgets.Button(
                description=str(button.press), disabled=not button.enabled, tooltip=button.tooltip
            )
            for button in card.buttons
        }
        for name, button in self._buttons.items():
            order = functools.partial(press, card.stage.stage_id, name)
            button.on_click(lambda _button, order=order: order())
        row = widgets.HBox(list(self._buttons.values()), layout=widgets.Layout(flex_flow="row wrap"))
        layout = widgets.Layout(flex="1 1 420px", max_width="640px", margin="2px 8px 6px 0", padding="6px 8px")
        super().__init__([self._text, row, self._below], layout=layout)
        self.add_class("omni-card")

    def show(self, card: Card) -> None:
        """Another state of the same stage."""
        self._text.value, self._below.value = card.html, card.below
        for button in card.buttons:
            shown = self._buttons[button.press]
            with shown.hold_sync():  # one message for both
                shown.disabled, shown.tooltip = not button.enabled, button.tooltip


class Dashboard(widgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """A live view of one engine; `close()` frees it. Several may look at one engine.

    Attributes:
        frame: what is shown now, and what it was drawn from.
    """

    sampler: sampling.Sampler | None = None
    _pieces: Pieces | None = None

    def __init__(self, engine: Engine) -> None:
        self.sampler = attached = sampling.attach(engine, self._show)
        self.frame = attached.frame
        super().__init__(_view_count=0)
        self.name = f"omni-{uuid.uuid4().hex[:8]}"
        self._watch = watch_kernel()
        self._stills = Stills(f"{self.name}-still")
        self._seen = False
        self.add_class("omni-dashboard")
        self.add_class(self.name)
        self.observe(self._viewed, "_view_count")
        pieces = Pieces(self.frame, self.name, self._press)
        self.children = pieces.children
        self._pieces = pieces

    def _press(self, stage_id: int, press: Press) -> None:
        self._watch.heard()
        if self.sampler is not None:
            pressing.carry_out(self.sampler, stage_id, press)

    def _viewed(self, _change: object) -> None:
        self._watch.heard()
        self._seen = self._seen or bool(self._view_count)

    def _show(self, frame: Frame) -> None:
        """On the sampler's thread, which alone changes what is shown."""
        self.frame = frame
        if self._pieces is None:  # not made yet
            return
        if self._view_count or not self._seen:  # nobody looks at a view that was closed
            self._pieces.show(frame, waits=self._watch.waiting())
        self._stills.keep(frame)

    def close(self) -> None:
        """Free everything: thread, subscription, widgets, the engine; the still pictures stay. Idempotent."""
        watched, self.sampler = self.sampler, None
        if watched is not None:
            watched.fresh()  # what stays shows how things are, not how they were at the last look
            sampling.detach(watched, self._show)
            self._watch.close()
            self._pieces = None
            self._stills.update(self.frame, png=True)
        if self.comm is not None:
            close_tree(self)

    def plot_timeline(self) -> Figure:
        """What the chart shows, as a figure to keep."""
        return still.figure(self.frame)

    def __repr__(self) -> str:
        """The status in text."""
        return still.as_text(self.frame)

    def _repr_mimebundle_(self, **_kwargs: object) -> dict[str, Any]:
        """The widget, and for pages without a kernel text, HTML with a picture, and a figure."""
        return {**self._view(), **still.bundle(self.frame, self._stills.name)}

    def _view(self) -> dict[str, Any]:
        return {VIEW: self.get_view_spec()} if self.comm is not None else {}

    def _ipython_display_(self, **_kwargs: object) -> None:
        """The widget and under it the still picture, which the widget hides as long as it lives."""
        if not hasattr(get_ipython(), "kernel"):
            display({"text/plain": repr(self)}, raw=True)  # type: ignore[no-untyped-call]
            return
        if self.comm is not None:
            display({**self._view(), "text/plain": _ALIVE}, raw=True)  # type: ignore[no-untyped-call]
        self._stills.display(self.frame)


class Stills:
    """A dashboard's still pictures in the cells that showed it; `name` is the class of their outermost element."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._shown: list[Any] = []
        self._opened_s: float | None = None
        self._kept: tuple[object, ...] = ()
        self._facts: tuple[object, ...] = ()
        self._kept_s = self._facts_s = float("-inf")

    def display(self, frame: Frame) -> None:
        """One more, in the cell that runs."""
        data = still.bundle(frame, self.name, png=False)
        self._shown.append(display(data, raw=True, display_id=True))  # type: ignore[no-untyped-call]

    def keep(self, frame: Frame) -> None:
        """Bring them up to date: once what happened has settled, and now and then while things go on."""
        now_s, facts = frame.view.at_s, _facts(frame)
        self._opened_s = now_s if self._opened_s is None else self._opened_s
        if facts != self._facts:
            self._facts, self._facts_s = facts, now_s
        patience_s = min(max((now_s - self._opened_s) / 2, _SETTLED_S), _KEEP_STILL_S)  # a young chart says little
        if facts != self._kept:
            patience_s = 0.0 if now_s - self._facts_s >= _SETTLED_S else _KEEP_MOVED_S
        if frame.last or now_s - self._kept_s >= patience_s:
            self._kept, self._kept_s = facts, now_s
            self.update(frame, png=frame.last)

    def update(self, frame: Frame, *, png: bool) -> None:
        """Bring them up to date now; `png` adds a drawn figure (slow)."""
        if self._shown:
            data = still.bundle(frame, self.name, png=png)
            for shown in self._shown:
                shown.update(data, raw=True)


class Pieces:
    """The widgets of a dashboard, from top to bottom."""

    def __init__(self, frame: Frame, name: str, press: Callable[[int, Press], None]) -> None:
        self._name = name
        style = f"<style>{parts.CSS}\n{_LIVE.replace('NAME', name)}</style>"
        self._notice, self._head = widgets.HTML(""), widgets.HTML(frame.head)
        self._press = press
        self._cards: dict[int, StageCard] = {}
        self._row = widgets.HBox(layout=widgets.Layout(**_WRAP))
        self._show_cards(frame.cards)
        drawn = (frame.chart, frame.reclaimed, frame.host)
        self._chart, self._reclaimed, self._host = (widgets.HTML(self._own(text)) for text in drawn)
        self._devices, self._log = widgets.HTML(frame.devices), widgets.HTML(frame.log)
        self._asked = (widgets.HTML(""), widgets.HTML(""))
        self._accordion = widgets.Accordion(self._asked, titles=_ASKED)
        self.children = (
            widgets.HTML(style, layout=widgets.Layout(display="none")),
            widgets.HBox([self._head, self._notice], layout=widgets.Layout(**_WRAP, grid_gap="0 16px")),
            self._row,
            self._chart,
            self._reclaimed,
            self._host,
            self._devices,
            self._log,
            self._accordion,
        )

    def show(self, frame: Frame, *, waits: bool) -> None:
        """Another frame; widgets whose text is as before send nothing."""
        self._chart.value = self._own(frame.chart)
        self._show_cards(frame.cards)
        self._head.value = frame.head
        self._notice.value = parts.notice(WAITS) if waits else ""
        self._reclaimed.value, self._host.value = self._own(frame.reclaimed), self._own(frame.host)
        self._devices.value, self._log.value = frame.devices, frame.log
        if self._accordion.selected_index is not None:
            self._asked[self._accordion.selected_index].value = (frame.table, frame.reasons)[
                self._accordion.selected_index
            ]()

    def _show_cards(self, cards: Sequence[Card]) -> None:
        """One a stage; a server that was started again may have others."""
        before = self._cards
        self._cards = {
            card.stage.stage_id: before.get(card.stage.stage_id) or StageCard(card, self._press) for card in cards
        }
        if list(self._cards) != list(before):
            self._row.children = tuple(self._cards.values())
            for stage_id in before.keys() - self._cards.keys():
                close_tree(before[stage_id])
        for card in cards:
            self._cards[card.stage.stage_id].show(card)

    def _own(self, drawn: str) -> str:
        """A drawing with names that no other drawing of the page has."""
        return drawn.replace(looks.IDS, f"{self._name}-")


def _facts(frame: Frame) -> tuple[object, ...]:
    """What a still picture must not get wrong."""
    stages = tuple((card.stage.state, card.stage.level, card.stage.pause_state) for card in frame.cards)
    return frame.view.log.count, frame.view.status.closed, stages


def close_tree(widget: widgets.Widget) -> None:
    """Close a widget and everything that belongs to it."""
    for part in list(_parts(widget)):
        close_tree(part)
    if isinstance(widget, Dashboard):
        super(Dashboard, widget).close()
    else:
        widget.close()


def _parts(widget: widgets.Widget) -> Iterator[widgets.Widget]:
    for name in ("children", "layout", "style"):
        found = getattr(widget, name, ())
        yield from found if isinstance(found, tuple) else (found,)
