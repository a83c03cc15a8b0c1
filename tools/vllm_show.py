"""Shows what a vLLM stage does on this machine's device, as Markdown and JSON: run it where vLLM runs.

python tools/vllm_show.py FOLDER cycles [--tp 2] [--graphs]     ACKs beside an outside view, 20 mixed cycles
python tools/vllm_show.py FOLDER features                       features of vLLM × level: exact, or refused
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))

from benchmarks.vllm_models import BIG, SMALL, write_llama  # noqa: E402
from omni_notebook import AsyncOmni  # noqa: E402
from omni_notebook.protocol import LoRARequest  # noqa: E402
from omni_notebook.worker.vllm.versions import vllm_version  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from omni_notebook.protocol import OmniACK

PROMPT = {"prompt_token_ids": list(range(3, 303))}
TOKENS = 48
CYCLES = 20
MIB = 1024 * 1024
CUDA = torch.cuda.is_available()
KV_BYTES = int(os.environ.get("OMNI_SHOW_KV_MIB", "4096" if CUDA else "256")) * MIB
"""Told, so that several engines can be shown at the same time on one device."""


def outside(pid: int) -> int:
    """What a process holds, seen from this one: on the device by NVML, on a CPU its resident memory."""
    if not CUDA:
        return int(psutil.Process(pid).memory_info().rss)
    import pynvml  # noqa: PLC0415

    pynvml.nvmlInit()
    found = 0
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        found += sum(one.usedGpuMemory or 0 for one in running if one.pid == pid)
    return found


def start(folder: Path, *, tp: int = 1, graphs: bool = False, more: dict[str, Any] | None = None) -> AsyncOmni:
    """An engine of one vLLM stage."""
    arguments: dict[str, Any] = {"enforce_eager": not graphs, **(more or {})}
    arguments.setdefault("kv_cache_memory_bytes", KV_BYTES)
    return AsyncOmni(
        str(folder),
        runtime="vllm",
        tensor_parallel_size=tp,
        max_num_seqs=16,
        gpu_memory_utilization=0.15,
        max_model_len=2048,
        engine_args=arguments,
        default_timeout=300.0,
    )


async def generated(engine: AsyncOmni, **known: Any) -> tuple[list[int], int | None]:
    """Tokens, and how many of the prompt's came from the prefix cache."""
    params = {"max_tokens": TOKENS, "seed": 1}
    outputs = [out async for out in engine.generate(PROMPT, sampling_params=params, **known)]
    return outputs[-1].outputs[0].token_ids, outputs[-1].metrics["cached_tokens"]


def row(ack: OmniACK, held_before: int, held_after: int) -> dict[str, Any]:
    """One rank's answer beside the outside view of its process."""
    facts = ack.metadata
    return {
        "rank": ack.rank,
        "pid": facts["pid"],
        "status": ack.status,
        "freed_mib": round(ack.freed_bytes / MIB, 1),
        "expected_mib": round((facts["expected_bytes"] or 0) / MIB, 1),
        "outside_drop_mib": round((held_before - held_after) / MIB, 1),
        "residual_mib": round((facts["residual_bytes"] or 0) / MIB, 1),
        "outside_after_mib": round(held_after / MIB, 1),
        "residual": facts["residual"],
        "copied_mib": round((facts["copied_bytes"] or 0) / MIB, 1),
        "latency_ms": round(facts["latency_ms"], 1),
        "phases_ms": facts["phases_ms"],
        "scope": facts["observed_scope"],
        "note": facts["note"],
    }


async def cycles(engine: AsyncOmni) -> dict[str, Any]:
    """Mixed cycles of both levels: ACKs beside the outside view, tokens, cached tokens, latencies."""
    golden, _ = await generated(
        engine
    )  # with an empty cache, as the first one after a wake: other shapes round otherwise
    cached_golden, _ = await generated(engine)
    rows, wrong, cached_wrong, stale, hits, took = [], 0, 0, 0, 0, []
    for cycle in range(CYCLES):
        level = 1 + cycle % 2
        pids = [rank.pid for rank in engine.status().stages[0].ranks if rank.pid]
        held = {pid: outside(pid) for pid in pids}
        began_s = time.perf_counter()
        acks = await engine.sleep([0], level=level)
        slept_s = time.perf_counter() - began_s
        after = {pid: outside(pid) for pid in pids}
        rows += [
            {"cycle": cycle, "level": level, **row(a, held[a.metadata["pid"]], after[a.metadata["pid"]])} for a in acks
        ]
        began_s = time.perf_counter()
        woken = await engine.wake_up([0])
        woke_s = time.perf_counter() - began_s
        took.append(
            {"level": level, "sleep_s": round(slept_s, 4), "wake_s": round(woke_s, 4),
             "wake_phases_ms": [ack.metadata["phases_ms"] for ack in woken]}
        )  # fmt: skip
        tokens, cached = await generated(engine)
        same, again = await generated(engine)
        wrong += tokens != golden
        cached_wrong += same != cached_golden
        stale += bool(cached)
        hits += bool(again)
    return {
        "acks": rows,
        "took": took,
        "cycles": CYCLES,
        "token_mismatches": wrong,
        "token_mismatches_with_cache_hits": cached_wrong,
        "first_requests_with_stale_cache": stale,
        "second_requests_with_cache_hits": hits,
    }


