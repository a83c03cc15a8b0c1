"""The most memory that this process held during a piece of code: measured by the kernel, or sampled."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLE_S = 0.01
_RESET_HIGH_WATER = "5"
_NEAR_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Peak:
    """`high_bytes`: the most that was resident, `begin_bytes`: what was at the beginning; `how` it was measured."""

    begin_bytes: int
    high_bytes: int
    how: str

    @property
    def own_bytes(self) -> int:
        """What the code itself took at its peak."""
        return max(0, self.high_bytes - self.begin_bytes)


class PeakWatch:
    """Watches from its making until `end`; several may watch at once, also one inside another.

    The kernel keeps the high-water mark (VmHWM) of a process, and lets it be set back to the present: the value 5 in
    proc_pid_clear_refs(5). Where it does not, a thread samples.
    """

    _lock = threading.Lock()
    _watching: set[PeakWatch] = set()  # noqa: RUF012  (shared on purpose: the mark is the process's)

    def __init__(self, *, sampled: bool = False) -> None:
        self._highest = 0
        self._sampler: _Sampler | None = None
        with self._lock:
            by_kernel = not sampled and self._reset()
            self._begin = _field("VmRSS") if by_kernel else psutil.Process().memory_info().rss
            if by_kernel:
                self._watching.add(self)
        if not by_kernel:
            self._sampler = _Sampler()

    def _reset(self) -> bool:
        """Set the mark back; whether that worked. Who watches already keeps what was seen until now."""
        mark = _field("VmHWM")
        for other in self._watching:
            other._highest = max(other._highest, mark)  # noqa: SLF001  (its own class)
        try:
            Path("/proc/self/clear_refs").write_text(_RESET_HIGH_WATER, encoding="ascii")
        except OSError:
            return False
        return _field("VmHWM") - _field("VmRSS") <= _NEAR_BYTES

    def end(self) -> Peak:
        """What was seen; the watch is over."""
        if self._sampler is not None:
            return Peak(self._begin, self._sampler.end(), f"psutil, every {SAMPLE_S * 1000:.0f} ms")
        with self._lock:
            self._watching.discard(self)
            return Peak(self._begin, max(self._highest, _field("VmHWM")), "VmHWM")


class _Sampler:
    """A thread that looks every `SAMPLE_S`."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._highest = self._process.memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="omni-peak", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._highest = max(self._highest, self._process.memory_info().rss)

    def end(self) -> int:
        """The highest of all samples, the last one taken now."""
        self._stop.set()
        self._thread.join()
        return max(self._highest, self._process.memory_info().rss)


def _field(name: str) -> int:
    """A size in /proc/self/status, bytes; 0 where it is not there."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) * 1024
    return 0
