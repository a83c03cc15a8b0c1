"""What is known about a segment's contents: which chunks its backup holds, which differ from a recorded checksum."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from omni_notebook.memory.arena import CHUNK
from omni_notebook.memory.base import TransitionCancelledError
from omni_notebook.memory.checksum import empty_sums, sum_bytes
from omni_notebook.memory.lanes import never, run_lanes
from omni_notebook.memory.spill import Spill, check_room
from omni_notebook.memory.tracking import no_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from omni_notebook.memory.arena import Chunk, Segment
    from omni_notebook.memory.tracking import Flags, Tracker

_local = threading.local()


class Content:
    """One segment's contents, backup and write flags.

    `stale`: the backup lacks or may lack the chunk's bytes; `changed`: the chunk may differ from the recorded
    checksum; `held`: the spill holds some version of the chunk. Flags err on the safe side only: a chunk is claimed
    (`stale` cleared) and armed *before* it is copied, so that a write during the copy makes it stale again.
    """

    def __init__(self, segment: Segment, tracker: Tracker) -> None:
        self.segment = segment
        self.spill: Spill | None = None
        self._tracker = tracker
        self._lock = threading.Lock()
        tracker.register(segment)
        self.forget()

    def forget(self) -> None:
        """Nothing is known any more: the contents were dropped."""
        self.changed: Flags = ~no_flags(self.segment)
        self.drop_spill()

    def drop_spill(self) -> None:
        """Give the backup up."""
        if self.spill is not None:
            self.spill.close()
        self.spill = None
        self.stale: Flags = ~no_flags(self.segment)
        self.held: Flags = no_flags(self.segment)
        self.held_sums = empty_sums(self.segment)

    def _observe(self, *, arm: bool) -> None:
        try:
            written = self._tracker.written(self.segment)
            if arm:
                self._tracker.arm(self.segment, written)
        except OSError:  # tracking was taken from us: everything may have been written
            written = ~no_flags(self.segment)
        self.stale |= written
        self.changed |= written

    def claim_stale(self, *, arm: bool) -> list[Chunk]:
        """Chunks to copy; they count as clean from now on, unless given back by `unclaim` or written again.

        Without `arm`, which takes time, what was written until now is told again at the next look: right where pages
        are given up next, which ends all watching until `rearm`.
        """
        with self._lock:
            self._observe(arm=arm)
            claimed = [chunk for chunk in self.segment.chunks() if self.stale[chunk.index]]
            self.stale[:] = False
            return claimed

    def unclaim(self, chunk: Chunk) -> None:
        """The chunk was claimed and not copied."""
        with self._lock:
            self.stale[chunk.index] = True

    def peek_changed(self) -> list[Chunk]:
        """Chunks that may differ from the recorded checksum."""
        with self._lock:
            self._observe(arm=False)
            return [chunk for chunk in self.segment.chunks() if self.changed[chunk.index]]

    def mark_recorded(self) -> None:
        """A checksum of the contents as they are from now on is about to be taken."""
        with self._lock:
            self._observe(arm=True)
            self.changed[:] = False

    def mark_changed(self) -> None:
        """The contents differ from the recorded checksum."""
        with self._lock:
            self.changed[:] = True

    def rearm(self) -> None:
        """What was written since the last look came from the backup: it is not a change."""
        with self._lock, contextlib.suppress(OSError):
            self._tracker.arm(self.segment, ~no_flags(self.segment))

    def is_held(self) -> bool:
        """Whether the spill holds some version of every chunk."""
        return self.spill is not None and bool(self.held.all())

    def backup_sum(self, chunk: Chunk) -> tuple[int, ...]:
        """The checksum of what the spill holds of a chunk."""
        buffer = memoryview(bytearray(len(chunk.used)))
        if self.spill is not None:
            self.spill.read(chunk, buffer)
        return sum_bytes(buffer)

    def occupied_bytes(self) -> int:
        """What the backup takes now."""
        spill = self.spill
        return 0 if spill is None else spill.occupied_bytes()


@dataclass
class CopyResult:
    """What a backup did; `complete` False: stopped early."""

    complete: bool = True
    copied_bytes: int = 0
    skipped_bytes: int = 0
    checksum_ms: float = 0.0
    copy_ms: float = 0.0


class Backuper:
    """Brings spills of contents up to date, and contents back from their spills."""

    def __init__(self, folder: str, lanes: int, *, exact: bool) -> None:
        self.folder = folder
        self.lanes = lanes
        self._exact = exact

    def back_up(
        self, contents: Sequence[Content], *, stop: Callable[[], bool] = never, ahead: bool = False
    ) -> CopyResult:
        """Copy the stale chunks of `contents`; after a failure or a stop, backups are as before or still marked stale.

        `ahead`: contents stay in use, so writes are watched during the copy, and it leaves a core to others.

        Raises:
            OutOfMemoryError: no room for a spill.
            OSError: a spill could not be written.
        """
        made = self._make_spills(contents)
        result = CopyResult(complete=False)
        try:
            self._copy(contents, result, stop, ahead=ahead)
        finally:
            if not result.complete:
                for content in made:
                    content.drop_spill()
        return result

    def _make_spills(self, contents: Sequence[Content]) -> list[Content]:
        lacking = [content for content in contents if content.spill is None]
        check_room(self.folder, sum(content.segment.used_bytes for content in lacking))
        spills: list[Spill] = []
        try:
            for content in lacking:
                spills.append(Spill(self.folder, content.segment, self.lanes))  # noqa: PERF401 - closed one by one
        except OSError:
            for spill in spills:
                spill.close()
            raise
        for content, spill in zip(lacking, spills, strict=True):
            content.spill = spill
        return lacking

    def _copy(self, contents: Sequence[Content], result: CopyResult, stop: Callable[[], bool], *, ahead: bool) -> None:
        lanes = 1 if ahead else self.lanes
        owner = {content.segment: content for content in contents}
        todo = {chunk: None for content in contents for chunk in content.claim_stale(arm=ahead)}
        started = time.perf_counter()
        try:
            if not self._exact and not self._drop_equal(owner, todo, stop, lanes):
                return
            summed = time.perf_counter()
            result.checksum_ms = (summed - started) * 1e3

            def work(chunk: Chunk) -> None:
                self._copy_chunk(owner[chunk.segment], chunk)
                del todo[chunk]
                result.copied_bytes += len(chunk.used)

            result.complete = run_lanes(tuple(todo), work, lanes=lanes, stop=stop, lane_of=_stripe)
            result.copy_ms = (time.perf_counter() - summed) * 1e3
            result.skipped_bytes = sum(content.segment.used_bytes for content in contents) - result.copied_bytes
        finally:
            for chunk in todo:
                owner[chunk.segment].unclaim(chunk)

    @staticmethod
    def _drop_equal(
        owner: dict[Segment, Content], todo: dict[Chunk, None], stop: Callable[[], bool], lanes: int
    ) -> bool:
        """Take chunks off `todo` whose checksum equals that of what the spill holds; False: stopped early."""

        def work(chunk: Chunk) -> None:
            if sum_bytes(chunk.used) == tuple(owner[chunk.segment].held_sums[chunk.index].tolist()):
                del todo[chunk]

        known = [chunk for chunk in todo if owner[chunk.segment].held[chunk.index]]
        return run_lanes(known, work, lanes=lanes, stop=stop)

    def _copy_chunk(self, content: Content, chunk: Chunk) -> None:
        data = chunk.used
        if content.spill is None:
            return
        if not self._exact:
            data = _bounced(data)  # so that the checksum is of just the bytes that the spill gets
            content.held_sums[chunk.index] = sum_bytes(data)
        content.held[chunk.index] = False
        content.spill.write(chunk, data)
        content.held[chunk.index] = True

    def bring_back(
        self, contents: Sequence[Content], *, populate: bool = False, stop: Callable[[], bool] = never
    ) -> int:
        """Read the spills into the contents' pages (made present on the way if `populate`); bytes copied.

        Raises:
            TransitionCancelledError: `stop()` said so.
            BackupError: a spill was cut short.
            OSError: the disk failed, or memory is used up (`populate`).
        """
        owner = {content.segment: content for content in contents}

        def work(chunk: Chunk) -> None:
            if populate:
                chunk.populate()
            spill = owner[chunk.segment].spill
            if spill is not None:
                spill.read(chunk, chunk.used)

        chunks = (chunk for segment in owner for chunk in segment.chunks())
        if not run_lanes(chunks, work, lanes=self.lanes, lane_of=_stripe, stop=stop):
            msg = "the wake was cancelled; memory is as before it"
            raise TransitionCancelledError(msg)
        backed = [content for content in contents if content.spill is not None]
        for content in backed:
            content.rearm()
        return sum(content.segment.used_bytes for content in backed)


def _stripe(chunk: Chunk) -> int:
    return chunk.index  # as `Spill` lays them out


def _bounced(data: memoryview) -> memoryview:
    buffer: NDArray[np.uint8] | None = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = np.empty(CHUNK, np.uint8)
    np.copyto(buffer[: len(data)], np.frombuffer(data, np.uint8))
    return buffer[: len(data)].data
