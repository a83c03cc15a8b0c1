"""The pool over vLLM's CUDA allocator against the link, and against vLLM's own sleep on memory of the same shape.

    python -m benchmarks.bench_cumem                    4 GiB of weights in 32 segments, 16 GiB of cache
    OMNI_BENCH_GIB=14,64 python -m benchmarks.bench_cumem

All in one process, floor first: pinned copies by torch of as many bytes. Then vLLM's allocator puts the segments to
sleep by itself, then our pool does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks import Figure
from omni_notebook.protocol import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SEGMENTS = 32
CYCLES = 4
TIMEOUT_S = 500
SLOWER = 1.05
"""Noise that "no slower" allows."""

Times = dict[str, list[float]]


class Weights(nn.Module):
    """Weights in as many segments as large tensors, small ones beside them, in vLLM's allocator."""

    def __init__(self, allocator: Any, n_bytes: int) -> None:
        super().__init__()
        count = n_bytes // SEGMENTS // 2
        with allocator.use_memory_pool("weights"):
            for number in range(SEGMENTS):
                self.register_buffer(f"w{number}", torch.empty(count, dtype=torch.bfloat16, device="cuda"))
            for number in range(2 * SEGMENTS):
                self.register_buffer(f"norm{number}", torch.ones(4096, dtype=torch.bfloat16, device="cuda"))
        for name, buffer in self.named_buffers():
            if name.startswith("w"):
                buffer.normal_()


