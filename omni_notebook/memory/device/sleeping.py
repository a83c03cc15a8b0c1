"""The two steps of a sleep over vLLM's allocator, and the step from level 1 to level 2."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

from omni_notebook.memory.arena import no_memory
from omni_notebook.memory.base import WEIGHTS, DeviceError, PrepareReport, SleepPlan, UnmapReport
from omni_notebook.memory.books import TagState, sleep_cancelled
from omni_notebook.memory.core import check_level
from omni_notebook.memory.device.core import Reading
from omni_notebook.memory.device.tags import WHOLE
from omni_notebook.protocol import gib

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from omni_notebook.memory.base import Scope
    from omni_notebook.memory.device.core import DeviceCore
    from omni_notebook.memory.device.tags import DeviceTag, KeptRange

_POLL_S = 0.001
_SPARE = 4
"""A sleep without copies leaves locked host memory for later ones where the host has this many times as much free."""


class DeviceSleeping:
    """Carries sleeps out; the pool's lock is held around each call."""

    def __init__(self, core: DeviceCore) -> None:
        self._core = core

    def plan(self, level: int, names: Collection[str] | None) -> SleepPlan:
        """See `CumemPool.plan`."""
        check_level(level)
        books = self._core.books
        chosen = books.in_state(*TagState) if names is None else books.named(names)
        awake = [tag for tag in chosen if tag.state is TagState.AWAKE]
        backed = [tag for tag in awake if tag.backed_up_at(level)]
        return SleepPlan(
            expected_bytes=sum(tag.mapped_bytes for tag in awake),
            backup_bytes=sum(tag.span_bytes for tag in backed),
            kept_bytes=sum(self._kept_bytes(tag) for tag in awake if tag not in backed),
            tags={tag.name: tag.mapped_bytes for tag in awake},
        )

    # -------------------------------------------------------------------------------- prepare

    def prepare(self, level: int, names: Collection[str] | None, cancelled: Callable[[], bool] | None) -> PrepareReport:
        """See `CumemPool.prepare_sleep`."""
        check_level(level)
        core = self._core
        core.begin("prepare_sleep")
        chosen = core.books.select(names, TagState.AWAKE, "prepare_sleep")
        core.books.require_none(TagState.PREPARED, "prepare_sleep")
        core.books.require_none(TagState.MAPPED, "prepare_sleep")
        core.require_own(chosen, "prepare_sleep")
        started = time.perf_counter()
        modified = self._modified(chosen, level)
        checksum_ms = (time.perf_counter() - started) * 1e3
        started = time.perf_counter()
        backed = [tag for tag in chosen if tag.backed_up_at(level)]
        ranges = {tag.name: [] if tag in backed else core.kept_ranges(tag) for tag in chosen}
        self._check_room(backed, chosen, ranges)
        try:
            self._copy(backed, cancelled)
            kept = {name: self._read(several) for name, several in ranges.items()}
        except BaseException:
            self._forget_created(backed)
            raise
        copy_ms = (time.perf_counter() - started) * 1e3
        for tag in chosen:
            tag.prepare(level, self._kind(tag, level, kept[tag.name]), kept[tag.name])
        return self._report(chosen, backed, modified, checksum_ms, copy_ms)

    def _modified(self, chosen: Sequence[DeviceTag], level: int) -> bool | None:
        weights = next((tag for tag in chosen if tag.name == WEIGHTS), None)
        if weights is None or level == 1 or WEIGHTS not in self._core.records:
            return None
        return not self._core.is_as_recorded(weights)

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

    def _copy(self, tags: Sequence[DeviceTag], cancelled: Callable[[], bool] | None) -> None:
        def check() -> None:
            if cancelled is not None and cancelled():
                raise sleep_cancelled()

        for tag in tags:
            tag.created = [one for one in tag.segments if not self._core.copies.has(one)]
        self._core.copies.save([segment for tag in tags for segment in tag.segments], check)

    def _kept_bytes(self, tag: DeviceTag) -> int:
        return sum(kept.n_bytes for kept in self._core.kept_ranges(tag))

    def _read(self, ranges: Sequence[KeptRange]) -> dict[KeptRange, bytearray]:
        found = {kept: bytearray(kept.n_bytes) for kept in ranges}
        try:
            for kept, data in found.items():
                self._core.driver.copy(host_address(data), kept.address, kept.n_bytes)
        finally:
            self._core.driver.finish()
        return found

    def _forget_created(self, tags: Sequence[DeviceTag]) -> None:
        for tag in tags:
            for segment in tag.created:
                self._core.copies.forget(segment)
            tag.created = []

    def _kind(self, tag: DeviceTag, level: int, kept: dict[KeptRange, bytearray]) -> str | None:
        if tag.backed_up_at(level):
            return self._core.copies.kind(tag.segments)
        return "host" if kept else None

    def _report(
        self,
        chosen: Sequence[DeviceTag],
        backed: Sequence[DeviceTag],
        modified: bool | None,
        checksum_ms: float,
        copy_ms: float,
    ) -> PrepareReport:
        dropping = [tag for tag in chosen if tag not in backed and not tag.keeps_room]
        dropped = sum(one.size_bytes for tag in dropping for one in tag.segments if self._core.copies.has(one))
        copied = sum(tag.span_bytes for tag in backed)
        copied += sum(len(data) for tag in chosen for data in tag.kept_data.values())
        return PrepareReport(
            backup={tag.name: tag.backup for tag in chosen},
            backup_location="host memory" if any(tag.backup for tag in chosen) else None,
            host_backup_bytes=host_bytes(self._core) - dropped,
            copied_bytes=copied,
            skipped_clean_bytes=0,
            modified=modified,
            checksum_ms=checksum_ms,
            copy_ms=copy_ms,
        )

    # --------------------------------------------------------------------------------- commit

    def commit(self) -> UnmapReport:
        """See `CumemPool.commit_sleep`."""
        core = self._core
        core.check_open("commit_sleep")
        chosen = core.books.select(None, TagState.PREPARED, "commit_sleep")
        started = time.perf_counter()
        core.driver.enter()
        expected = sum(segment.size_bytes for tag in chosen for segment in tag.slept)
        core.driver.trim()
        before = core.reading()
        if before.scope == "process":
            report = self._unmap_measured(chosen, before, None)
        else:
            with core.probe.exclusive() as alone:
                report = self._unmap_measured(
                    chosen, core.reading(), _device_note(core.probe.device_source, alone=alone)
                )
        for tag in chosen:
            tag.state, tag.created = TagState.ASLEEP, []
            if tag.backup not in WHOLE and not tag.keeps_room:
                self._forget(tag)
        took_ms = (time.perf_counter() - started) * 1e3
        return UnmapReport(expected_bytes=expected, unmap_ms=took_ms, **report)  # type: ignore[arg-type]

    def _unmap_measured(self, chosen: Sequence[DeviceTag], before: Reading, note: str | None) -> dict[str, object]:
        released, notes = self._unmap(chosen)
        try:
            observed = self._observe(before, sum(released.values()))
        except DeviceError as error:
            observed = 0
            notes.append(str(error))
        if note is not None:
            notes.append(f"{note}: {gib(observed)} GiB left it")
        freed = _capped(released, observed) if before.scope == "process" else released
        return {
            "freed": freed,
            "observed_bytes": observed,
            "scope": before.scope,
            "note": "; ".join(notes) or None,
        }

    def _unmap(self, chosen: Sequence[DeviceTag]) -> tuple[dict[str, int], list[str]]:
        """Unmap all; bytes released by tag, and what went wrong.

        Raises:
            DeviceError: the driver refused every single one; all is still mapped, with its contents.
        """
        released = dict.fromkeys((tag.name for tag in chosen), 0)
        errors: list[DeviceError] = []
        for tag in chosen:
            for segment in tag.slept:
                try:
                    released[tag.name] += self._core.table.unmap(segment)
                except DeviceError as error:
                    errors.append(error)
        if errors and not any(released.values()) and not any(error.lost for error in errors):
            raise errors[0]
        return released, list(dict.fromkeys(map(str, errors)))

    def _observe(self, before: Reading, released: int) -> int:
        """Bytes that left since `before`, measured; the driver's books get a moment to follow.

        Raises:
            DeviceError: the probe that measured before can not measure now.
        """
        deadline = time.monotonic() + self._core.settle_s
        while True:
            held = self._held(before.scope)
            gone = max(0, before.n_bytes - held)
            if gone >= released or time.monotonic() > deadline:
                self._core.note_reading(Reading(held, before.scope))
                return gone
            time.sleep(_POLL_S)

    def _held(self, scope: Scope) -> int:
        """What is held now; a process that no longer holds anything is not listed."""
        probe = self._core.probe
        return (probe.process_bytes() or 0) if scope == "process" else probe.device_bytes()

    def _forget(self, tag: DeviceTag) -> None:
        for segment in tag.segments:
            self._core.copies.forget(segment)

    def abort(self) -> None:
        """See `CumemPool.abort_sleep`."""
        prepared = self._core.books.in_state(TagState.PREPARED)
        self._forget_created(prepared)
        for tag in prepared:
            tag.wake()

    def drop_backup(self, names: Collection[str] | None) -> int:
        """See `CumemPool.drop_backup`."""
        chosen = self._core.books.select(names, TagState.ASLEEP, "drop_backup")
        before = host_bytes(self._core)
        for tag in chosen:
            tag.level = 2
            if tag.backup in WHOLE and not tag.kept_whole:
                ranges = [kept for kept in self._core.kept_ranges(tag) if self._core.copies.has(kept.segment)]
                tag.kept_data = {kept: self._from_copy(kept) for kept in ranges}
                tag.backup = "host" if tag.kept_data else None
                self._forget(tag)
        return before - host_bytes(self._core)

    def _from_copy(self, kept: KeptRange) -> bytearray:
        return bytearray(self._core.copies.read(kept.segment, kept.offset, kept.n_bytes))


def host_bytes(core: DeviceCore) -> int:
    """Host memory that copies and kept tensors take now."""
    kept = (len(data) for tag in tuple(core.books.values()) for data in tuple(tag.kept_data.values()))
    return core.copies.held_bytes() + sum(kept)


def host_address(data: bytearray) -> int:
    """Where a bytearray's bytes are; it must not grow meanwhile."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _capped(released: dict[str, int], observed: int) -> dict[str, int]:
    """Released bytes by tag, in all no more than were seen to leave."""
    freed, left = {}, observed
    for name, n_bytes in released.items():
        freed[name] = min(n_bytes, left)
        left -= freed[name]
    return freed


def _device_note(source: str, *, alone: bool) -> str:
    others = "" if alone else ", and another stage may have moved memory meanwhile"
    return f"the driver does not show what this process holds; measured on the whole device by {source}{others}"
