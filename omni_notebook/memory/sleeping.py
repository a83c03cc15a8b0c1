"""The two steps of a CPU pool's sleep, and the step from level 1 to level 2."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omni_notebook.memory.base import PrepareReport, SleepPlan, UnmapReport
from omni_notebook.memory.books import TagState, sleep_cancelled
from omni_notebook.memory.core import check_level, release_measured, spilled_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from omni_notebook.memory.books import Tag
    from omni_notebook.memory.content import Content, CopyResult
    from omni_notebook.memory.core import Core


class Sleeping:
    """Carries sleeps out; the pool's lock is held around each call."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def plan(self, level: int, names: Collection[str] | None) -> SleepPlan:
        """See `CpuPool.plan`."""
        check_level(level)
        chosen = self._core.books.in_state(*TagState) if names is None else self._core.books.named(names)
        awake = [tag for tag in chosen if tag.state is TagState.AWAKE]
        backed = [tag for tag in awake if not tag.recomputable and (level == 1 or tag.kept_whole)]
        return SleepPlan(
            expected_bytes=sum(tag.span_bytes for tag in awake),
            backup_bytes=sum(tag.used_bytes for tag in backed if not self._core.from_checkpoint(tag)),
            kept_bytes=sum(kept.n_bytes for tag in awake if tag not in backed for kept in tag.kept) * (level == 2),
            tags={tag.name: tag.span_bytes for tag in awake},
        )

    def ahead_contents(self) -> list[Content]:
        """What a level-1 sleep of all that is awake would copy."""
        tags = [tag for tag in self._core.books.in_state(TagState.AWAKE) if not tag.recomputable]
        return [content for tag in tags if not self._core.from_checkpoint(tag) for content in tag.contents]

    def prepare(self, level: int, names: Collection[str] | None, cancelled: Callable[[], bool] | None) -> PrepareReport:
        """See `CpuPool.prepare_sleep`."""
        check_level(level)
        chosen = self._core.books.select(names, TagState.AWAKE, "prepare_sleep")
        self._core.books.require_none(TagState.PREPARED, "prepare_sleep")
        self._core.books.require_none(TagState.MAPPED, "prepare_sleep")
        self._core.ahead.stop()

        def stop() -> bool:
            return self._core.closing.is_set() or (cancelled is not None and cancelled())

        started = time.perf_counter()
        modified = self._modified(chosen, level, stop)
        checksum_ms = (time.perf_counter() - started) * 1e3
        backups = {tag: self._backup_kind(tag, level, modified=modified) for tag in chosen}
        spilled = [content for tag in chosen if backups[tag] == "spill" for content in tag.contents]
        copied = self._core.backuper.back_up(spilled, stop=stop)
        if not copied.complete:
            raise sleep_cancelled()
        for tag, backup in backups.items():
            tag.prepare(level, backup)
        return self._report(chosen, copied, modified, checksum_ms)

    def _modified(self, chosen: Sequence[Tag], level: int, stop: Callable[[], bool]) -> bool | None:
        """Whether a tag differs from its recorded checksum, where that matters; None: none was recorded."""
        asked = [tag for tag in chosen if level == 2 or self._core.from_checkpoint(tag)]
        known = [found for tag in asked if (found := self._core.records.modified(tag, stop)) is not None]
        return any(known) if known else None

    def _backup_kind(self, tag: Tag, level: int, *, modified: bool | None) -> str | None:
        if tag.recomputable or (level == 2 and not tag.kept_whole):
            return "host" if tag.kept else None
        return "checkpoint" if self._core.from_checkpoint(tag) and modified is False else "spill"

    def _report(
        self, chosen: Sequence[Tag], copied: CopyResult, modified: bool | None, checksum_ms: float
    ) -> PrepareReport:
        backups = {tag.name: tag.backup for tag in chosen}
        dropped = spilled_bytes(tag for tag in chosen if tag.backup != "spill")
        return PrepareReport(
            backup=backups,
            backup_location=self._core.spill_dir if "spill" in backups.values() else None,
            host_backup_bytes=self._core.host_backup_bytes() - dropped,
            copied_bytes=copied.copied_bytes,
            skipped_clean_bytes=copied.skipped_bytes,
            modified=modified,
            checksum_ms=checksum_ms + copied.checksum_ms,
            copy_ms=copied.copy_ms,
        )

    def commit(self) -> UnmapReport:
        """See `CpuPool.commit_sleep`."""
        chosen = self._core.books.select(None, TagState.PREPARED, "commit_sleep")
        started = time.perf_counter()
        freed, notes = release_measured(chosen, self._core.lanes)
        unmap_ms = (time.perf_counter() - started) * 1e3
        for tag in chosen:
            tag.fall_asleep()
        return UnmapReport(
            freed=freed,
            expected_bytes=sum(tag.span_bytes for tag in chosen),
            observed_bytes=sum(freed.values()),
            scope="mapping",
            unmap_ms=unmap_ms,
            note="; ".join(notes) or None,
        )

    def abort(self) -> None:
        """See `CpuPool.abort_sleep`."""
        for tag in self._core.books.in_state(TagState.PREPARED):
            tag.wake()

    def drop_backup(self, names: Collection[str] | None) -> int:
        """See `CpuPool.drop_backup`."""
        chosen = self._core.books.select(names, TagState.ASLEEP, "drop_backup")
        before = self._core.host_backup_bytes()
        for tag in chosen:
            tag.drop_backup()
        return before - self._core.host_backup_bytes()
