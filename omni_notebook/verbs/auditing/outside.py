"""What processes hold, as others than they themselves see it: /proc from a process of its own, NVML from the driver."""

from __future__ import annotations

import importlib
import json
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import psutil

from omni_notebook.errors import OmniError
from omni_notebook.memory.device.visible import visible_handle
from omni_notebook.verbs.auditing.child import Child
from omni_notebook.verbs.auditing.record import Source

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

STEADY_BYTES = 64 * 1024
STEADY_S = 0.03
_LOOKS = 12

Seat = tuple[int | None, str]
"""A process on a device: its id and the device's name."""


class Seen(NamedTuple):
    """What a process holds on a device and who says so, or why nobody can."""

    n_bytes: int | None
    source: Source | None
    why_not: str | None = None


class Outside:
    """Looks at processes from outside; use it as a context.

    On the device `cpu` a process holds its anonymous memory, which is what pools are made of: pages of files
    (libraries, the spill file that is the tier below) are not in it. On `cuda` it holds what NVML says.
    """

    def __init__(self) -> None:
        self._child: Child | None = None
        self._nvml = _Nvml()

    @property
    def pid(self) -> int | None:
        """The process that looks; None as long as none had to."""
        return None if self._child is None else self._child.pid

    def look(self, seats: Collection[Seat]) -> dict[Seat, Seen]:
        """What they hold now: the last of several looks, of which two in a row agree within `STEADY_BYTES`."""
        before = self._once(seats)
        for _ in range(_LOOKS):
            time.sleep(STEADY_S)
            now = self._once(seats)
            if all(_near(before[seat], now[seat]) for seat in seats):
                return now
            before = now
        return before

    def _once(self, seats: Collection[Seat]) -> dict[Seat, Seen]:
        on_cpu = {pid for pid, device in seats if device == "cpu" and pid is not None}
        smaps = self._read({pid for pid in on_cpu if _is_ours(pid)})
        return {seat: self._seen(seat, smaps) for seat in seats}

    def _seen(self, seat: Seat, smaps: dict[int, dict[str, int] | str]) -> Seen:
        pid, device = seat
        if pid is None:
            return Seen(None, None, "the rank has no process")
        if device != "cpu":
            return self._nvml.seen(pid, device)
        if pid not in smaps:
            ours = "does not come from this one" if psutil.pid_exists(pid) else "is not there, or not on this machine"
            return Seen(None, None, f"process {pid} {ours}")
        found = smaps[pid]
        if isinstance(found, str):
            return Seen(None, None, found)
        return Seen(found["anonymous"] + found.get("swap", 0), Source.SMAPS)

    def _read(self, pids: set[int]) -> dict[int, dict[str, int] | str]:
        if not pids:
            return {}
        try:
            if self._child is None:
                self._child = Child("reader.py")
            answer: dict[str, dict[str, int] | str] = json.loads(self._child.ask(" ".join(map(str, pids))))
        except (OSError, OmniError) as error:
            self.close()
            return dict.fromkeys(pids, f"nobody could look from outside: {error}")
        return {int(pid): found for pid, found in answer.items()}

    def close(self) -> None:
        """End the process that looks; idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.close()
        self._nvml.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _near(one: Seen, other: Seen) -> bool:
    if one.n_bytes is None or other.n_bytes is None:
        return one == other
    return abs(one.n_bytes - other.n_bytes) <= STEADY_BYTES


def _is_ours(pid: int) -> bool:
    """Whether it is this process or comes from it: a rank elsewhere may have the same number."""
    if pid == os.getpid():
        return True
    try:
        return any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


class _Nvml:
    """The driver's view of processes on CUDA devices, where `nvidia-ml-py` and a driver are there."""

    def __init__(self) -> None:
        self._library: Any = None
        self._why_not: str | None = None

    def seen(self, pid: int, device: str) -> Seen:
        """What a process holds on a device."""
        library = self._opened()
        if library is None:
            return Seen(None, None, self._why_not)
        try:
            handle = visible_handle(library, device)
            found = [one for one in library.nvmlDeviceGetComputeRunningProcesses(handle) if one.pid == pid]
        except (library.NVMLError, ValueError) as error:
            return Seen(None, None, f"NVML: {error}")
        if not found or found[0].usedGpuMemory is None:
            return Seen(None, None, f"NVML does not show process {pid} (its ids are those of another namespace)")
        return Seen(sum(one.usedGpuMemory for one in found), Source.NVML)

    def _opened(self) -> Any:
        if self._library is None and self._why_not is None:
            try:
                library: Any = importlib.import_module("pynvml")
                library.nvmlInit()
                self._library = library
            except Exception as error:  # noqa: BLE001  (no package, no driver, no device: all mean the same here)
                self._why_not = f"NVML is not available here: {error}"
        return self._library

    def close(self) -> None:
        """Let go of the driver."""
        library, self._library = self._library, None
        if library is not None:
            library.nvmlShutdown()
