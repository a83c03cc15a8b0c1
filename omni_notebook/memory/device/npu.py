"""Huawei NPUs: whether vLLM stages can sleep here, and the pool that does it."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from omni_notebook.memory.device.support import PlatformInfo, folders_of, refuse, version_of, whole, why_no_extension

if TYPE_CHECKING:
    from omni_notebook.memory.base import MemoryPool

DEVICES = Path("/dev")


def describe() -> PlatformInfo:
    """Whether vLLM stages can sleep on this machine's NPUs."""
    how = (
        f"for vLLM stages, over the allocator of vllm-ascend {version_of('vllm-ascend')}; measured by npu-smi, "
        "else by CANN for the whole device"
    )
    return whole("npu", why_not(), how)


def why_not() -> str | None:
    """Why there is no pool here and what to install, or None."""
    if not list(DEVICES.glob("davinci[0-9]*")):
        return "the kernel knows no Ascend NPU"
    if not folders_of("vllm"):
        return "vLLM is not installed; on npu this version puts vLLM stages to sleep, no others: install vllm-ascend"
    missing = why_no_extension("vllm_ascend", "vllm_ascend_C")
    if missing is not None:
        return f"vllm-ascend {missing}: pip install vllm-ascend"
    if importlib.util.find_spec("acl") is None:
        return "pyACL is not on Python's path; source the CANN toolkit's set_env.sh"
    return None


def pool(index: int) -> MemoryPool:
    """The pool over vllm-ascend's allocator in this process, for torch's device `index`; the model is loaded.

    Raises:
        UnsupportedError: there is no such allocator, or vLLM does not use it; names the reason.
    """
    refuse("npu", why_not())
    runtime = importlib.import_module("acl").rt
    torch_npu = importlib.import_module("torch_npu")
    camem = importlib.import_module("vllm_ascend.device_allocator.camem")

    from omni_notebook.memory.cumem import pool_over  # noqa: PLC0415  (loads torch)
    from omni_notebook.memory.device.npu_driver import NpuDriver  # noqa: PLC0415
    from omni_notebook.memory.device.npu_probe import NpuProbe  # noqa: PLC0415

    if not camem.camem_available:
        refuse("npu", "vllm-ascend's allocator extension could not be loaded: pip install vllm-ascend")
    driver = NpuDriver(index, camem, runtime=runtime, npu=torch_npu.npu)
    return pool_over(driver, NpuProbe(index, runtime))
