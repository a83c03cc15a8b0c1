"""Sleep and wake over upstream: one stage after the other, measured from outside before and after.

Upstream's calls take several stages and lose the answers of those that went before one that fails, so each stage is
asked alone. A level 2 is refused: `wake_up` raises NotImplementedError after it, for every stage of the engine
(vllm_omni/entrypoints/async_omni.py, 0.30), and no call of it loads weights again.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from omni_notebook.engine.upstream import answers
from omni_notebook.engine.upstream.answers import Change, Said
from omni_notebook.engine.upstream.refusing import busy, is_kept, refuse_state
from omni_notebook.engine.upstream.stage import named_states
from omni_notebook.errors import (
    DeadlineError,
    OmniError,
    SleepError,
    UnsupportedError,
    UpstreamError,
    WakeError,
)
from omni_notebook.memory.host import cpu_name
from omni_notebook.protocol import AckEvent, MemoryEvent, MemoryState, PauseMode, PauseState
from omni_notebook.stages.state_table import Action, Order, decide
from omni_notebook.stages.waiting import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from omni_notebook.engine.upstream.core import UpCore
    from omni_notebook.engine.upstream.outside import Look
    from omni_notebook.engine.upstream.stage import UpStage
    from omni_notebook.protocol import OmniACK
    from omni_notebook.stages.waiting import CancelToken

REOPEN_S = 30.0
LOOK_AGAIN_S = 0.25


class Sleeping:
    """Carries sleeps and wakes out; every method belongs to the engine's loop."""

    def __init__(self, core: UpCore) -> None:
        self._core = core

    # ----------------------------------------------------------------------------------- sleep

    def refuse_level_2(self, level: int) -> None:
        """Raise UnsupportedError for a sleep that upstream can not wake from."""
        if level == 2:
            msg = (
                f"vllm_omni {self._core.version} can not wake from level 2: the weights are discarded, it has no call "
                "that loads them again, and its wake_up then refuses every stage. Nothing changed; use sleep(level=1)"
            )
            raise UnsupportedError(msg)

    async def sleep(
        self, stages: Sequence[UpStage], task_id: str, mode: PauseMode | None, deadline: Deadline, token: CancelToken
    ) -> list[OmniACK]:
        """Put stages to sleep at level 1; every rank's ACK.

        Raises:
            StageBusyError, PauseError, StageFailedError: refused; nothing changed.
            DeadlineError: requests did not end in time, or another order held the engine; nothing slept.
        """
        acks: list[OmniACK] = []
        async with self._core.hold(deadline, token):
            refuse_state(Order.SLEEP_1, stages)
            todo = [s for s in stages if decide(Order.SLEEP_1, s.state, s.level) == Action.RUN]
            self._refuse_busy(todo, mode)
            paused = {stage for stage in todo if stage.pause_state != PauseState.OPEN}
            for stage in todo:  # closes the gate: every request goes through every stage
                stage.move(MemoryState.FALLING_ASLEEP, reason="sleep(1)")
            try:
                await self._quiesce(todo, mode, deadline, token)
                for stage in stages:
                    if not token.cancelled:
                        acks += await self._sleep_one(stage, task_id, mode, deadline, run=stage in todo)
            finally:
                await self._take_back(todo, mode, paused)
        self._tell("sleep", stages, acks)
        return acks

    def _refuse_busy(self, stages: Sequence[UpStage], mode: PauseMode | None) -> None:
        """Refuse what has requests and no mode that ends or keeps them, or waits for some that a pause holds."""
        for stage in stages:
            in_transit = self._core.requests.in_transit(stage.stage_id)
            if in_transit and (mode == PauseMode.WAIT if is_kept(stage) else mode is None):
                raise busy(Order.SLEEP_1, stage, in_transit)

    async def _quiesce(
        self, stages: Sequence[UpStage], mode: PauseMode | None, deadline: Deadline, token: CancelToken
    ) -> None:
        """Bring requests to rest as the mode says; none comes in any more."""
        requests, moving = self._core.requests, [stage for stage in stages if not is_kept(stage)]
        if mode is None or not any(map(requests.in_transit, [stage.stage_id for stage in stages])):
            return
        if mode == PauseMode.KEEP:
            work = self._core.pausing.closing(moving, PauseMode.KEEP, clear_cache=False)
            await self._core.calls.run(work, deadline, "pause_generation(mode='keep')")
            return
        if mode == PauseMode.ABORT:
            await requests.abort_all(deadline)
        if not await requests.ended(deadline, token):
            running = max((requests.in_transit(stage.stage_id) for stage in moving), default=0)
            msg = f"{running} requests had not ended after {deadline.seconds:g} s; nothing slept"
            raise DeadlineError(msg)

    async def _take_back(self, stages: Sequence[UpStage], mode: PauseMode | None, paused: Collection[UpStage]) -> None:
        """Stages that were to sleep and were not asked are awake as before; open, if they were or were resumed."""
        for stage in stages:
            if stage.state != MemoryState.FALLING_ASLEEP:
                continue
            try:
                if mode == PauseMode.KEEP or (stage in paused and stage.pause_state == PauseState.OPEN):
                    await self._reopen(stage)
                stage.move(MemoryState.AWAKE, reason="it did not sleep")
            except OmniError as error:
                stage.move(MemoryState.FAILED, reason=f"it did not sleep, and takes no requests: {error}")

    async def _sleep_one(
        self, stage: UpStage, task_id: str, mode: PauseMode | None, deadline: Deadline, *, run: bool
    ) -> list[OmniACK]:
        names = self._names
        if not run:
            return await self._nothing_to_do(stage, task_id)
        before = await self._core.look(stage)
        if deadline.passed:
            late = Said(error="nothing, it was not asked: no time was left", error_code=DeadlineError.error_code)
            return answers.sleep_acks(self._change(stage, task_id, (before, before), late, 0.0), names())
        theirs = PauseMode.KEEP if mode is None or is_kept(stage) else mode
        call = self._core.upstream.sleep(stage_ids=[stage.stage_id], level=1, mode=str(theirs))
        said, latency_ms = await self._ask(call, deadline, "sleep")
        after = await self._looked_until(stage, before, lambda freed: freed >= self._core.outside.floor_bytes)
        change = self._change(stage, task_id, (before, after), said, latency_ms)
        acks = answers.sleep_acks(change, names())
        await self._after_sleep(stage, change, acks)
        return acks

    async def _after_sleep(self, stage: UpStage, change: Change, acks: Sequence[OmniACK]) -> None:
        stage.slept_bytes = {
            seat.pid: max(0, change.given_back(seat) or 0) for seat in change.seats if seat.pid is not None
        }
        if change.said.error is None and not any(seen.gone for seen in change.after.values()):
            unseen = "" if all(ack.ok for ack in acks) else ", memory was not seen free on every rank"
            stage.move(MemoryState.ASLEEP, level=1, reason=f"asleep{unseen}")
            return
        total = change.total()
        kept = total is not None and total < self._core.outside.floor_bytes
        reason = str(next(ack.error_msg for ack in acks if not ack.ok))
        if kept and change.said.error_code == UpstreamError.error_code and await self._is_as_before(stage):
            stage.move(MemoryState.AWAKE, reason=f"the sleep failed, the stage is as before: {reason}")
        else:
            stage.move(MemoryState.FAILED, reason=reason)

    async def _is_as_before(self, stage: UpStage) -> bool:
        """Whether upstream, which refused, does not believe that it sleeps, and takes requests again."""
        try:
            asleep = await self._core.calls.run(self._core.upstream.is_sleeping(), Deadline(REOPEN_S), "is_sleeping")
            if asleep:
                return False
            await self._reopen(stage)
        except OmniError:
            return False
        return True

    # ------------------------------------------------------------------------------------ wake

    async def wake(
        self, stages: Sequence[UpStage], task_id: str, deadline: Deadline, token: CancelToken
    ) -> list[OmniACK]:
        """Wake stages; every rank's ACK.

        Raises:
            StageFailedError: refused; nothing changed.
            DeadlineError: another order held the engine; nothing changed.
        """
        acks: list[OmniACK] = []
        async with self._core.hold(deadline, token):
            refuse_state(Order.WAKE, stages)
            for stage in stages:
                if not token.cancelled:
                    acks += await self._wake_one(stage, task_id, deadline)
        self._tell("wake", stages, acks)
        return acks

    async def _wake_one(self, stage: UpStage, task_id: str, deadline: Deadline) -> list[OmniACK]:
        if decide(Order.WAKE, stage.state, stage.level) == Action.NOOP:
            return await self._nothing_to_do(stage, task_id)
        before = await self._core.look(stage)
        if deadline.passed:
            late = Said(error="nothing, it was not asked: no time was left", error_code=DeadlineError.error_code)
            change = self._change(stage, task_id, (before, before), late, 0.0)
            return answers.wake_acks(change, self._names(), {})
        stage.move(MemoryState.WAKING, reason="wake")
        said, latency_ms = await self._ask(self._core.upstream.wake_up(stage_ids=[stage.stage_id]), deadline, "wake_up")
        expected = sum(stage.slept_bytes.values())
        after = await self._looked_until(stage, before, lambda freed: -freed >= 0.98 * expected)
        change = self._change(stage, task_id, (before, after), said, latency_ms)
        acks = answers.wake_acks(change, self._names(), stage.slept_bytes)
        if not all(ack.ok for ack in acks):
            stage.move(MemoryState.FAILED, reason=str(next(ack.error_msg for ack in acks if not ack.ok)))
            return acks
        try:
            await self._reopen(stage)
        except OmniError as error:
            stage.move(MemoryState.FAILED, reason=f"it woke, but takes no requests: {error}")
            return [_broken(ack, error) for ack in acks]
        stage.move(MemoryState.AWAKE, reason="awake")
        return acks

    async def _reopen(self, stage: UpStage) -> None:
        """Open what the sleep closed, and close again what the wake of an engine core opens in spite of a pause.

        A resume that comes meanwhile is carried out here: it leaves a stage that is not awake to its wake.
        """
        deadline, upstream, done = Deadline(REOPEN_S), self._core.upstream, None
        while done != stage.pause_state:
            done = stage.pause_state
            if done == PauseState.OPEN:
                work = upstream.resume_generation(stage_ids=[stage.stage_id])
                await self._core.calls.run(work, deadline, "resume_generation")
            elif stage.is_ar:
                work = upstream.pause_generation(mode="keep", stage_ids=[stage.stage_id], clear_cache=False)
                await self._core.calls.run(work, deadline, "pause_generation(mode='keep')")

    # ---------------------------------------------------------------------------------- shared

    async def _nothing_to_do(self, stage: UpStage, task_id: str) -> list[OmniACK]:
        """What ranks hold now; a stage that has lost one has FAILED."""
        seen = await self._core.look(stage)
        change = self._change(stage, task_id, (seen, seen), Said(), 0.0)
        acks = answers.noop_acks(change, stage.level, self._names())
        wrong = next((ack for ack in acks if not ack.ok), None)
        if wrong is not None:
            stage.move(MemoryState.FAILED, reason=str(wrong.error_msg))
        return acks

    async def _ask(self, call: Any, deadline: Deadline, what: str) -> tuple[Said, float]:
        """What upstream answers, whatever that is, and how long it took."""
        began_s = time.perf_counter()
        try:
            said = answers.said(await self._core.calls.run(call, deadline, what))
        except DeadlineError as error:
            said = Said(error=str(error), error_code=error.error_code)
        except OmniError as error:
            said = Said(error=str(error), error_code=error.error_code)
        return said, (time.perf_counter() - began_s) * 1000

    async def _looked_until(self, stage: UpStage, before: Look, enough: Callable[[int], bool]) -> Look:
        """A steady look; a second one a moment later where a driver has not caught up with what upstream said."""
        seen = await self._core.look(stage)
        freed = sum((before.processes[pid].n_bytes or 0) - (one.n_bytes or 0) for pid, one in seen.processes.items())
        if not enough(freed):
            await asyncio.sleep(LOOK_AGAIN_S)
            seen = await self._core.look(stage)
        return seen

    def _change(
        self,
        stage: UpStage,
        task_id: str,
        looks: tuple[Look, Look],
        said: Said,
        latency_ms: float,
    ) -> Change:
        outside = self._core.outside
        return Change(
            task_id=task_id,
            stage_id=stage.stage_id,
            seats=stage.seats,
            before=looks[0].processes,
            after=looks[1].processes,
            devices_bytes=(looks[0].devices_bytes, looks[1].devices_bytes),
            said=said,
            latency_ms=latency_ms,
            means=outside.means,
            floor_bytes=outside.floor_bytes,
            platform="cpu" if outside.device_type == "cpu" else "cuda",
        )

    def _names(self) -> dict[str, str]:
        """Devices' own names."""
        outside = self._core.outside
        if outside.device_type == "cpu":
            return {"cpu": cpu_name()}
        devices = {seen.device for seen in outside.glance([p for s in self._core.stages for p in s.pids]).values()}
        return {device: name for device in devices if (name := outside.name(device)) is not None}

    def _tell(self, order: str, stages: Sequence[UpStage], acks: Sequence[OmniACK]) -> None:
        for ack in acks:
            self._core.hub.push(AckEvent(time.time(), order, ack))
        for stage in stages:
            seen = self._core.outside.glance(stage.pids)
            for seat in stage.seats:
                held = seen[seat.pid].n_bytes if seat.pid is not None else None
                event = MemoryEvent(time.time(), stage.stage_id, seat.rank, seat.replica, {}, held, None)
                self._core.hub.push(event)

    def raise_if_failed(self, order: str, acks: Sequence[OmniACK], stages: Sequence[UpStage]) -> None:
        """Raise SleepError or WakeError with all answers if one of them is an ERROR."""
        wrong = [ack for ack in acks if not ack.ok]
        if not wrong:
            return
        first, more = wrong[0], f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        words = (
            f"{order} failed: stage {first.stage_id} rank {first.rank}: {first.error_msg}{more}. Now: "
            f"{named_states(stages)}; all answers are in .acks"
        )
        raise (SleepError if order == "sleep" else WakeError)(words, acks)


def _broken(ack: OmniACK, error: OmniError) -> OmniACK:
    ack.status, ack.error_msg = "ERROR", str(error)
    ack.metadata["error_code"] = error.error_code
    return ack
