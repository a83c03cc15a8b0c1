"""NVIDIA GPUs for stages of our own: a pool that makes its own segments, and sleeps and wakes them as vLLM's are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from omni_notebook.errors import ArgumentError
from omni_notebook.memory.adoption import Adoption
from omni_notebook.memory.base import KV_CACHE, WEIGHTS, DeviceError, TransitionOrderError
from omni_notebook.memory.books import TagState
from omni_notebook.memory.device.pool import DevicePool
from omni_notebook.memory.device.ranges import Range, RangeDriver
from omni_notebook.memory.device.settings import refuse_expandable_segments
from omni_notebook.memory.device.tags import DeviceTag
from omni_notebook.memory.device.tensors import plain_tensors, span_of
from omni_notebook.memory.device.waking import no_device_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from omni_notebook.memory.device.driver import Probe
    from omni_notebook.memory.device.reader import FileReader

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
            adoption.move_into(self._take(book, adoption.parts))
            self._core.modules.add(module, tag)
            self._core.count_used()

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, tag: str = KV_CACHE, *, recomputable: bool = True
    ) -> torch.Tensor:
        """A zeroed tensor in the pool.

        Raises:
            ArgumentError: `recomputable` differs from the tag's, or a size is negative.
            TransitionOrderError: the tag is not awake.
            OutOfMemoryError: no room.
        """
        if any(size < 0 for size in shape):
            msg = f"shape={tuple(shape)}: sizes must not be negative"
            raise ArgumentError(msg)
        n_bytes = torch.Size(shape).numel() * dtype.itemsize
        with self._lock:
            book = self._open_tag(tag, recomputable=recomputable)
            if n_bytes == 0:
                return torch.empty(tuple(shape), dtype=dtype, device=self.device)
            (made,) = self._take(book, [n_bytes])
            book.used_bytes += n_bytes
            return made.tensor(0, shape, dtype)

    def _open_tag(self, name: str, *, recomputable: bool) -> DeviceTag:
        self._core.check_open("allocate")
        tag = self._core.books.get(name) or DeviceTag(name, recomputable)
        if tag.recomputable is not recomputable:
            msg = f"tag {name!r} has recomputable={tag.recomputable}; one tag can not be both"
            raise ArgumentError(msg)
        if tag.state is not TagState.AWAKE:
            msg = f"tag {name!r} is {tag.state}; wake it before allocating in it"
            raise TransitionOrderError(msg)
        return tag

    def _has(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in the pool: no memory of anyone else has addresses there."""
        return any(span_of(name, plain, self._core.table) for name, plain in plain_tensors("", tensor))

    def _take(self, tag: DeviceTag, sizes: Sequence[int]) -> list[Range]:
        """Ranges of these sizes, all or none."""
        made: list[Range] = []
        try:
            self._core.driver.enter()
            for n_bytes in sizes:
                made.append(self._ranges.allocate(tag.name, n_bytes))  # noqa: PERF401  (an error must find those before)
        except DeviceError as error:
            self._let_go(made)
            if error.no_room:
                raise no_device_memory(self.device, sum(sizes), self._core.driver.free_bytes()) from error
            raise
        self._core.books.setdefault(tag.name, tag)
        self._core.refresh()
        for one in made:  # no tensor has all bytes of its segment: the rest is the same in every life of it
            self._core.driver.zero(one.address, one.size_bytes)
        self._core.driver.finish()
        return made

    def _let_go(self, ranges: Sequence[Range]) -> None:
        for one in ranges:
            one.unmap()
            self._ranges.forget(one.address)

    def reader(self) -> FileReader:
        """What reads files straight into the pool's tensors."""
        return self._reader

    def keep(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """Name pool tensors of `tag` whose contents every level keeps; may be called again for later ones.

        Raises:
            ArgumentError: the tag is unknown.
        """
        with self._lock:
            (book,) = self._core.books.named((tag,))
            for tensor in tensors:
                self._core.keep(tensor)
            kept = sum(one.n_bytes for one in book.kept)
            book.kept_whole = bool(book.segments) and kept >= sum(
                min(one.allocation.data.used_bytes, one.size_bytes) for one in book.segments
            )

    def discard(self, tag: str) -> None:
        """Give an awake tag's pages and copies up for good; its tensors must not be touched after.

        Raises:
            ArgumentError: the tag is unknown.
            TransitionOrderError: it is not awake.
        """
        with self._lock:
            self._core.begin("discard")
            (book,) = self._core.books.select((tag,), TagState.AWAKE, "discard")
            for segment in book.segments:
                self._core.table.unmap(segment)
                self._ranges.forget(segment.address)
            self._core.forget_record(tag)
            self._core.refresh()
            del self._core.books[tag]


def cuda_pool(index: int) -> CudaPool:
    """A pool on torch's CUDA device `index`.

    Raises:
        UnsupportedError: expandable segments are on.
    """
    refuse_expandable_segments(os.environ)
    from omni_notebook.memory.device.nvml import nvml_probe  # noqa: PLC0415  (touches the device)

    return CudaPool(RangeDriver(index), nvml_probe(index))
