"""A pool's books of the allocator's segments: which there are, and which of them are mapped."""

from __future__ import annotations

import bisect
import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_notebook.memory.base import DeviceError

if TYPE_CHECKING:
    from omni_notebook.memory.device.driver import Allocation, Driver


@dataclass(eq=False)
class DeviceSegment:
    """One segment; `mapped`: whether pages are behind its address."""

    allocation: Allocation
    mapped: bool = True

    @property
    def address(self) -> int:
        """Where it begins; the same for its life."""
        return self.allocation.address

    @property
    def size_bytes(self) -> int:
        """What it spans."""
        return self.allocation.size_bytes

    @property
    def tag(self) -> str:
        """The allocator's tag for it."""
        return self.allocation.tag

    def holds(self, address: int, n_bytes: int) -> bool:
        """Whether the range lies in it."""
        return self.address <= address and address + n_bytes <= self.address + self.size_bytes


class SegmentTable:
    """The segments by address; maps and unmaps them, one at a time.

    The lock makes a segment's step and its books one. It is taken within a free of torch's, under torch's own lock: no
    step here calls torch's allocator.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.RLock()
        self._segments: dict[int, DeviceSegment] = {}
        self._addresses: list[int] = []
        self._error_left = False
        driver.guard_frees(self._before_free)
        self.refresh()

    def refresh(self) -> list[DeviceSegment]:
        """Take over what the allocator has allocated and freed since; the segments that are gone."""
        with self._lock:
            there = self._driver.allocations()
            gone = [old for old in self._segments.values() if not self._is(old, there.get(old.address))]
            for old in gone:
                del self._segments[old.address]
            for address, allocation in there.items():
                self._segments.setdefault(address, DeviceSegment(allocation))
            self._addresses = sorted(self._segments)
            return gone

    @staticmethod
    def _is(segment: DeviceSegment, allocation: Allocation | None) -> bool:
        return allocation is not None and allocation.data is segment.allocation.data

    def all(self) -> list[DeviceSegment]:
        """Every segment, by address; any thread, never waits."""
        return [one for _, one in sorted(self._segments.copy().items())]

    def of(self, tag: str) -> list[DeviceSegment]:
        """A tag's segments, by address."""
        return [segment for segment in self.all() if segment.tag == tag]

    def find(self, address: int, n_bytes: int) -> DeviceSegment | None:
        """The segment that holds a range."""
        addresses = self._addresses
        place = bisect.bisect_right(addresses, address) - 1
        segment = self._segments.get(addresses[place]) if place >= 0 else None
        return segment if segment is not None and segment.holds(address, n_bytes) else None

    def mapped_bytes(self) -> int:
        """Bytes of all segments that are mapped."""
        return sum(segment.size_bytes for segment in self.all() if segment.mapped)

    def unmap(self, segment: DeviceSegment) -> int:
        """Give a segment's pages up; the bytes, 0 if it had none or is gone.

        Raises:
            DeviceError: the driver refused.
        """
        with self._lock:
            if not segment.mapped or not self._driver.is_live(segment.allocation):
                return 0
            try:
                self._driver.unmap(segment.allocation)
            except DeviceError as error:
                if error.lost:
                    self._has_no_pages(segment)
                raise
            self._has_no_pages(segment)
            return segment.size_bytes

    def _has_no_pages(self, segment: DeviceSegment) -> None:
        segment.mapped = False
        self._driver.set_asleep(segment.allocation, True)

    def map(self, segment: DeviceSegment) -> int:
        """Give a segment fresh pages; the bytes, 0 if it has some or is gone.

        Raises:
            DeviceError: the driver refused; the segment is unmapped.
        """
        with self._lock:
            allocation = segment.allocation
            if segment.mapped or not self._driver.is_live(allocation):
                return 0
            mapped_already = self._driver.is_mapped(allocation) is True  # by a wake that was not ours
            if not mapped_already:
                self._map(allocation)
            segment.mapped = True
            self._driver.set_asleep(allocation, False)
            return 0 if mapped_already else segment.size_bytes

    def _map(self, allocation: Allocation) -> None:
        if self._error_left:
            self._driver.clear_error()
            self._error_left = False
        try:
            self._driver.map(allocation)
        except DeviceError:
            if self._driver.is_mapped(allocation):  # mapped, but access was refused
                with contextlib.suppress(DeviceError):
                    self._driver.unmap(allocation)
            raise

    def strangers(self) -> list[DeviceSegment]:
        """Segments that someone else mapped or unmapped: the device says other than these books."""
        return [
            segment
            for segment in self.all()
            if self._driver.is_live(segment.allocation)
            and self._driver.is_mapped(segment.allocation) is (not segment.mapped)
        ]

    def _before_free(self, address: int) -> None:
        """The allocator is about to unmap and free a segment: see that there is something to unmap, in no room."""
        with self._lock:
            segment = self._segments.get(address)
            if segment is None or not self._driver.is_live(segment.allocation):
                return
            with contextlib.suppress(DeviceError):
                self._driver.wait()  # a copy of it may be on its way
            if self._has_pages(segment):
                return
            try:
                self._driver.make_freeable(segment.allocation)
            except DeviceError:  # the extension's unmap fails: the address is freed all the same
                self._error_left = True
            segment.mapped = True  # no wake of ours maps it any more

    def _has_pages(self, segment: DeviceSegment) -> bool:
        truth = self._driver.is_mapped(segment.allocation)
        return segment.mapped if truth is None else truth
