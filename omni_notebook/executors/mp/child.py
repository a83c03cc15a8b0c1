"""A rank's process: `python -m omni_notebook.executors.mp.child SOCKET PARENT`, two inherited file descriptors.

Three threads: the main one reads frames and answers what must not wait; one carries the orders out, first come, first
served, and makes the worker (heavy imports are its own); one ends the process when the parent is gone. A worker with an
event loop may have the frames read and the orders begun there instead, so that none of them wakes another thread.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import msgspec

from omni_notebook.errors import ArgumentError
from omni_notebook.executors.base import method_of
from omni_notebook.executors.mp.logs import trim
from omni_notebook.executors.mp.messages import (
    UNASKED,
    Ask,
    Failure,
    LogLevel,
    Order,
    Reply,
    Sample,
    Start,
    Stop,
    Tell,
    ToChild,
    payload,
)
from omni_notebook.executors.mp.wire import FRAMES_A_TURN, Receiver, pack
from omni_notebook.worker.faults import describe
from omni_notebook.worker.methods import AT_ONCE, signature
from omni_notebook.worker.reports import WorkerSpec

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from omni_notebook.executors.mp.wire import Frame, Packet

TICK_S = 0.5
"""How often memory is measured while nothing is ordered."""
_NOT_MEASURED = frozenset({"execute", "reached", "collect", "ping", "barrier", "noop", "weights_valid", "load_tensors"})
"""Orders that move no memory, or come too fast to measure after each: the next tick does. After all others memory is
measured and sent before the answer, so that who has the answer has the memory after it."""
_PR_SET_PDEATHSIG = 1
NICE = 5
"""How much nicer threads are that compute on processors: sixteen of them on two cores held orders up."""
_NICEST = 19
_log = logging.getLogger(__name__)


def die_with_parent(parent: int, connection: socket.socket) -> None:
    """End this process when the parent ends, or the thread that owns us there; whatever our threads do.

    A watching thread is enough while Python runs here; the kernel's signal ends us too while C code holds the
    interpreter. Source: prctl(2), PR_SET_PDEATHSIG; pidfd_open(2).
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    watched = select.poll()
    watched.register(parent, select.POLLIN)
    watched.register(connection, select.POLLRDHUP)

    def watch() -> None:
        watched.poll()
        os._exit(1)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()


@runtime_checkable
class Reporting(Protocol):
    """A worker whose memory changes by itself."""

    def report_with(self, report: Callable[[], None]) -> None:
        """Call `report`, from any thread, when `memory()` has news that can not wait for the next tick."""
        ...


@runtime_checkable
class Looping(Protocol):
    """A worker with an event loop of its own."""

    def speak_on(self, line: Line) -> None:
        """Where to say what nobody asked for, and to ask that frames are read on its loop."""
        ...


@runtime_checkable
class Computing(Protocol):
    """A worker whose batches this machine's processors may compute."""

    @property
    def uses_processors(self) -> bool:
        """Whether they do."""
        ...


class Line:
    """The worker's end of the connection, beside the answers to orders."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.loop: asyncio.AbstractEventLoop | None = None

    def say(self, value: Any) -> None:
        """Send what the engine hears without having asked; any thread. Waits if nobody reads: bound what you say.

        Raises:
            ArgumentError: it has no form on the wire.
        """
        pack(Reply(UNASKED, payload(value))).send(self._connection)

    def read_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have frames read, and their orders begun, on this loop: from the first that comes after this call."""
        self.loop = loop


