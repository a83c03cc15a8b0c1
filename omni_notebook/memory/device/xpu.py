"""Intel GPUs: whether vLLM stages can sleep here, and the pool that does it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omni_notebook.memory.device.support import PlatformInfo, folders_of, refuse, version_of, whole, why_no_extension

if TYPE_CHECKING:
    from omni_notebook.memory.base import MemoryPool

DRM = Path("/sys/class/drm")
_INTEL = "0x8086"


def describe() -> PlatformInfo:
    """Whether vLLM stages can sleep on this machine's Intel GPUs."""
    how = (
        f"for vLLM stages, over the allocator of vLLM {version_of('vllm')} and vllm-xpu-kernels "
        f"{version_of('vllm-xpu-kernels')}; measured by Level Zero Sysman, else by torch.xpu for the whole device"
    )
    return whole("xpu", why_not(), how)


def why_not() -> str | None:
    """Why there is no pool here and what to install, or None."""
    if not any(_vendor(node) == _INTEL for node in DRM.glob("renderD*")):
        return "the kernel knows no Intel GPU"
    vllm = folders_of("vllm")
    if not vllm:
        return "vLLM is not installed; on xpu this version puts vLLM stages to sleep, no others: install vLLM for XPU"
    if not any((folder / "device_allocator" / "xpumem.py").is_file() for folder in vllm):
        return f"vLLM {version_of('vllm')} has no allocator for XPU; use vLLM 0.32"
    missing = why_no_extension("vllm_xpu_kernels", "xpumem_allocator")
    return None if missing is None else f"vllm-xpu-kernels {missing}: pip install vllm-xpu-kernels"


def _vendor(node: Path) -> str | None:
    try:
        return (node / "device" / "vendor").read_text(encoding="ascii").strip()
    except OSError:
        return None


def pool(index: int) -> MemoryPool:
    """The pool over vLLM's allocator in this process, for torch's device `index`; vLLM has loaded its model.

    Raises:
        UnsupportedError: there is no such allocator, or vLLM does not use it; names the reason.
    """
    refuse("xpu", why_not())
    import torch  # noqa: PLC0415  (heavy)
    from vllm.device_allocator import xpumem  # noqa: PLC0415  (takes seconds)

    from omni_notebook.memory.cumem import pool_over  # noqa: PLC0415  (loads torch)
    from omni_notebook.memory.device.sysman import SysmanProbe, loader  # noqa: PLC0415
    from omni_notebook.memory.device.xpu_driver import XpuDriver  # noqa: PLC0415

    if not xpumem.xpumem_available:
        refuse("xpu", "vLLM's allocator extension could not be loaded: pip install vllm-xpu-kernels")
    return pool_over(XpuDriver(index, xpumem, torch=torch), SysmanProbe(index, loader(), xpu=torch.xpu))
