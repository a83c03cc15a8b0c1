"""NVIDIA GPUs for stages of our own: a pool that makes its own segments, and sleeps and wakes them as vLLM's are."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import TYPE_CHECKING, Any

import msgspec

from omni_notebook.memory.adoption import Adoption
from omni_notebook.memory.arena import ALIGN, round_up, tensor_bytes
from omni_notebook.memory.base import KV_CACHE, WEIGHTS, DeviceError
from omni_notebook.memory.books import TagState, check_takes
from omni_notebook.memory.device.libcuda import GRANULE
from omni_notebook.memory.device.measuring import MOVING
from omni_notebook.memory.device.pool import DevicePool
from omni_notebook.memory.device.ranges import Range, RangeDriver
from omni_notebook.memory.device.settings import refuse_expandable_segments
from omni_notebook.memory.device.tags import DeviceTag
from omni_notebook.memory.device.tensors import plain_tensors, span_of
from omni_notebook.memory.device.waking import no_device_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from omni_notebook.memory.base import TagInfo
    from omni_notebook.memory.device.driver import Probe
    from omni_notebook.memory.device.segments import DeviceSegment
    from omni_notebook.memory.reading import FileReader

PART_BYTES = 128 * 1024**2
"""A segment of adopted tensors is full once it has so much: so small that copying and mapping overlap."""


class CudaPool(DevicePool):
    """One rank's tagged memory on one GPU; fills `memory.base.MemoryPool`.

    Each `empty` makes one segment, each `adopt` one for every 128 MiB or so. Tensors keep their addresses, which are
    given to nothing else until the last of them has gone; while a tag sleeps, and after `close` or `discard`, they must
    not be touched.

    Args:
        driver: acts on the device.
        probe, options: see `DevicePool`.

    Raises:
        UnsupportedError: expandable segments are on.
    """

    def __init__(self, driver: RangeDriver, probe: Probe, **options: Any) -> None:
        super().__init__(driver, probe, **options)
        self._ranges = driver
        self._reader = driver.reader()

    def adopt(self, module: nn.Module, tag: str = WEIGHTS) -> None:
        """Move a module's parameters and buffers into the pool; tensors that are already in it stay.

        Raises:
            ArgumentError: a tensor on another device, sparse or quantised.
            TransitionOrderError: the tag is not awake.
            OutOfMemoryError: no room; the module is as before.
        """
        with self._lock:
            book = self._open_tag(tag, recomputable=False)
            adoption = Adoption(module, skip=self._has, device=self.device, part_bytes=PART_BYTES)
            made = self._take(book, adoption.parts)
            try:
                adoption.move_into(made)
            except BaseException:
                self._let_go(made)
                raise
            self._enter(book)
            self._core.modules.add(module, tag)

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, tag: str = KV_CACHE, *, recomputable: bool = True
    ) -> torch.Tensor:
        """A zeroed tensor in the pool.

        Raises:
            ArgumentError: `recomputable` differs from the tag's, or a size is negative.
            TransitionOrderError: the tag is not awake.
            OutOfMemoryError: no room.
        """
        n_bytes = tensor_bytes(shape, dtype)
        with self._lock:
            book = self._open_tag(tag, recomputable=recomputable)
            if n_bytes == 0:
                return self._ranges.nothing().view(dtype).view(tuple(shape))
            (made,) = self._take(book, [n_bytes])
            self._enter(book)
            return made.tensor(0, shape, dtype)

    def _open_tag(self, name: str, *, recomputable: bool) -> DeviceTag:
        self._core.check_open("allocate")
        tag = self._core.books.get(name) or DeviceTag(name, recomputable)
        check_takes(tag, recomputable=recomputable)
        return tag

    def _has(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in the pool: no memory of anyone else has addresses there."""
        return any(span_of(name, plain, self._core.table) for name, plain in plain_tensors("", tensor))

    def _take(self, tag: DeviceTag, sizes: Sequence[int]) -> list[Range]:
        """Zeroed ranges of these sizes, all or none: what no tensor takes of one is the same in every life of it."""
        made: list[Range] = []
        driver = self._core.driver
        try:
            driver.enter()
            with MOVING:
                for n_bytes in sizes:
                    made.append(self._allocate(tag.name, n_bytes))  # noqa: PERF401  (an error must find those before)
            for one in made:
                driver.zero(one.address, one.size_bytes)
            driver.finish()
        except BaseException as error:
            self._let_go(made)
            if isinstance(error, DeviceError) and error.no_room:
                needed = sum(round_up(n_bytes, GRANULE) for n_bytes in sizes)
                raise no_device_memory(self.device, needed, driver.free_bytes(), then="try again") from error
            raise
        return made

    def _allocate(self, tag: str, n_bytes: int) -> Range:
        """A new range; where there is no room for it, after torch has given back what it caches."""
        try:
            return self._ranges.allocate(tag, n_bytes)
        except DeviceError as error:
            if not error.no_room:
                raise
        gc.collect()
        self._core.driver.trim()
        return self._ranges.allocate(tag, n_bytes)

    def _enter(self, tag: DeviceTag) -> None:
        """Take new ranges into the books."""
        self._core.books.setdefault(tag.name, tag)
        self._core.refresh()
        tag.kept_whole = _is_kept_whole(tag)

    def _let_go(self, ranges: Sequence[Range]) -> None:
        """Give up ranges that are in no books yet, all that can be."""
        with contextlib.suppress(DeviceError):
            self._core.driver.enter()
            self._core.driver.finish()
        for one in ranges:
            with contextlib.suppress(DeviceError):
                one.unmap()
            self._ranges.forget(one.address)

    def tags(self) -> Mapping[str, TagInfo]:
        """The tags and their books."""
        books = self._core.books
        return {
            name: msgspec.structs.replace(info, used_bytes=sum(map(_used_bytes, tuple(books[name].segments))))
            for name, info in super().tags().items()
        }

    def reader(self) -> FileReader:
        """What reads files straight into the pool's tensors."""
        return self._reader

    def keep(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """Name pool tensors of `tag` whose contents every level keeps; may be called again for later ones.

        Raises:
            ArgumentError: the tag is unknown.
        """
        with self._lock:
            self._core.check_open("keep")
            self._core.books.named((tag,))
            for tensor in tensors:
                self._core.keep(tensor)
            for other in self._core.books.values():  # a tensor may lie in another tag
                other.kept_whole = _is_kept_whole(other)

    def discard(self, tag: str) -> None:
        """Give an awake tag's pages and copies up for good; its tensors must not be touched after.

        Raises:
            ArgumentError: the tag is unknown.
            TransitionOrderError: it is not awake.
        """
        with self._lock:
            self._core.begin("discard")
            (book,) = self._core.books.select((tag,), TagState.AWAKE, "discard")
            try:
                for segment in book.segments:
                    self._core.table.unmap(segment)
                    self._ranges.forget(segment.address)
            finally:
                self._core.refresh()
            self._core.records.pop(tag, None)
            self._core.modules.forget(tag)
            del self._core.books[tag]

    def close(self) -> None:
        """See `DevicePool.close`; addresses go back with the last tensor over them."""
        with self._lock:
            super().close()
            self._ranges.forget_all()


def _used_bytes(segment: DeviceSegment) -> int:
    """What tensors take of a segment."""
    used: int = segment.allocation.data.used_bytes
    return used


def _is_kept_whole(tag: DeviceTag) -> bool:
    """Whether every byte that tensors use is kept: no checkpoint has any of it."""
    ends = dict.fromkeys(tag.segments, 0)
    for kept in sorted(tag.kept, key=lambda kept: kept.offset):
        if kept.offset <= ends[kept.segment]:
            ends[kept.segment] = max(ends[kept.segment], round_up(kept.offset + kept.n_bytes, ALIGN))
    return bool(ends) and all(end >= _used_bytes(segment) for segment, end in ends.items())


def cuda_pool(index: int) -> CudaPool:
    """A pool on torch's CUDA device `index`.

    Raises:
        UnsupportedError: expandable segments are on.
    """
    refuse_expandable_segments(os.environ)
    from omni_notebook.memory.device.nvml import nvml_probe  # noqa: PLC0415  (touches the device)

    pool = CudaPool(RangeDriver(index), nvml_probe(index))
    pool.watch_host()
    return pool
