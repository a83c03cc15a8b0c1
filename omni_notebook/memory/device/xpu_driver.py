"""vLLM's XPU allocator (`XpuMemAllocator`) and its extension, as a pool acts on them.

Read from the sources of vLLM 0.32 (device_allocator/xpumem.py) and vllm-xpu-kernels (xpumem_allocator, mem_cpy.cpp);
not run on hardware. What differs from CUDA: the extension keeps its own books of what is mapped, so that mapping twice,
unmapping twice and freeing what sleeps do nothing; it syncs the device before it unmaps; copies go by a torch operator
that has copied when it returns and is told the direction; there is no fill, and no call that tells what is mapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_notebook.errors import UnsupportedError
from omni_notebook.memory.base import DeviceError
from omni_notebook.memory.device.allocator import AllocatorDriver, AtOnce

if TYPE_CHECKING:
    from omni_notebook.memory.device.driver import Allocation

_TO_DEVICE, _TO_HOST, _ON_DEVICE = 0, 1, 2  # MEMCPY_* of vllm.device_allocator.xpumem
_ZEROES = 8 * 1024**2
_SIGN, _WRAP = 1 << 63, 1 << 64


class XpuDriver(AtOnce, AllocatorDriver):
    """Drives the `XpuMemAllocator` of this process on one Intel GPU.

    Args:
        index: torch's number of the device.
        xpumem: `vllm.device_allocator.xpumem`.
        torch: the module.

    Raises:
        UnsupportedError: torch can not tell how much of the device is free, which every wake asks.
    """

    name = "XPU"

    def __init__(self, index: int, xpumem: Any, *, torch: Any) -> None:
        allocator = xpumem.XpuMemAllocator.get_instance()
        super().__init__("xpu", index, allocator, xpumem.xpumem_allocator.init_module, torch.xpu)
        self._xpumem = xpumem
        self._all_of_torch = torch
        self._zeroes: Any = None
        try:
            self.free_bytes()
        except DeviceError as error:
            msg = f"{self.device} does not tell its free memory: {error}. Install a newer driver and Level Zero"
            raise UnsupportedError(msg) from error

    # ------------------------------------------------------------------------------- segments

    def map(self, allocation: Allocation) -> None:
        """See `Driver.map`."""
        with self._errors("map"):
            self._xpumem.create_and_allocate(allocation.data.handle)

    def unmap(self, allocation: Allocation) -> None:
        """See `Driver.unmap`; one that is refused has changed nothing."""
        with self._errors("unmap"):
            self._xpumem.unmap_and_release(allocation.data.handle)

    def is_mapped(self, allocation: Allocation) -> bool | None:
        """See `Driver.is_mapped`: by vLLM's books, which its own sleep and wake keep."""
        asleep: bool | None = getattr(allocation.data, "is_asleep", None)
        return None if asleep is None else not asleep

    def make_freeable(self, allocation: Allocation) -> None:
        """See `Driver.make_freeable`: the extension unmaps only what it has mapped."""

    def clear_error(self) -> None:
        """See `Driver.clear_error`: the extension's next call that works forgets it."""

    # ----------------------------------------------------------------------------------- bytes

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        """See `Driver.copy`; it is done when it returns."""
        self._copy(to, source, n_bytes, _TO_DEVICE if self._is_on_device(to) else _TO_HOST)

    def zero(self, address: int, n_bytes: int) -> None:
        """See `Driver.zero`: copies from 8 MiB of zeroes, which torch allocates for the time of a wake."""
        if self._zeroes is None:
            with self._errors("allocate zeroes"):
                self._zeroes = self._all_of_torch.zeros(_ZEROES, dtype=self._all_of_torch.uint8, device=self.device)
        for start in range(0, n_bytes, _ZEROES):
            part = min(_ZEROES, n_bytes - start)
            self._copy(address + start, self._zeroes.data_ptr(), part, _ON_DEVICE)

    def finish(self) -> None:
        """See `Driver.finish`."""
        self._zeroes = None

    def _copy(self, to: int, source: int, n_bytes: int, kind: int) -> None:
        memcpy = self._all_of_torch.ops._C.xpu_memcpy_sync  # noqa: SLF001  (as vLLM calls it)
        with self._errors("copy"):
            memcpy(_signed(to), _signed(source), n_bytes, kind, self._index)


def _signed(address: int) -> int:
    """As torch's operators take an address: as a signed number of 64 bits."""
    return address if address < _SIGN else address - _WRAP
