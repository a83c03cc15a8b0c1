"""The executor whose ranks live in processes that another engine owns (vLLM): one host process answers for them."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from omni_notebook.errors import ArgumentError, ConfigError, DeadlineError, WorkerDiedError
from omni_notebook.executors.base import RankAnswer, on_loop, shut_down, silent, told
from omni_notebook.executors.mp.link import RankLink, Waiting, unseen
from omni_notebook.executors.mp.messages import Order, Start, Tell, payload
from omni_notebook.executors.mp.wire import pack
from omni_notebook.worker.faults import rebuild
from omni_notebook.worker.methods import signature
from omni_notebook.worker.vllm.versions import vllm_version, warn_if_untested
from omni_notebook.worker.vllm.wire import LAST_WORDS, RankReply, packed

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.executors.base import OnDeath
    from omni_notebook.protocol import RankId, RankStatus
    from omni_notebook.worker.reports import WorkerSpec

HOST = "omni_notebook.worker.vllm.host:VllmHost"
"""The class that the host process makes, as "module:Class"."""
_RAISED = re.compile(r"\b[A-Za-z_][\w.]*(?:Error|Exception|Interrupt): .*$")
_POINTS_ELSEWHERE = re.compile(r"[Ss]ee (?:root cause|stack trace)|initialization failed")
_FATAL = "EngineCore encountered a fatal error"
"""What vLLM prints when its engine core ends by an error of its own."""
_CURES = {
    "torchvision::": "the torchvision that is installed was made for another torch, and text needs none: "
    "pip uninstall -y torchvision torchaudio torchcodec",
}
"""What vLLM's error does not say: part of it, and what helps."""
GRACE_S = 2.0
"""The host says itself which ranks were silent; it is given this long to say so."""


class HostedExecutor:
    """One host process for all ranks of a replica; made on a running event loop, which it belongs to.

    Raises:
        UnsupportedError, OSError: the process could not be started; none is left.
        ArgumentError: the config has something that can not be sent to it.
    """

    def __init__(
        self, specs: tuple[WorkerSpec, ...], on_death: OnDeath | None = None, *, host: str | None = None
    ) -> None:
        warn_if_untested(vllm_version())
        self.ranks: tuple[RankId, ...] = tuple(spec.where for spec in specs)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._on_death = on_death
        self._closed = False
        self._number = 0
        first = specs[0]
        start = pack(Start(host or HOST, payload(first), ()))  # what can not be sent shows before there is a process
        self._unseen = tuple(unseen(where, first.config.device) for where in self.ranks)
        self._link = RankLink(first.where, None, first.config.device, self._loop, self._died)
        self._link.send(start)

    def _died(self, where: RankId, error: WorkerDiedError) -> None:
        """The host is gone: say why, where it could still tell."""
        if self._on_death is not None:
            self._on_death(where, _with_last_words(error, where))

    # ------------------------------------------------------------------------------------ calls

    async def call(
        self,
        method: str,
        *args: Any,
        timeout_s: float | None = None,
        settle_s: float | None = None,  # noqa: ARG002  (the host waits for all)
    ) -> list[RankAnswer]:
        """See `Executor.call`."""
        if self._closed:
            return [RankAnswer(where, None, shut_down(where)) for where in self.ranks]
        began_s = self._loop.time()
        try:
            if method == "load":
                await self._start(timeout_s)
            arguments = packed(args)
            left_s = None if timeout_s is None else max(0.0, timeout_s - (self._loop.time() - began_s))
            patience_s = None if left_s is None else left_s + GRACE_S
            replies = await self.ask_host("order", method, arguments, left_s, timeout_s=patience_s)
        except DeadlineError:
            waited_s = self._loop.time() - began_s
            return [silent(where, method, waited_s) for where in self.ranks]
        except Exception as error:  # noqa: BLE001  (every rank answers, whatever happened)
            return [RankAnswer(where, None, error) for where in self.ranks]
        waited_s = self._loop.time() - began_s
        return [
            silent(where, method, waited_s) if reply is None else _answer(where, method, reply)
            for where, reply in zip(self.ranks, replies, strict=True)
        ]

    async def _start(self, timeout_s: float | None) -> None:
        try:
            await self.ask_host("start", timeout_s=timeout_s)
        except RuntimeError as error:  # vLLM's own, which tells to look at what it has printed
            raise ConfigError(_root_cause(error, self._link.log_tail(), self.ranks[0])) from error

    async def ask_host(self, method: str, *args: Any, timeout_s: float | None = None, kind: Any = Any) -> Any:
        """Call a method of the host itself; its answer, which is of this kind (plain types, if none is said).

        Raises:
            WorkerDiedError: it is gone.
            DeadlineError: it said nothing within `timeout_s`.
            Exception: what it raised.
        """
        self._number += 1
        number = self._number
        answered: asyncio.Future[Any] = self._loop.create_future()

        def take(value: Any, error: BaseException | None) -> None:
            if isinstance(error, WorkerDiedError):
                error = _with_last_words(error, self.ranks[0])
            if not answered.done():
                answered.set_result(RankAnswer(self.ranks[0], value, error))

        self._link.ask(number, pack(Order(number, method, payload(args))), Waiting(kind, take))
        await asyncio.wait({answered}, timeout=timeout_s)
        if not answered.done():
            self._link.forget(number)
            return silent(self.ranks[0], method, timeout_s or 0.0).unwrap()
        return answered.result().unwrap()

    @property
    def has_room(self) -> bool:
        """Whether the host reads what it is sent; else what can wait should, until `when_room` calls."""
        return self._link.has_room

    def when_room(self, look: Callable[[], None]) -> None:
        """Call `look` each time that the host has read what waited for it."""
        self._link.on_room = look

    def tell_host(self, method: str, *args: Any) -> None:
        """Call a method of the host itself, after the calls before; nobody answers, one that is gone hears nothing.

        Raises:
            ArgumentError: an argument has no form on the wire; nothing was sent.
            OSError: it is big, and this process may open no more files; nothing was sent.
        """
        self._link.send(pack(Tell(method, payload(args))))

    def listen(self, take: Callable[[Any, BaseException | None], None], kind: Any) -> None:
        """Hand what the host says unasked, of this kind, to `take`; at its end, once, the error."""
        self._link.listen(Waiting(kind, take))

    def cancel(self, task_id: str) -> None:
        """See `Executor.cancel`; a vLLM worker's one thread carries orders out, so that none can be overtaken."""

    def tell(self, method: str, *args: Any) -> None:  # noqa: ARG002
        """See `Executor.tell`: a vLLM stage has nothing that could overtake orders."""
        told(method)

    def memory(self) -> list[RankStatus]:
        """See `Executor.memory`: what each rank sent last."""
        known = {status.rank: status for status in self._link.statuses if status.tags}
        alive = not self._link.ended
        return [
            known.get(status.rank, msgspec.structs.replace(status, alive=alive, pid=None)) for status in self._unseen
        ]

    def log_tail(self, rank: int) -> list[str]:
        """The last lines of the log that all ranks share.

        Raises:
            ArgumentError: there is no such rank.
        """
        if rank not in {where.rank for where in self.ranks}:
            msg = f"there is no rank {rank}; this replica has {', '.join(str(where.rank) for where in self.ranks)}"
            raise ArgumentError(msg)
        return self._link.log_tail()

    def when_read(self, look: Callable[[], None]) -> None:
        """Call `look` each time that all that the host had said was handed out."""
        self._link.on_read = look

    # ---------------------------------------------------------------------------------- the end

    def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        on_loop(self._loop, self._thread, self._shut_down, self._link.kill)

    def _shut_down(self) -> None:
        if not self._closed:
            self._closed = True
            self._link.stop(shut_down(self.ranks[0]))

    @property
    def ended(self) -> bool:
        """See `Executor.ended`."""
        return self._link.ended


