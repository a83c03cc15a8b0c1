"""What the parts of a CPU pool share: its books, its tracker, its backups, and whether it is closing."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omni_notebook.errors import ArgumentError
from omni_notebook.memory.arena import release_range
from omni_notebook.memory.base import TransitionOrderError
from omni_notebook.memory.books import Books
from omni_notebook.memory.content import Backuper
from omni_notebook.memory.lanes import default_lanes, never, run_lanes
from omni_notebook.memory.records import ChecksumRecords
from omni_notebook.memory.residency import has_pagemap_scan, resident_bytes
from omni_notebook.memory.writeahead import WriteAhead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from omni_notebook.memory.arena import Chunk, Segment
    from omni_notebook.memory.base import HostMemory
    from omni_notebook.memory.books import Tag
    from omni_notebook.memory.tracking import Tracker


@dataclass
class Core:
    """One pool's state; the pool's lock guards all of it but reading the books."""

    spill_dir: str
    tracker: Tracker
    room: Callable[[], HostMemory]
    prefer_checkpoint: bool
    lanes: int = field(default_factory=default_lanes)
    restorer: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        self.books = Books()
        self.records = ChecksumRecords(self.lanes)
        self.backuper = Backuper(self.spill_dir, self.lanes, exact=self.tracker.exact)
        self.ahead = WriteAhead()
        self.closing = threading.Event()

    def check_open(self, step: str) -> None:
        """Refuse a step of a closed pool.

        Raises:
            TransitionOrderError: it is closed.
        """
        if self.closing.is_set():
            msg = f"{step}: the pool is closed; make a new one"
            raise TransitionOrderError(msg)

    def from_checkpoint(self, tag: Tag) -> bool:
        """Whether the tag, if unmodified, is restored by the checkpoint's restorer instead of a copy."""
        able = self.prefer_checkpoint and self.restorer is not None
        return able and self.records.has(tag)

    def populate(self, chunks: Iterable[Chunk], stop: Callable[[], bool] = never) -> bool:
        """Make the chunks' pages physically there; False if `stop()` ended it early."""
        return run_lanes(chunks, lambda chunk: chunk.populate(), lanes=self.lanes, stop=stop)

    def host_backup_bytes(self) -> int:
        """Bytes that backups take now: blocks of the spill files, and kept tensors on the host."""
        tags = tuple(self.books.values())
        return spilled_bytes(tags) + sum(len(data) for tag in tags for data in tuple(tag.kept_data))


def spilled_bytes(tags: Iterable[Tag]) -> int:
    """What the tags' spill files take now."""
    return sum(content.occupied_bytes() for tag in tags for content in tuple(tag.contents))


def check_level(level: int) -> None:
    """Refuse levels that there are not.

    Raises:
        ArgumentError: not 1 or 2.
    """
    if level not in {1, 2} or isinstance(level, bool):
        msg = f"level={level!r}: a sleep has level 1 (keeps a backup) or 2 (discards); nothing changed"
        raise ArgumentError(msg)


def release(tags: Sequence[Tag]) -> None:
    """Give the tags' pages up, as far as the kernel lets them go."""
    for tag in tags:
        for segment in tag.segments:
            with contextlib.suppress(OSError):
                segment.release()


def release_measured(tags: Sequence[Tag], lanes: int) -> tuple[dict[str, int], list[str]]:
    """Give the tags' pages up; bytes that left residency, by tag, and what went wrong, in words."""
    freed: list[tuple[str, int]] = []
    notes: list[str] = []

    def give_up(part: tuple[str, int, int]) -> None:
        name, address, n_bytes = part
        before = resident_bytes(address, n_bytes)
        try:
            release_range(address, n_bytes)
        except OSError as error:
            notes.append(f"{name}: {error.strerror}")
        freed.append((name, before - resident_bytes(address, n_bytes)))

    parts = [(tag.name, *part) for tag in tags for segment in tag.segments for part in _measurable(segment)]
    run_lanes(parts, give_up, lanes=lanes, alone_under=2)
    return {tag.name: sum(n_bytes for name, n_bytes in freed if name == tag.name) for tag in tags}, notes


def _measurable(segment: Segment) -> list[tuple[int, int]]:
    return segment.parts() if has_pagemap_scan() else [(segment.address, segment.span_bytes)]