class Orders:
    """The thread that makes the worker and carries orders out."""

    def __init__(self, connection: socket.socket, line: Line) -> None:
        self.worker: Any = None
        self.here = False
        """Whether orders are begun by whoever reads them; they all return at once."""
        self._line = line
        self._connection = connection
        self._queue: queue.SimpleQueue[tuple[Order, Frame] | Callable[[], object] | None] = queue.SimpleQueue()
        self._sampled: bytes | None = None
        self._sampling = threading.Lock()

    def begin(self, start: Start, frame: Frame) -> None:
        """Start the thread."""
        threading.Thread(target=self._main, args=(start, frame), name="orders", daemon=True).start()

    def take(self, order: Order, frame: Frame) -> None:
        """Queue an order, or carry it out here and now if it is one of `AT_ONCE`, or all are."""
        if self.here or (order.method in AT_ONCE and self.worker is not None):
            self._answer(order, frame, self._run)
        else:
            self._queue.put((order, frame))

    def after(self, act: Callable[[], object]) -> None:
        """Do something once the orders so far are carried out."""
        self._queue.put(act)

    def end(self) -> None:
        """Shut the worker down and end the process, after the orders before."""
        self._queue.put(None)

    def _main(self, start: Start, frame: Frame) -> None:
        carry_out: Callable[[Order, Frame], Any] = self._run
        try:
            self.worker = _make_worker(start, frame)
            if isinstance(self.worker, Reporting):
                self.worker.report_with(self.sample)
            if isinstance(self.worker, Looping):
                self.worker.speak_on(self._line)
            if isinstance(self.worker, Computing) and self.worker.uses_processors:
                _stand_back()
        except BaseException as error:  # noqa: BLE001  (answered to every order)
            carry_out = _raising(error)
        del start, frame
        while (item := self._queue.get()) is not None:
            if callable(item):
                item()
            else:
                self._answer(*item, carry_out)
            del item  # its arrays are shared memory
        try:
            if self.worker is not None:
                self.worker.shutdown()
        except Exception:  # noqa: BLE001  (the end of the process gives everything back)
            _log.exception("the worker's shutdown failed")
        leave(0)

    def _run(self, order: Order, frame: Frame) -> Any:
        return method_of(self.worker, order.method)(*_arguments(order, frame))

    def _answer(self, order: Order, frame: Frame, carry_out: Callable[[Order, Frame], Any]) -> None:
        try:
            value = carry_out(order, frame)
        except BaseException as error:  # noqa: BLE001  (it belongs to the caller, whatever it is)
            failed = _raising(error)
            self._reply(order, lambda: failed(order, frame))
            return
        if isinstance(value, Future):
            value.add_done_callback(lambda done: self._reply(order, done.result))
        else:
            self._reply(order, lambda: value)

    def _reply(self, order: Order, result: Callable[[], Any]) -> None:
        """Send what an order gave or raises; on the thread that finished it."""
        try:
            answer = _packed(order, result)
            if order.method not in _NOT_MEASURED:
                self.sample()
            answer.send(self._connection)
        except Exception:  # noqa: BLE001  (the orders after it are answered all the same)
            _log.exception("%s could not be answered", order.method)

    def sample(self) -> None:
        """Send this rank's memory if it has changed; any thread."""
        if self.worker is None:
            return
        with self._sampling:
            try:
                memory = self.worker.memory()
                packet = pack(Sample(memory if isinstance(memory, tuple) else (memory,)))
            except Exception:  # noqa: BLE001  (a measurement that fails must not end the rank)
                _log.exception("memory could not be measured")
                return
            if packet.data != self._sampled:
                self._sampled = packet.data
                packet.send(self._connection)


def _packed(order: Order, result: Callable[[], Any]) -> Packet:
    """What an order gave or raises."""
    try:
        return pack(Reply(order.id, payload(result())))
    except BaseException as error:  # noqa: BLE001  (it belongs to the caller, whatever it is)
        return pack(Failure(order.id, describe(error)))


def _stand_back() -> None:
    """Let the notebook, and the thread that answers orders, run before this thread and those that it will start.

    Source: setpriority(2); on Linux a thread has a nice value of its own.
    """
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + NICE, _NICEST))


