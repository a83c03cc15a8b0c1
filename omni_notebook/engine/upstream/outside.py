"""What ranks' processes hold on their devices, looked at from here: NVML a process on CUDA, smaps on a CPU.

Nothing that a rank says of itself is in these numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from omni_notebook.memory.device.visible import visible_handle
from omni_notebook.worker.ack import TOLERANCE_FLOOR_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection

STEADY_BYTES = 64 * 1024
STEADY_S = 0.03
_LOOKS = 12
_ON_CPU = ("Anonymous", "Swap")


class Seen(NamedTuple):
    """What a process holds on its devices, bytes, or why nobody can tell.

    `gone`: the process has ended.
    """

    n_bytes: int | None
    device: str
    why_not: str | None = None
    gone: bool = False


class Look(NamedTuple):
    """One look: processes by their ids, and what all holders together have on the devices; None = not told."""

    processes: dict[int, Seen]
    devices_bytes: int | None = None


class Outside:
    """Looks at processes on one kind of device.

    Args:
        device_type: "cpu" reads /proc; anything else asks NVML, which knows CUDA alone.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._nvml: Any = None
        self._why_not: str | None = None
        self._handles: dict[str, Any] = {}

    @property
    def means(self) -> str:
        """Who measures, in words."""
        return "smaps" if self.device_type == "cpu" else "NVML per process"

    @property
    def floor_bytes(self) -> int:
        """A change below this is noise."""
        return TOLERANCE_FLOOR_BYTES["cpu" if self.device_type == "cpu" else "cuda"]

    def look(self, pids: Collection[int]) -> dict[int, Seen]:
        """What they hold now: the last of several looks, of which two in a row agree within `STEADY_BYTES`. Blocks."""
        before = self.glance(pids)
        for _ in range(_LOOKS):
            time.sleep(STEADY_S)
            now = self.glance(pids)
            if all(_near(before[pid], now[pid]) for pid in pids):
                return now
            before = now
        return before

    def glance(self, pids: Collection[int]) -> dict[int, Seen]:
        """What they hold now, one look."""
        if self.device_type == "cpu":
            return {pid: _on_cpu(pid) for pid in pids}
        return self._on_cuda(pids)

    def devices_bytes(self) -> int | None:
        """What all processes, whoever's, hold on the devices that this one may use; None on a CPU or where not told."""
        if self.device_type == "cpu":
            return None
        try:
            return sum(int(self._nvml.nvmlDeviceGetMemoryInfo(one).used) for one in self._devices().values())
        except Exception:  # noqa: BLE001  (as in `_on_cuda`: nobody can tell)
            return None

    def holders(self, pids: Collection[int]) -> set[int]:
        """Those of the processes that hold memory on a GPU; none where that is not told."""
        return (
            {pid for pid, seen in self._on_cuda(pids).items() if seen.n_bytes} if self.device_type != "cpu" else set()
        )

    def _on_cuda(self, pids: Collection[int]) -> dict[int, Seen]:
        held: dict[int, dict[str, int | None]] = {}
        try:
            for name, handle in self._devices().items():
                for one in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    held.setdefault(one.pid, {})[name] = one.usedGpuMemory
        except Exception as error:  # noqa: BLE001  (no package, no driver, a driver's own errors: nobody can tell)
            return {pid: self._blind(pid, f"NVML: {error}") for pid in pids}
        return {pid: self._of(pid, held.get(pid)) for pid in pids}

    def _of(self, pid: int, held: dict[str, int | None] | None) -> Seen:
        if held is None:
            return self._blind(pid, f"NVML does not show process {pid} (its ids are those of another namespace)")
        if None in held.values():
            return self._blind(pid, f"NVML does not tell the bytes of process {pid}")
        sizes = {name: n_bytes or 0 for name, n_bytes in held.items()}
        return Seen(sum(sizes.values()), max(sizes, key=sizes.__getitem__))

    def _blind(self, pid: int, why_not: str) -> Seen:
        gone = _has_ended(pid)
        return Seen(None, self.device_type, f"process {pid} has ended" if gone else why_not, gone)

    def _devices(self) -> dict[str, Any]:
        """`{"cuda:0": handle}` of the devices that this process may use."""
        if self._nvml is None:
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            for number in range(nvml.nvmlDeviceGetCount()):
                with contextlib.suppress(ValueError):
                    self._handles[f"cuda:{number}"] = visible_handle(nvml, f"cuda:{number}")
        return self._handles

    def name(self, device: str) -> str | None:
        """The device's own name, where the driver tells it."""
        if device not in self._handles:
            return None
        found = self._nvml.nvmlDeviceGetName(self._handles[device])
        return found.decode(errors="replace") if isinstance(found, bytes) else str(found)

    def close(self) -> None:
        """Let go of the driver."""
        nvml, self._nvml = self._nvml, None
        self._handles.clear()
        if nvml is not None:
            nvml.nvmlShutdown()


def _near(one: Seen, other: Seen) -> bool:
    if one.n_bytes is None or other.n_bytes is None:
        return one.gone == other.gone and one.n_bytes == other.n_bytes
    return abs(one.n_bytes - other.n_bytes) <= STEADY_BYTES


def _has_ended(pid: int) -> bool:
    """Whether it is not there, or a zombie that nobody has read."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _on_cpu(pid: int) -> Seen:
    """Anonymous memory: pages of files, libraries and a backup on disk among them, are not in it."""
    path = Path(f"/proc/{pid}/smaps_rollup")
    try:
        text = path.read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return Seen(None, "cpu", f"process {pid} has ended", gone=True)
    except OSError as error:
        return Seen(None, "cpu", f"{path}: {error.strerror}")
    pairs = (line.partition(":") for line in text.splitlines())
    found = {key: int(value.split()[0]) * 1024 for key, _, value in pairs if key in _ON_CPU}
    if "Anonymous" not in found:
        return Seen(None, "cpu", f"process {pid} has ended", gone=True)
    return Seen(sum(found.values()), "cpu")
