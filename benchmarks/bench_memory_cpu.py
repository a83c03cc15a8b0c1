"""The CPU pool against the memory bus: sleep, wake and clean repeat of 1 GiB beside warm memcpy, interleaved.

    python -m benchmarks.bench_memory_cpu                 1 GiB, 15 rounds
    python -m benchmarks.bench_memory_cpu --quick         128 MiB, 3 rounds: does it run at all
    python -m benchmarks.bench_memory_cpu --out f.json --check --spill-dir /dev/shm

A round does everything once, so that a busy neighbour slows all alike; figures are medians of rounds, a percentage
is the median of the rounds' own quotients. The floor is memcpy in 2 MiB pieces between two warm buffers of huge
pages, on as many threads as the pool uses.
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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

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
        lanes = default_lanes()
        self.dirty()
        for name, threads in (("memcpy", lanes), ("memcpy on 1 thread", 1)):
            self.timed(name, lambda n=threads: copy_chunks(self.weights.data_ptr(), self.buffer, n))  # type: ignore[misc]
        self.timed("sleep", self.sleep)
        self.timed("wake", self.wake)
        self.timed("memcpy after", lambda: copy_chunks(self.weights.data_ptr(), self.buffer, lanes))
        self.timed("clean sleep", self.sleep)
        self.timed("wake by steps", self.wake_by_steps)
        self.timed("checksum", lambda: sum_segments([self.buffer], lanes=lanes))

    def shares(self, name: str, floor: str) -> tuple[float, str]:
        """Floor ÷ step in percent: the median of the rounds, and in words where most rounds lie."""
        quotients = sorted(100 * one / two for one, two in zip(self.times[floor], self.times[name], strict=True))
        low, high = quotients[len(quotients) // 5], quotients[-1 - len(quotients) // 5]
        return statistics.median(quotients), f"{low:.0f} to {high:.0f} % in the middle rounds"

    def ms(self, name: str) -> float:
        """A step's median in milliseconds."""
        return statistics.median(self.times[name]) * 1e3


def share_figure(rounds: Rounds, what: str, name: str, floor: str, bar: float) -> Figure:
    """A figure in percent of the floor."""
    share, spread = rounds.shares(name, floor)
    alone = rounds.shares(name, "memcpy on 1 thread")[0]
    return Figure(
        what=what,
        value=share,
        unit="%",
        floor=100.0,
        floor_is=f"warm memcpy, {rounds.ms(floor):.1f} ms",
        bar=f"≥ {bar:.0f} %" if bar else "",
        met=share >= bar if bar else None,
        note=f"{rounds.ms(name):.1f} ms; {spread}; {alone:.0f} % of memcpy on 1 thread",
    )


def figures(rounds: Rounds, n_bytes: int) -> list[Figure]:
    """The table's lines."""
    size = f"{n_bytes / GIB:g} GiB"
    clean = rounds.ms("clean sleep") * GIB / n_bytes
    untracked = why_not_tracked()
    return [
        share_figure(rounds, f"level-1 sleep, all of {size} dirty", "sleep", "memcpy", SLEEP_BAR),
        share_figure(rounds, f"wake of {size}, one pass", "wake", "memcpy after", WAKE_BAR),
        share_figure(rounds, f"wake of {size}, map then restore", "wake by steps", "memcpy after", 0),
        Figure(
            what="level-1 sleep, clean repeat, a GiB",
            value=clean,
            unit="ms",
            bar=f"≤ {CLEAN_BAR_MS:g} ms a GiB",
            met=clean <= CLEAN_BAR_MS if untracked is None else None,
            note="writes tracked by userfaultfd" if untracked is None else f"by checksums: {untracked}",
        ),
        Figure(
            what="checksum",
            value=n_bytes / GIB / rounds.ms("checksum") * 1e3,
            unit="GiB/s",
            floor=n_bytes / GIB / rounds.ms("memcpy") * 1e3,
            floor_is="warm memcpy",
        ),
    ]


def measure(n_bytes: int = GIB, n_rounds: int = ROUNDS, spill_dir: str | None = None) -> list[Figure]:
    """The figures of the CPU pool."""
    rounds = Rounds(n_bytes, spill_dir or tempfile.gettempdir())
    try:
        rounds.run()  # the first round warms up
        rounds.times.clear()
        for _ in range(n_rounds):
            rounds.run()
        return figures(rounds, n_bytes)
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
        verdict = {True: "met", False: "MISSED", None: ""}[figure.met]
        floor = "" if figure.floor is None else f"floor {figure.floor:.4g} {figure.unit} ({figure.floor_is})"
        print(f"{figure.what}: {figure.value:.4g} {figure.unit}  {floor}  {figure.bar} {verdict}  {figure.note}")
    if args.out is not None:
        report = {"load": os.getloadavg(), "figures": [asdict(figure) for figure in found]}
        args.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return int(args.check and any(figure.met is False for figure in found))


if __name__ == "__main__":
    sys.exit(main())
