"""Copies of whole segments in host memory: the seam behind which a faster policy goes."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from omni_notebook.memory import libc
from omni_notebook.memory.arena import CHUNK, Segment, no_memory, round_up
from omni_notebook.memory.device.nearness import stay_near
from omni_notebook.memory.host import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from omni_notebook.memory.device.driver import Driver
    from omni_notebook.memory.device.segments import DeviceSegment
    from omni_notebook.memory.device.shadow import Shadow, Sums, TakenSums


MAX_THREADS = 8
"""That fetch pages at a time."""
_PART = 64 * 1024**2
_AHEAD = 16
"""Buffers whose pages are on their way at a time."""
_FIRST_LOOK = 1024**3
_GROWTH = 16
"""So many bytes are summed before any is copied, then so many times more while those are: that takes less time (14 GiB
in 9 ms on an H200, where copying 1 GiB takes 19)."""


class Run(NamedTuple):
    """Bytes of a segment that its copy does not have yet."""

    segment: DeviceSegment
    offset: int
    n_bytes: int


class Looked(NamedTuple):
    """What is to be copied of several segments; `sums`: of all that is in them now, where those could be had."""

    runs: tuple[Run, ...]
    sums: dict[DeviceSegment, Sums]


class Copies(Protocol):
    """Keeps one copy a segment. One thread at a time, but for `held_bytes`."""

    def look(self, segments: Sequence[DeviceSegment]) -> Iterator[Looked]:
        """See what of mapped segments, which have room for copies, is not copied yet.

        By several segments at a time, the next ones when they are asked for; first those of which nothing is known.

        Raises:
            DeviceError: nobody can tell whether something still reads the segments.
        """
        ...

    def begin(self, run: Run) -> None:
        """Begin to copy to the host; the driver's `finish` waits for it. The copy counts only after `accept`.

        Raises:
            DeviceError: the driver refused.
        """
        ...

    def take_sums(self, segments: Sequence[DeviceSegment]) -> TakenSums:
        """Take the sums of mapped segments."""
        ...

    def accept(self, sums: Mapping[DeviceSegment, Sums]) -> None:
        """All runs of these segments are copied, and nobody has written there since their sums were taken."""
        ...

    def make_room(self, segments: Sequence[DeviceSegment], go_on: Callable[[int], bool]) -> None:
        """Have memory for copies of these, one after the other while `go_on(bytes still to come)` says so.

        Raises:
            OutOfMemoryError: the host has no room.
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
        """Give the copy and its memory up, if there is one.

        Raises:
            DeviceError: the driver does not unlock it; all is as before.
        """
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


class Saving:
    """One save of segments to which nobody writes meanwhile: every byte is summed once.

    `copied_bytes`: what is begun; `checksum_ms`: how long the first of it waited for sums.
    """

    def __init__(self, copies: Copies, segments: Sequence[DeviceSegment]) -> None:
        self._copies, self._segments = copies, segments
        self._sums: dict[DeviceSegment, Sums] = {}
        self._taken: TakenSums | None = None
        self.copied_bytes, self.checksum_ms = 0, 0.0

    @property
    def skipped_bytes(self) -> int:
        """What its copy had already, once all runs were given."""
        return sum(one.size_bytes for one in self._segments) - self.copied_bytes

    def runs(self) -> Iterator[Run]:
        """What is to be copied; each run is to be begun when it is given, later ones are looked for meanwhile.

        Raises:
            DeviceError: see `Copies.look`.
        """
        started = time.perf_counter()
        for looked in self._copies.look(self._segments):
            self._sums.update(looked.sums)
            if not self.copied_bytes:
                self.checksum_ms = (time.perf_counter() - started) * 1e3
            for run in looked.runs:
                self.copied_bytes += run.n_bytes
                yield run

    def take_rest(self) -> None:
        """All runs are begun: take the sums that are missing beside the copies, before anything is unmapped.

        Raises:
            DeviceError: see `Copies.look`.
        """
        self._taken = self._copies.take_sums([one for one in self._segments if one not in self._sums])

    def accept(self) -> None:
        """All is copied."""
        taken, self._taken = self._taken, None
        self._copies.accept(self._sums if taken is None else {**self._sums, **taken.result()})


class _Buffer(NamedTuple):
    memory: Segment
    pinned: bool


def parts_of(memory: Segment) -> Iterator[tuple[int, int]]:
    """Ranges (address, bytes) that one thread populates at a time."""
    for start in range(0, memory.span_bytes, _PART):
        yield memory.address + start, min(_PART, memory.span_bytes - start)


