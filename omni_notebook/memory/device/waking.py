"""The steps of a wake over vLLM's allocator."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

from omni_notebook.errors import OutOfMemoryError
from omni_notebook.memory.base import (
    DeviceError,
    MapReport,
    RestoreReport,
    TransitionCancelledError,
    TransitionOrderError,
)
from omni_notebook.memory.books import TagState
from omni_notebook.memory.device.sleeping import host_address
from omni_notebook.memory.device.tags import WHOLE
from omni_notebook.memory.lanes import never
from omni_notebook.protocol import gib

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from omni_notebook.memory.device.core import DeviceCore
    from omni_notebook.memory.device.segments import DeviceSegment
    from omni_notebook.memory.device.tags import DeviceTag


class DeviceWaking:
    """Carries wakes out; the pool's lock is held around each call."""

    def __init__(self, core: DeviceCore) -> None:
        self._core = core

    def map(self, names: Collection[str] | None, stop: Callable[[], bool] = never) -> MapReport:
        """See `CumemPool.map`."""
        self._core.begin("map")
        chosen = self._core.books.select(names, TagState.ASLEEP, "map")
        started = time.perf_counter()
        segments = [segment for tag in chosen for segment in tag.sleeping_segments()]
        self._check_room([segment for segment in segments if not segment.mapped])
        mapped = self._map(segments, stop)
        for tag in chosen:
            tag.state, tag.restored = TagState.MAPPED, False
        return MapReport(mapped_bytes=mapped, map_ms=(time.perf_counter() - started) * 1e3)

    def _check_room(self, waiting: Sequence[DeviceSegment]) -> None:
        """Refuse early what the device has no room for.

        Raises:
            OutOfMemoryError: too little is free; nothing is mapped.
        """
        needed = sum(segment.size_bytes for segment in waiting)
        if needed > self._core.driver.free_bytes():
            gc.collect()
            self._core.driver.trim()
            free = self._core.driver.free_bytes()
            if needed > free:
                raise no_device_memory(self._core.driver.device, needed, free)

    def _map(self, segments: Sequence[DeviceSegment], stop: Callable[[], bool]) -> int:
        """Map and zero all of them, or none; bytes mapped."""
        needed = sum(segment.size_bytes for segment in segments if not segment.mapped)
        mapped = 0
        try:
            for segment in segments:
                _check(stop)
                mapped += self._core.table.map(segment)
                self._core.driver.zero(segment.address, segment.size_bytes)
            self._core.driver.enter()
        except BaseException as error:
            self._unmap(segments)
            if isinstance(error, DeviceError) and error.no_room:
                free = self._core.driver.free_bytes()
                raise no_device_memory(self._core.driver.device, needed, free) from error
            raise
        return mapped

    def _unmap(self, segments: Sequence[DeviceSegment]) -> None:
        """Give their pages up, all that can be.

        Raises:
            DeviceError: the driver kept some.
        """
        errors: list[DeviceError] = []
        for segment in segments:
            try:
                self._core.table.unmap(segment)
            except DeviceError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def restore(self, names: Collection[str] | None) -> RestoreReport:
        """See `CumemPool.restore`."""
        self._core.begin("restore")
        chosen = self._core.books.select(names, TagState.MAPPED, "restore")
        started = time.perf_counter()
        copied = sum(self._refill(tag) for tag in chosen if not tag.restored)
        self._core.driver.enter()
        return RestoreReport(
            copied_bytes=copied,
            copy_ms=(time.perf_counter() - started) * 1e3,
            needs_reload=tuple(tag.name for tag in chosen if tag.needs_reload()),
        )

    def _refill(self, tag: DeviceTag) -> int:
        """Copy back what the sleep kept; bytes copied."""
        copied = 0
        if tag.backup in WHOLE:
            for segment in tag.sleeping_segments():
                self._core.copies.load(segment)
                copied += segment.size_bytes
        for kept, data in tag.kept_data.items():
            if kept.segment in tag.segments:
                self._core.driver.copy(kept.address, host_address(data), kept.n_bytes)
                copied += kept.n_bytes
        tag.restored = True
        return copied

    def map_restore(self, names: Collection[str] | None, stop: Callable[[], bool]) -> tuple[MapReport, RestoreReport]:
        """See `CumemPool.map_restore`."""
        chosen = self._core.books.select(names, TagState.ASLEEP, "map_restore")
        mapped = self.map(names, stop)
        try:
            _check(stop)
            return mapped, self.restore(names)
        except BaseException:
            self._sleep_again(chosen)
            raise

    def commit(self) -> None:
        """See `CumemPool.commit_wake`."""
        chosen = self._core.books.select(None, TagState.MAPPED, "commit_wake")
        for tag in chosen:
            if tag.needs_restore():
                msg = f"commit_wake: the backup of {tag.name!r} was not restored; restore it or abort the wake"
                raise TransitionOrderError(msg)
        for tag in chosen:
            tag.wake()

    def abort(self) -> None:
        """See `CumemPool.abort_wake`."""
        mapped = self._core.books.in_state(TagState.MAPPED)
        if mapped:
            self._core.driver.enter()
            self._sleep_again(mapped)

    def _sleep_again(self, tags: Sequence[DeviceTag]) -> None:
        for tag in tags:
            tag.state, tag.restored = TagState.ASLEEP, False
        self._unmap([segment for tag in tags for segment in tag.slept])


def _check(stop: Callable[[], bool]) -> None:
    if stop():
        msg = "the wake was cancelled; memory is as before it"
        raise TransitionCancelledError(msg)


def no_device_memory(device: str, needed_bytes: int, free_bytes: int) -> OutOfMemoryError:
    """The error for device memory that can not be had."""
    message = (
        f"{gib(needed_bytes)} GiB of {device}'s memory are needed and {gib(free_bytes)} GiB are free; nothing was "
        "mapped. Free memory (other stages, variables of this session, other processes) and wake again."
    )
    return OutOfMemoryError(message, needed_bytes=needed_bytes, free_bytes=free_bytes)
