"""The two steps of a sleep over vLLM's allocator, and the step from level 1 to level 2."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from omni_notebook.memory.arena import no_memory
from omni_notebook.memory.base import PrepareReport, SleepPlan
from omni_notebook.memory.books import TagState, sleep_cancelled
from omni_notebook.memory.core import check_level
from omni_notebook.memory.device.copies import Saving
from omni_notebook.memory.device.tags import WHOLE, hull, together
from omni_notebook.memory.device.unmapping import Unmapping, host_address

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from omni_notebook.memory.base import UnmapReport
    from omni_notebook.memory.device.core import DeviceCore
    from omni_notebook.memory.device.segments import DeviceSegment
    from omni_notebook.memory.device.tags import DeviceTag, KeptRange

_SPARE = 4
"""A sleep without copies leaves locked host memory for later ones where the host has this many times as much free."""


class DeviceSleeping:
    """Carries sleeps out; the pool's lock is held around each call."""

    def __init__(self, core: DeviceCore) -> None:
        self._core = core
        self._unmapping = Unmapping(core)
        self._late: list[DeviceSegment] = []

    def plan(self, level: int, names: Collection[str] | None) -> SleepPlan:
        """See `DevicePool.plan`."""
        check_level(level)
        books = self._core.books
        chosen = books.in_state(*TagState) if names is None else books.named(names)
        awake = [tag for tag in chosen if tag.state is TagState.AWAKE]
        backed = [tag for tag in awake if tag.backed_up_at(level)]
        return SleepPlan(
            expected_bytes=sum(tag.mapped_bytes for tag in awake),
            backup_bytes=sum(tag.span_bytes for tag in backed),
            kept_bytes=self._kept_bytes([tag for tag in awake if tag not in backed]),
            tags={tag.name: tag.mapped_bytes for tag in awake},
        )

    # -------------------------------------------------------------------------------- prepare

    def prepare(
        self, level: int, names: Collection[str] | None, cancelled: Callable[[], bool] | None, *, late_copy: bool
    ) -> PrepareReport:
        """See `DevicePool.prepare_sleep`."""
        check_level(level)
        core = self._core
        core.begin("prepare_sleep")
        chosen = core.books.select(names, TagState.AWAKE, "prepare_sleep")
        core.books.require_none(TagState.PREPARED, "prepare_sleep")
        core.books.require_none(TagState.MAPPED, "prepare_sleep")
        core.require_own(chosen, "prepare_sleep")
        core.ahead.stop()
        started = time.perf_counter()
        modified = self._modified(chosen, level)
        checksum_ms = (time.perf_counter() - started) * 1e3
        started = time.perf_counter()
        backed = [tag for tag in chosen if tag.backed_up_at(level)]
        ranges = core.kept_ranges(tag for tag in chosen if tag not in backed)
        self._check_room(backed, chosen, ranges)
        try:
            segments = self._make_room(backed, cancelled)
            saved = Saving(core.copies, [] if late_copy else segments)
            self._copy(saved, cancelled)
            kept = {name: self._read(several) for name, several in ranges.items()}
        except BaseException:
            self._forget_created(backed)
            raise
        copy_ms = (time.perf_counter() - started) * 1e3 - saved.checksum_ms
        self._late = segments if late_copy else []
        for tag in chosen:
            data = kept.get(tag.name, {})
            tag.prepare(level, self._kind(tag, level, data), data)
        return self._report(chosen, saved, modified, checksum_ms + saved.checksum_ms, copy_ms)

    def _modified(self, chosen: Sequence[DeviceTag], level: int) -> bool | None:
        recorded = [tag for tag in chosen if tag.name in self._core.records]
        if level == 1 or not recorded:
            return None
        return not all(self._core.is_as_recorded(tag) for tag in recorded)

    def _check_room(
        self, backed: Sequence[DeviceTag], chosen: Sequence[DeviceTag], ranges: Mapping[str, Sequence[KeptRange]]
    ) -> None:
        """Refuse what the host has no room for; decide whether locked memory that is not needed now stays.

        Raises:
            OutOfMemoryError: too little is free.
        """
        needed = sum(self._core.copies.missing_bytes(tag.segments) for tag in backed)
        needed += sum(kept.n_bytes for several in ranges.values() for kept in several)
        free = self._core.room().available_bytes
        if needed > free:
            raise no_memory(needed, free_bytes=free)
        for tag in chosen:
            tag.keeps_room = free >= _SPARE * self._core.copies.held_bytes()

    def _make_room(self, tags: Sequence[DeviceTag], cancelled: Callable[[], bool] | None) -> list[DeviceSegment]:
        """Have host memory for all segments of these; the segments."""
        for tag in tags:
            tag.created = [one for one in tag.segments if not self._core.copies.has(one)]
        segments = [segment for tag in tags for segment in tag.segments]

        def go_on(_rest: int) -> bool:
            _check(cancelled)
            return True

        self._core.copies.make_room(segments, go_on)
        _check(cancelled)
        return segments

    def _copy(self, saving: Saving, cancelled: Callable[[], bool] | None) -> None:
        try:
            for run in saving.runs():
                _check(cancelled)
                self._core.copies.begin(run)
            saving.take_rest()
        finally:
            self._core.driver.finish()
        saving.accept()

    def _kept_bytes(self, tags: Sequence[DeviceTag]) -> int:
        ranges = self._core.kept_ranges(tags) if tags else {}
        return sum(kept.n_bytes for several in ranges.values() for kept in several)

    def _read(self, ranges: Sequence[KeptRange]) -> dict[KeptRange, bytearray]:
        """The bytes of ranges; small ones that lie together come in one copy, with what is between them."""
        groups = [(group, bytearray(hull(group))) for group in together(ranges)]
        try:
            for group, data in groups:
                self._core.driver.copy(host_address(data), group[0].address, len(data))
        finally:
            self._core.driver.finish()
        return {kept: _part(data, kept, group[0].offset) for group, data in groups for kept in group}

    def _forget_created(self, tags: Sequence[DeviceTag]) -> None:
        for tag in tags:
            self._core.give_up(tag.created)
            tag.created = []

    def _kind(self, tag: DeviceTag, level: int, kept: dict[KeptRange, bytearray]) -> str | None:
        if tag.backed_up_at(level):
            return self._core.copies.kind(tag.segments)
        return "host" if kept else None

    def _report(
        self,
        chosen: Sequence[DeviceTag],
        saved: Saving,
        modified: bool | None,
        checksum_ms: float,
        copy_ms: float,
    ) -> PrepareReport:
        dropping = [tag for tag in chosen if tag.backup not in WHOLE and not tag.keeps_room]
        dropped = sum(one.size_bytes for tag in dropping for one in tag.segments if self._core.copies.has(one))
        kept = sum(len(data) for tag in chosen for data in tag.kept_data.values())
        return PrepareReport(
            backup={tag.name: tag.backup for tag in chosen},
            backup_location="host memory" if any(tag.backup for tag in chosen) else None,
            host_backup_bytes=host_bytes(self._core) - dropped,
            copied_bytes=saved.copied_bytes + kept,
            skipped_clean_bytes=saved.skipped_bytes,
            modified=modified,
            checksum_ms=checksum_ms,
            copy_ms=copy_ms,
        )

    # --------------------------------------------------------------------------------- commit

    def commit(self) -> UnmapReport:
        """See `DevicePool.commit_sleep`."""
        core = self._core
        core.check_open("commit_sleep")
        chosen = core.books.select(None, TagState.PREPARED, "commit_sleep")
        started = time.perf_counter()
        core.driver.enter()
        expected = sum(segment.size_bytes for tag in chosen for segment in tag.slept)
        core.driver.trim()
        report = self._unmapping.measured(chosen, self._late)
        self._late = []
        notes = [] if report.note is None else [report.note]
        for tag in chosen:
            tag.state, tag.created = TagState.ASLEEP, []
            if tag.backup not in WHOLE and not tag.keeps_room:
                errors = core.give_up(tag.segments)
                notes += [f"host memory of {tag.name!r} stays locked: {error}" for error in errors[:1]]
        took_ms = (time.perf_counter() - started) * 1e3 - report.checksum_ms - report.copy_ms
        note = "; ".join(notes) or None
        return msgspec.structs.replace(report, expected_bytes=expected, unmap_ms=took_ms, note=note)

    def abort(self) -> None:
        """See `DevicePool.abort_sleep`."""
        self._late = []
        prepared = self._core.books.in_state(TagState.PREPARED)
        self._forget_created(prepared)
        for tag in prepared:
            tag.wake()

    def drop_backup(self, names: Collection[str] | None) -> int:
        """See `DevicePool.drop_backup`."""
        chosen = self._core.books.select(names, TagState.ASLEEP, "drop_backup")
        self._core.driver.trim()  # what a level 2 gives up beside the pool
        self._core.ahead.stop()
        before = host_bytes(self._core)
        kept_ranges = self._core.kept_ranges(chosen)
        for tag in chosen:
            tag.level = 2
            if tag.backup in WHOLE and not tag.kept_whole:
                ranges = [kept for kept in kept_ranges[tag.name] if self._core.copies.has(kept.segment)]
                tag.kept_data = {kept: self._from_copy(kept) for kept in ranges}
                tag.backup = "host" if tag.kept_data else None
                self._core.give_up(tag.segments)
        return before - host_bytes(self._core)

    def _from_copy(self, kept: KeptRange) -> bytearray:
        return bytearray(self._core.copies.read(kept.segment, kept.offset, kept.n_bytes))


def _part(data: bytearray, kept: KeptRange, first: int) -> bytearray:
    return data[kept.offset - first : kept.offset - first + kept.n_bytes]


def _check(cancelled: Callable[[], bool] | None) -> None:
    if cancelled is not None and cancelled():
        raise sleep_cancelled()


def host_bytes(core: DeviceCore) -> int:
    """Host memory that copies and kept tensors take now."""
    kept = (len(data) for tag in tuple(core.books.values()) for data in tuple(tag.kept_data.values()))
    return core.copies.held_bytes() + sum(kept)
