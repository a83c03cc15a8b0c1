"""Which button may be pressed in which state, and why not: the engine's own table, in words. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from omni_notebook.protocol import MemoryState, PauseMode, PauseState
from omni_notebook.stages import state_table
from omni_notebook.stages.state_table import Action, Order
from omni_notebook.verbs import hints

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from omni_notebook.protocol import StageStatus
    from omni_notebook.verbs.engine_api import Engine


class Press(StrEnum):
    """The buttons of a stage, in the order in which they stand."""

    PAUSE = "Pause"
    RESUME = "Resume"
    SLEEP_1 = "Sleep L1"
    SLEEP_2 = "Sleep L2"
    WAKE = "Wake"
    RESTART = "Restart"


_DOES = {
    Press.PAUSE: f"close admission; the running batch ends, requests that wait are held; {hints.NEW_REQUESTS}",
    Press.RESUME: "open admission and the scheduler again",
    Press.SLEEP_1: "level 1: give the device memory back and keep a copy on the host; loses nothing",
    Press.SLEEP_2: "level 2: give the device memory back and keep no copy; the wake reads the checkpoint again",
    Press.WAKE: "map the memory, fill it and verify it",
    Press.RESTART: (
        "end this stage's workers and start new ones from the last checkpoint; running requests end first, queued ones "
        "are kept"
    ),
}
_ORDERS = {
    Press.SLEEP_1: Order.SLEEP_1,
    Press.SLEEP_2: Order.SLEEP_2,
    Press.WAKE: Order.WAKE,
    Press.RESTART: Order.RESTART,
}
_SLEEPS = frozenset({Press.SLEEP_1, Press.SLEEP_2})
CLOSED = "the engine was shut down; %omni start starts a new one"


@dataclass(frozen=True, slots=True)
class Button:
    """A button as it is to be shown."""

    press: Press
    enabled: bool
    tooltip: str


def buttons(stage: StageStatus, *, closed: bool = False) -> tuple[Button, ...]:
    """All buttons of a stage; the tooltip of one that is off says why and what helps."""
    made = []
    for press in Press:
        why_not = CLOSED if closed else refusal(press, stage)
        what = why_not or _DOES[press] + _first(press, stage)
        made.append(Button(press, not why_not, f"Stage {stage.stage_id} ({stage.name}), {press}: {what}"))
    return tuple(made)


def refusal(press: Press, stage: StageStatus) -> str:
    """Why the stage does not take this order now; empty if it does."""
    if stage.state in hints.MOVING:
        return f"it is {stage.state}; wait until that has ended"
    if press == Press.PAUSE:
        return _no_pause(stage)
    if press == Press.RESTART and not hints.can_restart(stage):
        return hints.NO_RESTART
    if press == Press.RESUME:
        return "it is not paused" if stage.pause_state == PauseState.OPEN else ""
    if press in _SLEEPS and stage.pause_state in {PauseState.PAUSING, PauseState.PAUSE_FAILED}:
        return f"it is {stage.pause_state}; press Pause again or Resume first"
    return _by_table(press, stage)


def _no_pause(stage: StageStatus) -> str:
    if stage.state == MemoryState.FAILED:
        return f"it has FAILED; {'press Restart first' if hints.can_restart(stage) else hints.NO_RESTART}"
    if stage.pause_state == PauseState.PAUSED:
        return f"it is PAUSED: {hints.NEW_REQUESTS}"
    return f"it is {stage.pause_state}" if stage.pause_state == PauseState.PAUSING else ""


def _by_table(press: Press, stage: StageStatus) -> str:
    order = _ORDERS[press]
    action = state_table.decide(order, stage.state, stage.level)
    if action == Action.NOOP:
        return f"nothing to do, it is {hints.memory_words(stage)}"
    if action == Action.REFUSE:
        return _why_refused(order, stage)
    if press == Press.SLEEP_2 and not stage.recoverable:
        return (
            f"its weights can not be read again, they would be LOST; %omni sleep {stage.stage_id} --level 2 --discard "
            "does it all the same"
        )
    return ""


def _why_refused(order: Order, stage: StageStatus) -> str:
    """The table's reason; which stage it is, and that nothing changes, a tooltip of its button need not say."""
    way_out = None if hints.can_restart(stage) else hints.NO_RESTART
    error = state_table.refusal(
        order, stage.stage_id, stage.state, stage.level, reload=stage.recoverable, way_out=way_out
    )
    why = hints.in_verbs(str(error)).removesuffix(". Nothing changed")
    return why.replace(f"stage {stage.stage_id} is ", "it is ", 1)


def busy(stage: StageStatus) -> bool:
    """Whether a sleep must quiesce the stage first."""
    return bool(stage.running or stage.queued or stage.in_transit) and stage.pause_mode != PauseMode.KEEP


def _first(press: Press, stage: StageStatus) -> str:
    return "; first its running batch ends, the rest is held until the wake" if press in _SLEEPS and busy(stage) else ""


def line(press: Press, stage: StageStatus) -> str:
    """The `%omni` line that does the same."""
    number = stage.stage_id
    if press in _SLEEPS:
        mode = " --mode keep" if busy(stage) else ""
        return f"sleep {number} --level {_level(press)}{mode}"
    return f"{press.lower()} {number}" + (" --mode keep" if press == Press.PAUSE else "")


def call(press: Press, engine: Engine, stage: StageStatus) -> Coroutine[Any, Any, Any]:
    """The engine's coroutine for a press."""
    number = stage.stage_id
    if press in _SLEEPS:
        return engine.sleep([number], _level(press), "keep" if busy(stage) else None, discard=False)
    if press == Press.WAKE:
        return engine.wake_up([number])
    if press == Press.RESTART:
        return engine.restart(number)
    if press == Press.RESUME:
        return engine.resume_generation([number])
    return engine.pause_generation("keep", [number])


def _level(press: Press) -> int:
    return 1 if press == Press.SLEEP_1 else 2
