"""vllm-ascend's allocator (`CaMemAllocator`) as a pool acts on it.

Read from the sources of vllm-ascend (device_allocator/camem.py, csrc/camem_allocator.cpp) and the pyACL reference; not
run on hardware. What differs from CUDA: the extension's own `python_create_and_map` and `python_unmap_and_release` say
nothing when they fail, so the same CANN calls are made here through pyACL, which returns their error codes. The
extension keeps a segment's physical handle in the cell that its tuple names; it must be there when the extension frees.
A free of a segment without pages gives the address back and leaves the handle alone. Copies and fills are done when
they return. Neither CANN nor vllm-ascend's books tell what is mapped: a sleep of vllm-ascend's own is not seen.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import UnsupportedError
from omni_notebook.memory.base import DeviceError
from omni_notebook.memory.device.allocator import AllocatorDriver, AtOnce

if TYPE_CHECKING:
    from omni_notebook.memory.device.driver import Allocation

_TO_DEVICE, _TO_HOST = 1, 2  # ACL_MEMCPY_HOST_TO_DEVICE, ACL_MEMCPY_DEVICE_TO_HOST
_HUGE_PAGES = 4  # ACL_HBM_MEM_HUGE, as the extension asks for
_ON_DEVICE = 1  # ACL_MEM_LOCATION_TYPE_DEVICE
_NO_ROOM = frozenset({200000, 207001})  # ACL_ERROR_BAD_ALLOC, ACL_ERROR_RT_MEMORY_ALLOCATION
_NEEDED = ("malloc_physical", "free_physical", "map_mem", "unmap_mem", "memcpy", "memset")


class NpuDriver(AtOnce, AllocatorDriver):
    """Drives the `CaMemAllocator` of this process on one NPU.

    Args:
        index: torch's number of the device.
        camem: `vllm_ascend.device_allocator.camem`.
        runtime: pyACL's `acl.rt`.
        npu: `torch.npu`.

    Raises:
        UnsupportedError: pyACL does not have all calls.
    """

    name = "CANN"

    def __init__(self, index: int, camem: Any, *, runtime: Any, npu: Any) -> None:
        missing = [name for name in _NEEDED if not hasattr(runtime, name)]
        if missing:
            msg = f"this CANN's pyACL has no acl.rt.{missing[0]}; install a newer CANN toolkit"
            raise UnsupportedError(msg)
        super().__init__("npu", index, camem.CaMemAllocator.get_instance(), camem.init_module, npu)
        self._acl = runtime

    # ------------------------------------------------------------------------------- segments

    def map(self, allocation: Allocation) -> None:
        """See `Driver.map`."""
        device, n_bytes, address, cell = allocation.data.handle
        properties = {
            "handleType": 0,
            "allocationType": 0,
            "memAttr": _HUGE_PAGES,
            "location": {"id": device, "type": _ON_DEVICE},
            "reserve": 0,
        }
        handle, error = self._acl.malloc_physical(n_bytes, properties, 0)
        self._check("map", "malloc_physical", error)
        try:
            self._check("map", "map_mem", self._acl.map_mem(address, n_bytes, 0, handle, 0))
        except DeviceError:
            with contextlib.suppress(DeviceError):
                self._check("map", "free_physical", self._acl.free_physical(handle))
            raise
        _cell(cell).value = handle

    def unmap(self, allocation: Allocation) -> None:
        """See `Driver.unmap`."""
        _, _, address, cell = allocation.data.handle
        self._check("unmap", "unmap_mem", self._acl.unmap_mem(address))
        try:
            self._check("unmap", "free_physical", self._acl.free_physical(_cell(cell).value))
        except DeviceError as error:
            error.lost = True
            raise

    def is_mapped(self, allocation: Allocation) -> bool | None:  # noqa: ARG002
        """See `Driver.is_mapped`: neither CANN nor vllm-ascend tells."""
        return None

    def make_freeable(self, allocation: Allocation) -> None:
        """See `Driver.make_freeable`: the extension prints that there is nothing to unmap, and goes on."""

    def clear_error(self) -> None:
        """See `Driver.clear_error`: the extension keeps none."""

    # ----------------------------------------------------------------------------------- bytes

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        """See `Driver.copy`; it is done when it returns."""
        kind = _TO_DEVICE if self._is_on_device(to) else _TO_HOST
        self._check("copy", "memcpy", self._acl.memcpy(to, n_bytes, source, n_bytes, kind))

    def zero(self, address: int, n_bytes: int) -> None:
        """See `Driver.zero`; it is done when it returns."""
        self._check("fill", "memset", self._acl.memset(address, n_bytes, 0, n_bytes))

    def _check(self, step: str, call: str, error: int) -> None:
        if error:
            raise self._refused(step, f"acl.rt.{call}: error {error}", no_room=error in _NO_ROOM)


def _cell(address: int) -> ctypes.c_uint64:
    """The extension's 8 bytes for a segment's physical handle."""
    return ctypes.c_uint64.from_address(address)