def _arguments(order: Order | Tell, frame: Frame) -> tuple[Any, ...]:
    try:
        arguments: tuple[Any, ...] = frame.decode(signature(order.method).args, order.args)
    except msgspec.ValidationError as error:
        msg = f"{order.method!r}: {error}; nothing was called"
        raise ArgumentError(msg) from error
    return arguments


def _raising(error: BaseException) -> Callable[[Order, Frame], Any]:
    """What carries orders out where the worker could not be made."""

    def carry_out(_order: Order, _frame: Frame) -> Any:
        raise error

    return carry_out


def _make_worker(start: Start, frame: Frame) -> Any:
    module, _, name = start.worker.partition(":")
    return getattr(import_module(module), name)(frame.decode(WorkerSpec, start.spec))


class Control:
    """The main thread: reads frames until the connection ends, or a worker's loop reads them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._receiver = Receiver(connection)
        self._line = Line(connection)
        self._orders = Orders(connection, self._line)
        self._ready = select.poll()
        self._ready.register(connection, select.POLLIN)

    def run(self) -> NoReturn:
        """Serve until told to stop, or left alone."""
        while True:
            came = self._ready.poll(TICK_S * 1000)
            if self._line.loop is not None:
                self._move_to(self._line.loop)
            if came:
                self._read()
            else:
                self._tick()

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> NoReturn:
        """Let the loop read from now on, once all that was read before is begun; this thread only measures."""
        self._orders.after(lambda: loop.call_soon_threadsafe(self._read_on, loop))
        while True:
            time.sleep(TICK_S)
            self._tick()

    def _read_on(self, loop: asyncio.AbstractEventLoop) -> None:
        self._orders.here = True
        loop.add_reader(self._connection, self._read_all)

    def _read_all(self) -> None:
        """Follow all that came meanwhile: what was asked together begins in one turn of the loop."""
        for _ in range(FRAMES_A_TURN):
            self._read()
            if not self._ready.poll(0):
                return

    def _tick(self) -> None:
        self._orders.sample()
        trim(sys.stderr.fileno())

    def _read(self) -> None:
        frame = self._receiver.receive()
        if frame is None:
            leave(1)
        try:
            self._take(frame.decode(ToChild), frame)
        except Exception:  # noqa: BLE001  (one bad word must not end the rank)
            _log.exception("a message could not be followed")

    def _take(self, message: ToChild, frame: Frame) -> None:
        if isinstance(message, Order):
            self._orders.take(message, frame)
        elif isinstance(message, Tell):
            self._follow(message, frame)
        elif isinstance(message, Ask):
            self._answer(message)
        elif isinstance(message, LogLevel):
            logging.getLogger().setLevel(message.level)
        elif isinstance(message, Start):
            if message.cpus:
                os.sched_setaffinity(0, message.cpus)
            self._orders.begin(message, frame)
        elif isinstance(message, Stop):
            self._orders.end()

    def _follow(self, told: Tell, frame: Frame) -> None:
        """Do what nobody waits for; who listens to what is unasked hears of a failure."""
        if self._orders.worker is None:
            return
        try:
            method_of(self._orders.worker, told.method)(*_arguments(told, frame))
        except Exception as error:  # noqa: BLE001  (it belongs to whoever told)
            _log.exception("%s(...) could not be followed", told.method)
            pack(Failure(UNASKED, describe(error))).send(self._connection)

    def _answer(self, question: Ask) -> None:
        try:
            value = os.getpid() if question.what == "ping" else self._orders.worker.memory()
            answer = pack(Reply(question.id, payload(value)))
        except Exception as error:  # noqa: BLE001  (it belongs to the caller)
            answer = pack(Failure(question.id, describe(error)))
        answer.send(self._connection)


def leave(status: int) -> NoReturn:
    """End at once: no exit handler of a library may hold a rank's memory back."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> NoReturn:
    """The process's whole life."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])
    for fd in (connection.fileno(), parent):
        os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the person's cell, not for us
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    die_with_parent(parent, connection)
    Control(connection).run()


if __name__ == "__main__":
    main()
