"""What ranks answered and how stages moved, newest kept: the ACK log, and the marks in the chart. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from omni_notebook.protocol import AckEvent, LinkEvent, MemoryState, PauseState, StateEvent

if TYPE_CHECKING:
    from omni_notebook.protocol import Event, OmniACK

KEPT_ORDERS = 64
KEPT_ACKS = 4096
RESTARTS = "restarts"
Place = tuple[int, int, int]
"""stage id, replica, rank"""


def place_of(ack: OmniACK) -> Place:
    """Whose answer it is."""
    return ack.stage_id, ack.metadata.get("replica") or 0, ack.rank


def _process_of(ack: OmniACK) -> tuple[object, ...]:
    pid = ack.metadata.get("pid")
    return place_of(ack) if pid is None else (pid, ack.metadata.get("device"))


def _without_residual(ack: OmniACK) -> OmniACK:
    return replace(ack, metadata={**ack.metadata, "residual_bytes": None})


@dataclass(slots=True)
class Answered:
    """One order ("sleep" or "wake") and the ranks' answers so far; `at_s` is the chart's time, `time_s` the wall's."""

    order: str
    time_s: float
    at_s: float
    acks: list[OmniACK] = field(default_factory=list)

    @property
    def level(self) -> int | None:
        """The level that a sleep reached."""
        return next((ack.metadata.get("level") for ack in self.acks if ack.metadata.get("level")), None)

    @property
    def title(self) -> str:
        """`sleep L2`, `wake`."""
        return f"{self.order} L{self.level}" if self.order == "sleep" and self.level else self.order

    @property
    def noop(self) -> bool:
        """Whether nothing had to be done."""
        return all(ack.metadata.get("noop") for ack in self.acks)


@dataclass(frozen=True, slots=True)
class Moved:
    """A stage failed, was restarted, paused or opened; without a stage: the way to a server broke, or is there."""

    time_s: float
    at_s: float
    stage_id: int | None
    words: str
    failed: bool


class Log:
    """Takes every ACK and state change; keeps the newest, and each rank's last answer."""

    def __init__(self) -> None:
        self.count = 0
        """Events taken so far; it changes whenever something here does."""
        self.moves: deque[Moved] = deque(maxlen=KEPT_ORDERS)
        self._orders: OrderedDict[str, Answered] = OrderedDict()
        self._last: dict[Place, OmniACK] = {}
        self._last_sleep: dict[Place, OmniACK] = {}
        self._since: dict[Place, str] = {}
        self._before: dict[int, StateEvent] = {}
        self._n_acks = 0

    @property
    def orders(self) -> list[Answered]:
        """The newest orders, newest last."""
        return list(self._orders.values())

    @property
    def last_acks(self) -> list[OmniACK]:
        """Each rank's last answer to an order that moved something, in order of ranks."""
        return [self._last[place] for place in sorted(self._last)]

    @property
    def last_sleeps(self) -> list[OmniACK]:
        """Each rank's last answer to a sleep that moved something, in order of ranks; a wake does not take it away.

        What a process held is left out of an answer where another rank of it has answered a later sleep.
        """
        newest = {_process_of(ack): ack.task_id for ack in self._last_sleep.values()}
        found = (self._last_sleep[place] for place in sorted(self._last_sleep))
        return [ack if newest[_process_of(ack)] == ack.task_id else _without_residual(ack) for ack in found]

    def since(self, ack: OmniACK) -> str:
        """What has happened to a rank since its last sleep: "since woken", "since restarted", or nothing."""
        return self._since.get(place_of(ack), "")

    def take(self, event: Event, at_s: float) -> None:
        """Take an event that arrived at `at_s` of the chart's clock; samples and requests are not kept."""
        if isinstance(event, LinkEvent):
            self._link(event, at_s)
        elif isinstance(event, AckEvent):
            self._answer(event, at_s)
        elif isinstance(event, StateEvent):
            self._move(event, at_s)
        else:
            return
        self.count += 1

    def _link(self, event: LinkEvent, at_s: float) -> None:
        self.moves.append(Moved(event.time_s, at_s, None, event.reason, failed=not event.connected))
        if event.other:  # what its ranks answered is nothing of this one's
            for known in (self._last, self._last_sleep, self._since, self._before):
                known.clear()

    def _answer(self, event: AckEvent, at_s: float) -> None:
        known = self._orders.get(event.ack.task_id)
        if known is None:
            known = self._orders[event.ack.task_id] = Answered(event.order, event.time_s, at_s)
        known.acks.append(event.ack)
        if not event.ack.metadata.get("noop"):
            self._last[place_of(event.ack)] = event.ack
            self._note_sleep(event)
        self._n_acks += 1
        while len(self._orders) > 1 and (len(self._orders) > KEPT_ORDERS or self._n_acks > KEPT_ACKS):
            _, oldest = self._orders.popitem(last=False)
            self._n_acks -= len(oldest.acks)

    def _note_sleep(self, event: AckEvent) -> None:
        place = place_of(event.ack)
        if event.order == "sleep":
            if place in self._last_sleep and event.ack.ok and event.ack.metadata.get("host_freed_bytes"):
                return  # level 1 to 2: only its copy went, what it gave back before stands
            self._last_sleep.pop(place, None)
            self._last_sleep[place] = event.ack  # the newest stands last
            self._since.pop(place, None)
        elif event.ack.ok:
            self._since[place] = "since woken"

    def _move(self, event: StateEvent, at_s: float) -> None:
        words = _words(event, self._before.get(event.stage_id))
        if words == RESTARTS:
            self._since.update(
                dict.fromkeys((p for p in self._last_sleep if p[0] == event.stage_id), "since restarted")
            )
        self._before[event.stage_id] = event
        if words:
            failed = words.startswith("FAILED") or event.pause_state == PauseState.PAUSE_FAILED
            self.moves.append(Moved(event.time_s, at_s, event.stage_id, words, failed))


def _words(event: StateEvent, before: StateEvent | None) -> str:
    """What happened, where no ACK tells it."""
    if event.state == MemoryState.FAILED and (before is None or before.state != MemoryState.FAILED):
        return f"FAILED: {event.reason}"
    if event.state == MemoryState.NEEDS_WEIGHTS and "failed" in event.reason:
        return event.reason
    if event.reason == "restart":
        return RESTARTS
    if event.reason == "loaded" or event.reason.startswith("weights "):
        return f"{event.reason}, {event.state}"
    paused = PauseState.OPEN if before is None else before.pause_state
    if event.pause_state in {paused, PauseState.PAUSING}:
        return ""
    return event.reason or str(event.pause_state)
