"""Sleep, wake, new weights and restart over several stages: checked for all before any moves, then all at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

from omni_notebook.engine import residual, tracing
from omni_notebook.engine.answers import failure
from omni_notebook.engine.pausing import check_pausable
from omni_notebook.engine.supervising import Supervisor
from omni_notebook.errors import DeadlineError, PauseError, SleepError, StageBusyError, WakeError
from omni_notebook.protocol import AckEvent, MemoryEvent, PauseMode, PauseState, SleepTask, WakeTask
from omni_notebook.stages import transitions, weights
from omni_notebook.stages.state_table import Action, Order, decide, refusal
from omni_notebook.stages.transitions import Context
from omni_notebook.stages.waiting import CancelToken, Deadline, acquire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractContextManager

    from omni_notebook.engine.events import EventHub
    from omni_notebook.protocol import OmniACK
    from omni_notebook.stages.stage import Stage
    from omni_notebook.stages.tensor_source import TensorSource

T = TypeVar("T")


class Orders(Supervisor):
    """Carries orders out; every method belongs to the engine's loop."""

    def __init__(self, hub: EventHub, written: Callable[[], Awaitable[None]]) -> None:
        super().__init__(written)
        self._hub = hub

    # ----------------------------------------------------------------------------------- sleep

    async def sleep(
        self, stages: Sequence[Stage], task: SleepTask, mode: PauseMode | None, deadline: Deadline, *, strict: bool
    ) -> list[OmniACK]:
        """Put stages to sleep; every rank's ACK.

        Raises:
            StageBusyError, PauseError, AsleepError, …: refused; nothing changed.
            StepLevelError: `mode="keep"` on a step-level stage; nothing changed.
            SleepError: a rank answered ERROR (only if `strict`).
        """
        order = Order.SLEEP_1 if task.level == 1 else Order.SLEEP_2

        def check(stage: Stage) -> None:
            self._check(stage, order)
            if mode is not None:
                check_pausable([stage], mode)
                if mode == PauseMode.WAIT and decide(order, stage.state, stage.level) == Action.RUN:
                    refuse_frozen(stage, str(order))
            elif decide(order, stage.state, stage.level) == Action.RUN:
                refuse_busy(stage, str(order))

        async def run(stage: Stage, context: Context) -> list[OmniACK]:
            return await transitions.whole(stage, task.task_id, transitions.sleep_stage(stage, task, mode, context))

        def answered(acks: list[OmniACK]) -> None:
            residual.measure_together(acks, stages)
            self._tell("sleep", stages, acks)

        with _span("sleep", stages, task_id=task.task_id, level=task.level, mode=mode) as span:
            acks = await self._on_all(stages, check, run, deadline, answered)
            span.answered(acks)
        if strict and not all(ack.ok for ack in acks):
            raise SleepError(failure("sleep", acks, stages), acks)
        return acks

    # ------------------------------------------------------------------------------------ wake

    async def wake(self, stages: Sequence[Stage], task: WakeTask, deadline: Deadline, *, strict: bool) -> list[OmniACK]:
        """Wake stages, or some of their tags; every rank's ACK.

        Raises:
            StageFailedError: refused; nothing changed.
            WakeError: a rank answered ERROR (only if `strict`); memory is as before the wake.
        """
        order = Order.WAKE if task.reload else Order.WAKE_NO_RELOAD

        async def run(stage: Stage, context: Context) -> list[OmniACK]:
            return await transitions.whole(stage, task.task_id, transitions.wake_stage(stage, task, context))

        def answered(acks: list[OmniACK]) -> None:
            self._tell("wake", stages, acks)

        def check(stage: Stage) -> None:
            self._check(stage, order, pause=False)

        with _span("wake", stages, task_id=task.task_id, reload=task.reload) as span:
            acks = await self._on_all(stages, check, run, deadline, answered)
            span.answered(acks)
        if strict and not all(ack.ok for ack in acks):
            raise WakeError(failure("wake", acks, stages), acks)
        return acks

    # --------------------------------------------------------------------------------- weights

    async def load_weights(
        self, stage: Stage, source: str | TensorSource, version: str | None, deadline: Deadline
    ) -> None:
        """New weights into one stage; see `stages.weights.load_weights`."""

        def check(stage: Stage) -> None:
            self._check(stage, Order.LOAD_WEIGHTS)
            refuse_busy(stage, str(Order.LOAD_WEIGHTS))

        async def run(stage: Stage, context: Context) -> list[OmniACK]:
            await weights.load_weights(stage, source, version, context)
            return []

        with _span("load_weights", [stage], version=version) as span:
            await self._on_all([stage], check, run, deadline)
            span.note(weight_version=stage.weight_version)

    async def lora(
        self,
        stages: Sequence[Stage],
        check: Callable[[], object],
        change: Callable[[Context], Awaitable[None]],
        deadline: Deadline,
    ) -> None:
        """One change of adapters over several stages together; see `stages.lora_orders`. `check` may refuse it.

        Raises:
            StageBusyError, PauseError, AsleepError, …: refused; nothing changed.
        """
        token = CancelToken()

        async def everything() -> None:
            async with _locks(stages, deadline, token):
                for stage in stages:
                    self._check(stage, Order.LORA)
                    refuse_busy(stage, str(Order.LORA))
                check()
                await change(Context(deadline, token))
            for stage in stages:
                self.sample(stage)

        await self.supervise(everything(), token)

    async def restart(self, stage: Stage, deadline: Deadline) -> None:
        """A stage made anew; see `stages.weights.restart`."""

        async def run(stage: Stage, context: Context) -> list[OmniACK]:
            await weights.restart(stage, context)
            return []

        with _span("restart", [stage]):
            await self._on_all([stage], lambda _stage: None, run, deadline)

    # ---------------------------------------------------------------------------------- shared

    def _check(self, stage: Stage, order: Order, *, pause: bool = True) -> None:
        if pause and stage.pause_state in {PauseState.PAUSING, PauseState.PAUSE_FAILED}:
            msg = (
                f"stage {stage.stage_id} is {stage.pause_state}: {order} is refused until the pause holds; call "
                f"pause_generation(mode={str(stage.pause_mode)!r}, stage_ids=[{stage.stage_id}]) again, or "
                "resume_generation(). Nothing changed"
            )
            raise PauseError(msg)
        if decide(order, stage.state, stage.level) == Action.REFUSE:
            raise refusal(order, stage.stage_id, stage.state, stage.level, reload=stage.recoverable)

    async def _on_all(
        self,
        stages: Sequence[Stage],
        check: Callable[[Stage], None],
        run: Callable[[Stage, Context], Awaitable[list[OmniACK]]],
        deadline: Deadline,
        answered: Callable[[list[OmniACK]], None] = lambda _acks: None,
    ) -> list[OmniACK]:
        """Lock all, check all, then run each; a stage's lock goes when it is done.

        `answered` gets the ACKs even if the caller has gone away.
        """
        token = CancelToken()

        async def everything() -> list[OmniACK]:
            async with _locks(stages, deadline, token) as release:
                for stage in stages:
                    check(stage)
                context = Context(deadline, token)
                runs = [self._one(stage, run(stage, context), release) for stage in stages]
                results = await asyncio.gather(*runs, return_exceptions=True)
            acks = _flatten(results)
            answered(acks)
            return acks

        return await self.supervise(everything(), token)

    async def _one(
        self, stage: Stage, running: Awaitable[list[OmniACK]], release: Callable[[Stage], None]
    ) -> list[OmniACK]:
        try:
            with tracing.span("stage", stage_id=stage.stage_id) as span:
                try:
                    acks = await running
                    span.answered(acks)
                    return acks
                finally:
                    span.state(stage.state)
        finally:
            release(stage)

    def _tell(self, order: str, stages: Sequence[Stage], acks: Sequence[OmniACK]) -> None:
        for ack in acks:
            self._hub.push(AckEvent(time.time(), order, ack))
        for stage in stages:
            self.sample(stage)

    def sample(self, stage: Stage) -> None:
        """Push one memory event a rank."""
        for replica in stage.replicas:
            for rank in replica.executor.memory():
                self._hub.push(
                    MemoryEvent(
                        time.time(),
                        stage.stage_id,
                        rank.rank,
                        rank.replica,
                        rank.tags,
                        rank.process_bytes,
                        rank.host_backup_bytes,
                    )
                )


