"""What a process holds on an NVIDIA GPU, as the driver tells it (NVML)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from omni_notebook.memory.device.measuring import device_lock, not_measured, used_bytes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class NvmlProbe:
    """Measures one CUDA device for this process.

    Args:
        index: torch's number of the device.
        nvml: `pynvml`, or None where it is not installed.
        cuda: `torch.cuda`.
    """

    device_source = "torch.cuda.mem_get_info"

    def __init__(self, index: int, nvml: Any, *, cuda: Any = torch.cuda) -> None:
        self._index = index
        self._cuda = cuda
        self._pid = os.getpid()
        self._uuid = str(cuda.get_device_properties(index).uuid)
        self._nvml = nvml
        self._handle = None if nvml is None else _handle(nvml, self._uuid)

    def process_bytes(self) -> int | None:
        """See `Probe.process_bytes`; None also where NVML is not there or does not tell bytes."""
        if self._handle is None:
            return None
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError as error:
            raise not_measured(error, source="NVML") from error
        ours = [process.usedGpuMemory for process in running if process.pid == self._pid]
        return None if not ours or None in ours else sum(ours)

    def device_bytes(self) -> int:
        """See `Probe.device_bytes`."""
        return used_bytes(self._cuda, self._index)

    def exclusive(self) -> AbstractContextManager[bool]:
        """See `device_lock`."""
        return device_lock(self._uuid)


def _handle(nvml: Any, uuid: str) -> Any:
    """NVML's handle of the device with torch's `uuid`, or None."""
    try:
        nvml.nvmlInit()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return nvml.nvmlDeviceGetHandleByUUID(name)
    except nvml.NVMLError:
        return None


def nvml_probe(index: int) -> NvmlProbe:
    """The probe of this process, with whatever NVML there is."""
    try:
        import pynvml  # noqa: PLC0415  (only CUDA machines have it)
    except ImportError:
        return NvmlProbe(index, None)
    return NvmlProbe(index, pynvml)
