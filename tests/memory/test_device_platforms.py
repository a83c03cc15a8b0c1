"""What the platforms say of themselves where something is missing, and the pools that they make where nothing is."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest
import torch

from omni_notebook.config import StageConfig
from omni_notebook.errors import UnsupportedError
from omni_notebook.memory import platforms
from omni_notebook.memory.cumem import pool_over
from omni_notebook.memory.device import npu, rocm, support, sysman, xpu
from omni_notebook.memory.device.sysman import SysmanProbe
from omni_notebook.memory.device.xpu_driver import XpuDriver
from omni_notebook.worker.ack import tolerance_bytes
from omni_notebook.worker.vllm.memory import make_pool
from tests.memory.fake_cuda import MIB
from tests.memory.fake_npu import NpuMachine
from tests.memory.fake_rocm import FakeAmdsmi, RocmMachine
from tests.memory.fake_xpu import XpuMachine

# --------------------------------------------------------------------- what the platforms say


class Packages:
    """Packages with compiled modules, in a folder of the test's own."""

    def __init__(self, folder, monkeypatch) -> None:
        self.folder, self.there = folder, {}
        monkeypatch.setattr(support.importlib.util, "find_spec", self.there.get)
        monkeypatch.setattr(support.metadata, "version", lambda name: {"vllm": "0.32.0"}.get(name, "1.0"))

    def add(self, name, *files) -> None:
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(self.folder / name)]
        self.there[name] = spec
        for file in files:
            (self.folder / name / file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name / file).touch()


@pytest.fixture
def packages(tmp_path, monkeypatch):
    return Packages(tmp_path, monkeypatch)


def said(name):
    (info,) = [one for one in platforms.describe_platforms() if one.platform == name]
    assert not info.run_on_hardware
    return info.supported, info.reason


def test_rocm_says_what_is_missing_until_nothing_is(packages, monkeypatch):
    smi = FakeAmdsmi(RocmMachine().gpu)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert said("rocm") == (
        False,
        "rocm: the amdsmi package is not installed; it comes with ROCm (pip install <ROCm>/share/amd_smi)",
    )
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    smi.broken = True
    assert said("rocm")[1].startswith("rocm: the AMD driver can not be asked (Error code: 32")
    smi.broken = False
    assert said("rocm")[1].startswith("rocm: vLLM is not installed")
    packages.add("vllm", "cumem_allocator.abi3.so")
    assert said("rocm")[1].endswith("was not built for ROCm with its allocator extension; install vLLM for ROCm")
    packages.add("vllm", "_rocm_C.abi3.so")
    assert said("rocm") == (
        True,
        "for vLLM stages, over the allocator of vLLM 0.32.0 built for HIP; measured by AMD SMI",
    )


def test_xpu_says_what_is_missing_until_nothing_is(packages, monkeypatch, tmp_path):
    vendor = tmp_path / "drm" / "renderD128" / "device" / "vendor"
    vendor.parent.mkdir(parents=True)
    monkeypatch.setattr(xpu, "DRM", tmp_path / "drm")
    vendor.write_text("0x10de\n", encoding="ascii")
    assert said("xpu") == (False, "xpu: the kernel knows no Intel GPU")
    vendor.write_text("0x8086\n", encoding="ascii")
    assert said("xpu")[1].startswith("xpu: vLLM is not installed")
    packages.add("vllm", "device_allocator/cumem.py")
    assert said("xpu")[1] == "xpu: vLLM 0.32.0 has no allocator for XPU; use vLLM 0.32"
    packages.add("vllm", "device_allocator/xpumem.py")
    assert said("xpu")[1] == "xpu: vllm-xpu-kernels is not installed: pip install vllm-xpu-kernels"
    packages.add("vllm_xpu_kernels", "_C.abi3.so")
    assert said("xpu")[1].startswith("xpu: vllm-xpu-kernels was built without xpumem_allocator")
    packages.add("vllm_xpu_kernels", "xpumem_allocator.abi3.so")
    supported, reason = said("xpu")
    assert supported
    assert reason.endswith("measured by Level Zero Sysman, else by torch.xpu for the whole device")


def test_npu_says_what_is_missing_until_nothing_is(packages, monkeypatch, tmp_path):
    (tmp_path / "dev").mkdir()
    monkeypatch.setattr(npu, "DEVICES", tmp_path / "dev")
    (tmp_path / "dev" / "davinci_manager").touch()
    assert said("npu") == (False, "npu: the kernel knows no Ascend NPU")
    (tmp_path / "dev" / "davinci0").touch()
    assert said("npu")[1].startswith("npu: vLLM is not installed")
    packages.add("vllm")
    assert said("npu")[1] == "npu: vllm-ascend is not installed: pip install vllm-ascend"
    packages.add("vllm_ascend", "vllm_ascend_C.so")
    assert said("npu")[1] == "npu: pyACL is not on Python's path; source the CANN toolkit's set_env.sh"
    packages.add("acl")
    assert said("npu") == (
        True,
        (
            "for vLLM stages, over the allocator of vllm-ascend 1.0; measured by npu-smi, "
            "else by CANN for the whole device"
        ),
    )


