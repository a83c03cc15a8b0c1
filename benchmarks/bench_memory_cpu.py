"""The CPU pool against the memory bus: sleep, wake and clean repeat of 1 GiB beside warm memcpy, interleaved.

    python -m benchmarks.bench_memory_cpu                 1 GiB, 15 rounds
    python -m benchmarks.bench_memory_cpu --quick         128 MiB, 3 rounds: does it run at all
    python -m benchmarks.bench_memory_cpu --out f.json --check --spill-dir /dev/shm

A round does everything once, so that a busy neighbour slows all alike; figures are medians of rounds, a percentage
is the median of the rounds' own quotients. The floor is memcpy in 2 MiB pieces between two warm buffers of huge pages,
on one thread, which the budget is written for; the pool copies on two, so the same on two stands beside it. Where other
processes took a tenth of the machine or more, a miss is "not resolved".
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from benchmarks import Figure
from omni_notebook.memory.arena import CHUNK, Chunk, Segment
from omni_notebook.memory.checksum import sum_segments
from omni_notebook.memory.cpu import CpuPool
from omni_notebook.memory.lanes import default_lanes, run_lanes
from omni_notebook.memory.tracking import why_not_tracked
from omni_notebook.protocol import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 15
SLEEP_BAR, WAKE_BAR = 75.0, 65.0
CLEAN_BAR_MS = 5.0
RESOLVED_UNDER = 0.1  # of the machine, used by others

Times = dict[str, list[float]]


def copy_chunks(source: int, target: Segment, lanes: int) -> None:
    """The floor: memcpy by chunks."""

    def work(chunk: Chunk) -> None:
        ctypes.memmove(target.address + chunk.offset, source + chunk.offset, CHUNK)

    run_lanes(target.chunks(), work, lanes=lanes)


class Rounds:
    """One pool of `n_bytes`, a buffer for the floor, and the times of each step."""

    def __init__(self, n_bytes: int, spill_dir: str) -> None:
        self.times: Times = defaultdict(list)
        self.buffer = Segment(n_bytes)
        self.pool = CpuPool(spill_dir)
        self.weights = self.pool.empty((n_bytes,), torch.uint8, "weights", recomputable=False)
        self.weights.random_()
        self.pool.write_ahead()
        self.pool.wait_write_ahead(600)

    def timed(self, name: str, step: Callable[[], object]) -> None:
        """Run a step and note its seconds."""
        started = time.perf_counter()
        step()
        self.times[name].append(time.perf_counter() - started)

    def dirty(self) -> None:
        """Write every page, as a trainer would."""
        self.weights.view(torch.int64).add_(1)

    def sleep(self) -> None:
        """A whole level-1 sleep."""
        self.pool.prepare_sleep(1)
        self.pool.commit_sleep()

    def wake(self) -> None:
        """A whole wake, in one pass."""
        self.pool.map_restore()
        self.pool.commit_wake()

    def wake_by_steps(self) -> None:
        """A whole wake, mapped first and filled after."""
        self.pool.map()
        self.pool.restore()
        self.pool.commit_wake()

    def run(self) -> None:
        """One round."""
        lanes, source = default_lanes(), self.weights.data_ptr()
        self.dirty()
        self.timed("memcpy on 1 thread", lambda: copy_chunks(source, self.buffer, 1))
        self.timed("sleep", self.sleep)
        self.timed("wake", self.wake)
        self.timed(f"memcpy on {lanes} threads", lambda: copy_chunks(source, self.buffer, lanes))
        self.timed("clean sleep", self.sleep)
        self.timed("wake by steps", self.wake_by_steps)
        self.timed("checksum", lambda: sum_segments([self.buffer], lanes=lanes))

    def share(self, name: str, floor: str) -> float:
        """Floor ÷ step in percent, the median of the rounds."""
        pairs = zip(self.times[floor], self.times[name], strict=True)
        return statistics.median(100 * one / two for one, two in pairs)

    def ms(self, name: str) -> float:
        """A step's median in milliseconds."""
        return statistics.median(self.times[name]) * 1e3


