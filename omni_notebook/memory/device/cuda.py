"""NVIDIA GPUs: whether vLLM stages can sleep here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.memory.device.support import PlatformInfo, version_of, why_no_extension

if TYPE_CHECKING:
    from omni_notebook.memory.base import MemoryPool


def describe() -> PlatformInfo:
    """Whether vLLM stages can sleep on this machine's NVIDIA GPUs."""
    reason = _why_not()
    if reason is not None:
        return PlatformInfo(platform="cuda", supported=False, reason=reason)
    how = f"for vLLM stages, over the allocator of vLLM {version_of('vllm')}; measured by NVML"
    return PlatformInfo(platform="cuda", supported=True, reason=how)


def _why_not() -> str | None:
    no_gpu = _why_no_gpu()
    if no_gpu is not None:
        return f"cuda: {no_gpu}"
    missing = why_no_extension("vllm", "cumem_allocator")
    if missing == "is not installed":
        return "vLLM is not installed; on cuda this version puts vLLM stages to sleep, no others"
    return (
        None if missing is None else "cuda: the vLLM that is installed was built without its CUDA allocator extension"
    )


def _why_no_gpu() -> str | None:
    try:
        import pynvml  # noqa: PLC0415  (only CUDA machines have it)
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        return None if pynvml.nvmlDeviceGetCount() else "the NVIDIA driver knows no GPU"
    except pynvml.NVMLError as error:
        return f"the NVIDIA driver can not be asked ({error})"


def pool(index: int) -> MemoryPool:
    """The pool over vLLM's allocator in this process; see `memory.cumem.cumem_pool`.

    Raises:
        UnsupportedError: there is none; names the reason.
    """
    from omni_notebook.memory.cumem import cumem_pool  # noqa: PLC0415  (asks the device)

    return cumem_pool(index)
