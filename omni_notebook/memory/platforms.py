"""Which platforms have a memory pool here, and why others have none."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import UnsupportedError
from omni_notebook.memory.device.support import PlatformInfo

if TYPE_CHECKING:
    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.memory.cpu import Backup

_LINUX_LEAST = (5, 14)  # MADV_POPULATE_WRITE
VLLM_PLATFORMS = ("cuda", "rocm", "xpu", "npu")
"""Where vLLM stages can be put to sleep, over vLLM's own allocator; `memory.device` has a module for each."""


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


def describe_platforms() -> list[PlatformInfo]:
    """Every platform that this project knows, as it stands on this machine."""
    return [_describe_cpu(), *(_module(name).describe() for name in VLLM_PLATFORMS)]


def _module(platform: str) -> Any:
    """The module that describes a platform of vLLM's and makes its pools."""
    return importlib.import_module(f"omni_notebook.memory.device.{platform}")


def vllm_pool(platform: str, index: int) -> MemoryPool:
    """The pool over the allocator with which vLLM, in this process, has loaded a model.

    Args:
        platform: one of `VLLM_PLATFORMS`.
        index: torch's number of the device.

    Raises:
        UnsupportedError: there is none here; names the reason and what to install.
    """
    pool: MemoryPool = _module(platform).pool(index)
    return pool


def create_pool(
    device: str, *, spill_dir: str | None = None, backup: Backup = "spill", enable_sleep_mode: bool = True
) -> MemoryPool:
    """A pool for a stage of our own.

    Args:
        device: "cpu", "cuda" (the first), "cuda:1", or "auto": a GPU where there is one that can be used.
        spill_dir: where a CPU pool's backups go.
        backup: "checkpoint" is for CPU pools.
        enable_sleep_mode: False refuses.

    Raises:
        UnsupportedError: another device, a kernel that is too old, or sleep mode is off; says which.
        ArgumentError: `backup` is unknown.
    """
    if not enable_sleep_mode:
        msg = "enable_sleep_mode=False: there is no pool to put to sleep; start the engine with enable_sleep_mode=True"
        raise UnsupportedError(msg)
    known = {info.platform: info for info in describe_platforms()}
    platform, _, number = device.partition(":")
    if number and not (number.isascii() and number.isdigit()):
        msg = f"device {device!r}: after the colon comes the number of a device, like 'cuda:0'"
        raise UnsupportedError(msg)
    if platform == "auto":
        platform = "cuda" if known["cuda"].supported and _module("cuda").is_usable() else "cpu"
    if platform not in known:
        msg = f"device {device!r} is unknown; known are: {', '.join(known)}"
        raise UnsupportedError(msg)
    if not known[platform].supported:
        msg = f"device {device!r}: {known[platform].reason}; use device='cpu'"
        raise UnsupportedError(msg)
    if platform == "cuda":
        if backup != "spill":
            msg = f"device {device!r}: backup={backup!r} is for stages on a CPU; a GPU's level 1 copies to host memory"
            raise UnsupportedError(msg)
        pool: MemoryPool = _module("cuda").own_pool(int(number or 0))
        return pool
    if platform in VLLM_PLATFORMS:
        msg = f"device {device!r}: on {platform} this version puts vLLM stages to sleep (runtime='vllm'), no others"
        raise UnsupportedError(msg)
    from omni_notebook.memory.cpu import CpuPool  # noqa: PLC0415 - loads torch

    return CpuPool(spill_dir, backup)