def _with_last_words(error: WorkerDiedError, where: RankId) -> WorkerDiedError:
    """The error with what the host said before it ended in the place of a status that tells nobody anything."""
    said = next((line for line in reversed(error.log_lines) if line.startswith(LAST_WORDS)), None)
    if said is None:
        message = str(error).replace(where.title, "the host process of vLLM", 1)
        return WorkerDiedError(message, stage_id=where.stage_id, rank=where.rank, log_lines=error.log_lines)
    cause = _last_raised(error.log_lines) if any(_FATAL in line for line in error.log_lines) else None
    message = (
        f"stage {where.stage_id}: {said.removeprefix(LAST_WORDS)}{'' if cause is None else f' ({cause})'}; "
        f"other stages go on, call restart({where.stage_id})"
    )
    rank = re.match(r"rank (\d+)", said.removeprefix(LAST_WORDS))
    return WorkerDiedError(
        message,
        stage_id=where.stage_id,
        rank=where.rank if rank is None else int(rank[1]),
        log_lines=error.log_lines,
    )


def _root_cause(error: RuntimeError, log_lines: list[str], where: RankId) -> str:
    """VLLM's error with the one that it had printed before: that of the process in which it happened."""
    cause = _last_raised(log_lines) or " ".join(str(error).split())
    cure = next((f"; {cure}" for words, cure in _CURES.items() if words in cause), "")
    return f"stage {where.stage_id}: vLLM could not start: {cause}{cure}. Nothing is left of it"


def _last_raised(log_lines: list[str]) -> str | None:
    """The last error that was printed and does not point to another."""
    found = [match for line in log_lines if (match := _RAISED.search(line)) and not _POINTS_ELSEWHERE.search(line)]
    return found[-1][0].partition(", please check")[0].rstrip(".") if found else None


def _answer(where: RankId, method: str, data: bytes) -> RankAnswer:
    reply = msgspec.msgpack.decode(data, type=RankReply)
    if reply.fault is not None:
        return RankAnswer(where, None, rebuild(reply.fault))
    return RankAnswer(where, msgspec.msgpack.decode(reply.value, type=signature(method).answer), None)
