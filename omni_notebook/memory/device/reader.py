"""Files straight into device memory: threads read into page-locked buffers while earlier buffers are copied."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from omni_notebook.memory.arena import Segment
from omni_notebook.memory.host import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

_MAX_THREADS = 8
_BUFFER = 8 * 1024**2
_BUFFERS = 2
"""For each thread: one is read into while the other is copied."""


class FilePiece(NamedTuple):
    """Bytes of a file, and the address on the device where they go."""

    path: Path
    offset: int
    n_bytes: int
    address: int


class Device(Protocol):
    """Of a `memory.device.driver.Driver`, what a reader needs."""

    def attach(self) -> None:
        """Make the device the calling thread's own."""
        ...

    def enter(self) -> None:
        """`attach`, and wait until the device has done all that was started."""
        ...


class FileReader:
    """Reads pieces of files into mapped device memory, many at a time. One caller at a time.

    A copy through the page cache into pinned memory and one over the link run side by side; a plain `copy_` from a
    mapped file does the one after the other, on one thread. Each call takes and gives back 128 MiB of locked memory.

    Args:
        device: attaches threads, and waits until all that was begun there is done.
        driver: `memory.device.libcuda`, or what has its functions.
    """

    def __init__(self, device: Device, driver: Any) -> None:
        self._device = device
        self._driver = driver
        self._streams: list[int] = []

    def read(self, pieces: Iterable[FilePiece], check: Callable[[], None]) -> None:
        """Read all pieces; `check` is called before each part of one, and may raise, which ends the read.

        Raises:
            OSError: a file could not be read, or ended too early.
            DeviceError: the driver refused a copy.
            OutOfMemoryError: no host memory for the buffers.
        """
        self._device.enter()  # what was begun on other streams must not write after it
        n_threads = max(1, min(_MAX_THREADS, usable_cpus()))
        while len(self._streams) < n_threads:
            self._streams.append(self._driver.new_stream())
        with ExitStack() as stack:
            run = _Run(_cut(pieces), check)
            memory = Segment(n_threads * _BUFFERS * _BUFFER)
            stack.callback(memory.close)
            if self._driver.pin(memory.address, memory.span_bytes):
                stack.callback(self._driver.unpin, memory.address)
            stack.callback(run.close)
            lanes = [
                threading.Thread(target=self._serve, args=(run, memory, lane), name="omni-read", daemon=True)
                for lane in range(n_threads)
            ]
            _work_through(lanes, run)
        if run.error is not None:
            raise run.error

    def _serve(self, run: _Run, memory: Segment, lane: int) -> None:
        """One thread: its own stream, its own buffers."""
        stream, first = self._streams[lane], lane * _BUFFERS * _BUFFER
        marks: deque[int] = deque()
        turn = 0
        try:
            self._device.attach()
            while (piece := run.next()) is not None:
                if len(marks) == _BUFFERS:
                    self._driver.wait_event(marks.popleft())
                start = first + turn % _BUFFERS * _BUFFER
                run.fill(piece, memory.view[start : start + piece.n_bytes])
                self._driver.copy(piece.address, memory.address + start, piece.n_bytes, stream)
                marks.append(self._driver.record_event(stream))
                turn += 1
        except BaseException as error:  # noqa: BLE001  (`read` raises it)
            run.stop(error)
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
    """What the threads of one read share."""

    def __init__(self, pieces: Iterator[FilePiece], check: Callable[[], None]) -> None:
        self._pieces = pieces
        self._check = check
        self._lock = threading.Lock()
        self._files: dict[Path, int] = {}
        self.error: BaseException | None = None

    def next(self) -> FilePiece | None:
        """The next piece; None once there is none, or somebody failed."""
        with self._lock:
            if self.error is not None:
                return None
            self._check()
            return next(self._pieces, None)

    def stop(self, error: BaseException) -> None:
        """Nobody takes another piece; the first error is the one that counts."""
        with self._lock:
            self.error = self.error or error

    def fill(self, piece: FilePiece, view: memoryview) -> None:
        """Read a piece."""
        file, done = self._open(piece.path), 0
        while done < piece.n_bytes:
            got = os.preadv(file, [view[done:]], piece.offset + done)
            if not got:
                msg = f"{piece.path} ends {piece.n_bytes - done} bytes before the end of a tensor"
                raise OSError(msg)
            done += got

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._files[path]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)


def _cut(pieces: Iterable[FilePiece]) -> Iterator[FilePiece]:
    """Parts of at most one buffer."""
    for piece in pieces:
        for done in range(0, piece.n_bytes, _BUFFER):
            n_bytes = min(_BUFFER, piece.n_bytes - done)
            yield FilePiece(piece.path, piece.offset + done, n_bytes, piece.address + done)