def _growing(segments: Sequence[DeviceSegment]) -> Iterator[list[DeviceSegment]]:
    """Groups, the first of about `_FIRST_LOOK` bytes, each `_GROWTH` times as large as the one before."""
    wanted, n_bytes, group = _FIRST_LOOK, 0, []
    for one in segments:
        group.append(one)
        n_bytes += one.size_bytes
        if n_bytes >= wanted:
            yield group
            wanted, n_bytes, group = wanted * _GROWTH, 0, []
    if group:
        yield group


def populate(address: int, n_bytes: int) -> None:
    """Make pages physically there. Source: madvise(2), MADV_POPULATE_WRITE."""
    libc.advise(address, n_bytes, libc.MADV_POPULATE_WRITE)


class HostCopies:
    """Each copy in a mapping of its own: huge pages of exactly its size, page-locked once and kept for the next sleep.

    Locking memory costs more than copying, so a buffer stays until `forget`; its bytes count as held. A chunk whose
    sums are those of its copy is not copied again.
    """

    def __init__(self, driver: Driver, shadow: Shadow) -> None:
        self._driver = driver
        self._shadow = shadow
        self._buffers: dict[DeviceSegment, _Buffer] = {}
        self._sums: dict[DeviceSegment, Sums] = {}

    def look(self, segments: Sequence[DeviceSegment]) -> Iterator[Looked]:
        """See `Copies.look`."""
        known = [one for one in segments if one in self._sums]
        new = [one for one in segments if one not in self._sums]
        if new:
            yield Looked(tuple(run for one in new for run in self._changed(one, None)), {})
        for several in _growing(known):
            sums = self._shadow.take(several).result()
            yield Looked(tuple(run for one in several for run in self._changed(one, sums.get(one))), sums)

    def _changed(self, segment: DeviceSegment, now: Sums | None) -> Iterator[Run]:
        """Runs of chunks that differ from the copy; all of it where nothing is known."""
        before = self._sums.get(segment)
        if now is None or before is None:
            yield Run(segment, 0, segment.size_bytes)
            return
        edges = np.flatnonzero(np.diff(np.r_[False, (now != before).any(axis=1), False])).reshape(-1, 2)
        for first, end in edges.tolist():
            yield Run(segment, first * CHUNK, (end - first) * CHUNK)

    def begin(self, run: Run) -> None:
        """See `Copies.begin`; a segment that was freed meanwhile needs none."""
        if not self._driver.is_live(run.segment.allocation):
            return
        self._sums.pop(run.segment, None)  # until `accept` the copy is of nothing
        host = self._buffers[run.segment].memory.address
        self._driver.copy(host + run.offset, run.segment.address + run.offset, run.n_bytes)

    def take_sums(self, segments: Sequence[DeviceSegment]) -> TakenSums:
        """See `Copies.take_sums`."""
        return self._shadow.take(segments)

    def accept(self, sums: Mapping[DeviceSegment, Sums]) -> None:
        """See `Copies.accept`."""
        self._sums.update((one, its) for one, its in sums.items() if one in self._buffers)

    def make_room(self, segments: Sequence[DeviceSegment], go_on: Callable[[int], bool]) -> None:
        """See `Copies.make_room`; threads fetch the pages of the next buffers while earlier ones are locked."""
        missing = [one for one in segments if one not in self._buffers]
        rest = sum(one.size_bytes for one in missing)
        coming: deque[tuple[DeviceSegment, Segment, list[Future[None]]]] = deque()
        near = self._driver.near_cpus()
        n_threads = max(1, min(MAX_THREADS, usable_cpus(), len(near) or MAX_THREADS))
        threads = ThreadPoolExecutor(n_threads, initializer=stay_near, initargs=(near,))
        try:
            waiting = iter(missing)
            while go_on(rest):
                while len(coming) < _AHEAD and (one := next(waiting, None)) is not None:
                    memory = Segment(one.size_bytes, populate=False)
                    coming.append((one, memory, [threads.submit(populate, *part) for part in parts_of(memory)]))
                if not coming:
                    return
                self._lock(*coming[0])
                rest -= coming.popleft()[0].size_bytes
        finally:
            threads.shutdown(cancel_futures=True)
            for _, memory, _ in coming:
                memory.close()

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
        buffer = self._buffers.get(segment)
        if buffer is None:
            return
        if buffer.pinned:
            self._driver.unpin(buffer.memory.address)
        del self._buffers[segment]
        self._sums.pop(segment, None)
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
