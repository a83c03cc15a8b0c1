"""`pause_generation` and `resume_generation` (specification, "Quiescing a busy diffusion stage")."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_notebook.errors import DeadlineError, OmniError, PauseError, StepLevelError
from omni_notebook.protocol import PauseMode, PauseState
from omni_notebook.stages.quiesce import quiesce
from omni_notebook.stages.stage import raise_first
from omni_notebook.stages.waiting import OrderCancelled, acquire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.stages.stage import Stage
from omni_notebook.stages.waiting import CancelToken, Deadline

PAUSE = "pause"


def check_pausable(stages: Sequence[Stage], mode: PauseMode) -> None:
    """Refuse before any gate moves.

    Raises:
        StepLevelError: `keep` on a step-level stage.
    """
    for stage in stages:
        if mode == PauseMode.KEEP and stage.config.step_execution:
            msg = (
                f"stage {stage.stage_id} runs single steps (step_execution): mode 'keep' is not supported there; call "
                "sleep(..., mode='wait' | 'abort'), or abort its requests. Nothing changed"
            )
            raise StepLevelError(msg)


@dataclass(frozen=True, slots=True)
class Pause:
    """One call's wishes; `clear_cache` concerns AR stages."""

    mode: PauseMode
    clear_cache: bool
    deadline: Deadline
    token: CancelToken


async def pause(stages: Sequence[Stage], wanted: Pause) -> None:
    """Close admission, then bring the stages to rest as their kind and the mode say.

    Raises:
        DeadlineError, PauseError: the pause did not complete; the stage is PAUSE_FAILED, its scheduler closed.
    """
    wanted.token.check()
    mode = wanted.mode
    joining = [stage for stage in stages if (stage.pause_state, stage.pause_mode) == (PauseState.PAUSING, mode)]
    waiting = [stage for stage in stages if stage not in joining and not _already(stage, mode)]
    for stage in waiting:
        stage.pause_epoch += 1
        stage.set_pause(PauseState.PAUSING, mode, reason=f"pause {mode}")
    results = await asyncio.gather(
        *(_pause_stage(stage, wanted) for stage in waiting),
        *(_join_pause(stage, wanted) for stage in joining),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _already(stage: Stage, mode: PauseMode) -> bool:
    return stage.pause_state == PauseState.PAUSED and stage.pause_mode == mode


async def _join_pause(stage: Stage, wanted: Pause) -> None:
    """Someone else pauses the stage in the same way: two equal pauses are one."""
    ended = await stage.changed.until(lambda: stage.pause_state != PauseState.PAUSING, wanted.deadline, wanted.token)
    if not ended or not _already(stage, wanted.mode):
        raise _pause_failed(stage, wanted.mode, DeadlineError("the pause that was in progress did not complete"))


async def _pause_stage(stage: Stage, wanted: Pause) -> None:
    epoch, mode = stage.pause_epoch, wanted.mode
    try:
        await _bring_to_rest(stage, wanted)
    except (OmniError, OrderCancelled) as error:
        if stage.pause_epoch == epoch:
            if _stops_scheduler(stage, mode):
                stage.close(PAUSE)
            stage.set_pause(PauseState.PAUSE_FAILED, mode, reason=f"pause failed: {error}")
        raise _pause_failed(stage, mode, error) from error
    if stage.pause_epoch != epoch:
        msg = f"stage {stage.stage_id} was resumed while it was pausing; it is {stage.pause_state}"
        raise PauseError(msg)
    stage.set_pause(PauseState.PAUSED, mode, reason=f"paused ({mode})")


async def _bring_to_rest(stage: Stage, wanted: Pause) -> None:
    mode, deadline, token = wanted.mode, wanted.deadline, wanted.token
    if not _stops_scheduler(stage, mode):
        return  # a diffusion stage under abort or wait: only admission is paused (specification)
    if not await acquire(stage.pause_lock, deadline, token):
        msg = f"another pause or sleep held stage {stage.stage_id} for {deadline.seconds:g} s"
        raise DeadlineError(msg)
    try:
        if mode == PauseMode.WAIT:
            stage.reopen(PAUSE)
        raise_first(await quiesce(stage, mode, PAUSE, deadline, token))
        if wanted.clear_cache and stage.config.kind == "ar":
            stage.requeue()
    finally:
        stage.pause_lock.release()


def _stops_scheduler(stage: Stage, mode: PauseMode) -> bool:
    return stage.config.kind == "ar" or mode == PauseMode.KEEP


def _pause_failed(stage: Stage, mode: PauseMode, error: BaseException) -> OmniError:
    text = (
        f"the pause ({mode}) of stage {stage.stage_id} did not complete: {str(error) or 'cancelled'}; it is "
        f"{stage.pause_state}. Call pause_generation again, or resume_generation(); do not sleep or change weights now"
    )
    return DeadlineError(text) if isinstance(error, DeadlineError) else PauseError(text)


def resume(stages: Sequence[Stage]) -> None:
    """Open the schedulers of paused stages; admission opens when no paused stage is left. Takes no lock."""
    for stage in stages:
        if stage.pause_state != PauseState.OPEN:
            stage.pause_epoch += 1
            stage.reopen(PAUSE)
            stage.set_pause(PauseState.OPEN, None, reason="resumed")
