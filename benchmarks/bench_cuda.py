"""Sleep and wake of a stage's memory on a GPU: ours, vLLM's allocator, torch-memory-saver and plain `.to("cpu")`.

    python -m benchmarks.bench_cuda              14 GiB of weights, 64 GiB of cache, whatever peers are installed
    OMNI_BENCH_SIZES=2:64,14:64,50:64 python -m benchmarks.bench_cuda

Each peer in a process of its own on the same memory, the link's own rate measured first in the same process. Weights
are bfloat16 tensors of 128 MiB with small ones beside them, the cache tensors of 2 GiB. "At once" wakes directly after
the sleep, while the driver still clears what was given back; otherwise a second has passed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from benchmarks import Figure
from omni_notebook.memory.arena import Segment
from omni_notebook.memory.base import KV_CACHE, WEIGHTS
from omni_notebook.memory.device.copies import MAX_THREADS, parts_of, populate
from omni_notebook.protocol import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LARGE, CACHE = 128 * MIB, 2 * GIB
CYCLES = 4
REST_S = 1.0
FILES_GIB = 14
"""The disk of the machine that this was written for is small: level 2 reads no more than so much."""
TIMEOUT_S = 400
TOUCHED_GIB = 4
HOST_SHARE = 0.8
FIRST_PAGES, PAGES = "pages that the machine may never have had", "pages"
PEERS = {"ours": None, "vllm": "vllm", "saver": "torch_memory_saver", "plain": None}
NAMES = {"ours": "ours", "vllm": "vLLM's allocator", "saver": "torch-memory-saver", "plain": 'plain .to("cpu")'}


class Clock:
    """Times of steps in milliseconds, the device at rest before and after."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def timed(self, name: str, step: Callable[[], Any]) -> Any:
        """Run a step and note its time."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        result = step()
        torch.cuda.synchronize()
        self.times.setdefault(name, []).append((time.perf_counter() - started) * 1e3)
        return result

    def best(self, name: str) -> float:
        """The best of a step's times."""
        return min(self.times[name])


