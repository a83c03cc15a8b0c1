"""What the fakes of all platforms share: faults by name and number, a model and a cache in segments, ways to look.

A machine has a `FakeGpu`, the fakes of the modules that its adapter calls, and these names: `fail`, `complaints` (what
the extension printed), `pinned`, `hide_process`, `break_probe`, `show_bytes`, `sleep_by_vllm`, `wake_by_vllm`.
"""

from __future__ import annotations

from collections import Counter

from tests.memory.fake_cuda import INVALID, MIB, OUT_OF_MEMORY, FakeCuda, FakeGpu, Machine, NewData, OldData, Rig


class Faults:
    """Calls by name; chosen ones of them fail."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.faults: dict[str, dict[int, int]] = {}

    def fail(self, name: str, number: int = 1, error: int = INVALID) -> None:
        """Let the `number`-th call from now fail (1 = the next)."""
        self.faults.setdefault(name, {})[self.calls[name] + number] = error

    def code(self, name: str, run) -> int:
        """Run a call unless it is to fail; its error, 0 = none."""
        self.calls[name] += 1
        return self.faults.get(name, {}).get(self.calls[name]) or run()


class Platform:
    """What a machine of any platform offers to the contract's tests; the defaults are CUDA's."""

    name = "cuda"
    backup_kind = "pinned"
    tells_strangers = True
    """Whether a sleep of vLLM's own is seen."""
    abortable = True
    """Whether contents survive an unmap that is refused."""
    complains_of_sleeping_frees = 0
    """Lines that the extension prints for one segment that is freed asleep."""
    graphs_told_apart = True
    device_source = "torch.cuda.mem_get_info"
    host_total = 1 << 40


class CudaMachine(Platform, Machine):
    """The CUDA fakes, with the names of the contract."""

    @property
    def complaints(self) -> list[str]:
        return self.cumem.printed

    @property
    def pinned(self) -> dict[int, int]:
        return self.libcuda.pinned

    @property
    def torch_device(self) -> FakeCuda:
        return self.cuda

    @property
    def allocator(self):
        return self.cumem.allocator

    def fail(self, name: str, number: int = 1, error: int = INVALID) -> None:
        self.cumem.fail(name, number, error)

    def hide_process(self) -> None:
        self.nvml.pid = None

    def break_probe(self) -> None:
        def refuse(_handle):
            raise self.nvml.NVMLError

        self.nvml.nvmlDeviceGetComputeRunningProcesses = refuse

    def show_bytes(self, ours) -> None:
        self.nvml.ours = ours

    def sleep_by_vllm(self, data) -> None:
        self.cumem.unmap_and_release(data.handle)

    def wake_by_vllm(self, data) -> None:
        self.cumem.create_and_map(data.handle)


class OldCudaMachine(CudaMachine):
    """With vLLM 0.24."""

    def __init__(self, capacity: int = 64 * MIB) -> None:
        super().__init__(capacity, OldData)


class NewCudaMachine(CudaMachine):
    """With later versions' books."""

    def __init__(self, capacity: int = 64 * MIB) -> None:
        super().__init__(capacity, NewData)


__all__ = [
    "INVALID",
    "MIB",
    "OUT_OF_MEMORY",
    "FakeCuda",
    "FakeGpu",
    "NewCudaMachine",
    "OldCudaMachine",
    "Platform",
    "Rig",
]
