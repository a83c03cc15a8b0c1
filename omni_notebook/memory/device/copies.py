"""Copies of whole segments in host memory: the seam behind which a faster policy goes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

from omni_notebook.memory import libc
from omni_notebook.memory.arena import CHUNK, Segment, no_memory, round_up
from omni_notebook.memory.host import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from omni_notebook.memory.device.driver import Driver
    from omni_notebook.memory.device.segments import DeviceSegment


_MAX_THREADS = 8
_PART = 64 * 1024**2


class Copies(Protocol):
    """Keeps one copy a segment. One thread at a time, but for `held_bytes`."""

    def save(self, segments: Sequence[DeviceSegment], check: Callable[[], None]) -> None:
        """Copy mapped segments to the host; done when it returns. `check` is called before each, and may raise.

        Raises:
            OutOfMemoryError: the host has no room.
            DeviceError: the driver refused.
        """
        ...

    def load(self, segment: DeviceSegment) -> None:
        """Begin to copy it back into its mapped segment; the driver's `finish` waits for it.

        Raises:
            DeviceError: the driver refused.
        """
        ...

    def read(self, segment: DeviceSegment, offset: int, n_bytes: int) -> memoryview:
        """Bytes of a copy."""
        ...

    def has(self, segment: DeviceSegment) -> bool:
        """Whether there is a copy, or at least room for one."""
        ...

    def forget(self, segment: DeviceSegment) -> None:
        """Give the copy and its memory up, if there is one."""
        ...

    def kind(self, segments: Iterable[DeviceSegment]) -> str:
        """The memory that holds the copies of these: "pinned", or "pageable" if any could not be pinned."""
        ...

    def missing_bytes(self, segments: Iterable[DeviceSegment]) -> int:
        """Host memory that saving these would take more than is held."""
        ...

    def held_bytes(self) -> int:
        """Host memory that is held for copies; any thread."""
        ...


class _Buffer(NamedTuple):
    memory: Segment
    pinned: bool


def _parts(memory: Segment) -> Iterator[tuple[int, int]]:
    """Ranges (address, bytes) that one thread populates at a time."""
    for start in range(0, memory.span_bytes, _PART):
        yield memory.address + start, min(_PART, memory.span_bytes - start)


def _populate(address: int, n_bytes: int) -> None:
    """Make pages physically there. Source: madvise(2), MADV_POPULATE_WRITE."""
    libc.advise(address, n_bytes, libc.MADV_POPULATE_WRITE)


class HostCopies:
    """Each copy in a mapping of its own: huge pages of exactly its size, page-locked once and kept for the next sleep.

    Locking memory costs more than copying, so a buffer stays until `forget`; its bytes count as held.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._buffers: dict[DeviceSegment, _Buffer] = {}

    def save(self, segments: Sequence[DeviceSegment], check: Callable[[], None]) -> None:
        """See `Copies.save`; threads fetch the pages of new buffers while earlier ones are locked and copied into."""
        threads = ThreadPoolExecutor(max_workers=max(1, min(_MAX_THREADS, usable_cpus())))
        new = {one: Segment(one.size_bytes, populate=False) for one in segments if one not in self._buffers}
        try:
            coming = {one: [threads.submit(_populate, *part) for part in _parts(new[one])] for one in new}
            for segment in segments:
                check()
                if segment in new:
                    self._lock(segment, new[segment], coming[segment])
                self._driver.copy(self._buffers[segment].memory.address, segment.address, segment.size_bytes)
        finally:
            threads.shutdown(cancel_futures=True)
            self._driver.finish()

    def _lock(self, segment: DeviceSegment, memory: Segment, coming: Sequence[Future[None]]) -> None:
        try:
            for part in coming:
                part.result()
        except OSError as error:
            raise no_memory(memory.span_bytes, error) from error
        self._buffers[segment] = _Buffer(memory, self._driver.pin(memory.address, memory.span_bytes))

    def load(self, segment: DeviceSegment) -> None:
        """See `Copies.load`."""
        self._driver.copy(segment.address, self._buffers[segment].memory.address, segment.size_bytes)

    def read(self, segment: DeviceSegment, offset: int, n_bytes: int) -> memoryview:
        """See `Copies.read`."""
        return self._buffers[segment].memory.view[offset : offset + n_bytes]

    def has(self, segment: DeviceSegment) -> bool:
        """See `Copies.has`."""
        return segment in self._buffers

    def forget(self, segment: DeviceSegment) -> None:
        """See `Copies.forget`."""
        buffer = self._buffers.pop(segment, None)
        if buffer is None:
            return
        if buffer.pinned:
            self._driver.unpin(buffer.memory.address)
        buffer.memory.close()

    def kind(self, segments: Iterable[DeviceSegment]) -> str:
        """See `Copies.kind`."""
        return "pinned" if all(self._buffers[segment].pinned for segment in segments) else "pageable"

    def missing_bytes(self, segments: Iterable[DeviceSegment]) -> int:
        """See `Copies.missing_bytes`."""
        return sum(round_up(one.size_bytes, CHUNK) for one in segments if one not in self._buffers)

    def held_bytes(self) -> int:
        """See `Copies.held_bytes`."""
        return sum(buffer.memory.span_bytes for buffer in tuple(self._buffers.values()))
