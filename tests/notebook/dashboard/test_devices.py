import os
import sys
import types

import psutil
import pytest

from omni_notebook.notebook.dashboard import devices
from omni_notebook.notebook.dashboard.devices import HIDDEN, NO_NVML, DeviceProbe
from omni_notebook.protocol import GIB, MIB
from tests.notebook.acks import rank, stage, status


class NVMLError(Exception):
    pass


class FakeNVML(types.ModuleType):
    """Two GPUs as `pynvml` shows them; `held` are (pid, bytes) on the one that is asked for."""

    NVMLError = NVMLError

    def __init__(self, held, *, driver=True):
        super().__init__("pynvml")
        self.held, self.driver, self.asked, self.open = held, driver, [], 0

    def nvmlInit(self):  # noqa: N802
        if not self.driver:
            msg = "driver not loaded"
            raise NVMLError(msg)
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        self.asked.append(index)
        if index > 1:
            msg = "invalid argument"
            raise NVMLError(msg)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        self.asked.append(uuid)
        return 1

    def nvmlDeviceGetName(self, _handle):  # noqa: N802
        return b"NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, _handle):  # noqa: N802
        return types.SimpleNamespace(used=12 * GIB, total=140 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle):  # noqa: N802
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.held]


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(held=(), **options):
        fake = FakeNVML(list(held), **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def on_cuda(*pids, device="cuda:0"):
    return status(stage(ranks=tuple(rank(rank=n, pid=pid, device=device) for n, pid in enumerate(pids))))


def test_the_host_shows_what_is_in_use_this_kernel_and_each_ranks_process():
    found = DeviceProbe().look(status(stage(0, ranks=(rank(pid=7, process_bytes=500 * MIB),))))
    assert len(found) == 1
    host = found[0]
    assert host.name == "host RAM"
    assert 0 < host.used_bytes < host.total_bytes <= psutil.virtual_memory().total
    assert host.holders[0].who == "this kernel"
    assert host.holders[0].n_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert host.holders[1] == ("stage 0 rank 0 (pid 7)", 500 * MIB)


def test_ranks_in_this_process_are_named_with_the_kernel():
    mine = status(stage(0, ranks=(rank(pid=os.getpid()),)), stage(1, ranks=(rank(pid=os.getpid()),)))
    host = DeviceProbe().look(mine)[0]
    assert [holder.who for holder in host.holders] == [
        f"this kernel, with stage 0 rank 0, stage 1 rank 0 (pid {os.getpid()})"
    ]


def test_dead_ranks_hold_nothing():
    host = DeviceProbe().look(status(stage(ranks=(rank(pid=7, alive=False),))))[0]
    assert [holder.who for holder in host.holders] == ["this kernel"]


def test_nvml_is_not_touched_where_no_rank_is_on_cuda(nvml):
    fake = nvml()
    DeviceProbe().look(status(stage()))
    assert (fake.open, fake.asked) == (0, [])


def test_a_cuda_device_shows_ranks_by_process_and_the_rest_as_others(nvml):
    nvml([(7, 5 * GIB), (8, 3 * GIB), (99, 2 * GIB)])
    device = DeviceProbe().look(on_cuda(7, 8))[1]
    assert (device.name, device.used_bytes, device.total_bytes) == ("NVIDIA H200 (cuda:0)", 12 * GIB, 140 * GIB)
    assert device.holders == (
        ("stage 0 rank 0 (pid 7)", 5 * GIB),
        ("stage 0 rank 1 (pid 8)", 3 * GIB),
        ("others", 4 * GIB),
    )


def test_where_process_ids_are_hidden_the_ranks_pools_stand_in_and_it_says_so(nvml):
    nvml([(31337, 5 * GIB)])
    device = DeviceProbe().look(on_cuda(7))[1]
    assert device.holders == (("stage 0 rank 0", 67 * MIB),)
    assert device.note == HIDDEN


@pytest.mark.parametrize(
    ("visible", "device", "asked"),
    [
        ("", "cuda:1", 1),
        ("1,0", "cuda:0", 1),
        ("1,0", "cuda:1", 0),
        ("GPU-abc", "cuda", "GPU-abc"),
        (None, "cuda:1", 1),
    ],
)
def test_the_device_is_the_one_that_cuda_visible_devices_shows(nvml, monkeypatch, visible, device, asked):
    fake = nvml([(7, GIB)])
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    DeviceProbe().look(on_cuda(7, device=device))
    assert fake.asked == [asked]


def test_a_device_that_is_not_visible_and_one_that_nvml_refuses_are_a_line_and_no_error(nvml, monkeypatch):
    nvml()
    assert DeviceProbe().look(on_cuda(7, device="cuda:5"))[1].note == "NVML: invalid argument"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "cuda:1 is not among CUDA_VISIBLE_DEVICES=0" in DeviceProbe().look(on_cuda(7, device="cuda:1"))[1].note


@pytest.mark.parametrize("there", [False, True])
def test_without_nvml_or_without_a_driver_the_ranks_pools_are_shown(nvml, monkeypatch, there):
    if there:
        nvml(driver=False)
    else:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    device = DeviceProbe().look(on_cuda(7))[1]
    assert (device.name, device.used_bytes, device.note) == ("cuda:0", None, NO_NVML)
    assert device.holders == (("stage 0 rank 0", 67 * MIB),)


def test_closing_lets_go_of_nvml_once(nvml):
    fake = nvml([(7, GIB)])
    probe = DeviceProbe()
    probe.look(on_cuda(7))
    assert fake.open == 1
    probe.close()
    probe.close()
    assert fake.open == 0
    assert devices.KERNEL == "this kernel"
