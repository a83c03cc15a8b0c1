"""Pauses over upstream: its call, within a deadline, and what became of it on record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_notebook.errors import DeadlineError, OmniError, PauseError, StepLevelError, UpstreamError
from omni_notebook.protocol import MemoryState, PauseMode, PauseState
from omni_notebook.stages.waiting import Deadline, Signal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.engine.upstream.core import UpCore
    from omni_notebook.engine.upstream.stage import UpStage
    from omni_notebook.stages.waiting import CancelToken

RESUME_S = 60.0


class Pausing:
    """Carries pauses out; every method belongs to the engine's loop."""

    def __init__(self, core: UpCore) -> None:
        self._core = core
        self._resuming = 0
        self._resumed = Signal()

    async def pause(
        self, stages: Sequence[UpStage], mode: PauseMode, *, clear_cache: bool, deadline: Deadline, token: CancelToken
    ) -> None:
        """Close admission, then each stage's scheduler as its kind and the mode say.

        Raises:
            UnsupportedError: this version can not pause single stages.
            StepLevelError: "keep" on a stage that runs single steps; it is open as before.
            DeadlineError, PauseError: it did not complete, the stage is PAUSE_FAILED; or it was resumed meanwhile.
        """
        self._core.check_call("pause_generation", "stage_ids")
        async with self._core.hold(deadline, token):
            wishes = [_Wish(stage, mode, stage.resumes) for stage in stages]
            for wish in wishes:
                if not token.cancelled:
                    await self._pause_one(wish, clear_cache, deadline)

    async def _pause_one(self, wish: _Wish, clear_cache: bool, deadline: Deadline) -> None:
        stage, mode = wish.stage, wish.mode
        wish.check()
        before = stage.pause_state, stage.pause_mode
        if before == (PauseState.PAUSED, mode):
            return
        stage.set_pause(PauseState.PAUSING, mode, reason=f"pause {mode}")
        try:
            call = self.closing([stage], mode, clear_cache=clear_cache)
            await self._core.calls.run(call, deadline, f"pause_generation(mode={str(mode)!r})")
            wish.check()
        except OmniError as error:
            is_step_level = not wish.overtaken() and await self._is_step_level(stage, mode, error)
            if is_step_level and not wish.overtaken():
                stage.set_pause(*before, reason="this stage can not be kept")
                msg = (
                    f"stage {stage.stage_id} runs single steps (step_execution): mode 'keep' is not supported there; "
                    "call sleep(..., mode='wait' | 'abort'), or abort its requests. Nothing changed"
                )
                raise StepLevelError(msg) from error
            if stage.pause_state == PauseState.OPEN:
                wish.check()
            stage.set_pause(PauseState.PAUSE_FAILED, mode, reason=f"pause failed: {error}")
            msg = (
                f"the pause ({mode}) of stage {stage.stage_id} did not complete: {error}; it is PAUSE_FAILED. Call "
                "pause_generation again, or resume_generation(); do not sleep or change weights now"
            )
            raise (DeadlineError if isinstance(error, DeadlineError) else PauseError)(msg) from error
        stage.set_pause(PauseState.PAUSED, mode, reason=f"paused ({mode})")

    async def closing(self, stages: Sequence[UpStage], mode: PauseMode, *, clear_cache: bool) -> None:
        """Upstream's pause; what it closed is opened again where it is open here by then, however late that is."""
        ids = [stage.stage_id for stage in stages]
        try:
            await self._core.upstream.pause_generation(mode=str(mode), clear_cache=clear_cache, stage_ids=ids)
        except Exception:
            await self._open_as_recorded(stages, mode)
            raise
        await self._open_as_recorded(stages, mode)

    async def _open_as_recorded(self, stages: Sequence[UpStage], mode: PauseMode) -> None:
        await self.resumes_done(Deadline(RESUME_S))
        for stage in stages:
            if (stage.state, stage.pause_state) != (MemoryState.AWAKE, PauseState.OPEN):
                continue  # it is paused, or opens after its wake
            try:
                await self._resume_upstream(stage)
            except OmniError as error:
                stage.set_pause(PauseState.PAUSE_FAILED, mode, reason=f"closed in spite of a resume: {error}")
                raise

    async def _is_step_level(self, stage: UpStage, mode: PauseMode, error: OmniError) -> bool:
        """Whether it can not be kept at all, and is open again: upstream closes admission before it finds out."""
        if mode != PauseMode.KEEP or not isinstance(error, UpstreamError) or "NotImplementedError" not in str(error):
            return False
        others = any(other.pause_state != PauseState.OPEN for other in self._core.stages if other is not stage)
        try:
            await self._resume_upstream(stage)
        except OmniError:
            return others
        return True

    async def resume(self, stages: Sequence[UpStage]) -> None:
        """Open paused stages; one that sleeps opens after its wake. A pause that is under way does not hold.

        Raises:
            PauseError: upstream did not open one; it stays paused.
        """
        for stage in stages:
            stage.resumes += 1
        for stage in stages:
            if stage.pause_state == PauseState.OPEN:
                continue
            if stage.state == MemoryState.AWAKE:
                try:
                    await self._resume_upstream(stage)
                except OmniError as error:
                    msg = f"stage {stage.stage_id} was not resumed: {error}; it is {stage.pause_state}, call it again"
                    raise PauseError(msg) from error
            stage.set_pause(PauseState.OPEN, None, reason="resumed")

    async def resumes_done(self, deadline: Deadline, token: CancelToken | None = None) -> bool:
        """Whether upstream has answered every resume that it was asked for; what is on record is true then."""
        return await self._resumed.until(lambda: not self._resuming, deadline, token)

    async def _resume_upstream(self, stage: UpStage) -> None:
        self._resuming += 1
        try:
            call = self._core.upstream.resume_generation(stage_ids=[stage.stage_id])
            await self._core.calls.run(call, Deadline(RESUME_S), "resume_generation")
        finally:
            self._resuming -= 1
            self._resumed.notify()


@dataclass(frozen=True, slots=True)
class _Wish:
    """One stage's part of a pause; `resumes` is how many it had seen when the pause began."""

    stage: UpStage
    mode: PauseMode
    resumes: int

    def overtaken(self) -> bool:
        """Whether the stage was resumed since."""
        return self.stage.resumes != self.resumes

    def check(self) -> None:
        """Raise PauseError if it was: this pause does not hold."""
        if self.overtaken():
            msg = (
                f"stage {self.stage.stage_id} was resumed while it was pausing; this pause ({self.mode}) does not "
                f"hold, it is {self.stage.pause_state}"
            )
            raise PauseError(msg)
