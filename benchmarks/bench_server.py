"""Control orders over HTTP while pictures are drawn: no-op wakes of 16 ranks, beside the server's plainest answer."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import httpx

ORDERS, BAR_MS = 200, 10.0
RANKS: dict[str, Any] = {"executor": "mp", "tensor_parallel_size": 2, "num_replicas": 4}


def measure() -> list[Figure]:
    """The 95th percentile of an order that has nothing to do, and of `/health`, on one connection each."""
    from omni_notebook.engine.async_omni import AsyncOmni  # noqa: PLC0415  (torch: only this process)
    from omni_notebook.server.serving import Server  # noqa: PLC0415
    from omni_notebook.server.settings import ServerSettings  # noqa: PLC0415

    with AsyncOmni("demo", **RANKS) as engine:
        ranks = sum(len(stage.ranks) for stage in engine.status().stages)
        server = Server(engine, ServerSettings(port=0))
        server.start()
        orders_ms, health_ms, drawn = asyncio.run(_measure(server.url))
        server.stop()
    note = f"{ranks} ranks, {drawn} pictures drawn meanwhile; median {statistics.median(orders_ms):.1f} ms"
    order, floor = _p95(orders_ms), _p95(health_ms)
    return [
        Figure(
            what="HTTP: p95 of a wake that has nothing to do, while pictures are drawn",
            value=order,
            unit="ms",
            floor=floor,
            floor_is="p95 of /health in the same run",
            bar=f"≤ {BAR_MS:g} ms",
            met=order <= BAR_MS,
            note=note,
        )
    ]


async def _measure(url: str) -> tuple[list[float], list[float], int]:
    import httpx  # noqa: PLC0415  (a test's library)

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        drawing = asyncio.create_task(_draw(http))
        orders_ms: list[float] = []
        health_ms: list[float] = []
        for _ in range(ORDERS):
            orders_ms.append(await _timed_ms(lambda: http.post("/v1/omni/wakeup", json={})))
            health_ms.append(await _timed_ms(lambda: http.get("/health")))
        drawing.cancel()
        await asyncio.wait({drawing})
        return orders_ms, health_ms, drawing.result() if not drawing.cancelled() else 0


async def _draw(http: httpx.AsyncClient) -> int:
    """Draw one picture after the other until cancelled; how many."""
    count = 0
    try:
        while True:
            body = {"prompt": "a red star above a blue circle", "num_inference_steps": 20}
            (await http.post("/v1/images/generations", json=body)).raise_for_status()
            count += 1
    except asyncio.CancelledError:
        return count


async def _timed_ms(request: Callable[[], Coroutine[Any, Any, httpx.Response]]) -> float:
    began_s = time.perf_counter()
    (await request()).raise_for_status()
    return (time.perf_counter() - began_s) * 1e3


def _p95(values_ms: list[float]) -> float:
    return sorted(values_ms)[int(len(values_ms) * 0.95)]
