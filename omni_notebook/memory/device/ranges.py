"""Device memory of a stage of our own: ranges of addresses that stay, pages behind them that come and go.

The driver's virtual memory management does all of it; neither torch's allocator nor vLLM's extension is involved, so a
range has exactly the pages of its tensors and nobody else frees it.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

from omni_notebook.memory.arena import ALIGN, round_up, tensor_bytes
from omni_notebook.memory.base import DeviceError
from omni_notebook.memory.device import libcuda
from omni_notebook.memory.device.cuda_driver import CudaDriver
from omni_notebook.memory.device.reader import DeviceReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_notebook.memory.device.driver import Allocation


class Range:
    """One range with pages behind it.

    The addresses go back when the last tensor over them has gone: until then no other memory can appear there.

    Args:
        index: torch's number of the device.
        tag: whose it is.
        used_bytes: what tensors take of it.
        driver: `memory.device.libcuda`, or what has its functions.

    Raises:
        DeviceError: the driver refused; nothing is left behind.
    """

    def __init__(self, index: int, tag: str, used_bytes: int, driver: Any = libcuda) -> None:
        self.tag = tag
        self.used_bytes = round_up(used_bytes, ALIGN)
        self.size_bytes = round_up(used_bytes, libcuda.GRANULE)
        self._index = index
        self._driver = driver
        self.address: int = driver.reserve(self.size_bytes)
        self._addresses: _Addresses | None = _Addresses(self.address, self.size_bytes, driver)
        self.handle = (index, self.size_bytes, self.address)
        self._pages: int | None = None
        try:
            self.map()
        except DeviceError:
            self.let_go()
            raise

    @property
    def is_mapped(self) -> bool:
        """Whether there are pages, by these books."""
        return self._pages is not None

    def map(self) -> None:
        """Put fresh pages there; they hold anything.

        Raises:
            DeviceError: the driver refused; there are none.
        """
        self._pages = self._driver.map_new(*self.handle)

    def unmap(self) -> None:
        """Give the pages up.

        Raises:
            DeviceError: the driver refused; they are there as before, unless the error says `lost`.
        """
        try:
            self._driver.unmap(self.address, self.size_bytes, self._pages)
        except DeviceError as error:
            if error.lost:
                self._pages = None
            raise
        self._pages = None

    def let_go(self) -> None:
        """No tensor is made over it any more."""
        self._addresses = None

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor at `offset`; its storage is exactly its own bytes."""
        count = tensor_bytes(shape, dtype)
        flat: torch.Tensor = self._driver.tensor_at(self._index, self.address + offset, count, self._addresses)
        return flat.view(dtype).view(tuple(shape))


class _Addresses:
    """Reserved addresses; tensors over them hold this."""

    def __init__(self, address: int, n_bytes: int, driver: Any) -> None:
        weakref.finalize(self, _give_back, driver, address, n_bytes, os.getpid()).atexit = False


def _give_back(driver: Any, address: int, n_bytes: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        with contextlib.suppress(DeviceError):  # pages are still there: the process's end takes them
            driver.free_addresses(address, n_bytes)


class Ranges:
    """The books of one pool's ranges, as drivers read an allocator's."""

    def __init__(self) -> None:
        self.pointer_to_data: dict[int, Range] = {}
        self.allocator_and_pools: dict[str, Any] = {}


class RangeDriver(CudaDriver):
    """Drives the ranges of one pool.

    Args:
        index: torch's number of the device.
        cuda: `torch.cuda`.
        driver: `memory.device.libcuda`, or what has its functions.
    """

    def __init__(self, index: int, *, cuda: Any = torch.cuda, driver: Any = libcuda) -> None:
        self.ranges = Ranges()
        super().__init__("cuda", index, self.ranges, _no_callbacks, cuda=cuda, driver=driver)

    def allocate(self, tag: str, used_bytes: int) -> Range:
        """A new range with pages.

        Raises:
            DeviceError: the driver refused.
        """
        made = Range(self._index, tag, used_bytes, self._driver)
        self.ranges.pointer_to_data[made.address] = made
        return made

    def forget(self, address: int) -> None:
        """A range whose pages are gone is nobody's any more."""
        gone = self.ranges.pointer_to_data.pop(address, None)
        if gone is not None:
            gone.let_go()

    def forget_all(self) -> None:
        """See `forget`, of all."""
        for address in tuple(self.ranges.pointer_to_data):
            self.forget(address)

    def nothing(self) -> torch.Tensor:
        """A tensor of no bytes on the device."""
        empty: torch.Tensor = self._driver.tensor_at(self._index, 0, 0, None)
        return empty

    def reader(self) -> DeviceReader:
        """What reads files into the ranges."""
        return DeviceReader(self, self._driver)

    # ------------------------------------------------------------------------------- segments

    @contextlib.contextmanager
    def _errors(self, step: str) -> Iterator[None]:
        """Say of a refusal which step it was."""
        with super()._errors(step):
            try:
                yield
            except DeviceError as error:
                raise self._refused(step, str(error), no_room=error.no_room, lost=error.lost) from error

    def map(self, allocation: Allocation) -> None:
        """See `Driver.map`."""
        with self._errors("map"):
            allocation.data.map()

    def unmap(self, allocation: Allocation) -> None:
        """See `Driver.unmap`."""
        with self._errors("unmap"):
            allocation.data.unmap()

    def is_mapped(self, allocation: Allocation) -> bool | None:
        """See `Driver.is_mapped`: nobody else maps or unmaps these."""
        return bool(allocation.data.is_mapped)

    def guard_frees(self, before: Any) -> None:
        """See `Driver.guard_frees`: the pool alone frees."""

    def make_freeable(self, allocation: Allocation) -> None:
        """See `Driver.make_freeable`: the pool alone frees."""

    def clear_error(self) -> None:
        """See `Driver.clear_error`: these calls leave none behind."""


def _no_callbacks(*_callbacks: Any) -> None:
    """There is no extension to hand them to."""
