"""vLLM's allocator built for HIP, the HIP runtime and AMD SMI, as their sources say that they behave.

Recorded from vLLM 0.32 (csrc/cumem_allocator.cpp with USE_ROCM, device_allocator/cumem.py), clr (hip_vm.cpp) and ROCm 6
(amdsmi_interface.py): argument orders and types, results, what is cleaned up after which error. A handle that is
released twice ends the test: there it is freed memory that is written to.
"""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

from omni_notebook.memory.base import HostMemory
from omni_notebook.memory.cumem import CumemPool
from omni_notebook.memory.device.amdsmi_probe import AmdsmiProbe
from omni_notebook.memory.device.rocm_driver import RocmDriver
from tests.memory.fake_cuda import GRANULE, INVALID, TEXT, FakeAllocator, FakeCuda, FakeGpu, Machine, NewData
from tests.memory.fake_devices import MIB, Faults, Platform

CHUNK = 4 * MIB
HIP_UUID = b"de8287300da37c72"


class RocmAllocator(FakeAllocator):
    """`CuMemAllocator` on ROCm: what sleeps has nothing to unmap."""

    def _python_free_callback(self, address):
        data = self.pointer_to_data.pop(address)
        if data.is_asleep:
            device, n_bytes, start, _ = data.handle
            return device, n_bytes, start, []
        return data.handle


