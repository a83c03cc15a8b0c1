"""A vLLM stage beside bare `AsyncLLM`: throughput, first token, and on CUDA sleep and wake against its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import psutil

from benchmarks import Figure
from benchmarks.vllm_models import BIG, LLAMA_8B, SMALL, write_llama

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUESTS, TOKENS = 32, 128
PAIRS, IN_A_ROW, VARIED = 60, 4, 64
"""Throughput: so many clients at once, each with so many requests one after the other, so many tokens more or less
each, so that they do not end together; both sides in turns."""
STUDENT_T = {2: 12.71, 6: 2.57, 12: 2.20, 24: 2.07, 40: 2.02, 60: 2.00}
"""By the number of pairs at least, 95 %."""
BURSTS = 12
"""All clients at once, one request of `TOKENS` each: what a batch of prompts waits for."""
ROUNDS, FIRSTS = 15, 20
"""First tokens: so many one after the other on each side, in turns; the first of each is left out, for whoever has
rested for so long is slow to begin."""
LOSS, FIRST_MS = 0.02, 1.0
CYCLES = 5
ENOUGH = 12
"""Processors for cores, our host process and the client to have their own."""
PROMPT = list(range(3, 131))
SHAPES = {"1.8B": BIG, "8B": LLAMA_8B, "small": SMALL}


class Plan(NamedTuple):
    """What is measured.

    Attributes:
        shape: the model's, a key of `SHAPES`.
        pairs: of sustained load.
        seconds: how long those may take; fewer are made where they take longer.
        parts: "generation", "cycles".
        cycles: of each level, at least two.
        bare_first: whether vLLM's own sleeps and wakes go first in each cycle.
    """

    shape: str
    pairs: int = PAIRS
    seconds: float = math.inf
    parts: tuple[str, ...] = ("generation", "cycles")
    cycles: int = CYCLES
    bare_first: bool = False


class Side(Protocol):
    """One of the two that are compared."""

    async def generate(self, name: str, tokens: int) -> float:
        """Answer one prompt with so many tokens; seconds to the first."""
        ...


class Ours:
    """Through our engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def generate(self, name: str, tokens: int) -> float:
        """See `Side`."""
        began_s, first_s = time.perf_counter(), None
        params = {"max_tokens": tokens, "seed": 1}
        async for _ in self._engine.generate({"prompt_token_ids": PROMPT}, request_id=name, sampling_params=params):
            first_s = first_s or time.perf_counter() - began_s
        return first_s or 0.0


class Bare:
    """vLLM's own `AsyncLLM`, with the same arguments."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    async def generate(self, name: str, tokens: int) -> float:
        """See `Side`."""
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        params = SamplingParams(max_tokens=tokens, temperature=0.0, seed=1, output_kind=RequestOutputKind.DELTA)
        began_s, first_s = time.perf_counter(), None
        async for _ in self.llm.generate({"prompt_token_ids": PROMPT}, params, name):
            first_s = first_s or time.perf_counter() - began_s
        return first_s or 0.0


async def _rate(side: Side, name: str, in_a_row: int) -> tuple[float, float]:
    """Tokens a second of several clients at once, and when the last of them had its first token."""
    asked = [_lengths(number, in_a_row) for number in range(REQUESTS)]

    async def client(number: int) -> float:
        firsts = [await side.generate(f"{name}-{number}-{turn}", n) for turn, n in enumerate(asked[number])]
        return firsts[0]

    began_s = time.perf_counter()
    firsts = await asyncio.gather(*map(client, range(REQUESTS)))
    return sum(map(sum, asked)) / (time.perf_counter() - began_s), max(firsts)


def _lengths(number: int, in_a_row: int) -> list[int]:
    """How many tokens a client's requests ask for: all the same for a burst; always the same for the same client."""
    if in_a_row == 1:
        return [TOKENS]
    return [TOKENS - VARIED + (37 * number + 53 * turn) % (2 * VARIED + 1) for turn in range(in_a_row)]


async def _pairs(
    ours: Side, bare: Side, pairs: int, in_a_row: int, seconds: float = math.inf
) -> dict[Side, list[tuple[float, float]]]:
    found: dict[Side, list[tuple[float, float]]] = {ours: [], bare: []}
    until_s = time.perf_counter() + seconds
    for pair in range(pairs):
        if pair >= min(STUDENT_T) and time.perf_counter() > until_s:
            break
        for place, side in enumerate((bare, ours) if pair % 2 else (ours, bare)):
            found[side].append(await _rate(side, f"p{in_a_row}-{pair}-{place}", in_a_row))
    return found


