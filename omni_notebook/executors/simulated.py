"""An executor without processes, threads or memory: any number of ranks whose delays and failures are chosen.

For limits and benchmarks of what is above the executors; it keeps the same contract as the real ones.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from omni_notebook.errors import WorkerDiedError
from omni_notebook.executors.base import RankAnswer, called_off, follow, method_of, shut_down, silent, told
from omni_notebook.executors.simulated_worker import SimulatedWorker
from omni_notebook.worker.methods import AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.executors.base import OnDeath
    from omni_notebook.protocol import RankId, RankStatus
    from omni_notebook.worker.reports import WorkerSpec

END_S = 3.0
"""At a shutdown the orders before it are given this long."""
LAST_WORD_S = 0.2
"""What a worker's shutdown has answered arrives within this."""


@dataclass(slots=True, frozen=True)
class Behaviour:
    """What a rank does with one order: take time, raise, say nothing for ever, or die."""

    delay_s: float = 0.0
    error: BaseException | None = None
    silent: bool = False
    dies: bool = False


_AS_TOLD = Behaviour()


def well_behaved(where: RankId, method: str) -> Behaviour:  # noqa: ARG001
    """Every order at once."""
    return _AS_TOLD


class SimulatedExecutor:
    """Workers on the engine's loop; their methods may be plain or coroutine functions. One order at a time a rank."""

    def __init__(
        self,
        specs: tuple[WorkerSpec, ...],
        on_death: OnDeath | None = None,
        *,
        make_worker: Callable[[WorkerSpec], Any] = SimulatedWorker,
        behave: Callable[[RankId, str], Behaviour] = well_behaved,
    ) -> None:
        self.ranks: tuple[RankId, ...] = tuple(spec.where for spec in specs)
        self._loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._ranks = [_Rank(spec, make_worker, behave, self._died) for spec in specs]
        self._closed = False
        self._ended = False

    async def call(
        self, method: str, *args: Any, timeout_s: float | None = None, settle_s: float | None = None
    ) -> list[RankAnswer]:
        """See `Executor.call`."""
        if self._closed:
            return [RankAnswer(where, None, shut_down(where)) for where in self.ranks]
        began_s = self._loop.time()
        futures = [rank.order(method, args) for rank in self._ranks]
        ends_s = math.inf if timeout_s is None else self._loop.time() + timeout_s
        waiting = {future for future in futures if not future.done()}
        while waiting and ends_s > (now_s := self._loop.time()):
            if settle_s is not None and any(f.done() and f.result().error is not None for f in futures):
                ends_s, settle_s = min(ends_s, now_s + settle_s), None
            left_s = None if ends_s == math.inf else ends_s - now_s
            when = asyncio.ALL_COMPLETED if settle_s is None else asyncio.FIRST_COMPLETED
            _, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=when)
        return [
            future.result() if future.done() else silent(where, method, self._loop.time() - began_s)
            for where, future in zip(self.ranks, futures, strict=True)
        ]

    def cancel(self, task_id: str) -> None:
        """See `Executor.cancel`."""
        self.tell("cancel", task_id)

    def tell(self, method: str, *args: Any) -> None:
        """See `Executor.tell`."""
        told(method)
        for rank in self._ranks:
            follow(rank.worker, method, args)

    def memory(self) -> list[RankStatus]:
        """See `Executor.memory`."""
        return [rank.memory() for rank in self._ranks]

    def log_tail(self, rank: int) -> list[str]:  # noqa: ARG002
        """See `Executor.log_tail`: these ranks have no process."""
        return []

    def kill(self, rank: int) -> None:
        """What SIGKILL is to a real rank."""
        for one in self._ranks:
            if one.where.rank == rank:
                one.die()

    def _died(self, where: RankId, error: WorkerDiedError) -> None:
        if self._on_death is not None and not self._closed:
            self._on_death(where, error)

    def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end()))

    async def _end(self) -> None:
        await asyncio.gather(*(rank.end() for rank in self._ranks))
        self._ended = True

    @property
    def ended(self) -> bool:
        """See `Executor.ended`."""
        return self._ended or all(rank.error is not None for rank in self._ranks)


@dataclass(slots=True, frozen=True)
class _Order:
    """One order; `run` gives a value or an error, `turn` is set when the next may begin."""

    method: str
    run: Callable[[], tuple[Any, BaseException | None]]
    behaviour: Behaviour
    answer: asyncio.Future[RankAnswer]
    turn: asyncio.Future[None]