def _span(name: str, stages: Sequence[Stage], **attributes: Any) -> AbstractContextManager[tracing.Span]:
    """The span of an order over these stages; what it does to each is a span in it."""
    return tracing.span(name, stage_ids=[stage.stage_id for stage in stages], **attributes)


def refuse_busy(stage: Stage, order: str) -> None:
    """Raise StageBusyError if the stage has requests and is not quiesced.

    A batch that nobody waits for any more is no request: the order waits until it has ended.
    """
    in_transit = stage.in_transit()
    if stage.quiesced or not (stage.running or stage.queued or in_transit):
        return
    msg = (
        f"stage {stage.stage_id} is busy: {stage.running} running, {stage.queued} queued, {in_transit} in transit; "
        f"{order} is refused, nothing changed. Call pause_generation(mode='keep', stage_ids=[{stage.stage_id}]) "
        "first, or sleep(..., mode='keep' | 'wait' | 'abort')"
    )
    raise busy(stage, msg)


def refuse_frozen(stage: Stage, order: str) -> None:
    """Raise StageBusyError if requests are to end first that a pause holds: they never would."""
    in_transit = stage.in_transit()
    if not stage.quiesced or not (stage.running or stage.queued or in_transit):
        return
    msg = (
        f"stage {stage.stage_id} is {stage.pause_state} ({stage.pause_mode}) with {stage.running} running, "
        f"{stage.queued} queued, {in_transit} in transit, which can not end: {order} with mode='wait' is refused, "
        "nothing changed. Call resume_generation() first, or sleep(..., mode='keep' | 'abort')"
    )
    raise busy(stage, msg)


def busy(stage: Stage, message: str) -> StageBusyError:
    """The error of a stage that has requests, with its counts."""
    return StageBusyError(
        message,
        stage_id=stage.stage_id,
        running=stage.running,
        queued=stage.queued,
        in_transit=stage.in_transit(),
    )


@contextlib.asynccontextmanager
async def _locks(
    stages: Sequence[Stage], deadline: Deadline, token: CancelToken
) -> AsyncIterator[Callable[[Stage], None]]:
    """Hold every stage's order lock, taken in order of their ids so that two callers never wait for each other."""
    held: set[Stage] = set()

    def release(stage: Stage) -> None:
        if stage in held:
            held.discard(stage)
            stage.order_lock.release()

    try:
        for stage in sorted(stages, key=lambda s: s.stage_id):
            if not await acquire(stage.order_lock, deadline, token):
                msg = (
                    f"another order held stage {stage.stage_id} ({stage.state}) for {deadline.seconds:g} s; "
                    "nothing changed, call again later"
                )
                raise DeadlineError(msg)
            held.add(stage)
        yield release
    finally:
        for stage in list(held):
            release(stage)


def _flatten(results: Sequence[list[OmniACK] | BaseException]) -> list[OmniACK]:
    acks: list[OmniACK] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        acks.extend(result)
    return acks