# --------------------------------------------------------------------------------------- features


async def _exact(engine: AsyncOmni, level: int, **known: Any) -> str:
    await engine.pause_generation(mode="keep", clear_cache=True)  # all runs begin with an empty cache: rounding
    await engine.resume_generation()
    before, _ = await generated(engine, **known)
    await engine.pause_generation(mode="keep", clear_cache=True)
    await engine.resume_generation()
    again, _ = await generated(engine, **known)
    acks = await engine.sleep([0], level=level)
    await engine.wake_up([0])
    after, _ = await generated(engine, **known)
    freed = sum(ack.freed_bytes for ack in acks) / MIB
    if before == after:
        return f"exact, {freed:,.0f} MiB given back"
    return "DIFFERS" if before == again else f"{freed:,.0f} MiB given back; two runs without a sleep differ too"


def _adapter(folder: Path, engine: AsyncOmni) -> LoRARequest:
    from tests import adapters  # noqa: PLC0415

    shapes = engine._core.stages[0].model.adaptable  # noqa: SLF001
    write: Callable[..., Path] = adapters.write
    matrices: Callable[..., Any] = adapters.matrices
    path = write(folder / "adapter", matrices(shapes, seed=1, size=0.5))
    return LoRARequest("style", 1, str(path))


def _features(draft: Path) -> dict[str, dict[str, Any]]:
    return {
        "prefix caching, eager": {},
        "compiled, CUDA graphs" if CUDA else "compiled": {"graphs": True},
        "LoRA adapter": {"more": {"enable_lora": True}},
        "fp8 weights, quantised at load": {"more": {"quantization": "fp8"}},
        "speculative decoding, n-gram": {
            "more": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
        },
        "speculative decoding, draft model": {
            "more": {"speculative_config": {"model": str(draft), "num_speculative_tokens": 2, "method": "draft_model"}}
        },
        "fp8 KV cache": {"more": {"kv_cache_dtype": "fp8"}},
        "dummy weights (from no file)": {"more": {"load_format": "dummy"}},
    }


async def features(folder: Path, draft: Path, only: str) -> dict[str, Any]:
    """Each feature with each level: the same tokens after, or who refuses it and why."""
    table: dict[str, Any] = {}
    for name, options in _features(draft).items():
        if only in name:
            table[name] = await asyncio.to_thread(_feature, folder, name, options)
            sys.stderr.write(f"{name}: {table[name]}\n")
    return table


def _feature(folder: Path, name: str, options: dict[str, Any]) -> dict[str, str]:
    try:
        engine = start(folder, **options)
    except Exception as error:  # noqa: BLE001  (the refusal is the result)
        return {"start": f"refused: {' '.join(str(error).split())[:300]}"}
    try:
        return {f"level {level}": _outcome(_one(engine, folder, name, level)) for level in (1, 2)}
    finally:
        engine.shutdown()


async def _one(engine: AsyncOmni, folder: Path, name: str, level: int) -> str:
    if "LoRA" not in name:
        return await _exact(engine, level)
    plain, _ = await generated(engine)
    request = _adapter(folder.parent, engine)
    if not await engine.list_loras():
        await engine.add_lora(request)
    styled, _ = await generated(engine, lora_request=request)
    said = await _exact(engine, level, lora_request=request)
    return said if styled != plain else f"{said}, BUT THE ADAPTER CHANGES NOTHING"


def _outcome(work: Coroutine[Any, Any, str]) -> str:
    try:
        return asyncio.run(work)
    except Exception as error:  # noqa: BLE001  (the refusal is the result)
        traceback.print_exc()
        return f"refused: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def main() -> None:
    """Run what is asked for; the JSON goes to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the models are, or are written to")
    parser.add_argument("what", choices=("cycles", "features"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--only", default="", help="features whose name has this")
    given = parser.parse_args()
    device = "cuda" if CUDA else "cpu"
    model = write_llama(given.folder / "model", BIG if CUDA else SMALL, device=device)
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0) if CUDA else "cpu",
        "date": time.strftime("%Y-%m-%d"),
        "vllm": vllm_version(),
        "checkpoint_gb": round(sum(f.stat().st_size for f in model.glob("*.safetensors")) / 1e9, 2),
        "tp": given.tp,
        "graphs": given.graphs,
    }
    if given.what == "cycles":
        engine = start(model, tp=given.tp, graphs=given.graphs)
        try:
            facts |= asyncio.run(cycles(engine))
        except BaseException:
            sys.stderr.write("\n".join(engine.logs(0)[-60:]) + "\n")
            raise
        finally:
            engine.shutdown()
    else:
        small = {**(BIG if CUDA else SMALL), "num_hidden_layers": 2}
        draft = write_llama(given.folder / "draft", small, seed=2, device=device)
        facts["features"] = asyncio.run(features(model, draft, given.only))
    sys.stdout.write(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
