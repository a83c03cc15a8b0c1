"""What pausing costs who never pauses: the diffusion engine against its bare worker on the same batches.

The engine has the gate, the barrier and asynchronous output in its way and uses none of the first two; the bare worker
is called batch after batch by a plain loop. Alternating pairs, 95 % interval.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from benchmarks import Figure
from omni_notebook.config import DEMO_FOLDER
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.models.scene import encode_plan
from omni_notebook.protocol import RankId
from omni_notebook.worker.batches import BATCH_PREFIX, DiffusionBatch, ImageCondition, ImageStep
from omni_notebook.worker.reports import WorkerSpec
from omni_notebook.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

PAIRS = 40
BATCHES, BATCH_SIZE, STEPS = 4, 4, 10
BAR = 98.0
T_95 = 2.023
"""Student's t for 39 degrees of freedom, two-sided 95 %."""
LOOKS = 20_000
PLAN = "red star top center; blue circle bottom center"
_numbers = itertools.count()


def _params(seed: int) -> dict[str, Any]:
    return {"seed": seed, "num_inference_steps": STEPS}


async def _all(engine: AsyncOmni) -> list[Any]:
    """Every request at once; called on the engine's loop, so that all are queued before the first batch is made."""

    async def one(seed: int) -> Any:
        return [output async for output in engine.generate(PLAN, sampling_params=_params(seed))][-1]

    return list(await asyncio.gather(*(one(seed) for seed in range(BATCHES * BATCH_SIZE))))


class Took(NamedTuple):
    """Seconds by the clock, and of processor time of all threads, which other work on the machine does not lengthen."""

    wall_s: float
    cpu_s: float


def _timed(work: Callable[[], T]) -> tuple[T, Took]:
    began = time.perf_counter(), time.process_time()
    done = work()
    return done, Took(time.perf_counter() - began[0], time.process_time() - began[1])


def _engine(engine: AsyncOmni) -> Took:
    outputs, took = _timed(lambda: engine.submit(_all(engine)).result())
    sizes = {output.metrics["batch_size"] for output in outputs}
    if sizes != {BATCH_SIZE}:
        msg = f"the engine made batches of {sizes}, the bare worker gets {BATCH_SIZE}: not the same work"
        raise RuntimeError(msg)
    return took


def _batches() -> list[DiffusionBatch]:
    """The same images in the same batches."""
    condition = ImageCondition(plan_ids=tuple(encode_plan(PLAN)), hidden=None)
    return [
        DiffusionBatch(
            batch_id=f"{BATCH_PREFIX}{next(_numbers)}",
            images=tuple(
                ImageStep(key=seed, seed=seed, condition=condition) for seed in range(first, first + BATCH_SIZE)
            ),
            num_inference_steps=STEPS,
            guidance_scale=2.0,
        )
        for first in range(0, BATCHES * BATCH_SIZE, BATCH_SIZE)
    ]


def _bare(worker: Worker) -> Took:
    """Batch after batch; outputs are copied and encoded by the worker's own thread, as for the engine."""
    batches = _batches()

    def draw() -> None:
        leaving = []
        for batch in batches:
            worker.execute(batch)
            leaving.append(worker.collect(batch.batch_id))
        for future in leaving:
            future.result()

    return _timed(draw)[1]


async def _gate_us(engine: AsyncOmni) -> float:
    """Microseconds that an open gate costs a request."""
    admit: functools.partial[Coroutine[Any, Any, None]] = functools.partial(engine._core.gates.admit, [0], 0.0)  # noqa: SLF001  (the part that is measured)
    started = time.perf_counter()
    for _ in range(LOOKS):
        await admit()
    return (time.perf_counter() - started) / LOOKS * 1e6


def measure() -> list[Figure]:
    """The engine's throughput in percent of the bare worker's, and what the open gate takes of it."""
    folder = str(DEMO_FOLDER / "dit")
    with AsyncOmni(folder, executor="uni") as engine:
        config = engine._core.stages[0].config  # noqa: SLF001  (the bare worker gets the engine's own)
        worker = Worker(WorkerSpec(where=RankId(1, 0, 0), config=config))
        worker.load()
        runs = {"engine": functools.partial(_engine, engine), "bare": functools.partial(_bare, worker)}
        for run in runs.values():
            run()
        pairs = []
        for n in range(PAIRS):
            order = ("engine", "bare") if n % 2 else ("bare", "engine")
            pairs.append({name: runs[name]() for name in order})
        gate_us = engine.submit(_gate_us(engine)).result()
        worker.shutdown()
    wall, wall_half = _share([(pair["bare"].wall_s, pair["engine"].wall_s) for pair in pairs])
    cpu, cpu_half = _share([(pair["bare"].cpu_s, pair["engine"].cpu_s) for pair in pairs])
    resolved = wall - wall_half >= BAR or wall + wall_half < BAR
    image_s = statistics.median(pair["bare"].wall_s for pair in pairs) / (BATCHES * BATCH_SIZE)
    return [
        Figure(
            what="images a second, engine that never pauses in percent of its bare worker, uni",
            value=wall,
            unit="%",
            floor=100.0,
            floor_is=f"bare worker, {1 / image_s:.2f} images/s",
            bar=f"≥ {BAR:g} %",
            met=wall - wall_half >= BAR if resolved else None,
            note=f"{PAIRS} alternating pairs of {BATCHES} batches × {BATCH_SIZE}, 95 % interval ± {wall_half:.1f} %",
        ),
        Figure(
            what="the same by processor time",
            value=cpu,
            unit="%",
            floor=100.0,
            floor_is="bare worker",
            note=f"95 % interval ± {cpu_half:.1f} %",
        ),
        Figure(
            what="the open pause and sleep gates, a request",
            value=gate_us,
            unit="µs",
            note=f"{gate_us / image_s / 1e4:.4f} % of an image; no barrier runs (tests/engine)",
        ),
    ]


def _share(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean of the first in percent of the second, and half the width of its 95 % interval."""
    shares = [100 * bare / engine for bare, engine in pairs]
    return statistics.mean(shares), T_95 * statistics.stdev(shares) / len(shares) ** 0.5
