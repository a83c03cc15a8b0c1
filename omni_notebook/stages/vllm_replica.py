"""A replica whose engine is vLLM: it gets requests while the replica is open; closed, its scheduler stands still."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from omni_notebook.errors import ArgumentError, EngineClosedError, OmniError, WorkerDiedError
from omni_notebook.worker.faults import describe
from omni_notebook.worker.vllm.wire import NEWS_AHEAD, TextOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.executors.hosted import HostedExecutor
    from omni_notebook.stages.requests import StageRequest
    from omni_notebook.stages.vllm_scheduler import VllmScheduler
    from omni_notebook.stages.waiting import Signal

_GONE = (WorkerDiedError, EngineClosedError)


class VllmReplica:
    """Feeds one vLLM engine; see `Replica`, whose place it takes. All methods belong to the engine's loop."""

    def __init__(
        self,
        *,
        executor: HostedExecutor,
        scheduler: VllmScheduler,
        changed: Signal,
        weight_version: Callable[[], str],
        on_failure: Callable[[BaseException], None],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.closed_by: set[str] = {"loading"}
        self._changed = changed
        self._weight_version = weight_version
        self._on_failure = on_failure
        self._on_start = on_start
        self._work = asyncio.Event()
        self._frozen = True
        self._stale = False
        self._ended = False
        self._ordering = False
        self._aborted: list[str] = []
        self._heard = 0
        self._feeding = asyncio.get_running_loop().create_task(self._feed(), name="omni-vllm-feed")

    def loaded(self) -> None:
        """VLLM runs: take requests, and hear what becomes of them."""
        self.executor.listen(self._hear, list[TextOutput])
        self.executor.when_room(self.kick)
        self._frozen = False
        self.reopen("loading")

    @property
    def open(self) -> bool:
        """Whether requests may start."""
        return not self.closed_by

    @property
    def at_rest(self) -> bool:
        """Whether nothing runs: vLLM's scheduler stands still, or has no request."""
        return self._frozen or self._ended or (self.open and not self.scheduler.running)

    @property
    def drained(self) -> bool:
        """Whether there is no request at all."""
        return self.at_rest and not self.scheduler.running and not self.scheduler.queued

    def add(self, request: StageRequest) -> None:
        """Give a request to vLLM at once, unless something comes before it: then queue it."""
        self.scheduler.add(request)
        if not self.open or self._frozen or self._ordering or self._aborted or self._ended:
            self.kick()
            return
        try:
            self._submit()
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def close(self, reason: str) -> None:
        """Let nothing run until this reason is taken back."""
        self.closed_by.add(reason)
        self.kick()

    def reopen(self, reason: str) -> None:
        """Take a reason back."""
        self.closed_by.discard(reason)
        self.kick()

    def kick(self) -> None:
        """Look again what can be done."""
        self._work.set()
        self._changed.notify()

    def abort(self, request_id: str) -> bool:
        """End one request; whether it was here."""
        if self.scheduler.has(request_id):
            self._aborted.append(request_id)
        found = self.scheduler.abort(request_id)
        self.kick()
        return found

    def abort_all(self) -> None:
        """End every request with a terminal ABORTED output."""
        for request_id in list(self.scheduler.request_ids()):
            self.abort(request_id)

    def end_all(self, error: OmniError) -> None:
        """End every request with an error."""
        self._aborted += [one for one in self.scheduler.request_ids() if self.scheduler.has(one)]
        self.scheduler.end_all(error)
        self.kick()

    def requeue(self) -> None:
        """What vLLM has computed is not to be used again: before it goes on it forgets it, and computes it anew."""
        self._stale = True

    async def stop(self) -> None:
        """End the loop, hear no more; requests stay in the scheduler."""
        self._ended = True
        self._feeding.cancel()
        await asyncio.wait({self._feeding}, timeout=1.0)
        self._changed.notify()

    # ------------------------------------------------------------------------------- the loop

    async def _feed(self) -> None:
        """Give vLLM its orders, one after the other; a bug or vLLM's failure in it fails the stage."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                if "loading" not in self.closed_by:
                    await self._order()
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._ended = True
        if not isinstance(error, _GONE):  # whoever watches the process says so
            self._on_failure(error)
        self._changed.notify()

    async def _order(self) -> None:
        self._ordering = True
        if self._aborted:
            aborted, self._aborted = self._aborted, []
            await self.executor.ask_host("abort", aborted)
        if self.open and not self._ended:
            await self._go_on()
        elif not self.open and not self._frozen:
            await self._stand_still()
        self._ordering = False

    async def _go_on(self) -> None:
        if self._frozen:
            self._frozen = False
            stale, self._stale = self._stale, False
            await self.executor.ask_host("thaw", stale)
        if self.open:
            self._submit()

    def _submit(self) -> None:
        """Send what may start, as the host reads it; one that can not be sent ends alone, and the others go on.

        An id that was aborted meanwhile waits until vLLM has let go of the request that had it.
        """
        began = False
        while self.executor.has_room and (request := self.scheduler.take(held=self._aborted)) is not None:
            began = True
            try:
                self.executor.tell_host("submit", request)
            except (ArgumentError, OSError) as error:
                kind = ArgumentError if isinstance(error, ArgumentError) else OmniError
                fault = describe(kind(f"request {request.request_id}: {error}; vLLM was not asked"))
                self._take([TextOutput(request_id=request.request_id, fault=fault)])
        if began:
            self._on_start()
        self._changed.notify()

    async def _stand_still(self) -> None:
        await self.executor.ask_host("freeze")
        self._frozen = True
        self._changed.notify()
        if self.open:
            self._work.set()

    def _hear(self, outputs: list[TextOutput], error: BaseException | None) -> None:
        """What the host says unasked: outputs, or that it is gone or could not follow."""
        if self._ended:
            return
        if error is not None:
            self._fail(error)
            return
        try:
            self._take(outputs)
        except Exception as failure:  # noqa: BLE001
            self._fail(failure)
            return
        self._heard += 1
        if self._heard == NEWS_AHEAD // 2:
            self._heard = 0
            self.executor.tell_host("taken", NEWS_AHEAD // 2)

    def _take(self, outputs: list[TextOutput]) -> None:
        self.scheduler.finish(outputs, self._weight_version())
        self._changed.notify()
