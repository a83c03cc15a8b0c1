"""The process around vLLM's `AsyncLLM`: it answers for all ranks of one replica.

Everything of vLLM happens here and in the processes that it starts: the notebook's process imports no vLLM, its root
logger stays as it was, an interrupt does not reach the engine, and what vLLM prints goes to the stage's log. Orders to
ranks go out by `collective_rpc`; each rank answers by itself, over a datagram socket, so that one that hangs does not
hide what the others said.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from omni_notebook.errors import ConfigError, OmniError, UnsupportedError
from omni_notebook.worker.faults import describe
from omni_notebook.worker.vllm import engine, leftovers
from omni_notebook.worker.vllm.wire import (
    LAST_WORDS,
    NEWS_AHEAD,
    UNASKED,
    Attach,
    FromRank,
    RankReply,
    RankSample,
    TextOutput,
    TextRequest,
    packed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

    from omni_notebook.executors.mp.child import Line
    from omni_notebook.protocol import RankStatus
    from omni_notebook.worker.reports import WorkerSpec

_SOCKET = "ranks"
_BUFFER_BYTES = 4 * 1024 * 1024
_FOLDER_BYTES = 50
"""Room for our folder's name in it, and for vLLM's sockets, whose names have 36 characters."""
_DATAGRAM_BYTES = 1024 * 1024
CORE = "vLLM's engine core"
FATAL_S = 10.0
"""An engine core that has failed is given this long to end with its ranks."""
DIED = 70
"""The exit status of a host whose ranks have died."""


class VllmHost:
    """Runs `AsyncLLM` on an event loop of its own; the methods answer with futures."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._size = spec.config.tensor_parallel_size
        self._folder = Path(tempfile.mkdtemp(prefix="omni-vllm-", dir=_short_folder()))
        self._left = leftovers.Leftovers(os.getpgrp(), self._folder)
        self._sentinel = leftovers.Sentinel(self._folder)
        self._llm: Any = None
        self._core = 0
        self._number = 0
        self._asked: dict[int, _Asked] = {}
        self._statuses: dict[int, RankStatus] = {}
        self._report: Callable[[], None] = lambda: None
        self._outputs: dict[str, TextOutput] = {}
        self._ahead = 0
        self._speaking = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._frozen = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()

    def report_with(self, report: Callable[[], None]) -> None:
        """See `Reporting`."""
        self._report = report

    def speak_on(self, line: Line) -> None:
        """See `Looping`."""
        self._line = line

    def memory(self) -> tuple[RankStatus, ...]:
        """What each rank sent last, in their order; any thread."""
        return tuple(status for _, status in sorted(self._statuses.items()))

    def _go(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # ------------------------------------------------------------------------------- starting

    def start(self) -> Future[None]:
        """Start vLLM and take its ranks over.

        Raises:
            Exception: what vLLM raised; nothing is left.
        """
        return self._go(self._start())

    async def _start(self) -> None:
        self._listen()
        self._llm = await engine.make(self._spec, self._folder)
        self._guard()
        self._left.look()
        self._sentinel.started()
        attach = Attach(
            spec=self._spec,
            address=str(self._folder / _SOCKET),
            source=self._source(),
        )
        await self._llm.collective_rpc("omni_attach", args=(packed(attach),))
        for process in multiprocessing.active_children():
            self._core = process.pid or 0
            self._watch(self._core, CORE)
        gc.freeze()  # else a full collection looks at all that vLLM has imported, and no token comes meanwhile
        self._line.read_on(self._loop)

    def _guard(self) -> None:
        """Have vLLM's own `wake_up`, and its `resume_generation` while we hold it still, refused under the stage.

        (Its `sleep` the ranks refuse, so vLLM takes them for awake, and a `wake_up` would ask none of them.)
        """
        self._resume = self._llm.resume_generation

        async def wake_up(*_args: Any, **_known: Any) -> None:
            self._refuse("wake_up")

        async def resume_generation(*_args: Any, **_known: Any) -> None:
            if self._frozen:
                self._refuse("resume_generation")
            await self._resume()

        self._llm.wake_up, self._llm.resume_generation = wake_up, resume_generation

    def _refuse(self, name: str) -> NoReturn:
        stage = self._spec.where.stage_id
        msg = (
            f"vLLM's own {name}() was called under stage {stage}, whose memory has other books; it was refused, memory "
            f"is as it was. Call wake_up(stage_ids=[{stage}]) or resume_generation([{stage}]) of the engine"
        )
        sys.stderr.write(f"{msg}\n")
        raise UnsupportedError(msg)

    def _source(self) -> str | None:
        """The checkpoint folder that the weights come from; None where vLLM made them up."""
        if engine.makes_weights_up(self._llm):
            return None
        return str(engine.folder_of(self._llm))

    def _listen(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._socket.bind(str(self._folder / _SOCKET))
        self._loop.add_reader(self._socket, self._hear)

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                message = msgspec.msgpack.decode(self._socket.recv(_DATAGRAM_BYTES), type=FromRank)
                if isinstance(message, RankSample):
                    self._know(message.status)
                else:
                    self._heard(message)

    def _know(self, status: RankStatus) -> None:
        if status.rank not in self._statuses:
            self._watch(status.pid or 0, f"rank {status.rank}")
        self._statuses[status.rank] = status
        self._report()

    def _watch(self, pid: int, what: str) -> None:
        """End with a process that vLLM can not go on without."""
        try:
            self._loop.add_reader(os.pidfd_open(pid), self._ended_with, pid, what)
        except ProcessLookupError:
            self._ended_with(pid, what)

    def _ended_with(self, pid: int, what: str) -> None:
        sys.stderr.write(f"{LAST_WORDS}{what} (pid {pid}) ended, and vLLM can not go on without it\n")
        self._clean()
        sys.stderr.flush()
        os._exit(DIED)

    # ------------------------------------------------------------------------- orders to ranks

    def order(self, method: str, arguments: bytes, timeout_s: float | None) -> Future[list[bytes | None]]:
        """Have every rank carry `method` out; each one's `RankReply`, None for one that said nothing in time."""
        return self._go(self._order(method, arguments, timeout_s))

    async def _order(self, method: str, arguments: bytes, timeout_s: float | None) -> list[bytes | None]:
        replies = await self._ask(method, arguments, timeout_s)
        if all(reply is not None and reply.fault is None for reply in replies):
            await self._after(method)
        return [None if reply is None else packed(reply) for reply in replies]

    async def _ask(self, method: str, arguments: bytes, timeout_s: float | None) -> list[RankReply | None]:
        self._number += 1
        asked = self._asked[self._number] = _Asked(self._size)
        calling = self._loop.create_task(
            self._llm.collective_rpc("omni_call", args=(self._number, method, arguments)), name=method
        )
        calling.add_done_callback(asked.called)
        try:
            await asyncio.wait({asked.complete}, timeout=timeout_s)
        finally:
            del self._asked[self._number]
        if asked.complete.done():
            asked.complete.result()
        return list(asked.replies)

    def _heard(self, reply: RankReply) -> None:
        if reply.number == UNASKED and reply.fault is not None:
            sys.stderr.write(f"{reply.fault.message}\n")
            self._loop.create_task(self._as_it_was())
            return
        asked = self._asked.get(reply.number)
        if asked is not None:
            asked.take(reply)

    async def _as_it_was(self) -> None:
        """VLLM's own sleep has paused its scheduler before a rank refused it: let it go on, unless we stopped it."""
        if not self._frozen:
            await self._resume()

    async def _after(self, method: str) -> None:
        """Give up the caches: before memory goes those that take some, with an adapter what was computed with it.

        (VLLM finds it by the adapter's name, and another may get that.) What else is stale the next thaw clears.
        """
        if method in {"prepare_sleep", "remove_lora"}:
            await self._clear_caches()

    async def _clear_caches(self) -> None:
        """Nothing that vLLM computed with the memory as it is may be used again; requests begin again by themselves.

        Raises:
            OmniError: vLLM says that something stayed.
        """
        cleared, *_ = await asyncio.gather(
            self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True),
            self._llm.reset_mm_cache(),
            self._llm.reset_encoder_cache(),
        )
        if not cleared:
            msg = "vLLM could not clear its prefix cache, from which requests could be answered wrongly"
            raise OmniError(msg)

    # -------------------------------------------------------------------------------- requests

    def submit(self, request: TextRequest) -> None:
        """Begin a request; what becomes of it is said unasked, as lists of `TextOutput`. On the loop, once started."""
        task = self._loop.create_task(self._run(request), name=request.request_id)
        self._tasks[request.request_id] = task
        task.add_done_callback(functools.partial(self._ended, request.request_id))

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is task:
            del self._tasks[request_id]

    async def _run(self, request: TextRequest) -> None:
        try:
            first = True
            async for output in engine.generate(self._llm, request):
                news = engine.news(request, output, first=first)
                first = False
                self._put(news)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  (it belongs to whoever asked)
            if self._llm.errored:
                # its processes end now; who watches them says so, for all requests
                self._loop.call_later(FATAL_S, self._ended_with, self._core, CORE)
                return
            self._put(TextOutput(request_id=request.request_id, fault=describe(error)))

    def _put(self, output: TextOutput) -> None:
        """Keep news until they are said, those of one step together; those of one request become one."""
        earlier = self._outputs.get(output.request_id)
        self._outputs[output.request_id] = output if earlier is None else earlier.followed_by(output)
        if not self._speaking and self._ahead < NEWS_AHEAD:
            self._speaking = True
            self._loop.call_soon(self._speak)

    def _speak(self) -> None:
        self._speaking = False
        if self._outputs:
            self._ahead += 1
            said, self._outputs = self._outputs, {}
            self._line.say(list(said.values()))

    def taken(self, times: int) -> None:
        """The engine has taken what was said so many times. On the loop."""
        self._ahead -= times
        if not self._speaking and self._ahead < NEWS_AHEAD:
            self._speak()

    def abort(self, request_ids: list[str]) -> Future[None]:
        """End requests; nothing more comes of them."""
        return self._go(self._abort(request_ids))

    async def _abort(self, request_ids: list[str]) -> None:
        ended = [task for request_id in request_ids if (task := self._tasks.pop(request_id, None)) is not None]
        for task in ended:
            task.cancel()
        if ended:
            await asyncio.wait(ended)
        for request_id in request_ids:
            self._outputs.pop(request_id, None)

    def freeze(self) -> Future[None]:
        """Let vLLM's scheduler start no further step; once back, nothing runs, and what had come was said before."""
        return self._go(self._freeze())

    async def _freeze(self) -> None:
        self._frozen = True
        if self._tasks:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
        else:  # as above, without the wait for outputs that are on their way
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        self._speak()

    def thaw(self, stale: bool) -> Future[None]:
        """Let the scheduler go on; `stale`: with nothing of what it had computed."""
        return self._go(self._thaw(stale=stale))

    async def _thaw(self, *, stale: bool) -> None:
        if stale:
            await self._clear_caches()
        self._frozen = False
        await self._resume()

    # ------------------------------------------------------------------------------------- end

    def shutdown(self) -> None:
        """End vLLM's processes and give back what they leave behind."""
        self._clean()

    def _clean(self) -> None:
        self._left.clean()
        leftovers.stop_tracker()


def _short_folder() -> str:
    """The first temporary folder in which a socket's path is not too long. Source: unix(7), 108 bytes.

    Raises:
        ConfigError: there is none.
    """
    folders = (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp")  # noqa: S108
    for folder in folders:
        if 0 < len(os.fsencode(folder)) <= _FOLDER_BYTES and os.access(folder, os.W_OK | os.X_OK):
            return folder
    msg = (
        f"no temporary folder is short enough for vLLM's sockets: {folders[0]!r} is longer than {_FOLDER_BYTES} bytes; "
        "set TMPDIR to a shorter one. Nothing was started"
    )
    raise ConfigError(msg)


class _Asked:
    """An order's replies, until all are there, or vLLM could not bring it to the ranks."""

    def __init__(self, size: int) -> None:
        self.replies: list[RankReply | None] = [None] * size
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, reply: RankReply) -> None:
        """One more."""
        self.replies[reply.rank] = reply
        if None not in self.replies and not self.complete.done():
            self.complete.set_result(None)

    def called(self, calling: asyncio.Task[Any]) -> None:
        """VLLM's own call has ended."""
        error = None if calling.cancelled() else calling.exception()
        if error is not None and not self.complete.done():
            self.complete.set_exception(error)
