"""NVIDIA GPUs: which stages can sleep here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.errors import UnsupportedError
from omni_notebook.memory.device.support import PlatformInfo, folders_of, version_of, why_no_extension

if TYPE_CHECKING:
    from omni_notebook.memory.base import MemoryPool


def describe() -> PlatformInfo:
    """Which stages can sleep on this machine's NVIDIA GPUs; told without torch."""
    reason = _why_no_gpu() or _why_no_torch()
    if reason is not None:
        return PlatformInfo(platform="cuda", supported=False, reason=f"cuda: {reason}")
    missing = why_no_extension("vllm", "cumem_allocator")
    vllm = f"vLLM {missing}" if missing else f"vLLM stages over the allocator of vLLM {version_of('vllm')}"
    return PlatformInfo(platform="cuda", supported=True, reason=f"stages of our own; {vllm}; measured by NVML")


def _why_no_torch() -> str | None:
    if not any(list((folder / "lib").glob("libtorch_cuda*.so")) for folder in folders_of("torch")):
        return "the torch that is installed was built without CUDA"
    return None


def is_usable() -> bool:
    """Whether torch, which this loads, can use a GPU in this process."""
    import torch  # noqa: PLC0415

    return bool(torch.cuda.is_available())


def own_pool(index: int) -> MemoryPool:
    """A pool for a stage of our own; see `memory.cuda.cuda_pool`.

    Raises:
        UnsupportedError: torch can not use such a device.
    """
    import torch  # noqa: PLC0415  (says what this process may use)

    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or index >= count:
        msg = (
            f"cuda:{index}: torch sees {count} CUDA devices here (CUDA_VISIBLE_DEVICES says which); start fewer ranks, "
            "name others in devices=[…], or use device='cpu'"
        )
        raise UnsupportedError(msg)
    from omni_notebook.memory.cuda import cuda_pool  # noqa: PLC0415  (asks the device)

    return cuda_pool(index)


def _why_no_gpu() -> str | None:
    try:
        import pynvml  # noqa: PLC0415  (only CUDA machines have it)
    except ImportError:
        return "nvidia-ml-py, which measures, is not installed; pip install nvidia-ml-py"
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