class Cache(nn.Module):
    """A cache in as many segments, in vLLM's allocator."""

    def __init__(self, allocator: Any, n_bytes: int) -> None:
        super().__init__()
        with allocator.use_memory_pool("kv_cache"):
            for number in range(SEGMENTS):
                room = torch.zeros(n_bytes // SEGMENTS, dtype=torch.uint8, device="cuda")
                self.register_buffer(f"kv{number}", room)


class Clock:
    """Times of steps, in milliseconds, with a device at rest before and after."""

    def __init__(self) -> None:
        self.times: Times = defaultdict(list)

    def timed(self, name: str, step: Callable[[], Any]) -> Any:
        """Run a step and note its time."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        result = step()
        torch.cuda.synchronize()
        self.note(name, (time.perf_counter() - started) * 1e3)
        return result

    def note(self, name: str, ms: float) -> None:
        """Note a time that somebody else took."""
        self.times[name].append(ms)

    def first(self, name: str) -> float:
        """The first of a step's times."""
        return self.times[name][0]

    def later(self, name: str) -> float:
        """The median of a step's later times; of its only one, where it has no others."""
        return statistics.median(self.times[name][1:] or self.times[name])


def measure_floors(clock: Clock, n_bytes: int) -> None:
    """Pinned copies of as many bytes, both ways."""
    host = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    for _ in range(CYCLES):
        clock.timed("floor: to host", lambda: host.copy_(device, non_blocking=True))
        clock.timed("floor: to device", lambda: device.copy_(host, non_blocking=True))


def run_ours(clock: Clock, pool: Any) -> None:
    """Level 1 again and again, level 2, level 1 after it, and looks at what the parts cost."""
    clock.timed("checksum", pool.record_checksum)
    for _ in range(CYCLES):
        clock.timed("checksum", pool.verify_checksum)
        _sleep(clock, pool, 1)
        _wake(clock, pool, 1)
        clock.timed("held()", pool.held)
    for _ in range(CYCLES):
        _sleep(clock, pool, 2)
        clock.timed("map only", pool.map)
        pool.restore()
        pool.commit_wake()
    pool.record_checksum()
    _sleep(clock, pool, 1, "sleep 1 after level 2")
    _wake(clock, pool, 1)
    core = pool._core  # noqa: SLF001  (what the parts cost is the question)
    for _ in range(CYCLES):
        clock.timed("NVML, one question", core.probe.process_bytes)
        clock.timed("torch's segments, one look", core.driver._read_reserved)  # noqa: SLF001
        clock.timed("torch's totals, one look", core.driver.reserved)
        clock.timed("empty_cache", core.driver.trim)
        clock.timed("begin (at rest, books)", lambda: core.begin("a benchmark"))
        clock.timed("strangers (a question a segment)", core.table.strangers)


def _sleep(clock: Clock, pool: Any, level: int, name: str = "") -> None:
    name = name or f"sleep {level}"

    def step() -> tuple[Any, Any]:
        return pool.prepare_sleep(level), pool.commit_sleep()

    prepared, unmapped = clock.timed(name, step)
    clock.note(f"{name}: checksum", prepared.checksum_ms)
    clock.note(f"{name}: copy", prepared.copy_ms)
    clock.note(f"{name}: unmap, measured", unmapped.unmap_ms)


def _wake(clock: Clock, pool: Any, level: int) -> None:
    def step() -> tuple[Any, Any]:
        mapped, restored = pool.map_restore()
        pool.commit_wake()
        return mapped, restored

    mapped, restored = clock.timed(f"wake {level}", step)
    clock.note(f"wake {level}: map and begin copies", mapped.map_ms)
    clock.note(f"wake {level}: rest of the copies", restored.copy_ms)


def run_theirs(clock: Clock, allocator: Any) -> None:
    """The same by vLLM's allocator itself."""
    for _ in range(CYCLES):
        clock.timed("vLLM: sleep 1", lambda: allocator.sleep(("weights",)))
        clock.timed("vLLM: wake 1", allocator.wake_up)
    for _ in range(CYCLES):
        clock.timed("vLLM: sleep 2", lambda: allocator.sleep(()))
        clock.timed("vLLM: map only", allocator.wake_up)
    clock.timed("vLLM: sleep 1 after level 2", lambda: allocator.sleep(("weights",)))
    allocator.wake_up()


def figures(clock: Clock) -> Iterator[Figure]:
    """The table's lines: ours beside vLLM's own, then the phases, then what parts cost."""
    steps = [("sleep 1", "first", clock.first), ("sleep 1", "repeat", clock.later)]
    steps += [("sleep 1 after level 2", "", clock.first), ("wake 1", "repeat", clock.later)]
    steps += [("sleep 2", "first", clock.first), ("sleep 2", "repeat", clock.later), ("map only", "", clock.later)]
    links = {"sleep 1": "floor: to host", "sleep 1 after level 2": "floor: to host", "wake 1": "floor: to device"}
    for name, when, pick in steps:
        ours, theirs = pick(name), pick(f"vLLM: {name}")
        link = f"the link alone {clock.later(links[name]):.1f} ms" if name in links else ""
        yield Figure(
            what=f"{name} {when}".strip(),
            value=ours,
            unit="ms",
            floor=theirs,
            floor_is="vLLM's own",
            bar="no slower",
            met=ours <= SLOWER * theirs,
            note=link,
        )
    known = {name for name, _, _ in steps}
    for name in clock.times:
        if name not in known and not name.startswith("vLLM: "):
            note = f"first {clock.first(name):.2f} ms"
            yield Figure(what=f"  {name}", value=clock.later(name), unit="ms", note=note)


def why_not() -> str | None:
    """Why this can not run here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None if importlib.util.find_spec("vllm") else "vLLM is not installed"


def measure() -> Iterator[Figure]:
    """All figures, or one that says why there are none."""
    reason = why_not()
    if reason is not None:
        yield Figure(what="sleep and wake of CUDA memory", value=0.0, unit="–", note=f"{reason}: not run")
        return
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "figures.json"
        subprocess.run([sys.executable, "-m", "benchmarks.bench_cumem", str(answer)], check=True, timeout=TIMEOUT_S)
        for figure in json.loads(answer.read_text(encoding="utf-8")):
            yield Figure(**figure)


def measure_here() -> Iterator[Figure]:
    """All figures, in this process."""
    from vllm.device_allocator import cumem  # noqa: PLC0415  (takes seconds)

    from omni_notebook.memory.cumem import cumem_pool  # noqa: PLC0415  (asks the device)

    weights_gib, cache_gib = map(int, os.environ.get("OMNI_BENCH_GIB", "4,16").split(","))
    clock, allocator = Clock(), cumem.CuMemAllocator.get_instance()
    measure_floors(clock, weights_gib * GIB)
    torch.cuda.empty_cache()
    weights, cache = Weights(allocator, weights_gib * GIB), Cache(allocator, cache_gib * GIB)
    run_theirs(clock, allocator)  # before our pool: it knows nothing of a sleep that is not its own
    pool = cumem_pool(0)
    pool.adopt(cache, "kv_cache")
    pool.adopt(weights)
    run_ours(clock, pool)
    pool.close()
    yield from figures(clock)


def main() -> None:
    """Print a line a figure; with a file's name as argument, measure in this process and write them there."""
    if sys.argv[1:]:
        text = json.dumps([asdict(figure) for figure in measure_here()])
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
        os._exit(0)  # torch may abort when a memory pool dies with the interpreter (pytorch issue 145168)
    for figure in measure():
        floor = "" if figure.floor is None else f"  ({figure.floor_is} {figure.floor:.2f} {figure.unit})"
        word = {True: "met", False: "MISSED", None: ""}[figure.met]
        print(f"{figure.what:36} {figure.value:9.2f} {figure.unit}{floor}  {word}  {figure.note}", flush=True)


if __name__ == "__main__":
    main()
