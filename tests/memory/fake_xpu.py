"""vLLM's XPU allocator, its extension, torch's copy operator and Sysman, as their sources say that they behave.

Recorded from vLLM 0.32 (device_allocator/xpumem.py), vllm-xpu-kernels (xpumem_allocator, csrc/utils/mem_cpy.cpp) and
Level Zero (zes_api.h): argument orders and types, results, what is skipped and what raises.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from types import SimpleNamespace
from typing import Any

import torch

from omni_notebook.memory.base import HostMemory
from omni_notebook.memory.cumem import CumemPool
from omni_notebook.memory.device.sysman import SysmanProbe
from omni_notebook.memory.device.xpu_driver import XpuDriver
from tests.memory.fake_cuda import GRANULE, INVALID, OUT_OF_MEMORY, FakeAllocator, FakeCuda, FakeGpu, Machine, NewData
from tests.memory.fake_devices import MIB, Faults, Platform

UUID = bytes(range(16))
TEXT = {
    OUT_OF_MEMORY: "XPU SYCL Error: UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    INVALID: "XPU SYCL Error: UR backend failed. UR backend returns:4 (UR_RESULT_ERROR_INVALID_VALUE)",
}
INVALID_SIZE = 0x78000008


class FakeXpuExtension:
    """`vllm_xpu_kernels.xpumem_allocator`, which keeps books of its own; `allocator`: whose tag an allocation gets."""

    def __init__(self, gpu: FakeGpu, faults: Faults) -> None:
        self.gpu, self.faults = gpu, faults
        self.allocator: Any = None
        self.books: dict[int, dict[str, Any]] = {}
        self.printed: list[str] = []

    def init_module(self, malloc, free):
        assert callable(malloc)
        assert callable(free)
        self.malloc_callback, self.free_callback = malloc, free

    def _known(self, device, n_bytes, address, last) -> dict[str, Any]:
        assert all(isinstance(one, int) for one in (device, n_bytes, address, last))
        assert (device, last) == (0, 0)
        if address not in self.books:
            msg = "XPU Error: pointer not found in memory map"
            raise RuntimeError(msg)
        assert self.books[address]["size"] == n_bytes
        return self.books[address]

    def _check(self, name: str, run) -> None:
        error = self.faults.code(name, run)
        if error:
            self.printed.append(TEXT[error])
            raise RuntimeError(TEXT[error])

    def _map(self, book) -> None:
        if book["mapped"]:
            return
        if book["physical"] is not None:  # `emplace` gives the last one up
            assert self.gpu.release(book["physical"]) == 0
            book["physical"] = None

        def create() -> int:
            error, made = self.gpu.create(book["size"])
            book["physical"] = None if error else made
            return error

        self._check("create", create)
        self._check("map", lambda: self.gpu.map(book["address"], book["size"], book["physical"]))
        book["mapped"] = True

    def _unmap(self, book) -> None:
        if not book["mapped"]:
            return
        self._check("unmap", lambda: self.gpu.unmap(book["address"], book["size"]))
        assert self.gpu.release(book["physical"]) == 0
        book["physical"], book["mapped"] = None, False

    def python_create_and_allocate(self, device, size, pointer, handle) -> None:
        self._map(self._known(device, size, pointer, handle))

    def python_unmap_and_release(self, device, size, pointer, handle) -> None:
        self._unmap(self._known(device, size, pointer, handle))

    def my_malloc(self, n_bytes: int, tag: str) -> int:
        aligned = -(-n_bytes // GRANULE) * GRANULE  # as torch asks for it
        address = self.gpu.reserve(aligned)
        self.books[address] = {"address": address, "size": aligned, "mapped": False, "physical": None}
        self._map(self.books[address])
        self.allocator.current_tag = tag
        self.malloc_callback((0, aligned, address, 0))
        return address

    def my_free(self, address: int) -> None:
        book = self.books[address]
        device, n_bytes, start, _ = self.free_callback(address)
        assert (device, n_bytes, start) == (0, book["size"], address)
        self._unmap(book)
        assert self.gpu.free_address(address, n_bytes) == 0
        del self.books[address]


class FakeXpumem:
    """`vllm.device_allocator.xpumem`."""

    xpumem_available = True

    def __init__(self, extension: FakeXpuExtension, data_class: type) -> None:
        allocator = FakeAllocator(data_class)
        self.xpumem_allocator = extension
        self.XpuMemAllocator = SimpleNamespace(get_instance=lambda: allocator)

    def create_and_allocate(self, allocation_handle) -> None:
        self.xpumem_allocator.python_create_and_allocate(*allocation_handle)

    def unmap_and_release(self, allocation_handle) -> None:
        self.xpumem_allocator.python_unmap_and_release(*allocation_handle)


class FakeXpuTorch(FakeCuda):
    """`torch.xpu`."""

    def get_device_name(self, index):
        return "Fake Arc B60"

    def get_device_properties(self, index):
        return SimpleNamespace(uuid=SimpleNamespace(bytes=list(UUID)))


class FakeTorch:
    """`torch`, with the operator that `vllm_xpu_kernels._C` registers."""

    uint8 = torch.uint8

    def __init__(self, gpu: FakeGpu, faults: Faults) -> None:
        self.gpu, self.faults = gpu, faults
        self.xpu = FakeXpuTorch(gpu)
        self.ops = SimpleNamespace(_C=SimpleNamespace(xpu_memcpy_sync=self.xpu_memcpy_sync))
        self.blocks: dict[int, int] = {}

    def zeros(self, n_bytes, *, dtype, device):
        """A block of torch's own on the device; its bytes stay in torch's cache when it goes."""
        assert (dtype, device) == (torch.uint8, "xpu:0")
        if n_bytes > self.gpu.free_bytes:
            msg = "XPU out of memory. Tried to allocate 8.00 MiB"
            raise torch.OutOfMemoryError(msg)
        block = torch.zeros(n_bytes, dtype=torch.uint8)
        address = block.data_ptr()
        self.blocks[address] = n_bytes
        self.gpu.torch_bytes += n_bytes

        def gone() -> None:
            del self.blocks[address]
            self.xpu.cached_bytes += n_bytes

        weakref.finalize(block, gone)
        return block

    def _is_device(self, address: int) -> bool:
        blocks = (start <= address < start + size for start, size in self.blocks.items())
        return self.gpu.base <= address < self.gpu.next_address or any(blocks)

    def xpu_memcpy_sync(self, dst_ptr, src_ptr, n_bytes, kind, device):
        assert min(dst_ptr, src_ptr) >= -(1 << 63)
        assert max(dst_ptr, src_ptr) < 1 << 63
        assert device == 0
        ends = [(dst_ptr, kind != 1), (src_ptr, kind != 0)]
        assert [self._is_device(end) for end, _ in ends] == [on_device for _, on_device in ends], "a wrong direction"
        mapped = all(self.gpu.is_mapped(end) or end in self.blocks for end, on_device in ends if on_device)
        error = self.faults.code("memset" if kind == 2 else "memcpy", lambda: 0 if mapped else INVALID)
        if error:
            raise RuntimeError(TEXT[error])
        ctypes.memmove(dst_ptr, src_ptr, n_bytes)


class FakeSysman:
    """Level Zero's loader (`ctypes.CDLL`): counts are asked for first, structures must say what they are."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.broken = self.ready = False
        self.pid: int | None = os.getpid()
        self.ours = lambda: gpu.ours_bytes

    def zesInit(self, flags):  # noqa: N802 - Level Zero's names
        assert flags.value == 0
        self.ready = True
        return 0

    def _list(self, count, into, handles) -> int:
        if into is None:
            count._obj.value = len(handles)
            return 0
        if count._obj.value < len(handles):
            return INVALID_SIZE
        for place, handle in enumerate(handles):
            into[place] = handle
        return 0

    def zesDriverGet(self, count, into):  # noqa: N802
        assert self.ready
        return self._list(count, into, [11])

    def zesDeviceGet(self, driver, count, into):  # noqa: N802
        assert driver.value == 11
        return self._list(count, into, [21, 22])

    def zesDeviceGetProperties(self, device, properties):  # noqa: N802
        found = properties._obj
        assert (found.stype, found.core.stype) == (0x1, 0x3)
        found.core.uuid[:] = UUID if device.value == 22 else bytes(16)
        return 0

    def zesDeviceProcessesGetState(self, device, count, states):  # noqa: N802
        assert device.value == 22
        if self.broken:
            return 0x70000001  # ZE_RESULT_ERROR_DEVICE_LOST
        if states is None:
            count._obj.value = 1 if self.pid is None else 2
            return 0
        shown = [(1, self.gpu.others_bytes), *([] if self.pid is None else [(self.pid, self.ours())])]
        if count._obj.value < len(shown):
            return INVALID_SIZE
        count._obj.value = len(shown)
        for state, (pid, n_bytes) in zip(states, shown, strict=False):
            assert state.stype == 0x16
            state.processId, state.memSize = pid, n_bytes
        return 0


