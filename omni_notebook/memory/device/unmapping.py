"""The device's part of a sleep's commit: segments are unmapped, some behind their copies, and it is measured."""

from __future__ import annotations

import contextlib
import ctypes
import time
from itertools import groupby
from typing import TYPE_CHECKING, Any

from omni_notebook.memory.base import DeviceError, UnmapReport
from omni_notebook.memory.device.copies import Saving
from omni_notebook.memory.device.core import Reading
from omni_notebook.memory.device.measuring import MOVING
from omni_notebook.memory.device.tags import WHOLE
from omni_notebook.protocol import gib

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from omni_notebook.memory.base import Scope
    from omni_notebook.memory.device.core import DeviceCore
    from omni_notebook.memory.device.segments import DeviceSegment
    from omni_notebook.memory.device.tags import DeviceTag

_POLL_S = 0.001


class Unmapping:
    """Unmaps prepared tags; the pool's lock is held around each call."""

    def __init__(self, core: DeviceCore) -> None:
        self._core = core

    def measured(self, chosen: Sequence[DeviceTag], late: Sequence[DeviceSegment]) -> UnmapReport:
        """Unmap the tags' segments, what has changed of `late` first copied, and see what left.

        Raises:
            DeviceError: the driver refused every single one, or a copy; all is mapped, contents as they were but for
                those that nobody needs (zero). Or (`lost`) that could not be had either, and the pool is of no use.
        """
        core = self._core
        with MOVING:
            before = core.reading()
            if before.scope == "process":
                return self._seen(chosen, late, before, None)
            with core.probe.exclusive() as alone:
                return self._seen(chosen, late, core.reading(), _device_note(core.probe.device_source, alone=alone))

    def _seen(
        self, chosen: Sequence[DeviceTag], late: Sequence[DeviceSegment], before: Reading, note: str | None
    ) -> UnmapReport:
        others = self._others_bytes()
        saving = Saving(self._core.copies, late)
        released, notes, copy_ms = self._unmap(chosen, saving)
        if late:
            with contextlib.suppress(DeviceError):
                self._core.driver.trim()  # what taking sums took
        try:
            observed = self._observe(before, others, sum(released.values()))
        except DeviceError as error:
            observed = 0
            notes.append(str(error))
        if note is not None:
            notes.append(f"{note}: {gib(observed)} GiB left it")
        freed = _capped(released, observed) if before.scope == "process" else released
        return UnmapReport(
            freed=freed,
            expected_bytes=0,
            observed_bytes=observed,
            scope=before.scope,
            unmap_ms=0.0,
            note="; ".join(notes) or None,
            copied_bytes=saving.copied_bytes,
            skipped_clean_bytes=saving.skipped_bytes,
            checksum_ms=saving.checksum_ms,
            copy_ms=copy_ms,
        )

    def _unmap(self, chosen: Sequence[DeviceTag], saving: Saving) -> tuple[dict[str, int], list[str], float]:
        """Unmap all; bytes released by tag, what went wrong, milliseconds from the first copy until the last."""
        released = dict.fromkeys((tag.name for tag in chosen), 0)
        errors: list[DeviceError] = []
        gone: list[DeviceSegment] = []
        started = last = time.perf_counter()
        try:
            with contextlib.closing(self._in_order(chosen, saving)) as segments:
                for segment in segments:
                    last = time.perf_counter()
                    try:
                        released[segment.tag] += self._core.table.unmap(segment)
                        gone.append(segment)
                    except DeviceError as error:
                        errors.append(error)
        except BaseException:
            self._put_back(chosen)
            raise
        if errors and not gone and not any(error.lost for error in errors):
            raise errors[0]
        copy_ms = (last - started) * 1e3 - saving.checksum_ms if saving.copied_bytes else 0.0
        return released, list(dict.fromkeys(map(str, errors))), copy_ms

    def _in_order(self, chosen: Sequence[DeviceTag], saving: Saving) -> Generator[DeviceSegment]:
        """The segments: those that can be had again at once, others once their copy is there, at last what is given up.

        Raises:
            DeviceError: a copy failed.
        """
        segments = [segment for tag in chosen for segment in tag.slept]
        given_up = _given_up(chosen)
        marks: dict[DeviceSegment, Any] = {}
        try:
            for segment, runs in groupby(saving.runs(), key=lambda run: run.segment):
                for run in runs:
                    self._core.copies.begin(run)
                marks[segment] = self._core.driver.mark()
            saving.take_rest()
            yield from (segment for segment in segments if segment not in marks and segment not in given_up)
            for segment in list(marks):
                self._core.driver.reached(marks.pop(segment))
                yield segment
            self._core.driver.finish()
        finally:
            self._drop(marks)
        saving.accept()
        yield from (segment for segment in segments if segment in given_up)

    def _drop(self, marks: dict[DeviceSegment, Any]) -> None:
        """Nobody waits for these any more."""
        for mark in marks.values():
            with contextlib.suppress(DeviceError):
                self._core.driver.reached(mark)

    def _put_back(self, chosen: Sequence[DeviceTag]) -> None:
        """Map again what has no pages, with its contents; without them nothing of this pool is to be used any more.

        Raises:
            DeviceError: that failed too.
        """
        core = self._core
        segments = [one for tag in chosen for one in tag.slept if not one.mapped]
        lost = _given_up(chosen).intersection(segments)
        whole = {segment for tag in chosen if tag.backup in WHOLE for segment in tag.slept}
        try:
            with contextlib.suppress(DeviceError):
                core.driver.finish()
            for segment in segments:
                core.table.map(segment)
                if not segment.mapped:  # its owner has freed it meanwhile
                    continue
                if segment in whole:
                    core.copies.load(segment)
                else:
                    core.driver.zero(segment.address, segment.size_bytes)
            core.driver.finish()
            for tag in chosen:
                for kept, data in tag.kept_data.items():
                    if kept.segment in segments and kept.segment.mapped:
                        core.driver.copy(kept.address, host_address(data), kept.n_bytes)
            core.driver.finish()
        except DeviceError as error:
            raise self._broken(error) from error
        if lost:
            msg = "contents that were to be given up are gone"
            raise self._broken(msg)

    def _broken(self, why: object) -> DeviceError:
        self._core.broken = f"a sleep failed, and memory could not be put back as it was ({why})"
        return DeviceError(f"{self._core.broken}; restart the stage", lost=True)

    def _others_bytes(self) -> int:
        """What torch holds outside the pool: another stage of this process may draw meanwhile."""
        reserved = self._core.driver.reserved()
        return reserved.untagged_bytes + reserved.graphs_bytes

    def _observe(self, before: Reading, others: int, released: int) -> int:
        """Bytes that left since `before`, measured, without those that torch took (`others`: then) or gave back since.

        The driver's books get a moment to follow.

        Raises:
            DeviceError: the probe that measured before can not measure now.
        """
        deadline = time.monotonic() + self._core.settle_s
        while True:
            held = self._held(before.scope)
            gone = max(0, before.n_bytes - held + self._others_bytes() - others)
            if gone >= released or time.monotonic() > deadline:
                self._core.note_reading(Reading(held, before.scope))
                return gone
            time.sleep(_POLL_S)

    def _held(self, scope: Scope) -> int:
        """What is held now; a process that no longer holds anything is not listed."""
        probe = self._core.probe
        return (probe.process_bytes() or 0) if scope == "process" else probe.device_bytes()


def _given_up(chosen: Sequence[DeviceTag]) -> set[DeviceSegment]:
    """Segments whose contents matter and are on no host."""
    return {one for tag in chosen if not tag.recomputable and tag.backup not in WHOLE for one in tag.slept}


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
