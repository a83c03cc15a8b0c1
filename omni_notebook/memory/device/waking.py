"""The steps of a wake over vLLM's allocator."""

from __future__ import annotations

import contextlib
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
from omni_notebook.memory.device.arriving import Arrivals
from omni_notebook.memory.device.measuring import MOVING
from omni_notebook.memory.device.tags import WHOLE, hull, together
from omni_notebook.memory.device.tensors import plain_tensors, span_of
from omni_notebook.memory.device.unmapping import host_address
from omni_notebook.memory.lanes import never
from omni_notebook.protocol import gib

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import torch

    from omni_notebook.memory.device.core import DeviceCore
    from omni_notebook.memory.device.segments import DeviceSegment
    from omni_notebook.memory.device.tags import DeviceTag, KeptRange


class DeviceWaking:
    """Carries wakes out; the pool's lock is held around each call."""

    def __init__(self, core: DeviceCore) -> None:
        self._core = core
        self._arrivals: Arrivals | None = None
        self._begun_s = 0.0

    def map(self, names: Collection[str] | None, stop: Callable[[], bool] = never) -> MapReport:
        """See `DevicePool.map`."""
        self._core.begin("map")
        chosen = self._core.books.select(names, TagState.ASLEEP, "map")
        started = time.perf_counter()
        mapped = self._map_all(chosen, stop, self._zero)
        try:
            self._core.driver.finish()
        except BaseException:
            self._sleep_again(chosen)
            raise
        return MapReport(mapped_bytes=mapped, map_ms=(time.perf_counter() - started) * 1e3)

    def _map_all(
        self,
        chosen: Sequence[DeviceTag],
        stop: Callable[[], bool],
        fill: Callable[[DeviceSegment], None],
        order: Mapping[DeviceSegment, int] | None = None,
    ) -> int:
        """Map the tags' segments, in `order`, then others with copies, and begin to fill each; bytes mapped."""
        first = sorted(chosen, key=lambda tag: tag.backup not in WHOLE)
        segments = [segment for tag in first for segment in tag.sleeping_segments()]
        if order:
            segments.sort(key=lambda segment: order.get(segment, len(order)))
        self._check_room([segment for segment in segments if not segment.mapped])
        with MOVING:
            mapped = self._map(segments, stop, fill)
        for tag in chosen:
            tag.state, tag.restored = TagState.MAPPED, False
        return mapped

    def _zero(self, segment: DeviceSegment) -> None:
        self._core.driver.zero(segment.address, segment.size_bytes)

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

    def _map(
        self, segments: Sequence[DeviceSegment], stop: Callable[[], bool], fill: Callable[[DeviceSegment], None]
    ) -> int:
        """Map all of them, or none, and begin to fill each; bytes mapped."""
        needed = sum(segment.size_bytes for segment in segments if not segment.mapped)
        mapped = 0
        try:
            for segment in segments:
                _check(stop)
                mapped += self._core.table.map(segment)
                fill(segment)
        except BaseException as error:
            self._settle()
            self._unmap(segments)
            if isinstance(error, DeviceError) and error.no_room:
                free = self._core.driver.free_bytes()
                raise no_device_memory(self._core.driver.device, needed, free) from error
            raise
        return mapped

    def _settle(self) -> None:
        """Wait for fills that were begun; those that failed have been told of."""
        with contextlib.suppress(DeviceError):
            self._core.driver.finish()

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
        """See `DevicePool.restore`."""
        self._core.begin("restore")
        chosen = self._core.books.select(names, TagState.MAPPED, "restore")
        started = time.perf_counter()
        waiting = [tag for tag in chosen if not tag.restored]
        try:
            for tag in waiting:
                if tag.backup in WHOLE:
                    for segment in tag.sleeping_segments():
                        self._core.copies.load(segment)
        except BaseException:
            self._settle()
            raise
        return self._finish(chosen, waiting, started)

    def _finish(
        self, chosen: Sequence[DeviceTag], waiting: Sequence[DeviceTag], started: float, *, fresh: bool = True
    ) -> RestoreReport:
        """Wait for the copies and fills that were begun, then copy back into `waiting` what else the sleep kept.

        `fresh`: nobody has written there since it was mapped.
        """
        driver = self._core.driver
        driver.finish()
        here = {segment for tag in waiting for segment in tag.sleeping_segments()}
        kept = {one: data for tag in waiting for one, data in tag.kept_data.items() if one.segment in here}
        parts = together(kept) if fresh else ([one] for one in kept)
        groups = [(group, _filled(group, kept)) for group in parts]
        try:
            for group, data in groups:
                driver.copy(group[0].address, host_address(data), len(data))
        finally:
            driver.finish()
        for tag in waiting:
            tag.restored = True
        whole = [segment for tag in waiting if tag.backup in WHOLE for segment in tag.sleeping_segments()]
        return RestoreReport(
            copied_bytes=sum(segment.size_bytes for segment in whole) + sum(one.n_bytes for one in kept),
            copy_ms=(time.perf_counter() - started) * 1e3,
            needs_reload=tuple(tag.name for tag in chosen if tag.needs_reload()),
        )

    def map_restore(self, names: Collection[str] | None, stop: Callable[[], bool]) -> tuple[MapReport, RestoreReport]:
        """See `DevicePool.map_restore`."""
        self._core.begin("map_restore")
        chosen = self._core.books.select(names, TagState.ASLEEP, "map_restore")
        whole = {segment for tag in chosen if tag.backup in WHOLE for segment in tag.sleeping_segments()}

        def fill(segment: DeviceSegment) -> None:
            (self._core.copies.load if segment in whole else self._zero)(segment)

        started = time.perf_counter()
        mapped = self._map_all(chosen, stop, fill)
        done = time.perf_counter()
        try:
            _check(stop)
            restored = self._finish(chosen, chosen, done)
        except BaseException:
            self._settle()
            self._sleep_again(chosen)
            raise
        return MapReport(mapped_bytes=mapped, map_ms=(done - started) * 1e3), restored

    def begin(
        self, names: Collection[str] | None, stop: Callable[[], bool], order: Iterable[torch.Tensor]
    ) -> tuple[MapReport, Arrivals]:
        """See `DevicePool.begin_wake`."""
        core = self._core
        core.begin("begin_wake")
        chosen = core.books.select(names, TagState.ASLEEP, "begin_wake")
        whole = {segment for tag in chosen if tag.backup in WHOLE for segment in tag.sleeping_segments()}
        arrivals = Arrivals(core.driver, core.table)

        def fill(segment: DeviceSegment) -> None:
            if segment in whole:
                core.copies.load(segment)
                arrivals.begun(segment)
            else:
                self._zero(segment)

        started = time.perf_counter()
        try:
            mapped = self._map_all(chosen, stop, fill, self._places(order))
        except BaseException:
            self._drop(arrivals)
            raise
        self._arrivals = arrivals
        try:
            arrivals.filled()
        except BaseException:
            self.abort()
            raise
        self._begun_s = time.perf_counter()
        return MapReport(mapped_bytes=mapped, map_ms=(self._begun_s - started) * 1e3), arrivals

    def _places(self, order: Iterable[torch.Tensor]) -> dict[DeviceSegment, int]:
        """The segments that hold these tensors, numbered as they come first."""
        spans = (span_of(name, plain, self._core.table) for one in order for name, plain in plain_tensors("", one))
        segments = dict.fromkeys(span.segment for span in spans if span is not None)
        return {segment: place for place, segment in enumerate(segments)}

    def finish(self) -> RestoreReport:
        """See `DevicePool.finish_wake`."""
        self._core.check_open("finish_wake")
        chosen = self._core.books.select(None, TagState.MAPPED, "finish_wake")
        arrivals, self._arrivals = self._arrivals, None
        started = time.perf_counter() if arrivals is None else self._begun_s
        self._core.driver.attach()
        try:
            self._core.driver.finish()  # not by the marks: who follows them must not wait for this
        finally:
            if arrivals is not None:
                arrivals.end()
        waiting = [tag for tag in chosen if not tag.restored]
        return self._finish(chosen, waiting, started, fresh=arrivals is None)

    @staticmethod
    def _drop(arrivals: Arrivals) -> None:
        """Nobody follows these any more."""
        with contextlib.suppress(DeviceError):
            arrivals.end()

    def commit(self) -> None:
        """See `DevicePool.commit_wake`."""
        self._core.check_open("commit_wake")
        chosen = self._core.books.select(None, TagState.MAPPED, "commit_wake")
        for tag in chosen:
            if tag.needs_restore():
                msg = f"commit_wake: the backup of {tag.name!r} was not restored; restore it or abort the wake"
                raise TransitionOrderError(msg)
        for tag in chosen:
            tag.wake()

    def abort(self) -> None:
        """See `DevicePool.abort_wake`."""
        mapped = self._core.books.in_state(TagState.MAPPED)
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            self._settle()
            self._drop(arrivals)
        if mapped:
            self._core.driver.enter()
            self._sleep_again(mapped)

    def _sleep_again(self, tags: Sequence[DeviceTag]) -> None:
        for tag in tags:
            tag.state, tag.restored = TagState.ASLEEP, False
        self._unmap([segment for tag in tags for segment in tag.slept])


def _filled(group: Sequence[KeptRange], kept: Mapping[KeptRange, bytearray]) -> bytearray:
    """The bytes of a group and the zeros between, which is what a segment that was just mapped has there."""
    data = bytearray(hull(group))
    for one in group:
        start = one.offset - group[0].offset
        data[start : start + one.n_bytes] = kept[one]
    return data


def _check(stop: Callable[[], bool]) -> None:
    if stop():
        msg = "the wake was cancelled; memory is as before it"
        raise TransitionCancelledError(msg)


def no_device_memory(device: str, needed_bytes: int, free_bytes: int, *, then: str = "wake again") -> OutOfMemoryError:
    """The error for device memory that can not be had; `then`: what to do with more."""
    message = (
        f"{gib(needed_bytes)} GiB of {device}'s memory are needed and {gib(free_bytes)} GiB are free; nothing was "
        f"mapped. Free memory (other stages, variables of this session, other processes) and {then}."
    )
    return OutOfMemoryError(message, needed_bytes=needed_bytes, free_bytes=free_bytes)
