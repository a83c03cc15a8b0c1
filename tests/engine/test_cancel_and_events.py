"""A caller that goes away leaves a known state; subscribers miss no ACK and no state change."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.engine.events import SAMPLES_KEPT, EventHub
from omni_notebook.protocol import AckEvent, MemoryEvent, MemoryState, PauseState, RequestEvent, StateEvent
from tests.engine.engine_helpers import collect, golden, slow, until

if TYPE_CHECKING:
    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.protocol import StageStatus

AT_REST = {"AWAKE", "ASLEEP"}


def settled_with_its_memory(stage: StageStatus) -> bool:
    """At rest, and its memory is that of its state; an order to a server may begin after its caller has left."""
    tags = stage.ranks[0].tags.values()
    due = sum(tag.mapped_bytes for tag in tags) if stage.state == "AWAKE" else 0
    return stage.state in AT_REST and sum(tag.resident_bytes for tag in tags) == due


@pytest.mark.parametrize("order", ["sleep", "wake"])
def test_an_order_cancelled_at_any_point_ends_in_a_named_state(engine: AsyncOmni, order: str) -> None:
    """20 random points: before the commit it is rolled back, after it it finishes; memory says the same."""
    points = random.Random(7)

    async def run() -> None:
        before = await golden(engine)
        for _ in range(20):
            if order == "wake":
                await engine.sleep(level=2)
            call = engine.sleep(level=points.choice([1, 2])) if order == "sleep" else engine.wake_up()
            task = asyncio.create_task(call)
            await asyncio.sleep(points.uniform(0, 0.03))
            started = time.monotonic()
            task.cancel()
            await asyncio.wait({task}, timeout=5)
            assert time.monotonic() - started < 1
            await until(lambda: all(map(settled_with_its_memory, engine.status().stages)))
            await engine.wake_up()
            assert await golden(engine) == before

    asyncio.run(run())


def test_a_sleep_cancelled_while_it_quiesces_is_rolled_back(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 0.5):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            order = asyncio.create_task(engine.sleep([1], mode="keep"))
            await until(lambda: engine.status().stages[1].state == "FALLING_ASLEEP")
            order.cancel()
            with pytest.raises(asyncio.CancelledError):
                await order
            await until(lambda: engine.status().stages[1].state == "AWAKE")
        assert (await request)[-1].images

    asyncio.run(run())


def test_submit_runs_a_call_from_a_plain_thread_and_its_future_cancels_it(engine: AsyncOmni) -> None:
    acks = engine.submit(engine.sleep([0])).result(30)
    assert acks[0].ok
    engine.submit(engine.wake_up([0])).result(30)

    async def run() -> None:
        with slow(engine, 1, 0.5):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            future = engine.submit(engine.sleep([1], mode="wait"))
            await until(lambda: engine.status().stages[1].state == "FALLING_ASLEEP")
            future.cancel()
            await until(lambda: engine.status().stages[1].state == "AWAKE")
        await request

    asyncio.run(run())


def test_subscribers_see_acks_states_memory_and_requests_in_order(engine: AsyncOmni) -> None:
    async def run() -> None:
        async with engine.subscribe() as events:
            await collect(engine, request_id="seen")
            acks = await engine.sleep([0])
            await engine.wake_up([0])
            seen: list[Any] = []
            async with asyncio.timeout(10):
                async for event in events:
                    seen.append(event)
                    if isinstance(event, MemoryEvent) and sum(isinstance(e, AckEvent) for e in seen) == 2:
                        break
        states = [e.state for e in seen if isinstance(e, StateEvent)]
        assert states == ["FALLING_ASLEEP", "ASLEEP", "WAKING", "AWAKE"]
        assert [e.order for e in seen if isinstance(e, AckEvent)] == ["sleep", "wake"]
        assert next(e.ack for e in seen if isinstance(e, AckEvent)).task_id == acks[0].task_id
        requests = [(e.stage_id, str(e.state)) for e in seen if isinstance(e, RequestEvent) and e.request_id == "seen"]
        assert requests[0] == (0, "waiting")
        assert requests[-1] == (1, "finished")

    asyncio.run(run())


def test_a_slow_subscriber_loses_the_oldest_samples_and_no_fact() -> None:
    hub = EventHub()
    subscription = hub.subscribe()
    for n in range(SAMPLES_KEPT * 2):
        hub.push(MemoryEvent(float(n), 0, 0, 0, {}, None, 0))
        if n % 2:
            hub.push(StateEvent(float(n), 0, MemoryState.AWAKE, None, PauseState.OPEN))
    subscription.close()

    async def drain() -> list[Any]:
        return [event async for event in subscription]

    events = asyncio.run(drain())
    samples = [e.time_s for e in events if isinstance(e, MemoryEvent)]
    assert samples == [float(n) for n in range(SAMPLES_KEPT, SAMPLES_KEPT * 2)]
    assert sum(isinstance(e, StateEvent) for e in events) == SAMPLES_KEPT


def test_events_reach_a_subscriber_on_another_loop_from_other_threads() -> None:
    hub = EventHub()
    subscription = hub.subscribe()

    def push() -> None:
        for n in range(500):
            hub.push(StateEvent(float(n), 0, MemoryState.AWAKE, None, PauseState.OPEN))

    async def read() -> list[float]:
        threads = [threading.Thread(target=push) for _ in range(3)]
        for thread in threads:
            thread.start()
        seen = []
        async with asyncio.timeout(20):
            async for event in subscription:
                seen.append(event.time_s)
                if len(seen) == 1500:
                    break
        for thread in threads:
            thread.join()
        return seen

    assert sorted(asyncio.run(read())) == sorted([float(n) for n in range(500)] * 3)


def test_a_dropped_subscription_is_forgotten() -> None:
    hub = EventHub()
    hub.subscribe()
    assert len(hub._everyone()) == 0


@pytest.mark.quiet
def test_status_never_waits_for_a_worker(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 1.0):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            times = []
            for _ in range(20):
                started = time.monotonic()
                engine.status()
                times.append(time.monotonic() - started)
            assert sorted(times)[10] < 0.1
            assert not request.done()
            await engine.check_health()
            request.cancel()

    asyncio.run(run())
