"""The executor whose ranks are processes of their own."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from omni_notebook.errors import ArgumentError
from omni_notebook.executors.base import RankAnswer, on_loop, shut_down, silent, told
from omni_notebook.executors.mp.link import RankLink, Waiting
from omni_notebook.executors.mp.messages import ASKED, Ask, LogLevel, Order, Start, Tell, payload
from omni_notebook.executors.mp.placement import places
from omni_notebook.executors.mp.wire import pack
from omni_notebook.worker.methods import signature

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.errors import WorkerDiedError
    from omni_notebook.executors.base import OnDeath
    from omni_notebook.executors.mp.wire import Packet
    from omni_notebook.protocol import RankId, RankStatus
    from omni_notebook.worker.reports import WorkerSpec

WORKER = "omni_notebook.worker.worker:Worker"
"""The class that a rank's process makes, as "module:Class"."""


class MpExecutor:
    """One process a rank; made on a running event loop, which it belongs to.

    `shutdown`, `cancel`, `memory`, `ended` and `log_tail` may be used from any thread.

    Raises:
        UnsupportedError, OSError: a process could not be started; none is left.
    """

    def __init__(
        self, specs: tuple[WorkerSpec, ...], on_death: OnDeath | None = None, *, worker: str | None = None
    ) -> None:
        self.ranks: tuple[RankId, ...] = tuple(spec.where for spec in specs)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._on_death = on_death
        self._closed = False
        self._numbers = 0
        self._links: list[RankLink] = []
        try:
            for spec, place in zip(specs, places(specs), strict=True):
                link = RankLink(spec.where, place, spec.config.device, self._loop, self._died)
                self._links.append(link)
                link.send(pack(Start(worker or WORKER, payload(spec), place.cpus)))
        except BaseException:
            self._kill()
            raise

    def _died(self, where: RankId, error: WorkerDiedError) -> None:
        if self._on_death is not None:
            self._on_death(where, error)

    # ------------------------------------------------------------------------------------ calls

    async def call(
        self, method: str, *args: Any, timeout_s: float | None = None, settle_s: float | None = None
    ) -> list[RankAnswer]:
        """See `Executor.call`."""
        number = self._next()
        try:
            packet = pack(Order(number, method, payload(args)))
        except ArgumentError as error:
            return [RankAnswer(where, None, error) for where in self.ranks]
        return await self._gather(number, packet, _Asked(method, signature(method).answer, timeout_s, settle_s))

    async def ping(self, timeout_s: float) -> list[RankAnswer]:
        """Every rank's process id, from its control thread: orders in progress do not delay it."""
        number = self._next()
        return await self._ask(number, "ping", timeout_s)

    async def measure(self, timeout_s: float) -> list[RankAnswer]:
        """Every rank's `RankStatus`, measured now, not waiting for its orders."""
        number = self._next()
        return await self._ask(number, "memory", timeout_s)

    async def _ask(self, number: int, what: Literal["ping", "memory"], timeout_s: float) -> list[RankAnswer]:
        return await self._gather(number, pack(Ask(number, what)), _Asked(what, ASKED[what], timeout_s))

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    async def _gather(self, number: int, packet: Packet, asked: _Asked) -> list[RankAnswer]:
        if self._closed:
            return [RankAnswer(where, None, shut_down(where)) for where in self.ranks]
        began_s = self._loop.time()
        gathering = _Gathering(self.ranks, self._loop, asked.settle_s)
        for place, link in enumerate(self._links):
            link.ask(number, packet, Waiting(asked.kind, gathering.taker(place)))
        await asyncio.wait({gathering.complete}, timeout=asked.timeout_s)
        if None in gathering.answers:
            for link in self._links:
                link.forget(number)
        return [
            silent(where, asked.method, self._loop.time() - began_s) if answer is None else answer
            for where, answer in zip(self.ranks, gathering.answers, strict=True)
        ]

    # ----------------------------------------------------------------------------- side channel

    def cancel(self, task_id: str) -> None:
        """See `Executor.cancel`."""
        self.tell("cancel", task_id)

    def tell(self, method: str, *args: Any) -> None:
        """See `Executor.tell`."""
        told(method)
        self._tell(pack(Tell(method, payload(args))))

    def set_log_level(self, level: str) -> None:
        """Set the level of every rank's root logger ("DEBUG", …); returns at once.

        Raises:
            ArgumentError: there is no such level.
        """
        if level not in logging.getLevelNamesMapping():
            msg = f"{level!r} is no log level; known are: {', '.join(logging.getLevelNamesMapping())}. Nothing changed"
            raise ArgumentError(msg)
        self._tell(pack(LogLevel(level)))

    def _tell(self, packet: Packet) -> None:
        def tell() -> None:
            for link in self._links:
                link.send(packet)

        self._on_loop(tell)

    def memory(self) -> list[RankStatus]:
        """See `Executor.memory`: what each rank sent last; `alive` is False for one that is gone."""
        return [link.status for link in self._links]

    def log_tail(self, rank: int) -> list[str]:
        """The last lines that a rank wrote to its stdout and stderr.

        Raises:
            ArgumentError: there is no such rank.
        """
        for where, link in zip(self.ranks, self._links, strict=True):
            if where.rank == rank:
                return link.log_tail()
        msg = f"there is no rank {rank}; this replica has {', '.join(str(where.rank) for where in self.ranks)}"
        raise ArgumentError(msg)

    # ---------------------------------------------------------------------------------- the end

    def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        self._on_loop(self._shut_down)

    def _shut_down(self) -> None:
        if not self._closed:
            self._closed = True
            for link in self._links:
                link.stop(shut_down(link.where))

    @property
    def ended(self) -> bool:
        """See `Executor.ended`."""
        return all(link.ended for link in self._links)

    def _on_loop(self, act: Callable[[], object]) -> None:
        on_loop(self._loop, self._thread, act, self._kill)

    def _kill(self) -> None:
        for link in self._links:
            link.kill()


class _Asked(NamedTuple):
    """A method, the type of its answer, and how long to wait for all of them and for the others after an error."""

    method: str
    kind: Any
    timeout_s: float | None
    settle_s: float | None = None


class _Gathering:
    """The answers of one call, until all are there, or `settle_s` seconds after the first error."""

    def __init__(
        self, ranks: tuple[RankId, ...], loop: asyncio.AbstractEventLoop, settle_s: float | None = None
    ) -> None:
        self._loop = loop
        self._settle_s = settle_s
        self.answers: list[RankAnswer | None] = [None] * len(ranks)
        self.complete: asyncio.Future[None] = loop.create_future()
        self._ranks = ranks
        self._missing = len(ranks)

    def taker(self, place: int) -> Callable[[Any, BaseException | None], None]:
        """Who takes the answer of the rank at `place`."""

        def take(value: Any, error: BaseException | None) -> None:
            self.answers[place] = RankAnswer(self._ranks[place], value, error)
            self._missing -= 1
            if not self._missing:
                self._end()
            elif error is not None and self._settle_s is not None:
                self._loop.call_later(self._settle_s, self._end)

        return take

    def _end(self) -> None:
        if not self.complete.done():
            self.complete.set_result(None)
