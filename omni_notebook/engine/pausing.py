"""`pause_generation` and `resume_generation` (specification, "Quiescing a busy diffusion stage")."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_notebook.errors import DeadlineError, OmniError, PauseError, StepLevelError, WorkerDiedError
from omni_notebook.protocol import PauseMode, PauseState
from omni_notebook.stages.quiesce import quiesce
from omni_notebook.stages.waiting import CancelToken, Deadline, acquire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.executors.base import RankAnswer
    from omni_notebook.stages.stage import Stage

PAUSE = "pause"


def check_pausable(stages: Sequence[Stage], mode: PauseMode) -> None:
    """Refuse before any gate moves.

    Raises:
        StepLevelError: `keep` on a step-level stage.
        PauseError: a `keep` failed on a diffusion stage, and this mode would only close admission there.
    """
    for stage in stages:
        failed = (stage.pause_state, stage.pause_mode) == (PauseState.PAUSE_FAILED, PauseMode.KEEP)
        if failed and not _stops_scheduler(stage, mode):
            msg = (
                f"stage {stage.stage_id} is PAUSE_FAILED: mode={str(mode)!r} would only close admission there; call "
                "pause_generation(mode='keep') again, or resume_generation(). Nothing changed"
            )
            raise PauseError(msg)
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
        NotImplementedError, PauseError: refused, see `check_pausable`; nothing changed.
        DeadlineError, PauseError: the pause did not complete; the stage is PAUSE_FAILED, its scheduler closed.
    """
    wanted.token.check()
    mode = wanted.mode
    check_pausable(stages, mode)
    joining = [stage for stage in stages if (stage.pause_state, stage.pause_mode) == (PauseState.PAUSING, mode)]
    begun = [(stage, _begin(stage, mode)) for stage in stages if stage not in joining and not _holds(stage, mode)]
    results = await asyncio.gather(
        *(_pause_stage(stage, wanted, token) for stage, token in begun),
        *(_join_pause(stage, wanted) for stage in joining),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _begin(stage: Stage, mode: PauseMode) -> CancelToken:
    """This pause is the stage's now; one in another mode that was in progress is over."""
    token = stage.end_pause()
    stage.set_pause(PauseState.PAUSING, mode, reason=f"pause {mode}")
    return token


def _paused(stage: Stage, mode: PauseMode) -> bool:
    return (stage.pause_state, stage.pause_mode) == (PauseState.PAUSED, mode)


def _holds(stage: Stage, mode: PauseMode) -> bool:
    """Whether there is nothing to do: a stage that is kept, or about to be, has its admission closed already."""
    return _paused(stage, mode) or (stage.pause_mode == PauseMode.KEEP and not _stops_scheduler(stage, mode))


async def _join_pause(stage: Stage, wanted: Pause) -> None:
    """Someone else pauses the stage in the same way: two equal pauses are one; if that one fails, go on alone."""
    mode = wanted.mode
    ended = await stage.changed.until(lambda: stage.pause_state != PauseState.PAUSING, wanted.deadline, wanted.token)
    if ended and (stage.pause_state, stage.pause_mode) == (PauseState.PAUSE_FAILED, mode):
        await _pause_stage(stage, wanted, _begin(stage, mode))
    elif not ended:
        msg = f"another call's pause was still in progress after {wanted.deadline.seconds:g} s"
        raise _pause_failed(stage, mode, DeadlineError(msg))
    elif not _paused(stage, mode):
        raise _overtaken(stage, mode)


async def _pause_stage(stage: Stage, wanted: Pause, token: CancelToken) -> None:
    """Pause a stage while `token` is its own; a resume or another pause cancels it."""
    mode = wanted.mode
    wanted.token.on_cancel(token.cancel)
    try:
        await _bring_to_rest(stage, wanted, token)
    except Exception as error:
        if stage.pause_token is not token:
            raise _overtaken(stage, mode) from error
        if _stops_scheduler(stage, mode):
            stage.close(PAUSE)
        stage.set_pause(PauseState.PAUSE_FAILED, mode, reason=f"pause failed: {str(error) or 'cancelled'}")
        raise _pause_failed(stage, mode, error) from error
    stage.set_pause(PauseState.PAUSED, mode, reason=f"paused ({mode})")


async def _bring_to_rest(stage: Stage, wanted: Pause, token: CancelToken) -> None:
    mode, deadline = wanted.mode, wanted.deadline
    if not _stops_scheduler(stage, mode):
        return  # a diffusion stage under abort or wait: only admission is paused (specification)
    if not await acquire(stage.pause_lock, deadline, token):
        msg = f"another pause or sleep held stage {stage.stage_id} for {deadline.seconds:g} s"
        raise DeadlineError(msg)
    try:
        if mode == PauseMode.WAIT:
            stage.reopen(PAUSE)
        _check_acknowledged(await quiesce(stage, mode, PAUSE, deadline, token))
        token.check()  # resumed during the barrier: it runs again
        if wanted.clear_cache and stage.config.kind == "ar":
            stage.requeue()
    finally:
        stage.pause_lock.release()


def _check_acknowledged(answers: Sequence[RankAnswer]) -> None:
    """Raise what the first rank answered that did not come to rest; it says which one that is."""
    for where, _, error in answers:
        if isinstance(error, DeadlineError | WorkerDiedError):
            raise error
        if error is not None:
            msg = f"{where.title} answered {type(error).__name__}: {error}"
            raise PauseError(msg) from error


def _stops_scheduler(stage: Stage, mode: PauseMode) -> bool:
    return stage.config.kind == "ar" or mode == PauseMode.KEEP


def _overtaken(stage: Stage, mode: PauseMode) -> PauseError:
    how = "was resumed while it was pausing"
    if stage.pause_state != PauseState.OPEN:
        how = f"was pausing when another pause ({stage.pause_mode}) took over"
    return PauseError(f"stage {stage.stage_id} {how}; this pause ({mode}) does not hold, it is {stage.pause_state}")


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
            stage.end_pause()
            stage.reopen(PAUSE)
            stage.set_pause(PauseState.OPEN, None, reason="resumed")
