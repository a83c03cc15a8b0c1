"""The part of the CUDA driver that a pool of our own segments calls, and a machine with such a pool.

Addresses that were given back are the next ones to be handed out; a call of a thread that has not attached the device
fails the test.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from contextlib import contextmanager

import torch

from omni_notebook.memory.base import DeviceError, HostMemory
from omni_notebook.memory.cuda import CudaPool
from omni_notebook.memory.device.nvml import NvmlProbe
from omni_notebook.memory.device.ranges import RangeDriver
from tests.memory.fake_cuda import MIB, OUT_OF_MEMORY, FakeCuda, FakeCumem, FakeGpu, FakeLibcuda, FakeNvml, Rig
from tests.memory.fake_devices import Platform

RECOMPUTABLE = {"kv_cache", "workspace"}


class ThreadedCuda(FakeCuda):
    """`torch.cuda`, which knows the threads that have the device."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(gpu)
        self.here = threading.local()

    def set_device(self, index):
        super().set_device(index)
        self.here.attached = True

    def check(self) -> None:
        assert getattr(self.here, "attached", False), "this thread has not attached the device"


class FakeRanges(FakeLibcuda):
    """`memory.device.libcuda`; the calls "reserve", "create", "map", "unmap", "release" can be made to fail."""

    def __init__(self, faults: FakeCumem, cuda: ThreadedCuda) -> None:
        super().__init__(faults)
        self.cuda = cuda
        self.free: defaultdict[int, list[int]] = defaultdict(list)
        self.events = 0
        self.lock = threading.RLock()

    def _do(self, name: str, run) -> None:
        self.cuda.check()
        faults = self.cumem
        faults.calls[name] += 1
        error = faults.faults.get(name, {}).get(faults.calls[name]) or run()
        if error:
            msg = f"{name}: CUDA driver error {error}"
            raise DeviceError(msg, no_room=error == OUT_OF_MEMORY)

    def reserve(self, n_bytes):
        self._do("reserve", lambda: 0)
        if self.free[n_bytes]:
            address = self.free[n_bytes].pop()
            self.cumem.gpu.reserved[address] = n_bytes
            return address
        return self.cumem.gpu.reserve(n_bytes)

    def free_addresses(self, address, n_bytes):
        if self.cumem.gpu.free_address(address, n_bytes):
            msg = "cuMemAddressFree: CUDA driver error 1"
            raise DeviceError(msg)
        self.free[n_bytes].append(address)

    def map_new(self, device, n_bytes, address):
        assert device == 0
        gpu, made = self.cumem.gpu, []

        def create() -> int:
            error, handle = gpu.create(n_bytes)
            made.append(handle)
            return error

        self._do("create", create)
        try:
            self._do("map", lambda: gpu.map(address, n_bytes, made[0]))
        except DeviceError:
            gpu.release(made[0])
            raise
        return made[0]

    def unmap(self, address, n_bytes, handle):
        self._do("unmap", lambda: self.cumem.gpu.unmap(address, n_bytes))
        try:
            self._do("release", lambda: self.cumem.gpu.release(handle))
        except DeviceError as error:
            raise DeviceError(str(error), lost=True) from error

    def tensor_at(self, device, address, n_bytes, holder):
        assert device == 0
        if not n_bytes:
            return torch.empty(0, dtype=torch.uint8)
        assert self.cumem.gpu.is_mapped(address)
        array = (ctypes.c_char * n_bytes).from_address(address)
        array.holder = holder
        return torch.frombuffer(array, dtype=torch.uint8)

    # ------------------------------------------------------------------- as it was, by threads

    def pin(self, address, n_bytes):
        self.cuda.check()
        return super().pin(address, n_bytes)

    def unpin(self, address):
        self.cuda.check()
        super().unpin(address)

    def new_stream(self):
        self.cuda.check()
        with self.lock:
            return super().new_stream()

    def _begin(self, call, name, stream, ends, work):
        self.cuda.check()
        with self.lock:
            super()._begin(call, name, stream, ends, work)

    def wait(self, stream):
        self.cuda.check()
        with self.lock:
            super().wait(stream)

    def record_event(self, stream):
        self.cuda.check()
        self._do("event", lambda: 0)
        self.events += 1
        return super().record_event(stream)

    def follow_event(self, stream, mark):
        self.cuda.check()
        with self.lock:
            super().follow_event(stream, mark)

    def wait_event(self, mark):
        self.cuda.check()
        self.events -= 1
        with self.lock:
            super().wait_event(mark)


class OwnMachine(Platform):
    """A GPU without vLLM; `pool()` is the one that `tensor` allocates in."""

    def __init__(self, capacity: int = 64 * MIB) -> None:
        self.gpu = FakeGpu(capacity)
        self.cumem = FakeCumem(self.gpu)  # its faults alone: there is no extension
        self.torch_device = self.cuda = ThreadedCuda(self.gpu)
        self.nvml = FakeNvml(self.gpu)
        self.libcuda = FakeRanges(self.cumem, self.cuda)
        self.host_bytes = self.host_total
        self.first: CudaPool | None = None
        self.complaints: list[str] = []

    @property
    def pinned(self):
        return self.libcuda.pinned

    @property
    def allocator(self):
        return self.first._ranges.ranges

    def fail(self, name, number=1, error=1):
        self.cumem.fail(name, number, error)

    @contextmanager
    def failing_from(self, name, number=1, error=1):
        """Every call of this name fails, from the `number`-th from now on."""
        faults = self.cumem.faults.setdefault(name, {})
        first = self.cumem.calls[name] + number
        faults.update(dict.fromkeys(range(first, first + 1000), error))
        yield
        faults.clear()

    def hide_process(self):
        self.nvml.pid = None

    def break_probe(self):
        def refuse(_handle):
            raise self.nvml.NVMLError

        self.nvml.nvmlDeviceGetComputeRunningProcesses = refuse

    def show_bytes(self, ours):
        self.nvml.ours = ours

    def make_pool(self, environ=None):
        """One more pool in this process."""
        return CudaPool(
            RangeDriver(0, cuda=self.cuda, driver=self.libcuda),
            NvmlProbe(0, self.nvml, cuda=self.cuda),
            room=lambda: HostMemory(limit_bytes=self.host_total, available_bytes=self.host_bytes),
            environ=environ or {},
            settle_s=0.02,
        )

    def pool(self, environ=None):
        if environ is not None:
            return self.make_pool(environ)
        self.first = self.first or self.make_pool()
        return self.first

    def tensor(self, tag, shape, dtype=torch.float32):
        return self.pool().empty(shape, dtype, tag, recomputable=tag in RECOMPUTABLE)


class OwnRig(Rig):
    """A model and a cache in such a pool."""

    def __init__(self, machine: OwnMachine | None = None) -> None:
        super().__init__(machine=machine or OwnMachine())

    def adopt_cache(self):
        """Caches are made in place; what is adopted is never recomputable."""

    def loose_tensors(self):
        return [self.model.scale]