class FakeHipExtension:
    """`vllm.cumem_allocator`; `allocator`: whose tag an allocation gets."""

    def __init__(self, gpu: FakeGpu, faults: Faults) -> None:
        self.gpu, self.faults = gpu, faults
        self.allocator: Any = None
        self.error_code, self.printed, self.cells = 0, [], {}

    def init_module(self, malloc, free):
        assert callable(malloc)
        assert callable(free)
        self.malloc_callback, self.free_callback = malloc, free

    def _record(self, error: int) -> int:
        if error:
            self.error_code = error
            self.printed.append(f"CUDA Error: {TEXT[error]} at cumem_allocator.cpp")
        return error

    def _raise(self) -> None:
        if self.error_code:
            error, self.error_code = self.error_code, 0
            msg = f"CUDA Error: {TEXT[error]} at cumem_allocator.cpp"
            raise RuntimeError(msg)

    @staticmethod
    def _parsed(handle) -> tuple[int, int, int, list[tuple[int, int]]]:
        device, n_bytes, address, chunks = handle
        if not isinstance(chunks, list):
            msg = "Expected a list for the 4th argument on ROCm"
            raise TypeError(msg)
        assert all(isinstance(one, tuple) and len(one) == 2 for one in chunks)
        assert device == 0
        assert not chunks or sum(size for _, size in chunks) == n_bytes
        return device, n_bytes, address, chunks

    @staticmethod
    def _starts(address: int, chunks: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
        starts, at = [], address
        for cell, size in chunks:
            starts.append((at, cell, size))
            at += size
        return starts

    def _release(self, cell: int) -> int:
        error = self.gpu.release(self.cells[cell].value)
        assert not error, "a handle was released twice"
        return error

    def _create_and_map(self, handle) -> None:
        _, n_bytes, address, chunks = self._parsed(handle)
        starts = self._starts(address, chunks)
        for done, (_, cell, size) in enumerate(starts):
            made = self.faults.code("create", lambda cell=cell, size=size: self._create(cell, size))
            if self._record(made) or self.error_code:
                for _, earlier, _ in starts[:done]:
                    self._release(earlier)
                return
        for done, (start, cell, size) in enumerate(starts):
            mapping = lambda start=start, cell=cell, size=size: self.gpu.map(start, size, self.cells[cell].value)  # noqa: E731
            if self._record(self.faults.code("map", mapping)):
                for earlier, _, length in starts[:done]:
                    self.gpu.unmap(earlier, length)
                for _, one, _ in starts:
                    self._release(one)
                return
        self._record(self.faults.code("access", lambda: 0 if n_bytes else INVALID))

    def _create(self, cell: int, size: int) -> int:
        error, made = self.gpu.create(size)
        if not error:
            self.cells[cell].value = made
        return error

    def _unmap_and_release(self, handle) -> None:
        _, _, address, chunks = self._parsed(handle)
        starts = self._starts(address, chunks)
        errors = [
            self.faults.code("unmap", lambda start=start, size=size: self.gpu.unmap(start, size))
            for start, _, size in starts
        ]
        errors += [self._release(cell) for _, cell, _ in starts]
        self._record(next((error for error in errors if error), 0))

    def python_create_and_map(self, device, size, pointer, handle) -> None:
        self._create_and_map((device, size, pointer, handle))
        self._raise()

    def python_unmap_and_release(self, device, size, pointer, handle) -> None:
        self._unmap_and_release((device, size, pointer, handle))
        self._raise()

    def my_malloc(self, n_bytes: int, tag: str) -> int:
        aligned = -(-n_bytes // GRANULE) * GRANULE
        address = self.gpu.reserve(aligned)
        chunks = []
        for start in range(0, aligned, CHUNK):
            cell = ctypes.c_ulonglong()
            self.cells[ctypes.addressof(cell)] = cell
            chunks.append((ctypes.addressof(cell), min(CHUNK, aligned - start)))
        self.allocator.current_tag = tag
        handle = (0, aligned, address, chunks)
        self.malloc_callback(handle)
        self._create_and_map(handle)
        assert not self.error_code
        return address

    def my_free(self, address: int) -> None:
        handle = self.free_callback(address)
        self._unmap_and_release(handle)
        self._record(self.gpu.free_address(address, handle[1]))


class FakeHipCumem:
    """`vllm.device_allocator.cumem`."""

    cumem_available = True

    def __init__(self, extension: FakeHipExtension, library: FakeHip, data_class: type) -> None:
        allocator = RocmAllocator(data_class)
        self.extension = extension
        self.init_module = extension.init_module
        self.CuMemAllocator = SimpleNamespace(get_instance=lambda: allocator)
        self.libcudart = SimpleNamespace(lib=library)

    def create_and_map(self, allocation_handle) -> None:
        self.extension.python_create_and_map(*allocation_handle)

    def unmap_and_release(self, allocation_handle) -> None:
        self.extension.python_unmap_and_release(*allocation_handle)


class FakeHip:
    """The HIP runtime's library (`ctypes.CDLL`): arguments must come as the C types that it declares."""

    def __init__(self, gpu: FakeGpu, faults: Faults) -> None:
        self.gpu, self.faults = gpu, faults
        self.streams: dict[int, list[Any]] = {}
        self.pinned: dict[int, int] = {}
        self.pin_error = self.last_error = 0

    def _end(self, error: int) -> int:
        self.last_error = error or self.last_error
        return error

    def hipGetLastError(self):  # noqa: N802 - HIP's names
        error, self.last_error = self.last_error, 0
        return error

    def hipPointerGetAttributes(self, attributes, pointer):  # noqa: N802
        assert isinstance(pointer, ctypes.c_void_p)
        attributes._obj[0] = 2 if self.gpu.is_mapped(pointer.value) else 0
        return 0

    def hipStreamCreateWithFlags(self, stream, flags):  # noqa: N802
        assert isinstance(flags, ctypes.c_uint)
        assert flags.value == 1
        stream._obj.value = len(self.streams) + 1
        self.streams[len(self.streams) + 1] = []
        return 0

    def hipMemcpyAsync(self, to, source, n_bytes, kind, stream):  # noqa: N802
        assert [type(one) for one in (to, source, stream)] == [ctypes.c_void_p] * 3
        assert isinstance(n_bytes, ctypes.c_size_t)
        assert kind.value == 4
        ends, work = (to.value, source.value), lambda: ctypes.memmove(to.value, source.value, n_bytes.value)
        return self._end(self._begin("memcpy", stream.value, ends, work))

    def hipMemsetD8Async(self, to, value, n_bytes, stream):  # noqa: N802
        assert (type(to), type(value), type(n_bytes)) == (ctypes.c_void_p, ctypes.c_ubyte, ctypes.c_size_t)
        work = lambda: ctypes.memset(to.value, value.value, n_bytes.value)  # noqa: E731
        return self._end(self._begin("memset", stream.value, (to.value,), work))

    def _lost(self, ends) -> bool:
        return any(self.gpu.base <= end < self.gpu.next_address and not self.gpu.is_mapped(end) for end in ends)

    def _begin(self, name, stream, ends, work) -> int:
        error = self.faults.code(name, lambda: INVALID if self._lost(ends) else 0)
        if not error:
            self.streams[stream].append((ends, work))
        return error

    def hipStreamSynchronize(self, stream):  # noqa: N802
        works, self.streams[stream.value] = self.streams[stream.value], []
        for ends, work in works:
            assert not self._lost(ends), "an unmap did not wait for a stream"
            work()
        return self._end(self.faults.code("wait", lambda: 0))

    def hipHostRegister(self, address, n_bytes, flags):  # noqa: N802
        assert (type(address), type(n_bytes), type(flags)) == (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        if not self.pin_error:
            self.pinned[address.value] = n_bytes.value
        return self._end(self.pin_error)

    def hipHostUnregister(self, address):  # noqa: N802
        error = self.faults.code("unpin", lambda: 0)
        if not error:
            del self.pinned[address.value]
        return self._end(error)


class FakeAmdsmi:
    """`amdsmi`."""

    class AmdSmiException(Exception):  # noqa: N818 - AMD's name
        pass

    AmdSmiMemoryType = SimpleNamespace(VRAM="vram")

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.ready = self.broken = False
        self.pid: int | None = os.getpid()
        self.ours = lambda: gpu.ours_bytes
        self.uuid = "GPU-" + HIP_UUID.decode()

    def _check(self, handle="card") -> None:
        if not self.ready or self.broken or handle != "card":
            msg = "Error code: 32 | AMDSMI_STATUS_NOT_INIT"
            raise self.AmdSmiException(msg)

    def amdsmi_init(self):
        self.ready = True

    def amdsmi_get_processor_handles(self):
        self._check()
        return ["card"]

    def amdsmi_get_gpu_enumeration_info(self, processor_handle):
        self._check(processor_handle)
        return {"drm_render": 128, "drm_card": 0, "hsa_id": 1, "hip_id": 0, "hip_uuid": self.uuid}

    def amdsmi_get_gpu_memory_usage(self, processor_handle, mem_type):
        self._check(processor_handle)
        assert mem_type == self.AmdSmiMemoryType.VRAM
        return self.gpu.capacity - self.gpu.free_bytes

    def amdsmi_get_gpu_process_list(self, processor_handle):
        self._check(processor_handle)
        others = [self._process(1, self.gpu.others_bytes)]
        return others if self.pid is None else [*others, self._process(self.pid, self.ours())]

    @staticmethod
    def _process(pid: int, vram: int) -> dict[str, Any]:
        return {
            "name": "python3",
            "pid": pid,
            "mem": vram,
            "engine_usage": {"gfx": 0, "enc": 0},
            "memory_usage": {"gtt_mem": 4096, "cpu_mem": 4096, "vram_mem": vram},
            "cu_occupancy": "N/A",
        }


class FakeRocmTorch(FakeCuda):
    """`torch.cuda` of a torch built for ROCm."""

    def get_device_name(self, index):
        return "Fake MI300X"

    def get_device_properties(self, index):
        return SimpleNamespace(uuid=SimpleNamespace(bytes=list(HIP_UUID)))


class RocmMachine(Platform, Machine):
    """All of it, with a pool over it."""

    name = "rocm"
    abortable = False
    device_source = "AMD SMI"

    def __init__(self, capacity: int = 64 * MIB, data_class: type = NewData, *, module=None) -> None:
        self.gpu, self.faults = FakeGpu(capacity), Faults()
        self.hip = FakeHip(self.gpu, self.faults)
        self.cumem = FakeHipExtension(self.gpu, self.faults)
        self.module = module(self.cumem, self.hip) if module else FakeHipCumem(self.cumem, self.hip, data_class)
        self.allocator = self.cumem.allocator = self.module.CuMemAllocator.get_instance()
        self.cumem.init_module(self.allocator.python_malloc_callback, self.allocator.python_free_callback)
        self.torch_device = FakeRocmTorch(self.gpu)
        self.smi = FakeAmdsmi(self.gpu)
        self.host_bytes = 1 << 40
        self.complaints, self.pinned = self.cumem.printed, self.hip.pinned
        self.fail = self.faults.fail

    def pool(self, environ=None) -> CumemPool:
        return CumemPool(
            RocmDriver(0, self.module, cuda=self.torch_device),
            AmdsmiProbe(0, self.smi, cuda=self.torch_device),
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

    def sleep_by_vllm(self, data) -> None:
        try:
            self.module.unmap_and_release(data.handle)
        finally:
            data.is_asleep = True

    def wake_by_vllm(self, data) -> None:
        self.module.create_and_map(data.handle)
        data.is_asleep = False
