"""Figures for Prometheus: what the ACKs said, summed, and what the status says."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.server.metrics import BUCKETS_S
from tests.engine.engine_helpers import collect, until
from tests.server.conftest import STEPS

if TYPE_CHECKING:
    import httpx


def figures(http: httpx.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = [one for family in text_string_to_metric_families(answer.text) for one in family.samples]
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for one in samples}


def rank(stage: int, number: int = 0, **more: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"stage": str(stage), "replica": "0", "rank": str(number), **more}.items()))


def test_orders_are_counted_by_what_their_acks_said(http: httpx.Client, engine: AsyncOmni) -> None:
    before = figures(http)
    acks = asyncio.run(engine.sleep([1], level=2))
    http.post("/v1/omni/sleep", json={"stage_ids": [1], "level": 2})
    http.post("/v1/omni/wakeup", json={})
    after = figures(http)

    def grown(name: str, labels: tuple[tuple[str, str], ...]) -> float:
        return after[(name, labels)] - before.get((name, labels), 0.0)

    for ack in acks:
        assert grown("omni_freed_bytes_total", rank(1, ack.rank)) == ack.freed_bytes > 0
        done = {"order": "sleep", "status": "SUCCESS"}
        assert grown("omni_orders_total", rank(1, ack.rank, noop="false", **done)) == 1
        assert grown("omni_orders_total", rank(1, ack.rank, noop="true", **done)) == 1
        assert grown("omni_order_seconds_count", rank(1, ack.rank, order="sleep")) == 1
        assert grown("omni_order_seconds_count", rank(1, ack.rank, order="wake")) == 1
        seconds = grown("omni_order_seconds_sum", rank(1, ack.rank, order="sleep"))
        assert abs(seconds - ack.metadata["latency_ms"] / 1e3) < 1e-6


def test_gauges_are_the_status_at_the_moment(http: httpx.Client, engine: AsyncOmni) -> None:
    asyncio.run(engine.sleep([0], level=1))
    asyncio.run(engine.pause_generation(mode="keep", stage_ids=[1]))
    found, stages = figures(http), engine.status().stages
    assert found[("omni_stage_state", (("stage", "0"), ("state", "ASLEEP")))] == 1
    assert found[("omni_stage_state", (("stage", "0"), ("state", "AWAKE")))] == 0
    assert found[("omni_stage_paused", (("stage", "1"),))] == 1
    assert found[("omni_requests", (("stage", "0"), ("where", "running")))] == 0
    assert found[("omni_resident_bytes", rank(0, tag="weights"))] == 0
    assert found[("omni_host_backup_bytes", rank(0))] == stages[0].ranks[0].host_backup_bytes > 0
    weights = stages[1].ranks[1].tags["weights"].resident_bytes
    assert found[("omni_resident_bytes", rank(1, 1, tag="weights"))] == weights > 0


def test_a_request_is_counted_where_it_is_and_on_its_way_where_it_will_come(
    http: httpx.Client, engine: AsyncOmni
) -> None:
    def load() -> dict[tuple[str, str], float]:
        told = {labels: count for (name, labels), count in figures(http).items() if name == "omni_requests"}
        return {(dict(labels)["stage"], dict(labels)["where"]): count for labels, count in told.items() if count}

    async def run() -> None:
        engine._core.stages[0].close("test")  # the thinker is held
        request = asyncio.create_task(collect(engine, sampling_params=STEPS))
        try:
            await until(lambda: engine.status().stages[1].in_transit)
            assert load() == {("0", "queued"): 1, ("1", "transit"): 1}
        finally:
            engine._loop.loop.call_soon_threadsafe(engine._core.stages[0].reopen, "test")
        assert (await request)[-1].images
        assert load() == {}

    asyncio.run(run())


def test_buckets_are_fine_and_rise() -> None:
    assert list(BUCKETS_S) == sorted(set(BUCKETS_S))
    assert all(later / earlier <= 2.51 for earlier, later in itertools.pairwise(BUCKETS_S))


def test_an_engine_that_was_shut_down_has_no_stages_and_no_memory() -> None:
    from omni_notebook.server.metrics import Metrics

    with AsyncOmni("demo") as engine:
        metrics = Metrics(engine)
        assert b"omni_up 1.0" in metrics.text()
        assert b"omni_resident_bytes{" in metrics.text()
    told = metrics.text()
    assert b"omni_up 0.0" in told
    assert b"omni_resident_bytes{" not in told
    assert b"omni_stage_state{" not in told
