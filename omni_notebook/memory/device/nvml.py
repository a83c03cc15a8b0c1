"""What a process holds on a GPU, as the driver tells it (NVML), and the lock around device-wide measurements."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK_WAIT_S = 2.0


class NvmlProbe:
    """Measures one CUDA device for this process.

    Args:
        index: torch's number of the device.
        nvml: `pynvml`, or None where it is not installed.
        cuda: `torch.cuda`.
    """

    def __init__(self, index: int, nvml: Any, *, cuda: Any = torch.cuda) -> None:
        self._index = index
        self._cuda = cuda
        self._pid = os.getpid()
        self._uuid = str(cuda.get_device_properties(index).uuid)
        self._nvml = nvml
        self._handle = None if nvml is None else _handle(nvml, self._uuid)

    def process_bytes(self) -> int | None:
        """What this process holds; None where NVML is not there, hides process ids or does not tell bytes."""
        if self._handle is None:
            return None
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return None
        ours = [process.usedGpuMemory for process in running if process.pid == self._pid]
        return None if not ours or None in ours else sum(ours)

    def device_bytes(self) -> int:
        """What all processes hold."""
        free, total = self._cuda.mem_get_info(self._index)
        return int(total - free)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Hold the device's file lock, for at most two seconds of waiting; False: it was not to be had."""
        path = Path(tempfile.gettempdir()) / f"omni_notebook-{self._uuid}.lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError:
            yield False
            return
        try:
            yield _locked(fd)
        finally:
            os.close(fd)


def _locked(fd: int) -> bool:
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        else:
            return True


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
