"""The state that things are in, and the call that helps, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.protocol import EngineStatus, MemoryState, PauseState, StageStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

MOVING = frozenset({MemoryState.FALLING_ASLEEP, MemoryState.WAKING})

_MEMORY_CALLS = {
    MemoryState.FALLING_ASLEEP: "%omni status shows when it has ended",
    MemoryState.WAKING: "%omni status shows when it has ended",
    MemoryState.ASLEEP: "%omni wake {id} wakes it",
    MemoryState.PARTLY_AWAKE: "%omni wake {id} wakes the rest",
    MemoryState.NEEDS_WEIGHTS: "%omni wake {id} or engine.load_weights({id}, …) gives it weights",
    MemoryState.FAILED: "%omni restart {id} brings it back",
}
_PAUSE_CALLS = {
    PauseState.PAUSING: "%omni status shows when it has ended",
    PauseState.PAUSED: "%omni resume {id} opens it",
    PauseState.PAUSE_FAILED: "pause it again, or %omni resume {id} opens it",
}


def is_moving(stage: StageStatus) -> bool:
    """Whether a sleep, a wake or a pause of the stage is on its way."""
    return stage.state in MOVING or stage.pause_state is PauseState.PAUSING


def memory_words(stage: StageStatus) -> str:
    """`ASLEEP (level 2)`, `PARTLY_AWAKE (weights awake)`."""
    if stage.state is MemoryState.ASLEEP and stage.level is not None:
        return f"{stage.state} (level {stage.level})"
    if stage.state is MemoryState.PARTLY_AWAKE:
        return f"{stage.state} ({', '.join(stage.awake_tags) or 'nothing'} awake)"
    return str(stage.state)


def state_words(stage: StageStatus) -> str:
    """`ASLEEP (level 2)`, `AWAKE, PAUSED (keep)`."""
    words = memory_words(stage)
    if stage.pause_state is not PauseState.OPEN:
        words += f", {stage.pause_state}" + (f" ({stage.pause_mode})" if stage.pause_mode else "")
    return words


def call_that_helps(stage: StageStatus) -> str | None:
    """The call that leads back to AWAKE and OPEN, or None when the stage is there."""
    text = _MEMORY_CALLS.get(stage.state) or _PAUSE_CALLS.get(stage.pause_state)
    return text.format(id=stage.stage_id) if text else None


def pick(status: EngineStatus, stage_ids: Sequence[int] | None) -> list[StageStatus]:
    """The stages that an order names; None = all. Unknown ids are left to the engine to refuse."""
    return [stage for stage in status.stages if stage_ids is None or stage.stage_id in stage_ids]


def describe(stages: Sequence[StageStatus]) -> str:
    """`stage 0 (thinker) is ASLEEP (level 1): %omni wake 0 wakes it; stage 1 …`."""
    return "; ".join(_describe_one(stage) for stage in stages)


def _describe_one(stage: StageStatus) -> str:
    words = f"stage {stage.stage_id} ({stage.name}) is {state_words(stage)}"
    call = call_that_helps(stage)
    return f"{words}: {call}" if call else words
