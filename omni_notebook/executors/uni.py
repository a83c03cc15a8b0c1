"""The in-process executor: one worker, on one thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import UnsupportedError
from omni_notebook.executors.base import RankAnswer, called_off, follow, method_of, shut_down, silent, told
from omni_notebook.worker.methods import AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.executors.base import OnDeath
    from omni_notebook.protocol import RankId, RankStatus
    from omni_notebook.worker.reports import WorkerSpec
    from omni_notebook.worker.worker import Worker

_STOP = None


def _make_worker(spec: WorkerSpec) -> Worker:
    from omni_notebook.worker.worker import Worker  # noqa: PLC0415  (imports torch: in the worker's thread)

    return Worker(spec)


class _Call:
    __slots__ = ("args", "future", "method")

    def __init__(self, method: str, args: tuple[Any, ...]) -> None:
        self.method = method
        self.args = args
        self.future: Future[Any] = Future()

    def run(self, worker: Worker) -> Future[Any] | None:
        """Call the method; the future that will answer where it does not answer now."""
        try:
            result = method_of(worker, self.method)(*self.args)
        except BaseException as error:  # noqa: BLE001  (it belongs to the caller, whatever it is)
            self.fail(error)
            return None
        if isinstance(result, Future):
            return result
        self.future.set_result(result)
        return None

    def fail(self, error: BaseException) -> None:
        """Answer with an error, unless it is answered."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)

    def take(self, result: Future[Any], where: RankId) -> None:
        """Answer as a worker's future did."""
        error = called_off(where, self.method) if result.cancelled() else result.exception()
        if error is not None:
            self.fail(error)
            return
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(result.result())


class UniExecutor:
    """Runs one worker on a daemon thread; a FIFO queue keeps the order of calls."""

    def __init__(
        self,
        specs: tuple[WorkerSpec, ...],
        on_death: OnDeath | None = None,  # noqa: ARG002  (a thread of this process does not end by itself)
        *,
        make_worker: Callable[[WorkerSpec], Worker] = _make_worker,
    ) -> None:
        if len(specs) != 1:
            msg = f"executor='uni' runs one rank, not {len(specs)}; tensor parallelism needs executor='mp'"
            raise UnsupportedError(msg)
        self.ranks: tuple[RankId, ...] = (specs[0].where,)
        self._spec = specs[0]
        self._make_worker = make_worker
        self._worker: Worker | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._later: set[_Call] = set()
        self._closed = False
        self._lock = threading.Lock()
        name = f"omni-worker-{specs[0].where.stage_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._worker = self._make_worker(self._spec)
        except BaseException as error:  # noqa: BLE001  (answered to every call)
            while (call := self._calls.get()) is not _STOP:
                call.future.set_exception(error)
            return
        while (call := self._calls.get()) is not _STOP:
            result = call.run(self._worker)
            if result is not None:
                self._later.add(call)
                result.add_done_callback(functools.partial(self._answer, call))
        self._worker.shutdown()
        for call in list(self._later):
            call.fail(shut_down(self.ranks[0]))

    def _answer(self, call: _Call, result: Future[Any]) -> None:
        """A call's future is done; on the thread that has done it."""
        self._later.discard(call)
        call.take(result, self.ranks[0])

    async def call(
        self,
        method: str,
        *args: Any,
        timeout_s: float | None = None,
        settle_s: float | None = None,  # noqa: ARG002  (there are no others)
    ) -> list[RankAnswer]:
        """See `Executor.call`."""
        where = self.ranks[0]
        call = _Call(method, args)
        with self._lock:
            if self._closed:
                return [RankAnswer(where, None, shut_down(where))]
            if method in AT_ONCE and self._worker is not None:
                threading.Thread(target=call.run, args=(self._worker,), daemon=True).start()
            else:
                self._calls.put(call)
        future = asyncio.wrap_future(call.future)
        future.add_done_callback(_retrieve)
        await asyncio.wait({future}, timeout=timeout_s)  # unlike wait_for it cancels nothing: the order goes on
        if not future.done():
            return [silent(where, method, timeout_s or 0.0)]
        error = future.exception()
        return [RankAnswer(where, None if error else future.result(), error)]

    def cancel(self, task_id: str) -> None:
        """See `Executor.cancel`."""
        self.tell("cancel", task_id)

    def tell(self, method: str, *args: Any) -> None:
        """See `Executor.tell`."""
        told(method)
        if self._worker is not None:
            follow(self._worker, method, args)

    def memory(self) -> list[RankStatus]:
        """See `Executor.memory`."""
        return [] if self._worker is None else [self._worker.memory()]

    def log_tail(self, rank: int) -> list[str]:  # noqa: ARG002
        """See `Executor.log_tail`: what a worker writes here goes where this process's own output goes."""
        return []

    def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._calls.put(_STOP)

    @property
    def ended(self) -> bool:
        """See `Executor.ended`."""
        return not self._thread.is_alive()


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark an abandoned call's error as seen, so that asyncio does not print it."""
    if not future.cancelled():
        future.exception()
