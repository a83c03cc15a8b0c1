"""Copies of whole segments in host memory: the seam behind which a faster policy goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from omni_notebook.memory.arena import CHUNK, Segment, round_up

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_notebook.memory.device.driver import Driver
    from omni_notebook.memory.device.segments import DeviceSegment


class Copies(Protocol):
    """Keeps one copy a segment. One thread at a time, but for `held_bytes`."""

    def save(self, segment: DeviceSegment) -> None:
        """Copy a mapped segment to the host; done when it returns.

        Raises:
            OutOfMemoryError: the host has no room.
            DeviceError: the driver refused.
        """
        ...

    def load(self, segment: DeviceSegment) -> None:
        """Copy it back into its mapped segment; done when it returns.

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


class HostCopies:
    """Each copy in a mapping of its own: huge pages of exactly its size, page-locked once and kept for the next sleep.

    Locking memory costs more than copying, so a buffer stays until `forget`; its bytes count as held.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._buffers: dict[DeviceSegment, _Buffer] = {}

    def save(self, segment: DeviceSegment) -> None:
        """See `Copies.save`."""
        buffer = self._buffers.get(segment) or self._make(segment)
        self._driver.copy(buffer.memory.address, segment.address, segment.size_bytes)

    def _make(self, segment: DeviceSegment) -> _Buffer:
        memory = Segment(segment.size_bytes)
        buffer = _Buffer(memory, self._driver.pin(memory.address, memory.span_bytes))
        self._buffers[segment] = buffer
        return buffer

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