async def _compare(ours: Side, bare: Side, plan: Plan) -> list[Figure]:
    for side, name in ((ours, "warm-o"), (bare, "warm-b")):
        await _rate(side, name, 1)
    gc.collect()
    gc.freeze()  # as vLLM's server does: a full collection looks at all of vLLM, and no token comes meanwhile
    kept = await _pairs(ours, bare, plan.pairs, IN_A_ROW, plan.seconds)
    _note_raw({"kept": list(kept.values())})
    bursts = await _pairs(ours, bare, BURSTS, 1)
    _note_raw({"bursts": list(bursts.values())})
    firsts: dict[Side, list[float]] = {ours: [], bare: []}
    for turn in range(ROUNDS):
        for side in (bare, ours) if turn % 2 else (ours, bare):
            times = [await side.generate(f"f{turn}-{number}-{id(side)}", 2) for number in range(FIRSTS + 1)]
            firsts[side] += [1e3 * seconds for seconds in times[1:]]
    _note_raw({"firsts": list(firsts.values())})
    throughput = _throughput(
        "sustained",
        kept[ours],
        kept[bare],
        f"{REQUESTS} clients with {IN_A_ROW} in a row each, {TOKENS} ± {VARIED} tokens",
    )
    burst = _throughput("all at once", bursts[ours], bursts[bare], f"{REQUESTS} requests, {TOKENS} tokens each")
    last = [1e3 * statistics.median(first_s for _, first_s in bursts[side]) for side in (ours, bare)]
    note = f"{burst.note}; the last one's first token after {last[0]:.1f} against {last[1]:.1f} ms (medians)"
    return [
        throughput,
        dataclasses.replace(burst, bar="", met=None, note=note),
        _first(firsts[ours], firsts[bare]),
    ]


def _note_raw(raw: dict[str, Any]) -> None:
    """The times themselves, ours first, a line of JSON each time, to $OMNI_BENCH_RAW where that names a file."""
    if "OMNI_BENCH_RAW" in os.environ:
        with Path(os.environ["OMNI_BENCH_RAW"]).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(raw)}\n")


def _throughput(what: str, ours: list[tuple[float, float]], bare: list[tuple[float, float]], load: str) -> Figure:
    losses = [math.log(other / one) for (one, _), (other, _) in zip(ours, bare, strict=True)]
    mean = 1 - math.exp(-statistics.mean(losses))
    t = STUDENT_T[max(known for known in STUDENT_T if known <= len(losses))]
    half = t * statistics.stdev(losses) / len(losses) ** 0.5
    best = 1 - max(ours)[0] / max(bare)[0]
    return Figure(
        what=f"generation through a vLLM stage, {what}",
        value=1e2 * mean,
        unit="% slower",
        floor=_median(bare),
        floor_is="tokens/s of bare AsyncLLM, not %",
        bar=f"≤ {LOSS:.0%}",
        met=True if mean + half <= LOSS else False if mean - half > LOSS else None,
        note=f"± {1e2 * half:.1f} % (95 %), {len(losses)} pairs of {load}; "
        f"medians {1 - _median(ours) / _median(bare):.1%}, best against best {best:.1%}",
    )


def _median(found: list[tuple[float, float]]) -> float:
    return statistics.median(rate for rate, _ in found)


def _first(ours: list[float], bare: list[float]) -> Figure:
    added = statistics.median(ours) - statistics.median(bare)
    return Figure(
        what="time to the first token, added",
        value=added,
        unit="ms",
        floor=statistics.median(bare),
        floor_is="bare AsyncLLM's own, median",
        bar=f"≤ {FIRST_MS:g} ms",
        met=added <= FIRST_MS,
        note=f"medians of {len(ours)} each, in turns; best {min(ours):.1f} against {min(bare):.1f} ms",
    )


async def _cycles(engine: Any, bare: Bare, cycles: int, *, bare_first: bool) -> list[Figure]:
    """Sleep and wake of both, in turns; vLLM's level 2 is woken by its own recipe (wake, then reload)."""
    took: dict[str, list[float]] = {}
    phases: dict[str, list[str]] = {}

    async def timed(what: str, work: Any) -> None:
        began_s = time.perf_counter()
        acks = await work
        took.setdefault(what, []).append(time.perf_counter() - began_s)
        if acks:
            known = {name: ms for name, ms in acks[0].metadata["phases_ms"].items() if ms is not None}
            phases.setdefault(what, []).append(", ".join(f"{name} {ms:.1f}" for name, ms in known.items()))

    async def reload() -> None:
        await bare.llm.wake_up(["weights"])
        await bare.llm.collective_rpc("reload_weights")
        await bare.llm.wake_up(["kv_cache"])

    llm = bare.llm

    async def our_turn(level: int) -> None:
        await timed(f"ours: sleep {level}", engine.sleep([0], level=level))
        await timed(f"ours: wake {level}", engine.wake_up([0]))

    async def its_turn(level: int) -> None:
        await timed(f"vLLM: sleep {level}", llm.sleep(level))
        await timed(f"vLLM: wake {level}", llm.wake_up() if level == 1 else reload())

    for _ in range(cycles):
        for level in (1, 2):
            for turn in (its_turn, our_turn) if bare_first else (our_turn, its_turn):
                await turn(level)
    _note_raw({"cycles": took})
    return [
        Figure(
            what=f"{what}, {when}",
            value=pick(took[f"ours: {what}"]),
            unit="s",
            floor=pick(took[f"vLLM: {what}"]),
            floor_is="vLLM's own in the same run",
            bar="no slower",
            met=pick(took[f"ours: {what}"]) <= 1.05 * pick(took[f"vLLM: {what}"]),
            note=f"{cycles} cycles in turns; ours measures, checks and answers a rank; of that, ms: "
            + phases[f"ours: {what}"][took[f"ours: {what}"].index(pick(took[f"ours: {what}"]))],
        )
        for what in ("sleep 1", "wake 1", "sleep 2", "wake 2")
        for when, pick in {"first": _first_of, f"best of {cycles - 1} after": _best_after}.items()
    ]


