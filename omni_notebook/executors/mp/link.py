"""The engine's side of one rank's connection; it lives on the engine's event loop and needs no thread."""

from __future__ import annotations

import signal
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from omni_notebook.errors import EngineClosedError, OmniError, WorkerDiedError
from omni_notebook.executors.mp import logs
from omni_notebook.executors.mp.messages import UNASKED, Failure, Reply, Sample, Stop, ToParent
from omni_notebook.executors.mp.process import RankProcess
from omni_notebook.executors.mp.wire import FRAMES_A_TURN, Receiver, pack
from omni_notebook.protocol import RankStatus, TagMemory
from omni_notebook.worker.faults import rebuild

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from omni_notebook.executors.mp.placement import Place
    from omni_notebook.executors.mp.wire import Packet
    from omni_notebook.protocol import RankId

LIMBO_S = 0.2
"""A process whose connection has ended is given this long to end too."""
TERMINATE_S = 2.0
KILL_S = 3.0


class Waiting:
    """One place in `RankLink.waiting`: the type of the answer, and who takes it."""

    __slots__ = ("kind", "take")

    def __init__(self, kind: Any, take: Callable[[Any, BaseException | None], None]) -> None:
        self.kind = kind
        self.take = take


class RankLink:
    """Sends frames to a rank and hands its answers out; knows when it is dead.

    `error` is None while the rank lives. `on_death` is called once, unless `stop` was called before.
    """

    def __init__(
        self,
        where: RankId,
        place: Place | None,
        device: str,
        loop: asyncio.AbstractEventLoop,
        on_death: Callable[[RankId, WorkerDiedError], None],
    ) -> None:
        self.where = where
        self.error: OmniError | None = None
        self.on_room: Callable[[], None] = lambda: None
        self.on_read: Callable[[], None] = lambda: None
        self.statuses: tuple[RankStatus, ...] = (unseen(where, device),)
        self._loop = loop
        self._on_death = on_death
        self._waiting: dict[int, Waiting] = {}
        self._outbox: deque[Packet] = deque()
        self._stopped: EngineClosedError | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._last_lines: list[str] = []
        self._process = RankProcess(place)
        self.pid = self._process.pid
        self.statuses = (msgspec.structs.replace(self.statuses[0], pid=self.pid),)
        self._receiver = Receiver(self._process.socket)
        loop.add_reader(self._process.socket, self._readable)
        loop.add_reader(self._process.pidfd, self._ended)

    @property
    def status(self) -> RankStatus:
        """What the rank sent last, of its memory."""
        return self.statuses[0]

    @property
    def ended(self) -> bool:
        """Whether the process is gone and nothing of it is left."""
        return self.error is not None

    # ---------------------------------------------------------------------------------- sending

    @property
    def has_room(self) -> bool:
        """Whether no frame waits here, each big one with an open file; `on_room` is called when none does any more."""
        return not self._outbox

    def ask(self, number: int, packet: Packet, waiting: Waiting) -> None:
        """Send a frame whose answer carries `number`."""
        if self.error is not None:
            waiting.take(None, self.error)
            return
        self._waiting[number] = waiting
        self.send(packet)

    def listen(self, waiting: Waiting) -> None:
        """Hand out, again and again, what the rank says unasked; at its death, once, the error."""
        if self.error is not None:
            waiting.take(None, self.error)
            return
        self._waiting[UNASKED] = waiting

    def forget(self, number: int) -> None:
        """Nobody waits for this answer any more."""
        self._waiting.pop(number, None)

    def send(self, packet: Packet) -> None:
        """Send a frame after those before it; one to a dead rank is dropped."""
        if self.error is not None:
            return
        self._outbox.append(packet)
        if len(self._outbox) == 1 and not self._flush():
            self._loop.add_writer(self._process.socket, self._writable)

    def _flush(self) -> bool:
        """Whether everything was sent."""
        while self._outbox:
            try:
                self._outbox[0].send(self._process.socket)
            except BlockingIOError:
                return False
            except OSError:  # it is gone; the end of the connection says so too, and what it said before
                self._outbox.clear()
                return True
            self._outbox.popleft()
        return True

    def _writable(self) -> None:
        if self._flush():
            self._loop.remove_writer(self._process.socket)
            self.on_room()

    # -------------------------------------------------------------------------------- receiving

    def _readable(self) -> None:
        self._read()
        self.on_read()

    def _read(self) -> None:
        for _ in range(FRAMES_A_TURN):
            try:
                frame = self._receiver.receive()
            except BlockingIOError:
                return
            except OSError as error:
                self._die(f"could not be heard: {error}")
                return
            if frame is None:
                self._loop.remove_reader(self._process.socket)
                self._timers.append(self._loop.call_later(LIMBO_S, self._die, "closed its connection"))
                return
            self._take(frame.decode(ToParent), frame.decode)

    def _take(self, message: ToParent, decode: Callable[[Any, msgspec.Raw], Any]) -> None:
        if isinstance(message, Sample):
            self.statuses = message.statuses
            return
        waiting = self._waiting.get(message.id) if message.id == UNASKED else self._waiting.pop(message.id, None)
        if waiting is None:
            return  # it came too late
        if isinstance(message, Failure):
            waiting.take(None, rebuild(message.fault))
        else:
            _answer(waiting, message, decode)

    # ---------------------------------------------------------------------------------- the end

    def stop(self, reason: EngineClosedError) -> None:
        """Ask the rank to end after the orders before; insist after `TERMINATE_S` and `KILL_S` seconds."""
        if self.error is not None or self._stopped is not None:
            return
        self._stopped = reason
        self.send(pack(Stop()))
        for delay_s, number in ((TERMINATE_S, signal.SIGTERM), (KILL_S, signal.SIGKILL)):
            self._timers.append(self._loop.call_later(delay_s, self._process.signal, number))

    def _ended(self) -> None:
        """The process is gone: take what it said before, then answer for it."""
        self._die(None)

    def _die(self, what: str | None) -> None:
        if self.error is not None:
            return
        self._loop.remove_reader(self._process.pidfd)
        if what is None:
            self._drain()
        status = self._process.reap()
        self._last_lines = logs.tail(self._process.log)
        self._detach()
        died = self._obituary(what or _how(status))
        self.error = self._stopped or died
        self.statuses = tuple(_gone(status) for status in self.statuses)
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            one.take(None, self.error)
        if self._stopped is None:
            self._on_death(self.where, died)

    def _drain(self) -> None:
        """Read what the process wrote before it ended."""
        while True:
            try:
                frame = self._receiver.receive()
            except OSError:  # BlockingIOError among them: there is no more
                return
            if frame is None:
                return
            self._take(frame.decode(ToParent), frame.decode)

    def _detach(self) -> None:
        self._loop.remove_reader(self._process.socket)
        self._loop.remove_writer(self._process.socket)
        for timer in self._timers:
            timer.cancel()
        self._outbox.clear()
        self._process.close()

    def _obituary(self, what: str) -> WorkerDiedError:
        last = next((line for line in reversed(self._last_lines) if line.strip()), None)
        where = self.where
        message = (
            f"{where.title} of stage {where.stage_id} {what} (pid {self.pid}"
            + (f"; it wrote last: {last.strip()}" if last else "")
            + f"); other stages go on, call restart({where.stage_id})"
        )
        return WorkerDiedError(message, stage_id=where.stage_id, rank=where.rank, log_lines=self._last_lines)

    def kill(self) -> None:
        """End it now, without a word to anybody; for a constructor that failed, and for a loop that has ended."""
        self.error = self.error or EngineClosedError(f"stage {self.where.stage_id} was shut down")
        self._waiting.clear()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._process.pidfd)
            self._detach()
        self._process.close()

    def log_tail(self) -> list[str]:
        """The last lines that the rank wrote."""
        return list(self._last_lines) if self.error is not None else logs.tail(self._process.log)


def _answer(waiting: Waiting, message: Reply, decode: Callable[[Any, msgspec.Raw], Any]) -> None:
    try:
        value = decode(waiting.kind, message.value)
    except msgspec.ValidationError as error:
        waiting.take(None, OmniError(f"the rank's answer has a wrong type: {error}"))
    else:
        waiting.take(value, None)


def _how(status: int | None) -> str:
    if status is None or status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    hint = ", by someone or because the machine ran out of memory" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def unseen(where: RankId, device: str) -> RankStatus:
    """A rank that has not sent anything yet."""
    return RankStatus(
        rank=where.rank,
        replica=where.replica,
        pid=None,
        device=device,
        alive=True,
        tags={},
        host_backup_bytes=0,
        process_bytes=None,
    )


def _gone(status: RankStatus) -> RankStatus:
    """A dead rank's memory is nobody's."""
    tags = {tag: TagMemory(0, 0) for tag in status.tags}
    return msgspec.structs.replace(status, alive=False, tags=tags, host_backup_bytes=0, process_bytes=None)
