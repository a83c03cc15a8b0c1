"""A GPU of limited size in host memory, and fakes of what a pool over vLLM's allocator calls, as vLLM 0.24 behaves.

Recorded: the extension's order of driver calls, its error that stays until a Python call raises it, and that a free
unmaps, gives the address back and frees the handle's cell whatever went wrong. Memory that is unmapped is poisoned;
memory that is mapped anew holds garbage.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from omni_notebook.memory.base import DeviceError, HostMemory
from omni_notebook.memory.cumem import CumemPool
from omni_notebook.memory.device.nvml import NvmlProbe
from omni_notebook.memory.device.vllm_driver import VllmDriver

MIB = 1024**2
GRANULE = 2 * MIB
CONTEXT_BYTES = 6 * MIB
UUID = "12345678-aaaa-bbbb-cccc-123456789abc"
OUT_OF_MEMORY, INVALID = 2, 1
TEXT = {OUT_OF_MEMORY: "out of memory", INVALID: "invalid argument"}
POISON, GARBAGE = 0xCC, 0xAB


class FakeGpu:
    """Virtual addresses, physical pieces, mappings of these at those."""

    def __init__(self, capacity: int, span: int = 512 * MIB) -> None:
        self.capacity = capacity
        self.others_bytes = 0  # other processes
        self.torch_bytes = 0  # our process, outside the pool
        self.memory = mmap.mmap(-1, span)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.base = first + -first % GRANULE
        self.start = self.base - first
        self.reserved: dict[int, int] = {}
        self.pieces: dict[int, int] = {}
        self.handles: set[int] = set()
        self.mappings: dict[int, tuple[int, int]] = {}
        self.next_handle = 1
        self.next_address = self.base

    # --------------------------------------------------------------------------- what it holds

    @property
    def pool_bytes(self) -> int:
        return sum(self.pieces.values())

    @property
    def ours_bytes(self) -> int:
        return CONTEXT_BYTES + self.torch_bytes + self.pool_bytes

    @property
    def free_bytes(self) -> int:
        return self.capacity - self.ours_bytes - self.others_bytes

    def is_mapped(self, address: int) -> bool:
        return any(start <= address < start + n for start, (n, _) in self.mappings.items())

    # ------------------------------------------------------------------------- driver functions

    def reserve(self, n_bytes: int) -> int:
        address = self.next_address
        self.next_address += n_bytes + GRANULE
        self.reserved[address] = n_bytes
        return address

    def create(self, n_bytes: int) -> tuple[int, int]:
        if n_bytes > self.free_bytes:
            return OUT_OF_MEMORY, 0
        handle = self.next_handle
        self.next_handle += 1
        self.pieces[handle] = n_bytes
        self.handles.add(handle)
        return 0, handle

    def map(self, address: int, n_bytes: int, handle: int) -> int:
        overlaps = any(start < address + n_bytes and address < start + n for start, (n, _) in self.mappings.items())
        if overlaps or handle not in self.handles:
            return INVALID
        self.mappings[address] = (n_bytes, handle)
        ctypes.memset(address, GARBAGE, n_bytes)
        return 0

    def unmap(self, address: int, n_bytes: int) -> int:
        inside = {start: part for start, part in self.mappings.items() if address <= start < address + n_bytes}
        if not n_bytes or sum(n for n, _ in inside.values()) != n_bytes:
            return INVALID
        for start in inside:
            del self.mappings[start]
        ctypes.memset(address, POISON, n_bytes)
        self._collect()
        return 0

    def release(self, handle: int) -> int:
        if handle not in self.handles:
            return INVALID
        self.handles.discard(handle)
        self._collect()
        return 0

    def free_address(self, address: int, n_bytes: int) -> int:
        if self.reserved.get(address) != n_bytes or self.is_mapped(address):
            return INVALID
        del self.reserved[address]
        return 0

    def _collect(self) -> None:
        used = {handle for _, handle in self.mappings.values()} | self.handles
        self.pieces = {handle: n for handle, n in self.pieces.items() if handle in used}


@dataclass
class OldData:
    """vLLM 0.24's entry."""

    handle: tuple[int, int, int, int]
    tag: str
    cpu_backup_tensor: Any = None