class XpuMachine(Platform, Machine):
    """All of it, with a pool over it."""

    name = "xpu"
    backup_kind = "pageable"
    device_source = "torch.xpu.mem_get_info"

    def __init__(self, capacity: int = 64 * MIB, data_class: type = NewData, *, module=None) -> None:
        self.gpu, self.faults = FakeGpu(capacity), Faults()
        self.cumem = FakeXpuExtension(self.gpu, self.faults)
        self.module = module(self.cumem) if module else FakeXpumem(self.cumem, data_class)
        self.allocator = self.cumem.allocator = self.module.XpuMemAllocator.get_instance()
        self.cumem.init_module(self.allocator.python_malloc_callback, self.allocator.python_free_callback)
        self.torch = FakeTorch(self.gpu, self.faults)
        self.torch_device = self.torch.xpu
        self.sysman: FakeSysman | None = FakeSysman(self.gpu)
        self.host_bytes = 1 << 40
        self.complaints, self.pinned = self.cumem.printed, {}
        self.fail = self.faults.fail

    def pool(self, environ=None) -> CumemPool:
        return CumemPool(
            XpuDriver(0, self.module, torch=self.torch),
            SysmanProbe(0, self.sysman, xpu=self.torch.xpu),
            room=lambda: HostMemory(limit_bytes=self.host_total, available_bytes=self.host_bytes),
            environ=environ or {},
            settle_s=0.02,
        )

    def hide_process(self) -> None:
        self.sysman.pid = None

    def break_probe(self) -> None:
        self.sysman.broken = True

    def show_bytes(self, ours) -> None:
        self.sysman.ours = ours

    def sleep_by_vllm(self, data) -> None:
        self.module.unmap_and_release(data.handle)
        data.is_asleep = True

    def wake_by_vllm(self, data) -> None:
        self.module.create_and_allocate(data.handle)
        data.is_asleep = False