@dataclass
class Machine:
    """How much of the machine's processors others used since this was made."""

    started_s: float = field(default_factory=time.perf_counter)
    busy_s: float = field(default_factory=lambda: _busy_s() - _own_s())

    def others(self) -> float:
        """The share of all processors' time, 0 to 1."""
        wall_s = (time.perf_counter() - self.started_s) * (os.cpu_count() or 1)
        return (_busy_s() - _own_s() - self.busy_s) / wall_s


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _own_s() -> float:
    times = os.times()
    return times.user + times.system


def verdict(met: bool, others: float) -> bool | None:
    """Whether a bar is met; None: a miss, but others had so much of the machine that it tells nothing."""
    return None if not met and others >= RESOLVED_UNDER else met


def share_figures(rounds: Rounds, what: str, name: str, bar: float, others: float) -> list[Figure]:
    """A step in percent of memcpy on one thread (with the bar, if not 0) and on as many as the pool uses."""
    found = []
    for floor, limit in (("memcpy on 1 thread", bar), (f"memcpy on {default_lanes()} threads", 0.0)):
        share = rounds.share(name, floor)
        met = verdict(share >= limit, others) if limit else None
        found.append(
            Figure(
                what=f"{what}, of {floor}",
                value=share,
                unit="%",
                floor=100.0,
                floor_is=f"{rounds.ms(floor):.1f} ms",
                bar=f"≥ {limit:.0f} %" if limit else "",
                met=met,
                note=f"{rounds.ms(name):.1f} ms; others used {others:.0%} of the machine",
            )
        )
    return found


def figures(rounds: Rounds, n_bytes: int, others: float) -> list[Figure]:
    """The table's lines."""
    size = f"{n_bytes / GIB:g} GiB"
    clean = rounds.ms("clean sleep") * GIB / n_bytes
    untracked = why_not_tracked()
    return [
        *share_figures(rounds, f"level-1 sleep, all of {size} dirty", "sleep", SLEEP_BAR, others),
        *share_figures(rounds, f"wake of {size} in one pass", "wake", WAKE_BAR, others),
        *share_figures(rounds, f"wake of {size}, map then restore", "wake by steps", 0.0, others),
        Figure(
            what="level-1 sleep, clean repeat, a GiB",
            value=clean,
            unit="ms",
            bar=f"≤ {CLEAN_BAR_MS:g} ms a GiB",
            met=verdict(clean <= CLEAN_BAR_MS, others) if untracked is None else None,
            note="writes tracked by userfaultfd" if untracked is None else f"by checksums: {untracked}",
        ),
        Figure(
            what="checksum",
            value=n_bytes / GIB / rounds.ms("checksum") * 1e3,
            unit="GiB/s",
            floor=n_bytes / GIB / rounds.ms("memcpy on 1 thread") * 1e3,
            floor_is="memcpy on 1 thread",
        ),
    ]


def measure(n_bytes: int = GIB, n_rounds: int = ROUNDS, spill_dir: str | None = None) -> list[Figure]:
    """The figures of the CPU pool."""
    rounds = Rounds(n_bytes, spill_dir or tempfile.gettempdir())
    try:
        rounds.run()  # the first round warms up
        rounds.times.clear()
        machine = Machine()
        for _ in range(n_rounds):
            rounds.run()
        return figures(rounds, n_bytes, machine.others())
    finally:
        rounds.pool.close()
        rounds.buffer.close()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.bench_memory_cpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="128 MiB and 3 rounds")
    parser.add_argument("--spill-dir", help="where the backup goes; the folder for temporary files if not given")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a bar is missed")
    args = parser.parse_args()
    n_bytes, n_rounds = (128 * MIB, 3) if args.quick else (GIB, ROUNDS)
    found = measure(n_bytes, n_rounds, args.spill_dir)
    for figure in found:
        word = {True: "met", False: "MISSED", None: "not resolved" if figure.bar else ""}[figure.met]
        floor = "" if figure.floor is None else f"floor {figure.floor:.4g} {figure.unit} ({figure.floor_is})"
        print(f"{figure.what}: {figure.value:.4g} {figure.unit}  {floor}  {figure.bar} {word}  {figure.note}")
    if args.out is not None:
        report = {"load": os.getloadavg(), "figures": [asdict(figure) for figure in found]}
        args.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return int(args.check and any(figure.met is False for figure in found))


if __name__ == "__main__":
    sys.exit(main())
