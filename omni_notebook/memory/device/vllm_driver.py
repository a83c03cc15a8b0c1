"""vLLM's CUDA allocator (`CuMemAllocator`) and its extension, as a pool acts on them. Tested with vLLM 0.24.

vLLM allocates; here its segments are only unmapped and mapped again. Facts about the extension that matter (0.24, read
from its machine code): mapping a range that is mapped loses a handle for good; a free of a range that is not mapped
gives the address back, but leaves an error behind that makes the next mapping fail; a free callback that raises leaves
the interpreter lock held.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from omni_notebook.errors import UnsupportedError
from omni_notebook.memory.device import libcuda
from omni_notebook.memory.device.cuda_driver import CudaDriver

if TYPE_CHECKING:
    from omni_notebook.memory.device.driver import Allocation


class VllmDriver(CudaDriver):
    """Drives the `CuMemAllocator` of this process on one device.

    Args:
        index: torch's number of the device.
        cumem: `vllm.device_allocator.cumem`.
        cuda: `torch.cuda`.
        driver: `memory.device.libcuda`, or what has its functions.
        platform: "cuda", or "rocm" where the allocator was built for HIP.
    """

    def __init__(
        self, index: int, cumem: Any, *, cuda: Any = torch.cuda, driver: Any = libcuda, platform: str = "cuda"
    ) -> None:
        super().__init__(
            platform, index, cumem.CuMemAllocator.get_instance(), cumem.init_module, cuda=cuda, driver=driver
        )
        self._cumem = cumem
        # vLLM is awake when this is made: a driver that calls nothing mapped can not be asked.
        self._tells = any(driver.is_mapped(address) is True for address in self.allocations())

    # ------------------------------------------------------------------------------- segments

    def map(self, allocation: Allocation) -> None:
        """See `Driver.map`."""
        with self._errors("map"):
            self._cumem.create_and_map(allocation.data.handle)

    def unmap(self, allocation: Allocation) -> None:
        """See `Driver.unmap`."""
        with self._errors("unmap"):
            self._cumem.unmap_and_release(allocation.data.handle)

    def is_mapped(self, allocation: Allocation) -> bool | None:
        """See `Driver.is_mapped`."""
        if not self._tells:
            return None
        mapped: bool | None = self._driver.is_mapped(allocation.address)
        return mapped

    def make_freeable(self, allocation: Allocation) -> None:
        """See `Driver.make_freeable`: the extension's free unmaps whatever is there, so something must be."""
        device, n_bytes, address, cell = allocation.data.handle
        self._driver.map_alias(device, address, n_bytes, cell)

    def clear_error(self) -> None:
        """See `Driver.clear_error`: the extension forgets an error once it has raised one."""
        with contextlib.suppress(RuntimeError):
            self._cumem.unmap_and_release((self._index, 0, 0, 0))


def why_no_cumem() -> str | None:
    """Why vLLM's CUDA allocator can not be used here, or None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device is visible to torch"
    try:
        from vllm.device_allocator import cumem  # noqa: PLC0415  (takes seconds)
    except ImportError as error:
        return f"vLLM's allocator can not be imported ({error})"
    return None if cumem.cumem_available else "this vLLM was built without its CUDA allocator extension"


def vllm_driver(index: int) -> VllmDriver:
    """The driver of this process's allocator.

    Raises:
        UnsupportedError: there is none here; names the reason.
    """
    reason = why_no_cumem()
    if reason is not None:
        raise UnsupportedError(reason)
    from vllm.device_allocator import cumem  # noqa: PLC0415  (takes seconds)

    return VllmDriver(index, cumem)
