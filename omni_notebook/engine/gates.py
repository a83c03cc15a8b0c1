"""The two gates in front of `generate`: the pause gate (global) and the sleep gate (a stage)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from omni_notebook.errors import AsleepError, EngineClosedError, OmniError, PausedError
from omni_notebook.protocol import MemoryState, PauseState
from omni_notebook.stages.state_table import Action, Order, decide, refusal
from omni_notebook.stages.waiting import Deadline, Signal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.stages.waiting import CancelToken

_MOVING = frozenset({MemoryState.FALLING_ASLEEP, MemoryState.WAKING})


class Gated(Protocol):
    """What a gate must know of a stage, of whichever engine."""

    @property
    def stage_id(self) -> int:
        """Its place."""

    @property
    def state(self) -> MemoryState:
        """Where its memory is."""

    @property
    def level(self) -> int | None:
        """How deep it sleeps."""

    @property
    def pause_state(self) -> PauseState:
        """Whether it takes part in a pause."""

    @property
    def pause_mode(self) -> str | None:
        """In which mode."""

    @property
    def recoverable(self) -> bool:
        """Whether a path has its weights."""

    @property
    def arriving(self) -> bool:
        """Whether those who wait for its wake may begin already."""


class Gates:
    """Admits requests; closed while a stage is paused, or while a stage on the request's route is not awake.

    `way_out`: see `state_table.refusal`.
    """

    def __init__(self, stages: Sequence[Gated], way_out: str | None = None) -> None:
        self._stages = stages
        self._way_out = way_out
        self._changed = Signal()
        self.waiting: Counter[int] = Counter()
        self.first: Counter[int] = Counter()
        self.closed = False

    def notify(self) -> None:
        """A stage's state changed."""
        self._changed.notify()

    @property
    def paused(self) -> bool:
        """Whether the pause gate is closed."""
        return any(stage.pause_state != PauseState.OPEN for stage in self._stages)

    def open_for(self, route: Sequence[int]) -> bool:
        """Whether a request on this route may begin now, as far as that shows at a glance."""
        awake = all(self._stages[number].state == MemoryState.AWAKE for number in route)
        return awake and not self.paused and not self.closed

    async def admit(self, route: Sequence[int], timeout_s: float, token: CancelToken | None = None) -> None:
        """Return once both gates are open; no await lies between the look and the return.

        Raises:
            PausedError, AsleepError: still closed after `timeout_s` (0 = do not wait).
            NeedsWeightsError, StageFailedError: waiting would not help.
            EngineClosedError: the engine was shut down.
            OrderCancelled: `token` was cancelled while it waited.
        """
        error = self._closed_by(route)
        if error is None:
            return
        self._raise_if_final(error)
        self.waiting.update(route)
        self.first[route[0]] += 1
        waits = timeout_s > 0
        try:
            opened = await self._changed.until(lambda: self._settled(route, waits=waits), Deadline(timeout_s), token)
        finally:
            self.waiting.subtract(route)
            self.first[route[0]] -= 1
        error = self._closed_by(route, waits=waits)
        if error is None:
            return
        self._raise_if_final(error)
        if opened or timeout_s == 0:
            raise error
        error.args = (f"{error}. The request waited {timeout_s:g} s (admission_timeout)",)
        raise error

    def _settled(self, route: Sequence[int], *, waits: bool) -> bool:
        error = self._closed_by(route, waits=waits)
        return error is None or not isinstance(error, PausedError | AsleepError)

    @staticmethod
    def _raise_if_final(error: OmniError) -> None:
        if not isinstance(error, PausedError | AsleepError):
            raise error

    def _closed_by(self, route: Sequence[int], *, waits: bool = False) -> OmniError | None:
        """The error that names what closes the gates, or None; what is final comes before what may pass.

        A stage whose memory arrives is open to those who have waited for it.
        """
        if self.closed:
            return EngineClosedError("the engine was shut down; start a new one")
        stages = [self._stages[i] for i in route]
        closed = [s for s in stages if not (waits and s.arriving and s.state == MemoryState.WAKING)]
        errors = [e for e in (_stage_error(stage, self._way_out) for stage in closed) if e is not None]
        final = next((e for e in errors if not isinstance(e, AsleepError)), None)
        return final or self._pause_error() or next(iter(errors), None)

    def _pause_error(self) -> PausedError | None:
        held = [stage for stage in self._stages if stage.pause_state != PauseState.OPEN]
        if not held:
            return None
        names = ", ".join(f"stage {s.stage_id} {s.pause_state} ({s.pause_mode})" for s in held)
        return PausedError(f"admission is closed by a pause: {names}; call resume_generation() to open it")


def _stage_error(stage: Gated, way_out: str | None) -> OmniError | None:
    if stage.state in _MOVING:
        return AsleepError(f"stage {stage.stage_id} is {stage.state}; wait for it, or call wake_up([{stage.stage_id}])")
    action = decide(Order.GENERATE, stage.state, stage.level)
    if action == Action.RUN:
        return None
    if action == Action.REFUSE:
        return refusal(
            Order.GENERATE, stage.stage_id, stage.state, stage.level, reload=stage.recoverable, way_out=way_out
        )
    level = f" (level {stage.level})" if stage.level else ""
    return AsleepError(f"stage {stage.stage_id} is {stage.state}{level}; call wake_up([{stage.stage_id}]) to open it")
