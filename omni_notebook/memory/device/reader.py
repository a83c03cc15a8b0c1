"""Files straight into device memory: threads read into page-locked buffers while earlier buffers are copied."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from omni_notebook.errors import OutOfMemoryError
from omni_notebook.memory.arena import Segment
from omni_notebook.memory.host import usable_cpus
from omni_notebook.memory.reading import cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from omni_notebook.memory.reading import FilePiece

_MAX_THREADS = 8
_BUFFER = 8 * 1024**2
_BUFFERS = 2
"""For each thread: one is read into while the other is copied."""
_NOT_UNLOCKED: list[Segment] = []
"""What the driver has locked; what it did not unlock stays for good."""


class Device(Protocol):
    """Of a `memory.device.driver.Driver`, what a reader needs."""

    def attach(self) -> None:
        """Make the device the calling thread's own."""
        ...

    def enter(self) -> None:
        """`attach`, and wait until the device has done all that was started."""
        ...


class DeviceReader:
    """Reads pieces of files into mapped device memory, many at a time; fills `memory.reading.FileReader`.

    A copy through the page cache into pinned memory and one over the link run side by side; a plain `copy_` from a
    mapped file does the one after the other, on one thread. Each thread of a call takes and gives back 16 MiB of locked
    memory: together they have them sooner than one would.

    Args:
        device: attaches threads, and waits until all that was begun there is done.
        driver: `memory.device.libcuda`, or what has its functions.
    """

    least_bytes = 64 * 1024**2
    """Fewer are copied as fast as the buffers are made."""

    def __init__(self, device: Device, driver: Any) -> None:
        self._device = device
        self._driver = driver
        self._streams: list[int] = []

    def read(self, pieces: Iterable[FilePiece], check: Callable[[], None]) -> None:
        """See `FileReader`; `check` is called by any thread.

        Raises:
            OSError: a file could not be read, or ended too early.
            DeviceError: the driver refused a copy.
            OutOfMemoryError: no host memory for any thread's buffers; nothing was read.
        """
        self._device.enter()  # what was begun on other streams must not write after it
        n_threads = max(1, min(_MAX_THREADS, usable_cpus()))
        while len(self._streams) < n_threads:
            self._streams.append(self._driver.new_stream())
        run = _Run(tuple(cut(pieces, _BUFFER)), check)
        _work_through(
            [
                threading.Thread(target=self._serve, args=(run, stream), name="omni-read", daemon=True)
                for stream in self._streams[: min(n_threads, run.left)]
            ],
            run,
        )
        run.raise_error()

    def _serve(self, run: _Run, stream: int) -> None:
        """One thread: its own stream, its own buffers; without buffers it leaves the work to the others."""
        try:
            self._device.attach()
            try:
                memory = Segment(_BUFFERS * _BUFFER)
            except OutOfMemoryError as error:
                run.shortage = error
                return
            with self._locked(memory):
                self._pass_on(run, stream, memory.address)
        except BaseException as error:  # noqa: BLE001  (`read` raises it)
            run.stop(error)

    @contextlib.contextmanager
    def _locked(self, memory: Segment) -> Iterator[None]:
        """Within it the memory is locked; then it is given back, unless the driver does not unlock it."""
        locked = self._driver.pin(memory.address, memory.span_bytes)
        try:
            yield
        finally:
            if locked:
                _NOT_UNLOCKED.append(memory)
                self._driver.unpin(memory.address)
                _NOT_UNLOCKED.remove(memory)
            memory.close()

    def _pass_on(self, run: _Run, stream: int, first: int) -> None:
        marks: deque[int] = deque()
        turn = 0
        try:
            while (piece := run.next()) is not None:
                if len(marks) == _BUFFERS:
                    self._driver.wait_event(marks.popleft())
                start = first + turn % _BUFFERS * _BUFFER
                piece.read(start)
                self._driver.copy(piece.address, start, piece.n_bytes, stream)
                marks.append(self._driver.record_event(stream))
                turn += 1
        finally:
            self._settle(run, marks, stream)

    def _settle(self, run: _Run, marks: Iterable[int], stream: int) -> None:
        """The buffers must not go while a copy reads them, one that has no mark neither."""
        waits = [*((self._driver.wait_event, mark) for mark in marks), (self._driver.wait, stream)]
        for wait, what in waits:
            try:
                wait(what)
            except BaseException as error:  # noqa: BLE001
                run.stop(error)


def _work_through(lanes: Iterable[threading.Thread], run: _Run) -> None:
    """Start the threads and see their end, whatever comes: they use what the caller gives back then."""
    started: list[threading.Thread] = []
    try:
        for lane in lanes:
            lane.start()
            started.append(lane)
    except RuntimeError as error:  # no more threads
        run.stop(error)
    finally:
        for lane in started:
            lane.join()


class _Run:
    """What the threads of one read share.

    Attributes:
        error: the first that ended it.
        shortage: why a thread had no buffers.
    """

    def __init__(self, pieces: Sequence[FilePiece], check: Callable[[], None]) -> None:
        self.left = len(pieces)
        self.error: BaseException | None = None
        self.shortage: OutOfMemoryError | None = None
        self._pieces = iter(pieces)
        self._check = check
        self._lock = threading.Lock()

    def next(self) -> FilePiece | None:
        """The next piece; None once there is none, or somebody failed."""
        with self._lock:
            if self.error is not None or not self.left:
                return None
            self._check()
            self.left -= 1
            return next(self._pieces)

    def stop(self, error: BaseException) -> None:
        """Nobody takes another piece; the first error is the one that counts."""
        with self._lock:
            self.error = self.error or error

    def raise_error(self) -> None:
        """Raise what ended it, or that nobody had buffers: nothing was read then."""
        if self.error is not None:
            raise self.error
        if self.left and self.shortage is not None:
            raise self.shortage