def _first_of(times: list[float]) -> float:
    return times[0]


def _best_after(times: list[float]) -> float:
    return min(times[1:])


def measure(plan: Plan | None = None) -> Iterator[Figure]:
    """All of them; both engines are there at the same time. Without a plan: all, for a model that the device suits."""
    if importlib.util.find_spec("vllm") is None:
        yield Figure(what="a vLLM stage against AsyncLLM", value=0.0, unit="–", note="vLLM is not installed: not run")
        return
    yield from asyncio.run(_measure(plan))


async def _measure(plan: Plan | None) -> list[Figure]:
    import torch  # noqa: PLC0415

    from omni_notebook import AsyncOmni  # noqa: PLC0415

    cuda = torch.cuda.is_available()
    where = Path(os.environ.get("OMNI_BENCH_MODELS", tempfile.gettempdir()))
    plan = plan or Plan("1.8B" if cuda else "small")
    folder = write_llama(where / f"llama-{plan.shape}", SHAPES[plan.shape], device="cuda" if cuda else "cpu")
    room: dict[str, Any] = {} if cuda else {"kv_cache_memory_bytes": 256 << 20}
    room |= {"enforce_eager": not cuda, "max_num_batched_tokens": 2048}
    share = 0.4 if cuda else 0.9
    engine = AsyncOmni(
        str(folder), runtime="vllm", max_num_seqs=64, max_model_len=2048, gpu_memory_utilization=share, engine_args=room
    )
    try:
        bare = Bare(_bare(folder, cuda=cuda, share=share, room=room))
        try:
            _give_places()
            figures: list[Figure] = []
            if "generation" in plan.parts:
                figures += await _compare(Ours(engine), bare, plan)
            if cuda and "cycles" in plan.parts:
                figures += await _cycles(engine, bare, plan.cycles, bare_first=plan.bare_first)
            return figures
        finally:
            bare.llm.shutdown()
    finally:
        engine.shutdown()


def _give_places() -> None:
    """On a machine with many processors: both engines' cores on the same ones, else where they land decides.

    The first two, which hear most interrupts, are nobody's.
    """
    processors = sorted(os.sched_getaffinity(0))[2:]
    if len(processors) < ENOUGH:
        return
    mine = psutil.Process()
    cores = [one for one in mine.children(recursive=True) if "VLLM::" in " ".join(one.cmdline())]
    others = [one for one in mine.children(recursive=True) if one not in cores]
    for process, place in (
        *((core, processors[:4]) for core in cores),
        *((other, processors[4:8]) for other in others),
        (mine, processors[8:]),
    ):
        for thread in process.threads():
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(thread.id, place)


def _bare(folder: Path, *, cuda: bool, share: float, room: dict[str, Any]) -> Any:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": "auto" if cuda else "float32",
        "skip_tokenizer_init": True,
        "enable_sleep_mode": cuda,
        "max_num_seqs": 64,
        "max_model_len": 2048,
        "gpu_memory_utilization": share,
        "disable_log_stats": True,
        **room,
    }
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def _asked() -> Plan:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.8B")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--seconds", type=float, default=math.inf, help="how long the pairs may take")
    parser.add_argument("--cycles", type=int, default=CYCLES)
    parser.add_argument("--only", choices=("generation", "cycles"), action="append")
    parser.add_argument("--bare-first", action="store_true", help="vLLM's own sleeps and wakes go first in each cycle")
    asked = parser.parse_args()
    return Plan(
        shape=asked.shape,
        pairs=asked.pairs,
        seconds=asked.seconds,
        parts=tuple(asked.only or Plan._field_defaults["parts"]),
        cycles=asked.cycles,
        bare_first=asked.bare_first,
    )


if __name__ == "__main__":
    for figure in measure(_asked()):
        sys.stdout.write(f"{figure}\n")
