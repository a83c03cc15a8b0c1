"""Checksums "as loaded": recording, verifying, and finding out cheaply whether contents still equal them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omni_notebook.memory.base import TransitionOrderError
from omni_notebook.memory.books import sleep_cancelled
from omni_notebook.memory.checksum import digest, sum_bytes, sum_segments
from omni_notebook.memory.lanes import run_lanes

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.memory.arena import Chunk, Segment
    from omni_notebook.memory.books import Tag
    from omni_notebook.memory.checksum import Sums


class ChecksumRecords:
    """The recorded checksums of a pool's tags."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._tables: dict[str, dict[Segment, Sums]] = {}

    def has(self, tag: Tag) -> bool:
        """Whether a checksum was recorded for the tag as it is allocated now."""
        return list(self._tables.get(tag.name, ())) == tag.segments

    def forget(self, tag: Tag) -> None:
        """Drop the tag's record, if there is one."""
        self._tables.pop(tag.name, None)

    def record(self, tag: Tag) -> str:
        """Checksum the tag now and remember it; a write from now on makes its chunk a changed one."""
        for content in tag.contents:
            content.mark_recorded()
        tables = sum_segments(tag.segments, lanes=self._lanes)
        self._tables[tag.name] = tables
        return digest(tables.values())

    def verify(self, tag: Tag) -> bool:
        """Whether the tag, all of it read now, equals the record.

        Raises:
            TransitionOrderError: nothing was recorded.
        """
        tables = self._tables.get(tag.name)
        if tables is None:
            msg = f"no checksum of {tag.name!r} was recorded; call record_checksum after loading"
            raise TransitionOrderError(msg)
        for content in tag.contents:
            content.mark_recorded()
        now = sum_segments(tag.segments, lanes=self._lanes)
        equal = list(now) == list(tables) and all(np.array_equal(now[key], tables[key]) for key in now)
        if not equal:
            for content in tag.contents:
                content.mark_changed()
        return equal

    def modified_in_spill(self, tag: Tag) -> bool:
        """Whether a sleeping tag's spill differs from the record; without a record it does."""
        if not self.has(tag):
            return True
        tables = self._tables[tag.name]
        return any(
            content.backup_sum(chunk) != tuple(tables[chunk.segment][chunk.index].tolist())
            for content in tag.contents
            for chunk in content.segment.chunks()
            if content.changed[chunk.index]
        )

    def modified(self, tag: Tag, stop: Callable[[], bool]) -> bool | None:
        """Whether the tag differs from the record; reads only chunks that may have been written. None: no record.

        Raises:
            TransitionCancelledError: `stop()` said so.
        """
        if tag.name not in self._tables:
            return None
        if not self.has(tag):
            return True
        tables = self._tables[tag.name]
        differing: list[Chunk] = []

        def work(chunk: Chunk) -> None:
            if sum_bytes(chunk.used) != tuple(tables[chunk.segment][chunk.index].tolist()):
                differing.append(chunk)

        suspects = [chunk for content in tag.contents for chunk in content.peek_changed()]
        if not run_lanes(suspects, work, lanes=self._lanes, stop=lambda: bool(differing) or stop()) and not differing:
            raise sleep_cancelled()
        return bool(differing)
