"""AMD GPUs: whether vLLM stages can sleep here, and the pool that does it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from omni_notebook.memory.device.support import PlatformInfo, folders_of, refuse, version_of, whole, why_no_extension

if TYPE_CHECKING:
    from omni_notebook.memory.base import MemoryPool


def describe() -> PlatformInfo:
    """Whether vLLM stages can sleep on this machine's AMD GPUs."""
    how = f"for vLLM stages, over the allocator of vLLM {version_of('vllm')} built for HIP; measured by AMD SMI"
    return whole("rocm", why_not(), how)


def why_not() -> str | None:
    """Why there is no pool here and what to install, or None."""
    smi = _amdsmi()
    if smi is None:
        return "the amdsmi package is not installed; it comes with ROCm (pip install <ROCm>/share/amd_smi)"
    try:
        smi.amdsmi_init()
        if not smi.amdsmi_get_processor_handles():
            return "the AMD driver knows no GPU"
    except smi.AmdSmiException as error:
        return f"the AMD driver can not be asked ({' '.join(str(error).split())})"
    missing = why_no_extension("vllm", "cumem_allocator")
    if missing == "is not installed":
        return "vLLM is not installed; on rocm this version puts vLLM stages to sleep, no others: install vLLM for ROCm"
    if missing is not None or not any(list(folder.glob("_rocm_C*.so")) for folder in folders_of("vllm")):
        return "the vLLM that is installed was not built for ROCm with its allocator extension; install vLLM for ROCm"
    return None


def _amdsmi() -> Any:
    try:
        return importlib.import_module("amdsmi")
    except (ImportError, OSError, KeyError):  # the last two: the package is there, the library it loads is not
        return None


def pool(index: int) -> MemoryPool:
    """The pool over vLLM's allocator in this process, for torch's device `index`; vLLM has loaded its model.

    Raises:
        UnsupportedError: there is no such allocator, or vLLM does not use it; names the reason.
    """
    refuse("rocm", why_not())
    import torch  # noqa: PLC0415  (heavy)
    from vllm.device_allocator import cumem  # noqa: PLC0415  (takes seconds)

    from omni_notebook.memory.cumem import pool_over  # noqa: PLC0415  (loads torch)
    from omni_notebook.memory.device.amdsmi_probe import AmdsmiProbe  # noqa: PLC0415
    from omni_notebook.memory.device.rocm_driver import RocmDriver  # noqa: PLC0415

    if not cumem.cumem_available:
        refuse("rocm", "vLLM's allocator extension could not be loaded; install vLLM for ROCm")
    return pool_over(RocmDriver(index, cumem, cuda=torch.cuda), AmdsmiProbe(index, _amdsmi(), cuda=torch.cuda))
