"""The CPU platform: "device memory" is this process's private pages, backups are unnamed files in `spill_dir`."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from omni_notebook.errors import ArgumentError, OutOfMemoryError
from omni_notebook.memory.adoption import Adoption
from omni_notebook.memory.arena import Segment, no_memory
from omni_notebook.memory.base import (
    KV_CACHE,
    WEIGHTS,
    BackupError,
    MapReport,
    PrepareReport,
    RestoreReport,
    SleepPlan,
    TagInfo,
    TransitionCancelledError,
    TransitionOrderError,
    UnmapReport,
)
from omni_notebook.memory.books import Books, Kept, Tag, TagState
from omni_notebook.memory.content import Backuper, Content, CopyResult
from omni_notebook.memory.host import cpu_name, host_memory
from omni_notebook.memory.lanes import default_lanes, run_lanes
from omni_notebook.memory.records import ChecksumRecords
from omni_notebook.memory.tracking import Tracker, Tracking, Untracked, make_tracker
from omni_notebook.memory.writeahead import WriteAhead
from omni_notebook.protocol import TagMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import nn

    from omni_notebook.memory.arena import Chunk
    from omni_notebook.memory.base import HostMemory

Backup = Literal["spill", "checkpoint"]


class CpuPool:
    """One rank's tagged memory in this process; fills `memory.base.MemoryPool`.

    Each `adopt` and each `empty` makes one segment of whole 2 MiB chunks. Tensors keep their addresses until the last
    view is gone, also after `close`, when they read as zeros. While a tag sleeps its tensors read as zeros too.

    Args:
        spill_dir: where backups go; None = the system's folder for temporary files.
        backup: "checkpoint" restores unmodified weights through `set_checkpoint_restorer` instead of a copy.
        tracking: how unchanged chunks are found; "auto" takes the kernel's write tracking where it works.
        room: how much RAM may still be taken; asked before a wake.

    Raises:
        ArgumentError: a wrong `backup`, or a `spill_dir` that can not be used.
    """

    platform = "cpu"
    device = "cpu"

    def __init__(
        self,
        spill_dir: str | None = None,
        backup: Backup = "spill",
        *,
        tracking: Tracking = "auto",
        room: Callable[[], HostMemory] = host_memory,
    ) -> None:
        if backup not in {"spill", "checkpoint"}:
            msg = f'backup={backup!r}: known are "spill" and "checkpoint"'
            raise ArgumentError(msg)
        self.device_name = cpu_name()
        self.spill_dir = _writable(spill_dir or tempfile.gettempdir())
        self._prefer_checkpoint = backup == "checkpoint"
        self._restorer: Callable[[str], None] | None = None
        self._room = room
        self._tracker = make_tracker(tracking)
        self._lanes = default_lanes()
        self._backuper = Backuper(self.spill_dir, self._lanes, exact=self._tracker.exact)
        self._records = ChecksumRecords(self._lanes)
        self._ahead = WriteAhead()
        self._books = Books()
        self._lock = threading.RLock()
        self._closing = threading.Event()

    # ------------------------------------------------------------------------------------- contents

    def adopt(self, module: nn.Module, tag: str = WEIGHTS) -> None:
        """Move a module's parameters and buffers into the pool; tensors that are already in it stay.

        Raises:
            ArgumentError: a tensor on another device, sparse or quantised.
            OutOfMemoryError: no room; the module is as before.
        """
        with self._lock:
            book = self._open_tag(tag, recomputable=False)
            adoption = Adoption(module, skip=lambda tensor: self._find(tensor) is not None)
            if adoption.used_bytes:
                adoption.move_into(self._add(book, adoption.used_bytes))

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, tag: str = KV_CACHE, *, recomputable: bool = True
    ) -> torch.Tensor:
        """A zeroed tensor in the pool, physically there.

        Raises:
            ArgumentError: `recomputable` differs from the tag's, or a size is negative.
            OutOfMemoryError: no room.
        """
        with self._lock:
            if any(size < 0 for size in shape):
                msg = f"shape={tuple(shape)}: sizes must not be negative"
                raise ArgumentError(msg)
            book = self._open_tag(tag, recomputable=recomputable)
            n_bytes = dtype.itemsize
            for size in shape:
                n_bytes *= size
            if n_bytes == 0:
                return torch.empty(tuple(shape), dtype=dtype)
            return self._add(book, n_bytes).tensor(0, shape, dtype)

    def _open_tag(self, name: str, *, recomputable: bool) -> Tag:
        self._check_open("allocate")
        tag = self._books.get(name) or Tag(name, recomputable)
        if tag.recomputable is not recomputable:
            msg = f"tag {name!r} has recomputable={tag.recomputable}; one tag can not be both"
            raise ArgumentError(msg)
        if tag.state is not TagState.AWAKE:
            msg = f"tag {name!r} is {tag.state}; wake it before allocating in it"
            raise TransitionOrderError(msg)
        return tag

    def _add(self, tag: Tag, n_bytes: int) -> Segment:
        segment = Segment(n_bytes)
        tracker: Tracker = Untracked() if tag.recomputable else self._tracker
        tag.contents.append(Content(segment, tracker))
        self._books.setdefault(tag.name, tag)
        return segment

    def _find(self, tensor: torch.Tensor) -> Content | None:
        if tensor.device.type != "cpu":
            return None
        start, n_bytes = tensor.data_ptr(), tensor.numel() * tensor.itemsize
        return next((c for c in self._books.contents() if n_bytes and c.segment.holds(start, n_bytes)), None)

    def keep(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """Name contiguous pool tensors of `tag` whose contents every level keeps on the host.

        Raises:
            ArgumentError: a tensor is not contiguous or not in the pool under `tag`.
        """
        with self._lock:
            (book,) = self._books.named((tag,))
            kept = []
            for tensor in tensors:
                content = self._find(tensor)
                if tensor.numel() and (content not in book.contents or not tensor.is_contiguous()):
                    msg = f"keep: a tensor of shape {tuple(tensor.shape)} is not contiguous in the pool under {tag!r}"
                    raise ArgumentError(msg)
                if content is not None:
                    offset = tensor.data_ptr() - content.segment.address
                    kept.append(Kept(content, offset, tensor.numel() * tensor.itemsize))
            book.kept.extend(dict.fromkeys(item for item in kept if item not in book.kept))

    # --------------------------------------------------------------------------------------- looking

    def tags(self) -> Mapping[str, TagInfo]:
        """The tags and their books."""
        return {
            tag.name: TagInfo(
                span_bytes=tag.span_bytes,
                used_bytes=tag.used_bytes,
                mapped=tag.state is not TagState.ASLEEP,
                recomputable=tag.recomputable,
            )
            for tag in self._books.in_state(*TagState)
        }

    def memory(self) -> Mapping[str, TagMemory]:
        """Every tag's memory, measured now; any thread may ask at any time."""
        return {tag.name: TagMemory(tag.span_bytes, tag.resident_bytes()) for tag in self._books.in_state(*TagState)}

    def host_backup_bytes(self) -> int:
        """Bytes that backups take now: blocks of the spill files, and kept tensors on the host."""
        return self._spilled_bytes(self._books.in_state(*TagState)) + self._kept_bytes()

    @staticmethod
    def _spilled_bytes(tags: Sequence[Tag]) -> int:
        return sum(content.occupied_bytes() for tag in tags for content in tuple(tag.contents))

    def _kept_bytes(self) -> int:
        return sum(len(data) for tag in self._books.in_state(*TagState) for data in tag.kept_data)

    def plan(self, level: int, tags: Collection[str] | None = None) -> SleepPlan:
        """What a sleep of `tags` (None = all that are awake) would free and copy; tags that sleep count nothing."""
        _check_level(level)
        chosen = self._books.in_state(*TagState) if tags is None else self._books.named(tags)
        awake = [tag for tag in chosen if tag.state is TagState.AWAKE]
        backed = [tag for tag in awake if level == 1 and not tag.recomputable]
        return SleepPlan(
            expected_bytes=sum(tag.span_bytes for tag in awake),
            backup_bytes=sum(tag.used_bytes for tag in backed if not self._from_checkpoint(tag)),
            kept_bytes=sum(kept.n_bytes for tag in awake for kept in tag.kept) if level == 2 else 0,
            tags={tag.name: tag.span_bytes for tag in awake},
        )

    def record_checksum(self, tag: str = WEIGHTS) -> str:
        """Checksum `tag` now and remember it as "as loaded"; sixteen hex digits.

        Raises:
            TransitionOrderError: the tag is asleep.
        """
        with self._lock:
            return self._records.record(self._readable(tag))

    def verify_checksum(self, tag: str = WEIGHTS) -> bool:
        """Whether `tag`'s contents, all read now, equal the recorded checksum.

        Raises:
            TransitionOrderError: the tag is asleep, or no checksum was recorded.
        """
        with self._lock:
            return self._records.verify(self._readable(tag))

    def _readable(self, name: str) -> Tag:
        (tag,) = self._books.named((name,))
        if tag.state is TagState.ASLEEP:
            msg = f"tag {name!r} is asleep: it has no contents to checksum; wake it first"
            raise TransitionOrderError(msg)
        return tag

    # --------------------------------------------------------------------------------------- backup

    def set_checkpoint_restorer(self, restorer: Callable[[str], None] | None) -> None:
        """With backup="checkpoint": who refills a tag's tensors in place; unmodified `weights` then get no copy."""
        self._restorer = restorer

    def _from_checkpoint(self, tag: Tag) -> bool:
        able = self._prefer_checkpoint and self._restorer is not None
        return able and tag.name == WEIGHTS and self._records.has(tag)

    def write_ahead(self) -> None:
        """Start copying what a level-1 sleep would copy, in the background; a sleep takes over what is left."""
        with self._lock:
            self._check_open("write_ahead")
            self._ahead.stop()
            contents = self._ahead_contents()
            if contents:
                self._ahead.start(lambda stop: self._backuper.back_up(contents, stop=stop, lanes=1))

    def _ahead_contents(self) -> list[Content]:
        tags = [tag for tag in self._books.in_state(TagState.AWAKE) if not tag.recomputable]
        return [content for tag in tags if not self._from_checkpoint(tag) for content in tag.contents]

    def wait_write_ahead(self, timeout_s: float) -> bool:
        """Whether the background backup is complete (writes after it are the next sleep's)."""
        return self._ahead.wait(timeout_s) and all(content.is_held() for content in self._ahead_contents())

    # ---------------------------------------------------------------------------------------- sleep

    def prepare_sleep(
        self, level: int, tags: Collection[str] | None = None, *, cancelled: Callable[[], bool] | None = None
    ) -> PrepareReport:
        """Check room, back up; no page is given up.

        Raises:
            ArgumentError: the level or a tag is unknown.
            TransitionOrderError: a tag is not awake, or another transition is not finished.
            OutOfMemoryError: the backup has no room; nothing changed.
            TransitionCancelledError: `cancelled()` said so; nothing changed.
            OSError: the backup could not be written; nothing changed.
        """
        with self._lock:
            self._check_open("prepare_sleep")
            _check_level(level)
            self._books.require_none(TagState.PREPARED, "prepare_sleep")
            self._books.require_none(TagState.MAPPED, "prepare_sleep")
            chosen = self._books.select(tags, TagState.AWAKE, "prepare_sleep")
            self._ahead.stop()
            stop = self._stop(cancelled)
            started = time.perf_counter()
            looks = level == 2 or any(map(self._from_checkpoint, chosen))
            modified = self._records.modified(self._weights_of(chosen), stop) if looks else None
            checksum_ms = (time.perf_counter() - started) * 1e3
            backups = {tag.name: self._backup_kind(tag, level, modified=modified) for tag in chosen}
            spilled = [content for tag in chosen if backups[tag.name] == "spill" for content in tag.contents]
            copied = self._backuper.back_up(spilled, stop=stop)
            if not copied.complete:
                msg = "the sleep was cancelled; memory is as before it"
                raise TransitionCancelledError(msg)
            for tag in chosen:
                tag.kept_data = [] if backups[tag.name] == "spill" else [kept.read() for kept in tag.kept]
                tag.state, tag.level, tag.backup, tag.restored = TagState.PREPARED, level, backups[tag.name], False
            return self._prepare_report(chosen, copied, modified, checksum_ms)

    def _weights_of(self, tags: Sequence[Tag]) -> Tag | None:
        return next((tag for tag in tags if tag.name == WEIGHTS), None)

    def _backup_kind(self, tag: Tag, level: int, *, modified: bool | None) -> str | None:
        if tag.recomputable or level == 2:
            return "host" if tag.kept else None
        return "checkpoint" if self._from_checkpoint(tag) and modified is False else "spill"

    def _prepare_report(
        self, chosen: Sequence[Tag], copied: CopyResult, modified: bool | None, checksum_ms: float
    ) -> PrepareReport:
        backups = {tag.name: tag.backup for tag in chosen}
        dropped = self._spilled_bytes([tag for tag in chosen if tag.backup != "spill"])
        return PrepareReport(
            backup=backups,
            backup_location=self.spill_dir if "spill" in backups.values() else None,
            host_backup_bytes=self.host_backup_bytes() - dropped,
            copied_bytes=copied.copied_bytes,
            skipped_clean_bytes=copied.skipped_bytes,
            modified=modified,
            checksum_ms=checksum_ms + copied.checksum_ms,
            copy_ms=copied.copy_ms,
        )

    def commit_sleep(self) -> UnmapReport:
        """Give the prepared tags' pages up, and measure. Where writes are tracked, late ones are still saved.

        Raises:
            TransitionOrderError: no sleep is prepared.
            OSError: a late write could not be saved; nothing was given up.
        """
        with self._lock:
            chosen = self._books.select(None, TagState.PREPARED, "commit_sleep")
            if self._tracker.exact:
                self._backuper.back_up([c for tag in chosen if tag.backup == "spill" for c in tag.contents])
            started = time.perf_counter()
            before = {tag.name: tag.resident_bytes() for tag in chosen}
            notes = [note for tag in chosen for note in _release(tag)]
            after = {tag.name: tag.resident_bytes() for tag in chosen}
            unmap_ms = (time.perf_counter() - started) * 1e3
            for tag in chosen:
                tag.state = TagState.ASLEEP
                if tag.backup != "spill":
                    for content in tag.contents:
                        content.drop_spill() if tag.backup == "checkpoint" else content.forget()
            freed = {name: before[name] - after[name] for name in before}
            return UnmapReport(
                freed=freed,
                expected_bytes=sum(tag.span_bytes for tag in chosen),
                observed_bytes=sum(freed.values()),
                scope="mapping",
                unmap_ms=unmap_ms,
                note="; ".join(notes) or None,
            )

    def abort_sleep(self) -> None:
        """Forget a prepared sleep; without one it does nothing."""
        with self._lock:
            for tag in self._books.in_state(TagState.PREPARED):
                tag.state, tag.level, tag.backup, tag.kept_data = TagState.AWAKE, 0, None, []

    def drop_backup(self, tags: Collection[str] | None = None) -> int:
        """Sleeping tags lose their backup but for kept tensors (level 1 → 2); host bytes given back, measured.

        Raises:
            TransitionOrderError: a tag is not asleep.
        """
        with self._lock:
            chosen = self._books.select(tags, TagState.ASLEEP, "drop_backup")
            before = self.host_backup_bytes()
            for tag in chosen:
                if tag.backup == "spill":
                    tag.kept_data = [kept.read_backup() for kept in tag.kept]
                tag.level, tag.backup = 2, "host" if tag.kept_data else None
                for content in tag.contents:
                    content.forget()
            return before - self.host_backup_bytes()

    def modified_in_backup(self, tag: str = WEIGHTS) -> bool:
        """Whether what a sleeping tag's backup holds differs from the recorded checksum; reads only suspects.

        Raises:
            TransitionOrderError: the tag is not asleep.
        """
        with self._lock:
            (book,) = self._books.select((tag,), TagState.ASLEEP, "modified_in_backup")
            return book.backup == "spill" and self._records.modified_in_spill(book)

    # ----------------------------------------------------------------------------------------- wake

    def map(self, tags: Collection[str] | None = None) -> MapReport:
        """Make sleeping tags' pages physically there again, zeroed.

        Raises:
            TransitionOrderError: a tag is not asleep.
            OutOfMemoryError: not enough room; nothing is mapped then.
        """
        with self._lock:
            chosen = self._books.select(tags, TagState.ASLEEP, "map")
            return self._map(chosen, lambda chunks: _populate(chunks, self._lanes))

    def _map(self, chosen: Sequence[Tag], fill: Callable[[list[Chunk]], object]) -> MapReport:
        self._check_open("map")
        started = time.perf_counter()
        needed = sum(tag.span_bytes for tag in chosen)
        free = self._room().available_bytes
        if needed > free:
            raise no_memory(needed, free_bytes=free)
        for tag in chosen:
            _release(tag)  # what a stray write brought while it slept
        try:
            fill([chunk for tag in chosen for segment in tag.segments for chunk in segment.chunks()])
        except BaseException as error:
            for tag in chosen:
                _release(tag)
            if isinstance(error, OSError) and not isinstance(error, OutOfMemoryError):
                raise no_memory(needed, error) from error
            raise
        for tag in chosen:
            tag.state, tag.restored = TagState.MAPPED, False
        mapped = sum(tag.resident_bytes() for tag in chosen)
        return MapReport(mapped_bytes=mapped, map_ms=(time.perf_counter() - started) * 1e3)

    def restore(self, tags: Collection[str] | None = None) -> RestoreReport:
        """Copy backups (or kept tensors) into the mapped tags; a tag that this wake restored already is left alone.

        Raises:
            TransitionOrderError: a tag is not mapped.
            BackupError: a spill was cut short, or the checkpoint gave other contents; `abort_wake` is possible.
        """
        with self._lock:
            chosen = self._books.select(tags, TagState.MAPPED, "restore")
            started = time.perf_counter()
            waiting = [tag for tag in chosen if not tag.restored]
            spilled = [content for tag in waiting if tag.backup == "spill" for content in tag.contents]
            copied = self._backuper.bring_back(spilled)
            for tag in waiting:
                copied += self._refill(tag)
            return self._restore_report(chosen, copied, started)

    def _refill(self, tag: Tag) -> int:
        """Everything of a restore but the spill; bytes copied."""
        copied = 0
        for kept, data in zip(tag.kept, tag.kept_data, strict=False):
            kept.write(data)
            copied += len(data)
        if tag.backup == "checkpoint" and self._restorer is not None:
            self._restorer(tag.name)
            copied = tag.used_bytes
        if tag.backup == "checkpoint" and not self._records.verify(tag):
            msg = f"the checkpoint gave other contents for {tag.name!r} than were loaded; abort the wake, load it anew"
            raise BackupError(msg)
        tag.restored = True
        return copied

    @staticmethod
    def _restore_report(chosen: Sequence[Tag], copied_bytes: int, started: float) -> RestoreReport:
        return RestoreReport(
            copied_bytes=copied_bytes,
            copy_ms=(time.perf_counter() - started) * 1e3,
            needs_reload=tuple(tag.name for tag in chosen if tag.needs_reload()),
        )

    def map_restore(self, tags: Collection[str] | None = None) -> tuple[MapReport, RestoreReport]:
        """`map` and `restore` in one pass: each chunk is filled while its fresh pages are still in the cache.

        Raises:
            as `map` and `restore`; nothing is mapped then.
        """
        with self._lock:
            chosen = self._books.select(tags, TagState.ASLEEP, "map_restore")
            spilled = [content for tag in chosen if tag.backup == "spill" for content in tag.contents]
            inside = {content.segment for content in spilled}

            def fill(chunks: list[Chunk]) -> None:
                self._backuper.bring_back(spilled, populate=True)
                _populate([chunk for chunk in chunks if chunk.segment not in inside], self._lanes)

            mapped = self._map(chosen, fill)
            copied = sum(content.segment.used_bytes for content in spilled)
            started = time.perf_counter()
            try:
                copied += sum(self._refill(tag) for tag in chosen)
            except BaseException:
                self.abort_wake()
                raise
            return mapped, self._restore_report(chosen, copied, started)

    def commit_wake(self) -> None:
        """The mapped tags are awake; their spills stay for the next sleep.

        Raises:
            TransitionOrderError: no tag is mapped, or a backup was not restored.
        """
        with self._lock:
            chosen = self._books.select(None, TagState.MAPPED, "commit_wake")
            for tag in chosen:
                if tag.needs_restore():
                    msg = f"commit_wake: the backup of {tag.name!r} was not restored; restore it or abort the wake"
                    raise TransitionOrderError(msg)
            for tag in chosen:
                tag.state, tag.level, tag.backup, tag.kept_data = TagState.AWAKE, 0, None, []

    def abort_wake(self) -> None:
        """Unmap what this wake mapped; backups stay. Without a wake it does nothing."""
        with self._lock:
            for tag in self._books.in_state(TagState.MAPPED):
                _release(tag)
                tag.state, tag.restored = TagState.ASLEEP, False

    # ---------------------------------------------------------------------------------------- close

    def close(self) -> None:
        """Give pages, spill files and threads back; a transition in another thread ends first, at its next chunk."""
        self._closing.set()
        self._ahead.stop()
        with self._lock:
            self._ahead.stop()
            for content in self._books.contents():
                content.segment.close()
                content.drop_spill()
            self._books.clear()
            self._tracker.close()

    def _check_open(self, step: str) -> None:
        if self._closing.is_set():
            msg = f"{step}: the pool is closed; make a new one"
            raise TransitionOrderError(msg)

    def _stop(self, cancelled: Callable[[], bool] | None) -> Callable[[], bool]:
        return lambda: self._closing.is_set() or (cancelled is not None and cancelled())


def _check_level(level: int) -> None:
    if level not in {1, 2} or isinstance(level, bool):
        msg = f"level={level!r}: a sleep has level 1 (keeps a backup) or 2 (discards); nothing changed"
        raise ArgumentError(msg)


def _writable(folder: str) -> str:
    if not Path(folder).is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        msg = f"spill_dir={folder!r} is not a folder that can be written; give one on a disk with room for the weights"
        raise ArgumentError(msg)
    return folder


def _release(tag: Tag) -> list[str]:
    """Give a tag's pages up; what went wrong, in words (the measurement shows by how much)."""
    notes = []
    for segment in tag.segments:
        try:
            segment.release()
        except OSError as error:
            notes.append(f"{tag.name}: {error.strerror}")
    return notes


def _populate(chunks: Sequence[Chunk], lanes: int) -> None:
    run_lanes(chunks, lambda chunk: chunk.populate(), lanes=lanes)
