"""Which platforms have a memory pool here, and why others have none."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from omni_notebook.errors import UnsupportedError

if TYPE_CHECKING:
    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.memory.cpu import Backup

_LINUX_LEAST = (5, 14)  # MADV_POPULATE_WRITE
_LATER = ("rocm", "xpu", "npu")


class PlatformInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One platform: whether a pool can be made, and why not, or how it measures."""

    platform: str
    supported: bool
    reason: str


def _why_no_cpu() -> str | None:
    if not sys.platform.startswith("linux"):
        return f"the cpu platform needs Linux (this is {sys.platform}); use a Linux machine, WSL2 or a remote engine"
    release = linux_release()
    if release < _LINUX_LEAST:
        return f"the cpu platform needs Linux 5.14 or newer (this is {release[0]}.{release[1]})"
    return None


def linux_release() -> tuple[int, int]:
    """The kernel's version, as (major, minor)."""
    major, minor, *_ = os.uname().release.split(".")
    digits = "".join(char for char in minor if char.isdigit())
    return int(major), int(digits or 0)


def _describe_cpu() -> PlatformInfo:
    reason = _why_no_cpu()
    if reason is not None:
        return PlatformInfo(platform="cpu", supported=False, reason=reason)
    from omni_notebook.memory.residency import has_pagemap_scan  # noqa: PLC0415 - only Linux has what it loads
    from omni_notebook.memory.tracking import why_not_tracked  # noqa: PLC0415

    measured = "PAGEMAP_SCAN" if has_pagemap_scan() else "smaps"
    untracked = why_not_tracked()
    tracked = "userfaultfd" if untracked is None else f"checksums ({untracked})"
    how = f"residency by {measured}, unchanged weights by {tracked}"
    return PlatformInfo(platform="cpu", supported=True, reason=how)


def _describe_cuda() -> PlatformInfo:
    """Whether vLLM stages can sleep on a GPU here; found out without torch, vLLM or a CUDA context."""
    reason = _why_no_vllm_on_cuda()
    if reason is not None:
        return PlatformInfo(platform="cuda", supported=False, reason=reason)
    how = f"for vLLM stages, over the allocator of vLLM {importlib.metadata.version('vllm')}; measured by NVML"
    return PlatformInfo(platform="cuda", supported=True, reason=how)


def _why_no_vllm_on_cuda() -> str | None:
    no_gpu = _why_no_nvidia_gpu()
    if no_gpu is not None:
        return f"cuda: {no_gpu}"
    vllm = importlib.util.find_spec("vllm")
    if vllm is None:
        return "vLLM is not installed; on cuda this version puts vLLM stages to sleep, no others"
    folders = [Path(folder) for folder in vllm.submodule_search_locations or ()]
    if not any(list(folder.glob("cumem_allocator*.so")) for folder in folders):
        return "cuda: the vLLM that is installed was built without its CUDA allocator extension"
    return None


def _why_no_nvidia_gpu() -> str | None:
    try:
        import pynvml  # noqa: PLC0415  (only CUDA machines have it)
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        return None if pynvml.nvmlDeviceGetCount() else "the NVIDIA driver knows no GPU"
    except pynvml.NVMLError as error:
        return f"the NVIDIA driver can not be asked ({error})"


def describe_platforms() -> list[PlatformInfo]:
    """Every platform that this project knows, as it stands on this machine."""
    later = [
        PlatformInfo(platform=name, supported=False, reason=f"this version has no {name} memory pool yet")
        for name in _LATER
    ]
    return [_describe_cpu(), _describe_cuda(), *later]


def create_pool(
    device: str, *, spill_dir: str | None = None, backup: Backup = "spill", enable_sleep_mode: bool = True
) -> MemoryPool:
    """A pool for a stage of our own on `device`: "cpu", or "auto" for the first platform that works here.

    Raises:
        UnsupportedError: another device, a kernel that is too old, or sleep mode is off; says which.
        ArgumentError: `backup` is unknown.
    """
    if not enable_sleep_mode:
        msg = "enable_sleep_mode=False: there is no pool to put to sleep; start the engine with enable_sleep_mode=True"
        raise UnsupportedError(msg)
    known = {info.platform: info for info in describe_platforms()}
    if device == "auto":
        device = next((name for name, info in known.items() if info.supported and name != "cuda"), "cpu")
    platform = device.partition(":")[0]
    if platform not in known:
        msg = f"device {device!r} is unknown; known are: {', '.join(known)}"
        raise UnsupportedError(msg)
    if not known[platform].supported:
        msg = f"device {device!r}: {known[platform].reason}; use device='cpu'"
        raise UnsupportedError(msg)
    if platform == "cuda":
        msg = f"device {device!r}: on cuda this version puts vLLM stages to sleep (runtime='vllm'), no others"
        raise UnsupportedError(msg)
    from omni_notebook.memory.cpu import CpuPool  # noqa: PLC0415 - loads torch

    return CpuPool(spill_dir, backup)
