"""What a process holds on an AMD GPU, as the driver tells it (AMD SMI).

Source: amdsmi_interface.py of ROCm 6 (`amdsmi_get_gpu_process_list`, `amdsmi_get_gpu_memory_usage`,
`amdsmi_get_gpu_enumeration_info`). Not run on hardware.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from omni_notebook.memory.device.measuring import device_lock, not_measured, used_bytes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class AmdsmiProbe:
    """Measures one AMD GPU for this process.

    Args:
        index: torch's number of the device.
        amdsmi: the module, or None where it is not installed.
        cuda: `torch.cuda`, which on ROCm is HIP.
    """

    def __init__(self, index: int, amdsmi: Any, *, cuda: Any) -> None:
        self._index = index
        self._cuda = cuda
        self._pid = os.getpid()
        self._smi = amdsmi
        self._uuid = _hip_uuid(cuda.get_device_properties(index))
        self._handle = None if amdsmi is None or self._uuid is None else _handle(amdsmi, self._uuid)
        self.device_source = "hipMemGetInfo" if self._handle is None else "AMD SMI"

    def process_bytes(self) -> int | None:
        """See `Probe.process_bytes`: VRAM; None also where AMD SMI is not there or does not tell bytes."""
        if self._handle is None:
            return None
        try:
            running = self._smi.amdsmi_get_gpu_process_list(self._handle)
        except self._smi.AmdSmiException as error:
            raise not_measured(error, source="AMD SMI") from error
        ours = [_vram(process) for process in running if isinstance(process, dict) and process["pid"] == self._pid]
        known = [n_bytes for n_bytes in ours if n_bytes is not None]
        return sum(known) if ours and len(known) == len(ours) else None

    def device_bytes(self) -> int:
        """See `Probe.device_bytes`: VRAM, by AMD SMI where it knows the device, else by the HIP runtime."""
        if self._handle is None:
            return used_bytes(self._cuda, self._index)
        try:
            return int(self._smi.amdsmi_get_gpu_memory_usage(self._handle, self._smi.AmdSmiMemoryType.VRAM))
        except self._smi.AmdSmiException as error:
            raise not_measured(error, source="AMD SMI") from error

    def exclusive(self) -> AbstractContextManager[bool]:
        """See `device_lock`."""
        return device_lock(self._uuid or f"rocm-{self._index}")


def _vram(process: dict[str, Any]) -> int | None:
    n_bytes = process["memory_usage"]["vram_mem"]
    return n_bytes if isinstance(n_bytes, int) else None  # "N/A"


def _hip_uuid(properties: Any) -> str | None:
    """The device's id as AMD SMI writes HIP's: HIP's sixteen bytes are hexadecimal digits already."""
    try:
        return "GPU-" + bytes(properties.uuid.bytes).decode("ascii").strip("\0")
    except (AttributeError, TypeError, UnicodeDecodeError):
        return None


def _handle(smi: Any, uuid: str) -> Any:
    """AMD SMI's handle of the device, or None."""
    try:
        smi.amdsmi_init()
        for handle in smi.amdsmi_get_processor_handles():
            if smi.amdsmi_get_gpu_enumeration_info(handle)["hip_uuid"] == uuid:
                return handle
    except (smi.AmdSmiException, AttributeError):  # older ones have no enumeration_info
        return None
    return None