@pytest.mark.parametrize("name", ["rocm", "xpu", "npu"])
def test_a_pool_of_a_platform_that_is_not_here_is_refused_with_what_it_says(packages, monkeypatch, name, tmp_path):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    monkeypatch.setattr(xpu, "DRM", tmp_path)
    monkeypatch.setattr(npu, "DEVICES", tmp_path)
    _, reason = said(name)
    monkeypatch.setattr(torch.version, "hip", "6.4" if name == "rocm" else None)
    worker = types.SimpleNamespace(device=torch.device("cuda" if name == "rocm" else "xpu", 0))
    if name == "npu":  # torch knows the name once torch_npu is loaded
        worker = types.SimpleNamespace(device=types.SimpleNamespace(type="npu", index=0))
    config = StageConfig(kind="ar", model="x", runtime="torch")
    for refuse in (lambda: platforms.create_pool(f"{name}:0"), lambda: make_pool(worker, config)):
        with pytest.raises(UnsupportedError) as caught:
            refuse()
        assert reason in str(caught.value)


def test_where_it_is_here_stages_of_our_own_are_still_refused(packages, monkeypatch):
    monkeypatch.setattr(rocm, "why_not", lambda: None)
    with pytest.raises(UnsupportedError, match="on rocm this version puts vLLM stages to sleep"):
        platforms.create_pool("rocm")


def made_by(monkeypatch, platform, machine):
    """The pool that a platform's module makes of the modules that it imports, which are the machine's fakes."""
    modules = {
        "rocm": {"amdsmi": getattr(machine, "smi", None), "vllm.device_allocator.cumem": machine.module},
        "xpu": {"vllm.device_allocator.xpumem": machine.module},
        "npu": {
            "acl": types.SimpleNamespace(rt=getattr(machine, "acl", None)),
            "torch_npu": types.SimpleNamespace(npu=machine.torch_device),
            "vllm_ascend.device_allocator.camem": machine.module,
        },
    }[platform]
    packages = types.ModuleType("vllm.device_allocator")
    packages.cumem = packages.xpumem = machine.module
    for name in ("vllm", "vllm_ascend", "vllm_ascend.device_allocator"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator", packages)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr({"rocm": rocm, "xpu": xpu, "npu": npu}[platform], "why_not", lambda: None)
    return platforms.vllm_pool(platform, 0)


@pytest.mark.parametrize(
    ("platform", "machine_class", "flag"),
    [
        ("rocm", RocmMachine, "cumem_available"),
        ("xpu", XpuMachine, "xpumem_available"),
        ("npu", NpuMachine, "camem_available"),
    ],
)
def test_a_platforms_module_makes_the_pool_of_what_vllm_has_allocated(monkeypatch, platform, machine_class, flag):
    machine = machine_class()
    if platform == "rocm":
        for name in ("set_device", "synchronize", "get_device_name", "get_device_properties", "mem_get_info"):
            monkeypatch.setattr(torch.cuda, name, getattr(machine.torch_device, name))
    if platform == "xpu":
        monkeypatch.setattr(torch, "xpu", machine.torch_device)
        monkeypatch.setattr(sysman, "loader", lambda: machine.sysman)
    if platform == "npu":
        monkeypatch.setattr("omni_notebook.memory.device.npu_probe._npu_smi", machine.smi)
    with pytest.raises(UnsupportedError, match=r"vLLM has allocated nothing on .*enable_sleep_mode=True"):
        made_by(monkeypatch, platform, machine)
    machine.tensor("weights", (5,))
    pool = made_by(monkeypatch, platform, machine)
    assert (pool.platform, pool.tags()["weights"].span_bytes) == (platform, 2 * MIB)
    setattr(machine.module, flag, False)
    with pytest.raises(UnsupportedError, match=rf"{platform}: .* could not be loaded"):
        made_by(monkeypatch, platform, machine)


def test_a_pool_is_made_only_over_what_can_be_unmapped():
    machine = XpuMachine()
    driver = XpuDriver(0, machine.module, torch=machine.torch)
    probe = SysmanProbe(0, machine.sysman, xpu=machine.torch_device)
    with pytest.raises(UnsupportedError, match="on xpu:0 that can be unmapped"):
        pool_over(driver, probe)


@pytest.mark.parametrize("device", ["cuda:0", "xpu:0", "npu:3"])
def test_acks_of_every_device_allow_two_percent_or_64_mib(device):
    assert tolerance_bytes(1024 * MIB, device) == 64 * MIB
    assert tolerance_bytes(100 * 1024 * MIB, device) == 0.02 * 100 * 1024 * MIB
    assert tolerance_bytes(16 * MIB, device) == 4 * MIB