@dataclass
class NewData(OldData):
    """Later versions' entry."""

    is_asleep: bool = False


class FakeAllocator:
    """`CuMemAllocator`."""

    def __init__(self, data_class: type) -> None:
        self.data_class = data_class
        self.pointer_to_data: dict[int, Any] = {}
        self.current_tag = "default"
        self.allocator_and_pools: dict[str, Any] = {}
        self.python_malloc_callback = self._python_malloc_callback
        self.python_free_callback = self._python_free_callback

    def _python_malloc_callback(self, handle):
        self.pointer_to_data[handle[2]] = self.data_class(handle, self.current_tag)

    def _python_free_callback(self, address):
        return self.pointer_to_data.pop(address).handle


@dataclass
class FakeCumem:
    """`vllm.device_allocator.cumem` with the extension inside; `faults`: calls by name and number that fail."""

    gpu: FakeGpu
    data_class: type = OldData
    error_code: int = 0
    error_msg: str = ""
    printed: list[str] = field(default_factory=list)
    cells: dict[int, Any] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    faults: dict[str, dict[int, int]] = field(default_factory=dict)
    cumem_available: bool = True

    def __post_init__(self) -> None:
        self.allocator = FakeAllocator(self.data_class)
        self.CuMemAllocator = SimpleNamespace(get_instance=lambda: self.allocator)
        self.libcudart = SimpleNamespace(lib=SimpleNamespace(cudaGetLastError=lambda: 0))
        self.init_module(self.allocator.python_malloc_callback, self.allocator.python_free_callback)

    def init_module(self, malloc, free):
        self.malloc_callback, self.free_callback = malloc, free

    def fail(self, name: str, number: int, error: int = INVALID) -> None:
        """Let the `number`-th call from now fail (1 = the next)."""
        self.faults.setdefault(name, {})[self.calls[name] + number] = error

    def _check(self, name: str, run) -> bool:
        """Run a driver call; the extension goes on only while no error is on record."""
        self.calls[name] += 1
        error = self.faults.get(name, {}).get(self.calls[name]) or run()
        if error:
            self.error_code = error
            self.error_msg = f"CUDA Error: {TEXT[error]} at cumem_allocator.cpp"
            self.printed.append(self.error_msg)
        return not self.error_code

    def _create_and_map(self, handle) -> None:
        _, n_bytes, address, cell = handle

        def create() -> int:
            error, made = self.gpu.create(n_bytes)
            if not error:
                self.cells[cell].value = made
            return error

        if self._check("create", create):
            self._check("map", lambda: self.gpu.map(address, n_bytes, self.cells[cell].value))

    def _unmap_and_release(self, handle) -> None:
        _, n_bytes, address, cell = handle
        if self._check("unmap", lambda: self.gpu.unmap(address, n_bytes)):
            self._check("release", lambda: self.gpu.release(self.cells[cell].value))

    def _raise(self) -> None:
        if self.error_code:
            self.error_code = 0
            raise RuntimeError(self.error_msg)

    def create_and_map(self, handle) -> None:
        self._create_and_map(handle)
        self._raise()

    def unmap_and_release(self, handle) -> None:
        self._unmap_and_release(handle)
        self._raise()

    def my_malloc(self, n_bytes: int, tag: str) -> int:
        aligned = -(-n_bytes // GRANULE) * GRANULE
        address = self.gpu.reserve(aligned)
        cell = ctypes.c_ulonglong()
        self.cells[ctypes.addressof(cell)] = cell
        self.allocator.current_tag = tag
        handle = (0, aligned, address, ctypes.addressof(cell))
        self.malloc_callback(handle)
        self._create_and_map(handle)
        assert not self.error_code
        return address

    def my_free(self, address: int) -> None:
        handle = self.free_callback(address)
        self._unmap_and_release(handle)
        self._check("free_address", lambda: self.gpu.free_address(address, handle[1]))
        del self.cells[handle[3]]

    def touch(self, name: str, *ends: int) -> int:
        """The error of a call that reads or writes there."""
        self.calls[name] += 1
        fails = self.faults.get(name, {}).get(self.calls[name], 0)
        for end in ends:
            if self.gpu.base <= end < self.gpu.next_address and not self.gpu.is_mapped(end):
                fails = INVALID
        return fails


class FakeCuda:
    """`torch.cuda`."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.segments: list[dict[str, Any]] = []
        self.cached_bytes = 0
        self.snapshots = 0

    def set_device(self, index):
        assert index == 0

    def synchronize(self, index):
        assert index == 0

    def current_stream(self, index):
        assert index == 0
        return SimpleNamespace(cuda_stream=0)

    def get_device_name(self, index):
        return "Fake H200"

    def get_device_properties(self, index):
        return SimpleNamespace(uuid=UUID)

    def mem_get_info(self, index):
        return self.gpu.free_bytes, self.gpu.capacity

    def empty_cache(self):
        self.gpu.torch_bytes -= self.cached_bytes
        self.cached_bytes = 0

    def memory_snapshot(self):
        self.snapshots += 1
        return self.segments

    def memory_stats_as_nested_dict(self, index):
        assert index == 0
        large = [one["total_size"] for one in self.segments if one["total_size"] > 2 * MIB]
        small = [one["total_size"] for one in self.segments if one["total_size"] <= 2 * MIB]
        return {
            what: {"small_pool": {"current": of(small)}, "large_pool": {"current": of(large)}}
            for what, of in (("reserved_bytes", sum), ("segment", len))
        }


class FakeNvml:
    """`pynvml`; `pid` of our process as it shows it, `hidden_bytes`: what it does not see leave or come."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.pid: int | None = os.getpid()
        self.ours = lambda: gpu.ours_bytes

    def nvmlInit(self):  # noqa: N802 - NVML's name
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        assert uuid == f"GPU-{UUID}"
        return "handle"

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        assert handle == "handle"
        others = [SimpleNamespace(pid=1, usedGpuMemory=self.gpu.others_bytes)]
        return others if self.pid is None else [*others, SimpleNamespace(pid=self.pid, usedGpuMemory=self.ours())]


class FakeLibcuda:
    """`memory.device.libcuda`; what is begun on a stream happens when someone waits for that stream, not before."""

    def __init__(self, cumem: FakeCumem) -> None:
        self.cumem = cumem
        self.streams: dict[int, list[Any]] = {}
        self.done: Counter[int] = Counter()
        self.pinned: dict[int, int] = {}
        self.pin_fails = False

    def pin(self, address, n_bytes):
        if not self.pin_fails:
            self.pinned[address] = n_bytes
        return not self.pin_fails

    def unpin(self, address):
        faults = self.cumem
        faults.calls["unpin"] += 1
        error = faults.faults.get("unpin", {}).get(faults.calls["unpin"])
        if error:
            msg = f"cuMemHostUnregister: CUDA driver error {error}"
            raise DeviceError(msg)
        del self.pinned[address]

    def new_stream(self):
        self.streams[len(self.streams) + 1] = []
        return len(self.streams)

    def copy(self, to, source, n_bytes, stream):
        self._begin("cuMemcpyAsync", "memcpy", stream, (to, source), lambda: ctypes.memmove(to, source, n_bytes))

    def zero(self, address, n_bytes, stream):
        self._begin("cuMemsetD8Async", "memset", stream, (address,), lambda: ctypes.memset(address, 0, n_bytes))

    def _begin(self, call, name, stream, ends, work):
        error = self.cumem.touch(name, *ends)
        if error:
            msg = f"{call}: CUDA driver error {error}"
            raise DeviceError(msg)
        self.streams[stream].append((ends, work))

    def wait(self, stream):
        works, self.streams[stream] = self.streams[stream], []
        self.done[stream] += len(works)
        gpu = self.cumem.gpu
        for ends, work in works:
            lost = [end for end in ends if gpu.base <= end < gpu.next_address and not gpu.is_mapped(end)]
            assert not lost, "an unmap did not wait for a stream"
            work()
        error = self.cumem.touch("wait")
        if error:
            msg = f"cuStreamSynchronize: CUDA driver error {error}"
            raise DeviceError(msg)

    def record_event(self, stream):
        return stream, self.done[stream] + len(self.streams[stream])

    def follow_event(self, stream, mark):
        """Torch's stream computes at once here, so that what it follows happens at once, too."""
        assert stream == 0
        FakeLibcuda.wait_event(self, mark)

    def wait_event(self, mark):
        stream, count = mark
        count = max(0, count - self.done[stream])
        rest = self.streams[stream][count:]
        del self.streams[stream][count:]
        self.wait(stream)
        self.streams[stream] = rest

    def tensor_at(self, device, address, n_bytes, holder):
        assert device == 0
        assert self.cumem.gpu.is_mapped(address)
        gpu = self.cumem.gpu
        return torch.frombuffer(gpu.memory, dtype=torch.uint8, count=n_bytes, offset=gpu.start + address - gpu.base)

    def is_mapped(self, address):
        return self.cumem.gpu.is_mapped(address)

    def map_alias(self, device, address, n_bytes, cell):
        error, handle = self.cumem.gpu.create(GRANULE)
        if error:
            msg = "cuMemCreate: CUDA driver error 2"
            raise DeviceError(msg, no_room=True)
        for start in range(0, n_bytes, GRANULE):
            assert self.cumem.gpu.map(address + start, GRANULE, handle) == 0
        self.cumem.cells[cell].value = handle


class Machine:
    """All of it, with a pool over it."""

    host_total = 1 << 40

    def __init__(self, capacity: int = 64 * MIB, data_class: type = OldData) -> None:
        self.gpu = FakeGpu(capacity)
        self.cumem = FakeCumem(self.gpu, data_class)
        self.cuda = FakeCuda(self.gpu)
        self.nvml = FakeNvml(self.gpu)
        self.libcuda = FakeLibcuda(self.cumem)
        self.host_bytes = 1 << 40

    def pool(self, environ=None) -> CumemPool:
        return CumemPool(
            VllmDriver(0, self.cumem, cuda=self.cuda, driver=self.libcuda),
            NvmlProbe(0, self.nvml, cuda=self.cuda),
            room=lambda: HostMemory(limit_bytes=self.host_total, available_bytes=self.host_bytes),
            environ=environ or {},
            settle_s=0.02,
        )

    def tensor(self, tag: str, shape, dtype=torch.float32) -> torch.Tensor:
        """A tensor in a segment of its own, as vLLM's memory pools make them."""
        count = torch.Size(shape).numel()
        address = self.cumem.my_malloc(count * dtype.itemsize, tag)
        offset = self.gpu.start + address - self.gpu.base
        return torch.frombuffer(self.gpu.memory, dtype=dtype, count=count, offset=offset).view(shape)

    def free(self, tensor: torch.Tensor) -> None:
        """Free its segment, as torch does some time after the last tensor in it went."""
        self.cumem.my_free(tensor.untyped_storage().data_ptr())


class Model(nn.Module):
    """Two parameters, one of them transposed as quantised ones are, a buffer, a scale that is no buffer."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.big = nn.Parameter(machine.tensor("weights", (1024, 1536)), requires_grad=False)  # 6 MiB
        self.turned = nn.Parameter(machine.tensor("weights", (256, 100)).t(), requires_grad=False)
        self.register_buffer("table", machine.tensor("weights", (64,)))
        self.scale = machine.tensor("weights", (3,))


class Rig:
    """A model and a cache on such a machine, and a pool that knows them."""

    def __init__(self, data_class=OldData, capacity=64 * MIB, *, machine=None):
        self.machine = machine or Machine(capacity, data_class)
        self.gpu, self.cumem = self.machine.gpu, self.machine.cumem
        self.model = Model(self.machine)
        self.cache = nn.Module()
        self.cache.register_buffer("kv", self.machine.tensor("kv_cache", (4 * MIB,), torch.uint8))
        self.fill()
        self.pool = self.machine.pool()
        self.pool.adopt(self.model)
        self.adopt_cache()
        self.pool.keep("weights", [self.model.table, *self.loose_tensors()])

    def adopt_cache(self):
        self.pool.adopt(self.cache, "kv_cache")

    def loose_tensors(self):
        return self.pool.loose_tensors("weights")

    def tensors(self):
        return [self.model.big, self.model.turned, self.model.table, self.model.scale]

    def fill(self):
        generator = torch.Generator().manual_seed(7)
        for tensor in self.tensors():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.cache.kv.fill_(5)

    def copies(self):
        return [tensor.clone() for tensor in self.tensors()]

    def weights_bytes(self):
        return self.pool.tags()["weights"].span_bytes