def _given(value: Any) -> tuple[Any, BaseException | None]:
    """What an order that was begun at once has given already: a coroutine or a future."""
    return value, None


class _Rank:
    """One worker and the orders that wait for it."""

    def __init__(
        self,
        spec: WorkerSpec,
        make_worker: Callable[[WorkerSpec], Any],
        behave: Callable[[RankId, str], Behaviour],
        on_death: Callable[[RankId, WorkerDiedError], None],
    ) -> None:
        self.where = spec.where
        self.worker = make_worker(spec)
        self.error: WorkerDiedError | None = None
        self._behave = behave
        self._on_death = on_death
        self._orders: dict[asyncio.Future[RankAnswer], asyncio.Task[None] | None] = {}
        self._last: asyncio.Future[None] | None = None

    def order(self, method: str, args: tuple[Any, ...]) -> asyncio.Future[RankAnswer]:
        """An order after those before it; answered at once where nothing is in its way."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[RankAnswer] = loop.create_future()
        if self.error is not None:
            answer.set_result(RankAnswer(self.where, None, self.error))
            return answer
        behaviour = self._behave(self.where, method)
        run = functools.partial(self._run, method, args)
        at_once = method in AT_ONCE
        if behaviour is _AS_TOLD and (at_once or self._last is None or self._last.done()):
            value, error = run()
            if not inspect.isawaitable(value) and not isinstance(value, Future):
                answer.set_result(RankAnswer(self.where, value, error))
                return answer
            run = functools.partial(_given, value)
        ended: asyncio.Future[None] = loop.create_future()
        before = None if at_once else self._last
        if not at_once:
            self._last = ended
        order = _Order(method, run, behaviour, answer, ended)
        self._orders[answer] = loop.create_task(self._later(before, order))
        return answer

    def _run(self, method: str, args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
        try:
            return method_of(self.worker, method)(*args), None
        except BaseException as error:  # noqa: BLE001  (it belongs to the caller, whatever it is)
            return None, error

    async def _later(self, before: asyncio.Future[None] | None, order: _Order) -> None:
        if before is not None:
            await asyncio.wait({before})
        behaviour = order.behaviour
        await asyncio.sleep(behaviour.delay_s)
        if behaviour.silent:
            await asyncio.get_running_loop().create_future()
        if behaviour.dies:
            self.die()
            return
        value, error = order.run()
        if behaviour.error is not None:
            value, error = None, behaviour.error
        if isinstance(value, Future):
            order.turn.set_result(None)  # the next order does not wait for this answer
            value = self._result(order.method, value)
        if inspect.isawaitable(value):
            try:
                value = await value
            except Exception as raised:  # noqa: BLE001  (it belongs to the caller)
                value, error = None, raised
        self._orders.pop(order.answer, None)
        if not order.turn.done():
            order.turn.set_result(None)
        if not order.answer.done():
            order.answer.set_result(RankAnswer(self.where, value, error))

    async def _result(self, method: str, future: Future[Any]) -> Any:
        """What a worker's future gives."""
        given = asyncio.wrap_future(future)
        await asyncio.wait({given})
        if given.cancelled():
            raise called_off(self.where, method)
        return given.result()

    def memory(self) -> RankStatus:
        """The worker's, or what is left of it."""
        status: RankStatus = self.worker.memory()
        return status if self.error is None else msgspec.structs.replace(status, alive=False, tags={})

    def die(self) -> None:
        """Answer for everything that is under way."""
        if self.error is not None:
            return
        where = self.where
        message = f"{where.title} of stage {where.stage_id} was killed; call restart({where.stage_id})"
        self.error = WorkerDiedError(message, stage_id=where.stage_id, rank=where.rank)
        orders, self._orders = self._orders, {}
        for answer, task in orders.items():
            if not answer.done():
                answer.set_result(RankAnswer(where, None, self.error))
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        self._on_death(where, self.error)

    async def end(self) -> None:
        """After the orders before; what the worker's shutdown does not answer is called off."""
        if self._last is not None and self.error is None:
            await asyncio.wait({self._last}, timeout=END_S)
        self.worker.shutdown()
        tasks = {task for task in self._orders.values() if task is not None}
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=LAST_WORD_S)
            for task in stuck:
                task.cancel()
        for answer in self._orders:
            if not answer.done():
                answer.set_result(RankAnswer(self.where, None, shut_down(self.where)))
