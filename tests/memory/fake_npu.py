"""vllm-ascend's allocator, its extension, pyACL and npu-smi, as their sources and references say that they behave.

Recorded from vllm-ascend (device_allocator/camem.py, csrc/camem_allocator.cpp: errors are printed, never raised), the
pyACL reference (every call ends with an error code) and npu-smi's output on a machine of eight cards.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import weakref
from types import SimpleNamespace

from omni_notebook.memory.base import HostMemory
from omni_notebook.memory.cumem import CumemPool
from omni_notebook.memory.device.npu_driver import NpuDriver
from omni_notebook.memory.device.npu_probe import NpuProbe
from tests.memory.fake_cuda import GRANULE, INVALID, OUT_OF_MEMORY, FakeCuda, FakeGpu, Machine, OldData
from tests.memory.fake_devices import MIB, Faults, Platform

CODES = {OUT_OF_MEMORY: 207001, INVALID: 107000}  # ACL_ERROR_RT_MEMORY_ALLOCATION, ACL_ERROR_RT_PARAM_INVALID
MAPPING = """\tNPU ID                         Chip ID                        Chip Logic ID                  Chip Name
\t0                              0                              0                              Ascend 910B3
\t0                              1                              -                              Mcu
\t1                              0                              1                              Ascend 910B3
\t1                              1                              -                              Mcu
"""


class FakeCaMemAllocator:
    """`CaMemAllocator`: its callbacks are methods, so each look at one makes a new object."""

    def __init__(self, data_class: type) -> None:
        self.data_class = data_class
        self.pointer_to_data = {}
        self.current_tag = "default"
        self.allocator_and_pools = {}

    def python_malloc_callback(self, allocation_handle) -> None:
        self.pointer_to_data[allocation_handle[2]] = self.data_class(allocation_handle, self.current_tag)

    def python_free_callback(self, ptr):
        return self.pointer_to_data.pop(ptr).handle


class FakeAclRt:
    """`acl.rt`."""

    def __init__(self, gpu: FakeGpu, faults: Faults) -> None:
        self.gpu, self.faults = gpu, faults
        self.mem_info_error = 0

    def _code(self, name: str, run) -> int:
        error = self.faults.code(name, run)
        return CODES.get(error, error)

    def malloc_physical(self, size, prop, flags):
        assert set(prop) == {"handleType", "allocationType", "memAttr", "location", "reserve"}
        assert prop["location"] == {"id": 0, "type": 1}
        assert (prop["handleType"], prop["allocationType"], prop["memAttr"], prop["reserve"], flags) == (0, 0, 4, 0, 0)
        assert size % GRANULE == 0
        made = []

        def create() -> int:
            error, handle = self.gpu.create(size)
            made.append(handle)
            return error

        error = self._code("create", create)
        return (0 if error else made[0]), error

    def map_mem(self, vir_ptr, size, offset, handle, flags):
        assert (offset, flags) == (0, 0)
        assert self.gpu.pieces.get(handle) == size
        return self._code("map", lambda: self.gpu.map(vir_ptr, size, handle))

    def unmap_mem(self, vir_ptr):
        return self._code("unmap", lambda: self.gpu.unmap(vir_ptr, self.gpu.mappings.get(vir_ptr, (0, 0))[0]))

    def free_physical(self, handle):
        assert isinstance(handle, int)
        assert handle in self.gpu.handles, "a handle was released twice"
        return self._code("release", lambda: self.gpu.release(handle))

    def _lost(self, *ends) -> bool:
        return any(self.gpu.base <= end < self.gpu.next_address and not self.gpu.is_mapped(end) for end in ends)

    def memcpy(self, dst, dest_max, src, count, kind):
        on_device = [self.gpu.base <= end < self.gpu.next_address for end in (dst, src)]
        assert on_device == {1: [True, False], 2: [False, True]}[kind], "a wrong direction"
        assert count <= dest_max
        error = self._code("memcpy", lambda: INVALID if self._lost(dst, src) else 0)
        if not error:
            ctypes.memmove(dst, src, count)
        return error

    def memset(self, dev_ptr, max_count, value, count):
        assert count <= max_count
        error = self._code("memset", lambda: INVALID if self._lost(dev_ptr) else 0)
        if not error:
            ctypes.memset(dev_ptr, value, count)
        return error

    def get_mem_info(self, attr):
        assert attr == 1
        return self.gpu.free_bytes, self.gpu.capacity, self.mem_info_error


class FakeCamem:
    """`vllm_ascend.device_allocator.camem` with the extension (`vllm_ascend_C`) inside."""

    camem_available = True

    def __init__(self, gpu: FakeGpu, data_class: type) -> None:
        self.gpu = gpu
        self.allocator = FakeCaMemAllocator(data_class)
        self.CaMemAllocator = SimpleNamespace(get_instance=lambda: self.allocator)
        self.printed: list[str] = []
        self.cells: dict[int, ctypes.c_ulonglong] = {}
        self.loading = self.allocator.python_malloc_callback, self.allocator.python_free_callback
        self.init_module(*self.loading)

    def init_module(self, malloc, free):
        """The extension borrows: who passes a callback must keep it."""
        self.borrowed = weakref.ref(malloc), weakref.ref(free)

    def loaded(self) -> None:
        """vLLM's context of loading has ended, and with it the callbacks that it passed."""
        self.loading = None

    def _call(self, place: int, argument):
        callback = self.borrowed[place]()
        assert callback is not None, "nobody kept a callback that the extension borrows"
        return callback(argument)

    def my_malloc(self, n_bytes: int, tag: str) -> int:
        aligned = -(-n_bytes // GRANULE) * GRANULE
        address = self.gpu.reserve(aligned)
        cell = ctypes.c_ulonglong()
        self.cells[ctypes.addressof(cell)] = cell
        self.allocator.current_tag = tag
        self._call(0, (0, aligned, address, ctypes.addressof(cell)))
        error, cell.value = self.gpu.create(aligned)
        assert not error
        assert self.gpu.map(address, aligned, cell.value) == 0
        return address

    def my_free(self, address: int) -> None:
        _, n_bytes, start, cell = self._call(1, address)
        if self.gpu.unmap(start, n_bytes):
            self.printed.append("acl Error, code: 107000 at camem_allocator.cpp")
        else:
            assert self.gpu.release(self.cells[cell].value) == 0
        assert self.gpu.free_address(start, n_bytes) == 0
        del self.cells[cell]


class FakeNpuTorch(FakeCuda):
    """`torch_npu.npu`."""

    def get_device_name(self, index):
        return "Fake Ascend910B3"


class FakeNpuSmi:
    """`npu-smi`: what it prints for the two commands."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.installed, self.broken = True, False
        self.pid: int | None = os.getpid()
        self.ours = lambda: gpu.ours_bytes

    def __call__(self, arguments: tuple[str, ...]) -> str:
        if not self.installed:
            raise FileNotFoundError(2, "No such file or directory", "npu-smi")
        if self.broken:
            raise subprocess.CalledProcessError(255, ("npu-smi", *arguments))
        if arguments == ("info", "-m"):
            return MAPPING
        assert arguments == ("info", "-t", "proc-mem", "-i", "0", "-c", "0")
        shown = [(1, self.gpu.others_bytes), *([] if self.pid is None else [(self.pid, self.ours())])]
        lines = [f"\tProcess id:{pid} Process name:python    Process memory(MB):{n // MIB}" for pid, n in shown]
        return "\n".join(["\tNPU ID                         : 0", *lines, "\tChip ID                        : 0", ""])


class NpuMachine(Platform, Machine):
    """All of it, with a pool over it."""

    name = "npu"
    backup_kind = "pageable"
    tells_strangers = False
    complains_of_sleeping_frees = 1
    device_source = "acl.rt.get_mem_info"

    def __init__(self, capacity: int = 64 * MIB, data_class: type = OldData) -> None:
        self.gpu, self.faults = FakeGpu(capacity), Faults()
        self.cumem = self.module = self.camem = FakeCamem(self.gpu, data_class)
        self.acl = FakeAclRt(self.gpu, self.faults)
        self.torch_device = FakeNpuTorch(self.gpu)
        self.smi = FakeNpuSmi(self.gpu)
        self.host_bytes = 1 << 40
        self.allocator, self.complaints, self.pinned = self.camem.allocator, self.camem.printed, {}
        self.fail = self.faults.fail

    def pool(self, environ=None) -> CumemPool:
        return CumemPool(
            NpuDriver(0, self.camem, runtime=self.acl, npu=self.torch_device),
            NpuProbe(0, self.acl, run=self.smi, environ={}),
            room=lambda: HostMemory(limit_bytes=self.host_total, available_bytes=self.host_bytes),
            environ=environ or {},
            settle_s=0.02,
        )

    def hide_process(self) -> None:
        self.smi.pid = None

    def break_probe(self) -> None:
        self.smi.broken = True

    def show_bytes(self, ours) -> None:
        self.smi.ours = ours
