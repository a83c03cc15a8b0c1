"""The steps of a CPU pool's wake."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

from omni_notebook.memory.arena import no_memory
from omni_notebook.memory.base import (
    BackupError,
    MapReport,
    RestoreReport,
    TransitionCancelledError,
    TransitionOrderError,
)
from omni_notebook.memory.books import TagState
from omni_notebook.memory.core import release

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from omni_notebook.memory.arena import Chunk
    from omni_notebook.memory.books import Tag
    from omni_notebook.memory.content import Content
    from omni_notebook.memory.core import Core


class Waking:
    """Carries wakes out; the pool's lock is held around each call."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def map(self, names: Collection[str] | None) -> MapReport:
        """See `CpuPool.map`."""
        chosen = self._core.books.select(names, TagState.ASLEEP, "map")
        return self._map(chosen, self._core.populate)

    def _map(self, chosen: Sequence[Tag], fill: Callable[[list[Chunk]], object]) -> MapReport:
        started = time.perf_counter()
        needed = sum(tag.span_bytes for tag in chosen)
        free = self._core.room().available_bytes
        if needed > free:
            raise no_memory(needed, free_bytes=free)
        release(chosen)  # what a stray write brought while it slept
        try:
            fill([chunk for tag in chosen for segment in tag.segments for chunk in segment.chunks()])
        except BaseException as error:
            release(chosen)
            if isinstance(error, OSError) and error.errno in {errno.ENOMEM, errno.EAGAIN}:
                raise no_memory(needed, error) from error
            raise
        for tag in chosen:
            tag.state, tag.restored = TagState.MAPPED, False
        mapped = sum(tag.resident_bytes() for tag in chosen)
        return MapReport(mapped_bytes=mapped, map_ms=(time.perf_counter() - started) * 1e3)

    def restore(self, names: Collection[str] | None) -> RestoreReport:
        """See `CpuPool.restore`."""
        chosen = self._core.books.select(names, TagState.MAPPED, "restore")
        started = time.perf_counter()
        waiting = [tag for tag in chosen if not tag.restored]
        copied = self._core.backuper.bring_back(_spilled(waiting))
        copied += sum(self._refill(tag) for tag in waiting)
        return _report(chosen, copied, started)

    def _refill(self, tag: Tag) -> int:
        """Everything of a restore but the spill; bytes copied."""
        copied = tag.write_kept()
        if tag.backup == "checkpoint" and self._core.restorer is not None:
            self._core.restorer(tag.name)
            copied = tag.used_bytes
            tag.write_kept()
            if not self._core.records.verify(tag):
                msg = f"the checkpoint gave other contents for {tag.name!r} than were loaded; abort the wake, load anew"
                raise BackupError(msg)
        tag.restored = True
        return copied

    def map_restore(self, names: Collection[str] | None, stop: Callable[[], bool]) -> tuple[MapReport, RestoreReport]:
        """See `CpuPool.map_restore`."""
        chosen = self._core.books.select(names, TagState.ASLEEP, "map_restore")
        spilled = _spilled(chosen)
        inside = {content.segment for content in spilled}

        def fill(chunks: list[Chunk]) -> None:
            self._core.backuper.bring_back(spilled, populate=True, stop=stop)
            if not self._core.populate((chunk for chunk in chunks if chunk.segment not in inside), stop):
                msg = "the wake was cancelled; memory is as before it"
                raise TransitionCancelledError(msg)

        mapped = self._map(chosen, fill)
        copied = sum(content.segment.used_bytes for content in spilled)
        started = time.perf_counter()
        try:
            copied += sum(self._refill(tag) for tag in chosen)
        except BaseException:
            self._unmap(chosen)
            raise
        return mapped, _report(chosen, copied, started)

    def commit(self) -> None:
        """See `CpuPool.commit_wake`."""
        chosen = self._core.books.select(None, TagState.MAPPED, "commit_wake")
        for tag in chosen:
            if tag.needs_restore():
                msg = f"commit_wake: the backup of {tag.name!r} was not restored; restore it or abort the wake"
                raise TransitionOrderError(msg)
        for tag in chosen:
            tag.wake()

    def abort(self) -> None:
        """See `CpuPool.abort_wake`."""
        self._unmap(self._core.books.in_state(TagState.MAPPED))

    @staticmethod
    def _unmap(tags: Sequence[Tag]) -> None:
        release(tags)
        for tag in tags:
            tag.state, tag.restored = TagState.ASLEEP, False


def _spilled(tags: Sequence[Tag]) -> list[Content]:
    return [content for tag in tags if tag.backup == "spill" for content in tag.contents]


def _report(chosen: Sequence[Tag], copied_bytes: int, started: float) -> RestoreReport:
    return RestoreReport(
        copied_bytes=copied_bytes,
        copy_ms=(time.perf_counter() - started) * 1e3,
        needs_reload=tuple(tag.name for tag in chosen if tag.needs_reload()),
    )
