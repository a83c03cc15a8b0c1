"""vLLM's allocator built for HIP, as a pool acts on it.

Read from the sources of vLLM 0.32 and clr; not run on hardware. It is `CuMemAllocator` again, and torch calls the
devices "cuda". What differs: a handle's last part is a list of (cell, bytes), one a chunk of at most
VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE MiB; the extension cleans up after a mapping that fails, unless access is what was
refused; an unmapping that fails has released the handles of all chunks, so that it must not be tried again; and the
free callback asks `is_asleep` whether there is anything to unmap.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import UnsupportedError
from omni_notebook.memory.base import DeviceError
from omni_notebook.memory.device.libhip import HipRuntime
from omni_notebook.memory.device.vllm_driver import VllmDriver

if TYPE_CHECKING:
    import torch

    from omni_notebook.memory.device.driver import Allocation


class RocmDriver(VllmDriver):
    """Drives the `CuMemAllocator` of this process on one AMD GPU.

    Args:
        index: torch's number of the device.
        cumem: `vllm.device_allocator.cumem`.
        cuda: `torch.cuda`.

    Raises:
        UnsupportedError: this vLLM keeps no books of what sleeps: freeing what sleeps would release it twice.
    """

    name = "HIP"

    def __init__(self, index: int, cumem: Any, *, cuda: Any) -> None:
        self._hip = HipRuntime(cumem.libcudart.lib)
        self._lost: list[Any] = []
        super().__init__(index, cumem, cuda=cuda, driver=self._hip, platform="rocm")
        own = ctypes.create_string_buffer(1)
        # with managed memory on, HIP may know every address of the process: then it can not be asked either
        self._tells = self._tells and not self._hip.is_mapped(ctypes.addressof(own))
        if not all(hasattr(one.data, "is_asleep") for one in self.allocations().values()):
            msg = "this vLLM does not note what sleeps (AllocationData.is_asleep), which ROCm needs; use vLLM 0.32"
            raise UnsupportedError(msg)

    def map(self, allocation: Allocation) -> None:
        """See `Driver.map`."""
        self._require_handles("map", allocation)
        self.clear_error()
        super().map(allocation)

    def unmap(self, allocation: Allocation) -> None:
        """See `Driver.unmap`; when it fails, other chunks are gone and the handles of all are."""
        self._require_handles("unmap", allocation)
        self.clear_error()
        try:
            super().unmap(allocation)
        except DeviceError as error:
            error.lost = True
            self._lost.append(allocation.data)
            raise

    def is_mapped(self, allocation: Allocation) -> bool | None:
        """See `Driver.is_mapped`: by HIP, else by vLLM's books; of a segment without handles nothing is known."""
        if self._is_lost(allocation):
            return None
        mapped = super().is_mapped(allocation)
        return not allocation.data.is_asleep if mapped is None else mapped

    def _is_lost(self, allocation: Allocation) -> bool:
        return any(one is allocation.data for one in self._lost)

    def _require_handles(self, step: str, allocation: Allocation) -> None:
        if self._is_lost(allocation):
            text = "an earlier unmap failed and released this segment's handles; restart the stage"
            raise self._refused(step, text, lost=True)

    def make_freeable(self, allocation: Allocation) -> None:
        """See `Driver.make_freeable`: the allocator's books say that it sleeps, and its free unmaps nothing then."""

    def clear_error(self) -> None:
        """See `Driver.clear_error`; a free or an allocation that failed leaves one; nothing is unmapped here."""
        with contextlib.suppress(RuntimeError):
            self._cumem.unmap_and_release((self._index, 0, 0, []))

    def bytes_at(self, address: int, n_bytes: int) -> torch.Tensor | None:  # noqa: ARG002
        """See `Driver.bytes_at`: not tried."""
        return None

    def mark(self, *, fills: bool = False) -> int:  # noqa: ARG002
        """See `Driver.mark`: a mark is reached with all that was begun, events were not tried."""
        return 0

    def follow(self, mark: int) -> None:  # noqa: ARG002
        """See `Driver.follow`: the thread waits, too."""
        self.wait()

    def reached(self, mark: int) -> None:  # noqa: ARG002
        """See `Driver.reached`."""
        self.wait()

    def pin(self, address: int, n_bytes: int) -> bool:
        """See `Driver.pin`."""
        return self._hip.pin(address, n_bytes)

    def unpin(self, address: int) -> None:
        """See `Driver.unpin`."""
        self._hip.unpin(address)
