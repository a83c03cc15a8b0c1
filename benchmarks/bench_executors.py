"""The demo on child processes against the same in this process, one rank a stage: alternating pairs, 95 % interval."""

from __future__ import annotations

import asyncio
import statistics
import time

from benchmarks import Figure
from omni_notebook.engine.async_omni import AsyncOmni

PAIRS = 12
REQUESTS = 8
BAR = 95.0
T_95 = 2.201
"""Student's t for 11 degrees of freedom, two-sided 95 %."""


async def _seconds(engine: AsyncOmni) -> float:
    """Seconds for `REQUESTS` requests at once, text and image."""

    async def one(seed: int) -> None:
        async for _ in engine.generate("a red star above a blue circle", sampling_params={"seed": seed}):
            pass

    started = time.perf_counter()
    await asyncio.gather(*(one(seed) for seed in range(REQUESTS)))
    return time.perf_counter() - started


def measure() -> list[Figure]:
    """Throughput of `mp` in percent of `uni`'s."""
    with AsyncOmni("demo", executor="uni") as uni, AsyncOmni("demo", executor="mp") as mp:
        for engine in (uni, mp):
            asyncio.run(_seconds(engine))
        pairs = []
        for n in range(PAIRS):
            order = (uni, mp) if n % 2 else (mp, uni)
            times = {engine: asyncio.run(_seconds(engine)) for engine in order}
            pairs.append((times[uni], times[mp]))
    shares = [100 * a / b for a, b in pairs]
    mean = statistics.mean(shares)
    half = T_95 * statistics.stdev(shares) / PAIRS**0.5
    resolved = mean - half >= BAR or mean + half < BAR
    return [
        Figure(
            what="requests a second, executor='mp' in percent of 'uni', demo, one rank a stage",
            value=mean,
            unit="%",
            floor=100.0,
            floor_is=f"uni, {REQUESTS / statistics.median(a for a, _ in pairs):.2f} requests/s",
            bar=f"≥ {BAR:g} %",
            met=mean - half >= BAR if resolved else None,
            note=f"{PAIRS} alternating pairs, 95 % interval ± {half:.1f} %",
        )
    ]