class Weights(nn.Module):
    """Large tensors and small ones, uninitialised."""

    def __init__(self, n_gib: int, device: str) -> None:
        super().__init__()
        for number in range(n_gib * GIB // LARGE):
            self._add(f"large{number}", LARGE // 2, device)
            self._add(f"norm{number}", 4096, device)

    def _add(self, name: str, count: int, device: str) -> None:
        value = nn.Parameter(torch.empty(count, dtype=torch.bfloat16, device=device), requires_grad=False)
        self.register_parameter(name, value)

    def fill(self) -> None:
        """Random contents."""
        for parameter in self.parameters():
            parameter.normal_()

    def train(self, mode: bool = True) -> Weights:
        """What a training step does to them, as far as a sleep is concerned: all change."""
        if mode:
            for parameter in self.parameters():
                parameter.mul_(1.03)
        return self


def held_bytes() -> int:
    """What this process holds on the device, by NVML."""
    import pynvml  # noqa: PLC0415

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return sum(one.usedGpuMemory for one in running if one.pid == os.getpid())


def touch(clock: Clock, name: str, n_gib: int, n_bytes: int = TOUCHED_GIB * GIB) -> None:
    """Have huge pages as a sleep has them, by as many threads, and give them back; the time is told for `n_gib`."""
    memory = Segment(n_bytes, populate=False)
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        started = time.perf_counter()
        for part in [threads.submit(populate, *part) for part in parts_of(memory)]:
            part.result()
        took_s = time.perf_counter() - started
    memory.close()
    clock.times[f"floor {name}"] = [took_s * 1e3 * n_gib * GIB / n_bytes]


def have_pages(clock: Clock, n_gib: int) -> None:
    """Touch more of the host's memory than a sleep will want.

    A virtual machine's host gives a page only when it is touched for the first time since the machine began, which
    costs more than all that a sleep does and happens once: noted apart.
    """
    room = int(psutil.virtual_memory().available * HOST_SHARE)
    touch(clock, FIRST_PAGES, n_gib, min(room, (n_gib * 5 // 4 + TOUCHED_GIB) * GIB))
    touch(clock, PAGES, n_gib)


def floors(clock: Clock, n_gib: int) -> None:
    """Pinned copies both ways, of 2 GiB again and again, told for `n_gib`."""
    part = min(n_gib, 2)
    host = torch.empty(part * GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(part * GIB, dtype=torch.uint8, device="cuda")
    for _ in range(CYCLES):
        clock.timed("floor out", lambda: host.copy_(device, non_blocking=True))
        clock.timed("floor in", lambda: device.copy_(host, non_blocking=True))
    for name in ("floor out", "floor in"):
        clock.times[name] = [ms * n_gib / part for ms in clock.times[name]]
    torch.ones(256, 256, device="cuda") @ torch.ones(256, 256, device="cuda")
    torch.cuda.synchronize()


def run_ours(clock: Clock, weights_gib: int, cache_gib: int, facts: dict[str, Any]) -> None:
    """Our pool, as a rank that is alone in its stage uses it."""
    from omni_notebook.memory.cuda import cuda_pool  # noqa: PLC0415

    pool = cuda_pool(0)
    with torch.device("meta"):
        weights = Weights(weights_gib, "meta")
    pool.adopt(weights)
    weights.fill()
    for _ in range(cache_gib * GIB // CACHE):
        pool.empty((CACHE,), torch.uint8)
    pool.record_checksum()

    def sleep(name: str, level: int = 1) -> Any:
        def step() -> Any:
            prepared = pool.prepare_sleep(level, late_copy=True)
            return prepared, pool.commit_sleep()

        prepared, unmapped = clock.timed(name, step)
        checksum_ms = prepared.checksum_ms + unmapped.checksum_ms
        phases = checksum_ms, prepared.copy_ms + unmapped.copy_ms, unmapped.unmap_ms
        facts.setdefault("phases", {}).setdefault(name, []).append(phases)
        expected = sum(tag.span_bytes for tag in pool.tags().values())
        off = max(abs(unmapped.observed_bytes - expected), abs(unmapped.expected_bytes - expected))
        facts["off"] = max(facts.get("off", 0), off)
        facts["left"] = max(facts.get("left", 0), held_bytes() - facts["context"])
        facts.setdefault("skipped", {})[name] = unmapped.skipped_clean_bytes
        return unmapped

    def wake(name: str) -> None:
        def step() -> None:
            pool.map_restore()
            pool.commit_wake()

        clock.timed(name, step)
        facts["exact"] = facts.get("exact", True) and pool.verify_checksum()

    have_pages(clock, weights_gib)
    sleep("sleep 1, host memory not ready")
    wake("wake 1, at once")
    for _ in range(CYCLES):
        weights.train()
        pool.record_checksum()
        sleep("sleep 1, all changed")
        time.sleep(REST_S)
        wake("wake 1")
        sleep("sleep 1, unchanged")
        wake("wake 1, at once")
    for _ in range(CYCLES):
        sleep("sleep 2", 2)
        clock.timed("map only", pool.map)
        pool.restore()
        pool.commit_wake()
    _host_memory_made_ready(clock, pool, weights, facts)
    sleep("sleep 1, first, host memory ready")
    wake("wake 1, at once")
    if weights_gib <= FILES_GIB:
        _level_2_from_files(clock, pool, weights, facts)
    pool.close()


def _host_memory_made_ready(clock: Clock, pool: Any, weights: Weights, facts: dict[str, Any]) -> None:
    weights.fill()
    pool.record_checksum()
    facts["host"] = pool.host_backup_bytes()
    pool.drop_copies()
    pool.write_ahead()
    clock.timed("host memory made ready", lambda: pool.wait_write_ahead(120))


def _level_2_from_files(clock: Clock, pool: Any, weights: Weights, facts: dict[str, Any]) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    from omni_notebook.models.loaders import load_into  # noqa: PLC0415

    folder = Path(tempfile.mkdtemp(prefix="omni-bench-"))
    try:
        save_file({name: value.cpu() for name, value in weights.state_dict().items()}, folder / "model.safetensors")
        pool.record_checksum()

        def wake(tags: set[str] | None) -> bool:
            pool.map_restore(tags)
            load_into(weights, folder, reader=pool.reader())
            torch.cuda.synchronize()
            right = pool.verify_checksum()
            pool.commit_wake()
            return bool(right)

        for name, tags in (("", None), (", the cache later", {WEIGHTS})):
            for _ in range(CYCLES):
                pool.prepare_sleep(2, late_copy=True)
                pool.commit_sleep()
                time.sleep(REST_S)
                step = functools.partial(wake, tags)
                facts["exact"] = clock.timed(f"wake 2 to verified weights{name}", step) and facts["exact"]
                if tags:
                    pool.map_restore({KV_CACHE})
                    pool.commit_wake()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_vllm(clock: Clock, weights_gib: int, cache_gib: int, facts: dict[str, Any]) -> None:
    """VLLM's allocator, by itself."""
    from vllm.device_allocator.cumem import CuMemAllocator  # noqa: PLC0415

    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool("weights"):
        weights = Weights(weights_gib, "cuda")
    with allocator.use_memory_pool("kv_cache"):
        cache = [torch.zeros(CACHE, dtype=torch.uint8, device="cuda") for _ in range(cache_gib * GIB // CACHE)]
    weights.fill()
    for _ in range(CYCLES):
        first = "sleep 1, all changed" in clock.times or "sleep 1, host memory not ready" in clock.times
        name = "sleep 1, all changed" if first else "sleep 1, host memory not ready"
        clock.timed(name, lambda: allocator.sleep(("weights",)))
        facts["left"] = held_bytes() - facts["context"]
        time.sleep(REST_S)
        clock.timed("wake 1", allocator.wake_up)
        clock.timed("sleep 1, unchanged", lambda: allocator.sleep(("weights",)))
        clock.timed("wake 1, at once", allocator.wake_up)
    for _ in range(CYCLES):
        clock.timed("sleep 2", lambda: allocator.sleep(()))
        clock.timed("map only", allocator.wake_up)
    del cache


def run_saver(clock: Clock, weights_gib: int, cache_gib: int, facts: dict[str, Any]) -> None:
    """torch-memory-saver with its CPU backup."""
    from torch_memory_saver import torch_memory_saver as saver  # type: ignore[import-not-found]  # noqa: PLC0415

    saver.hook_mode = "torch"
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = Weights(weights_gib, "cuda")
    with saver.region(tag="cache", enable_cpu_backup=False):
        cache = [torch.zeros(CACHE, dtype=torch.uint8, device="cuda") for _ in range(cache_gib * GIB // CACHE)]
    weights.fill()
    for _ in range(2):
        clock.timed("sleep 1, all changed", saver.pause)
        facts["left"] = held_bytes() - facts["context"]
        time.sleep(REST_S)
        clock.timed("wake 1", saver.resume)
    del cache


def run_plain(clock: Clock, weights_gib: int, cache_gib: int, facts: dict[str, Any]) -> None:
    """What people write by hand."""
    weights = Weights(weights_gib, "cuda")
    weights.fill()
    for _ in range(2):
        cache = [torch.empty(CACHE, dtype=torch.uint8, device="cuda") for _ in range(cache_gib * GIB // CACHE)]

        def sleep(cache: list[torch.Tensor] = cache) -> None:
            weights.to("cpu")
            cache.clear()
            torch.cuda.empty_cache()

        clock.timed("sleep 1, all changed", sleep)
        facts["left"] = held_bytes() - facts["context"]
        time.sleep(REST_S)
        clock.timed("wake 1", lambda: weights.to("cuda"))


RUNS = {"ours": run_ours, "vllm": run_vllm, "saver": run_saver, "plain": run_plain}


def why_not() -> str | None:
    """Why this can not run here, or None."""
    return None if torch.cuda.is_available() else "no CUDA device"


def sizes() -> list[tuple[int, int]]:
    """(weights, cache) in GiB."""
    text = os.environ.get("OMNI_BENCH_SIZES", "14:64")
    return [(int(weights), int(cache)) for weights, cache in (size.split(":") for size in text.split(","))]


def measure() -> Iterator[Figure]:
    """Every size, ours beside its peers; the raw times go to $OMNI_BENCH_RAW where that names a file."""
    reason = why_not()
    if reason is not None:
        yield Figure(what="sleep and wake on a GPU", value=0.0, unit="–", note=f"{reason}: not run")
        return
    raw: dict[str, Any] = {}
    for size in sizes():
        found = {}
        for peer, package in PEERS.items():
            if package is not None and importlib.util.find_spec(package) is None:
                yield Figure(what=f"{NAMES[peer]}", value=0.0, unit="–", note="not installed: not run")
            elif peer not in os.environ.get("OMNI_BENCH_PEERS", ",".join(PEERS)).split(","):
                continue
            else:
                found[peer] = raw[f"{peer} {size[0]}:{size[1]}"] = child(peer, *size)
        yield from figures(size, found)
        if "OMNI_BENCH_RAW" in os.environ:
            Path(os.environ["OMNI_BENCH_RAW"]).write_text(json.dumps(raw, indent=1), encoding="utf-8")


def child(peer: str, weights_gib: int, cache_gib: int) -> dict[str, Any]:
    """One peer's times and facts, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_cuda", peer, str(weights_gib), str(cache_gib)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"times": {}, "facts": {"failed": f"not finished after {TIMEOUT_S} s"}}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"times": {}, "facts": {"failed": f"ended with status {done.returncode}"}}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def figures(size: tuple[int, int], found: dict[str, dict[str, Any]]) -> Iterator[Figure]:
    """One line a step and peer, with the bars of the design for ours."""
    for peer, answer in found.items():
        times, facts = answer["times"], answer["facts"]
        title = f"{size[0]}+{size[1]} GiB, {NAMES[peer]}"
        if "failed" in facts:
            yield Figure(what=title, value=0.0, unit="–", note=facts["failed"], bar="runs", met=False)
            continue
        out, into = min(times["floor out"]), min(times["floor in"])
        for step, several in times.items():
            if step.startswith("floor"):
                continue
            value = min(several)
            floor = into if "wake" in step else out
            bar, met = _bar(step, value, size, out, into) if peer == "ours" else ("", None)
            yield Figure(
                what=f"{title}: {step}",
                value=value,
                unit="ms",
                floor=floor,
                floor_is="the link alone",
                bar=bar,
                met=met,
                note=f"best of {len(several)}, worst {max(several):.0f}; {value / floor:.2f} × the link"
                + _profile(answer, step),
            )
        exact = {True: "contents exact; ", False: "CONTENTS DIFFER; ", None: ""}[facts.get("exact")]
        acks = f"measured within {facts['off'] / MIB:.0f} MiB of what was due; " if "off" in facts else ""
        yield Figure(
            what=f"{title}: left on the device above a context after one product",
            value=facts["left"] / MIB,
            unit="MiB",
            bar="≤ 205 MiB" if peer == "ours" else "",
            met=facts["left"] <= 0.2 * GIB if peer == "ours" else None,
            note=f"{exact}{acks}host memory {facts.get('host', 0) / GIB:.1f} GiB",
        )


def _profile(answer: dict[str, Any], step: str) -> str:
    """Where the best of a sleep's times went, as the pool's reports tell it, and the machine's own part."""
    phases = answer["facts"].get("phases", {}).get(step)
    if not phases:
        return ""
    times = answer["times"]
    sums, copies, unmap = phases[times[step].index(min(times[step]))]
    first, pages = (min(times[f"floor {name}"]) for name in (FIRST_PAGES, PAGES))
    alone = f"; the pages alone {pages:.0f}, touched for the first time {first:.0f}" if "not ready" in step else ""
    return f"; sums {sums:.0f}, copies {copies:.0f}, unmapped and measured {unmap:.0f} ms{alone}"


def _bar(step: str, ms: float, size: tuple[int, int], out: float, into: float) -> tuple[str, bool | None]:
    """The design's budget for a step, and whether it is met."""
    if step in {"sleep 1, all changed", "sleep 1, first, host memory ready"}:
        return "≤ 1.05 × the link", ms <= 1.05 * out
    if step == "sleep 1, host memory not ready":
        return "≤ 150 ms a GiB", ms <= 150 * size[0]
    if step == "sleep 1, unchanged" and size[0] <= FILES_GIB:
        return "≤ 100 ms", ms <= 100
    if step == "wake 1":
        return "≤ 1.12 × the link", ms <= 1.12 * into
    if step.startswith("wake 2 to verified weights"):
        return "≥ 60 % of the link's rate", into / ms >= 0.6
    return "", None


def main() -> None:
    """Print a line a figure; with a peer and sizes as arguments, measure that one here and print it as JSON."""
    if len(sys.argv) > 1:
        peer, weights_gib, cache_gib = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        clock, facts = Clock(), dict[str, Any]()
        floors(clock, weights_gib)
        torch.cuda.empty_cache()
        facts["context"] = held_bytes()
        RUNS[peer](clock, weights_gib, cache_gib, facts)
        print(json.dumps({"times": clock.times, "facts": facts}), flush=True)
        os._exit(0)  # torch may abort when a memory pool dies with the interpreter (pytorch issue 145168)
    for figure in measure():
        floor = "" if figure.floor is None else f"  ({figure.floor_is} {figure.floor:.1f} {figure.unit})"
        word = {True: "met", False: "MISSED", None: ""}[figure.met]
        line = f"{figure.what:62} {figure.value:9.1f} {figure.unit}{floor} {figure.bar} {word}  {figure.note}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
