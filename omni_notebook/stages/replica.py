"""A full copy of a stage: an executor, a scheduler, and the loop that feeds one from the other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import DeadlineError, PeerLostError, WorkerDiedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from omni_notebook.errors import OmniError
    from omni_notebook.executors.base import Executor, RankAnswer
    from omni_notebook.stages.requests import StageRequest
    from omni_notebook.stages.scheduler import Batch, Scheduler
    from omni_notebook.stages.waiting import Signal


MAX_LEAVING = 2
"""Batches whose outputs may be on their way while another runs; a slower output thread holds the next one back."""
SETTLE_S = 5.0
"""Once a rank has failed in a batch the others lose it: at once over gloo, while over nccl they may wait for it on the
device. One that has said nothing for this long is stuck."""


class Replica:
    """Runs batches while no one has closed it.

    `closed_by` holds the reasons that keep the scheduler closed ("pause", "sleep", "weights", …); it runs when there
    is none. All methods belong to the engine's loop.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        scheduler: Scheduler,
        changed: Signal,
        weight_version: Callable[[], str],
        on_failure: Callable[[BaseException], None],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.closed_by: set[str] = set()
        self._changed = changed
        self._weight_version = weight_version
        self._on_failure = on_failure
        self._on_start = on_start
        self._work = asyncio.Event()
        self._executing = False
        self._calls: set[asyncio.Task[list[RankAnswer]]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._committed: asyncio.Future[bool] | None = None
        self._task = asyncio.get_running_loop().create_task(self._run(), name="omni-replica")

    @property
    def open(self) -> bool:
        """Whether batches may start."""
        return not self.closed_by

    @property
    def at_rest(self) -> bool:
        """Whether no batch is on the device, and the outputs of all that were are handed over."""
        return not self._executing and not self._leaving

    @property
    def drained(self) -> bool:
        """Whether there is no request at all."""
        return self.at_rest and not self.scheduler.running and not self.scheduler.queued

    def add(self, request: StageRequest) -> None:
        """Queue a request."""
        self.scheduler.add(request)
        self._prefetch()
        self.kick()

    def close(self, reason: str) -> None:
        """Start no further batch until this reason is taken back."""
        self.closed_by.add(reason)

    def reopen(self, reason: str) -> None:
        """Take a reason back."""
        self.closed_by.discard(reason)
        self.kick()

    def withhold(self) -> None:
        """A wake is not committed: hand over nothing of batches that begin from now on before `release`."""
        self._committed = asyncio.get_running_loop().create_future()

    def release(self, *, committed: bool) -> None:
        """The wake is committed, or will not be: nothing of those batches is handed over ever.

        Then the caller has closed the replica, and queues its requests again once it is at rest.
        """
        withheld, self._committed = self._committed, None
        if withheld is not None and not withheld.done():
            withheld.set_result(committed)

    def kick(self) -> None:
        """Look again whether a batch can start."""
        self._work.set()
        self._changed.notify()

    def abort(self, request_id: str) -> bool:
        """End one request; whether it was here."""
        found = self.scheduler.abort(request_id)
        self._stop_what_nobody_waits_for()
        self._prefetch()
        self.kick()
        return found

    def _stop_what_nobody_waits_for(self) -> None:
        batch_id = self.scheduler.abandoned_batch()
        if batch_id is not None and self._executing:
            self.executor.cancel(batch_id)

    def abort_all(self) -> None:
        """End every request with a terminal ABORTED output."""
        for request_id in list(self.scheduler.request_ids()):
            self.abort(request_id)

    def end_all(self, error: OmniError) -> None:
        """End every request with an error."""
        self.scheduler.end_all(error)
        self._stop_what_nobody_waits_for()

    def requeue(self) -> None:
        """Device state is gone: what was begun will begin again."""
        self.scheduler.requeue()

    def loaded(self) -> None:
        """The ranks have loaded; nothing to do, batches start while no reason keeps them."""

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            batch = self.scheduler.schedule() if self.open and len(self._leaving) < MAX_LEAVING else None
            if batch is None:
                self._work.clear()
            else:
                self._on_start()
                await self._step(batch)

    def _prefetch(self) -> None:
        """While a batch runs, begin to move what the next one needs, and give up what none does.

        A closed scheduler has no next one.
        """
        if self.open and self._executing:
            wanted = self.scheduler.prefetch()
            if wanted is not None:
                self.executor.tell("prefetch", wanted)

    async def _step(self, batch: Batch) -> None:
        """Run one batch; return when the device is free for the next."""
        self._executing = True
        version, committed = self._weight_version(), self._committed
        try:
            for steps in batch.milestones:  # before the batch: orders are carried out one after the other
                self._watch(batch, steps, self._call("reached", batch.collect, steps))
            executing = self._call("execute", batch.payload, settle_s=SETTLE_S)
            collecting = None if batch.collect is None else self._call("collect", batch.collect)
            self._prefetch()
            answers = await executing
            errors = _errors(answers)
            if committed is not None and not await committed:
                if collecting is not None:
                    await collecting
            elif errors:
                self._fail(batch, errors)
            elif collecting is None:
                self.scheduler.finish(batch, answers[0].value, version)
            else:
                self.scheduler.executed(batch, answers[0].value)
                self._leave(self._deliver(batch, collecting, version))
        except Exception as error:  # noqa: BLE001  (a bug in a scheduler must not leave its clients waiting)
            self._fail(batch, [error])
        finally:
            self._executing = False
            self._changed.notify()

    def _watch(self, batch: Batch, steps: int, reached: asyncio.Task[list[RankAnswer]]) -> None:
        """Tell the requests of a batch once it has made so many steps."""

        def tell(task: asyncio.Task[list[RankAnswer]]) -> None:
            if task.cancelled() or not all(answer.error is None and answer.value for answer in task.result()):
                return
            for request in batch.requests:
                if not request.aborted:
                    request.progress(steps / batch.payload.num_inference_steps)

        reached.add_done_callback(tell)

    def _call(self, method: str, *args: Any, settle_s: float | None = None) -> asyncio.Task[list[RankAnswer]]:
        """A call that is on its way, after those begun before it."""
        task = asyncio.get_running_loop().create_task(self.executor.call(method, *args, settle_s=settle_s))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    def _leave(self, delivering: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(delivering)
        self._leaving.add(task)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        self.kick()

    async def _deliver(self, batch: Batch, collecting: asyncio.Task[list[RankAnswer]], version: str) -> None:
        """Hand a batch's outputs over when they are copied and encoded; the next batch runs meanwhile."""
        answers = await collecting
        errors = _errors(answers)
        if errors:
            self._fail(batch, errors)
            return
        try:
            self.scheduler.finish(batch, answers[0].value, version)
        except Exception as error:  # noqa: BLE001  (a bug in a scheduler must not leave its clients waiting)
            self._fail(batch, [error])

    def _fail(self, batch: Batch, errors: list[BaseException]) -> None:
        """Fail a batch's requests by the rank that caused it, not by those that lost their peer or wait for it.

        After that the ranks of a group can not compute together any more.
        """
        cause = min(errors, key=lambda error: (isinstance(error, PeerLostError), isinstance(error, DeadlineError)))
        self.scheduler.fail(batch, cause)
        if any(isinstance(error, WorkerDiedError | PeerLostError | DeadlineError) for error in errors):
            self._on_failure(cause)

    async def stop(self) -> None:
        """End the loop; requests stay in the scheduler."""
        tasks = {self._task, *self._leaving}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=1.0)


def _errors(answers: list[RankAnswer]) -> list[BaseException]:
    """What the ranks raised."""
    return [answer.error for answer in answers if answer.error is not None]
