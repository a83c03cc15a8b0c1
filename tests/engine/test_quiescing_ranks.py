"""The keep barrier over every rank of every replica: two stages × two replicas × two ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.errors import DeadlineError, PauseError
from tests.engine import faults
from tests.engine.engine_helpers import collect, golden, held, rank_fault, until
from tests.engine.faults import PLACES
from tests.engine.faulty_worker import OUTPUT
from tests.engine.painting import PAINTER, SHIPPED, THINKER, draw, executing, journals, places, replicas, stage
from tests.engine.rules import Rule

if TYPE_CHECKING:
    from pathlib import Path

    from omni_notebook.engine.async_omni import AsyncOmni

pytestmark = pytest.mark.timeout(180)
LATE = (1, 1)
"""The rank that keeps the others waiting: (replica, rank)."""


async def both_replicas_busy(engine: AsyncOmni) -> list[asyncio.Task[list[Any]]]:
    """A batch on each replica's device and a request behind it; they wait for whoever holds them."""
    requests = [draw(engine, steps, request_id=f"r{steps}") for steps in (3, 4, 5, 6)]
    await until(lambda: (stage(engine).running, stage(engine).queued) == (2, 2))
    assert all(replica._executing for replica in replicas(engine))
    return requests


def pause_states(engine: AsyncOmni) -> list[str]:
    return [str(s.pause_state) for s in engine.status().stages]


@pytest.mark.rule(Rule.EVERY_REPLICA)
@pytest.mark.parametrize("late", PLACES, ids=str)
def test_the_pause_returns_after_the_last_of_all_ranks_has_acknowledged(four: AsyncOmni, late: tuple[int, int]) -> None:
    async def run() -> None:
        for stage_id in (THINKER, PAINTER):
            await journals(four, stage_id)
        with held(four, PAINTER):
            requests = await both_replicas_busy(four)
        with rank_fault(four, PAINTER, late, "barrier", seconds=0.5):
            await four.pause_generation("keep")
            returned = time.monotonic()
        for stage_id in (THINKER, PAINTER):
            seen = await journals(four, stage_id)
            assert [len(places(entries, "barrier ends")) for entries in seen] == [1] * len(PLACES)
            assert all(entries[places(entries, "barrier ends")[0]][0] < returned for entries in seen)
            for entries in seen:
                assert all(n < places(entries, "barrier begins")[0] for n in places(entries, "execute ends"))
        assert stage(four).running == 0
        await four.resume_generation()
        assert all([(await r)[-1].images for r in requests])

    asyncio.run(run())


@pytest.mark.rule(Rule.EVERY_REPLICA, Rule.AFTER_THE_COPIES)
@pytest.mark.parametrize("late", [0, 1])
def test_the_pause_returns_after_every_replicas_outputs_are_handed_over(four: AsyncOmni, late: int) -> None:
    async def run() -> None:
        with rank_fault(four, PAINTER, (late, 0), OUTPUT, seconds=0.6):
            with held(four, PAINTER):
                requests = await both_replicas_busy(four)
                running = [name for replica in replicas(four) for name in replica.scheduler.request_ids()[:1]]
                pause = asyncio.create_task(four.pause_generation("keep", [PAINTER]))
                await until(lambda: pause_states(four)[PAINTER] == "PAUSING")
            await pause
        assert not set(running) & set(four._core._flows)
        assert (stage(four).running, stage(four).queued) == (0, 2)
        assert sum(request.done() for request in requests) <= 2
        await four.resume_generation()
        assert all([(await r)[-1].images for r in requests])

    asyncio.run(run())


@pytest.mark.rule(Rule.FAILED_STAYS_CLOSED, Rule.RETRY_OR_RESUME, Rule.EVERY_REPLICA)
@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_one_rank_of_four_that_does_not_acknowledge_fails_the_pause_and_is_named(four: AsyncOmni, how: str) -> None:
    what: dict[str, Any] = faults.RAISES if how == "raises" else {"hold": True}
    error = PauseError if how == "raises" else DeadlineError

    async def run() -> None:
        with held(four, PAINTER):
            requests = await both_replicas_busy(four)
        with rank_fault(four, PAINTER, LATE, "barrier", **what):
            started = time.monotonic()
            with pytest.raises(error, match=r"rank 1 of replica 1 .*it is PAUSE_FAILED.*resume_generation"):
                await four.pause_generation("keep", timeout=None if how == "raises" else 4.0)
            assert time.monotonic() - started < 15
        assert pause_states(four) == ["PAUSED", "PAUSE_FAILED"]
        assert stage(four).state == "AWAKE"
        with pytest.raises(PauseError, match="PAUSE_FAILED"):
            await four.sleep()
        assert (executing(four), stage(four).queued) == (False, 2)
        await four.pause_generation("keep")
        assert pause_states(four) == ["PAUSED", "PAUSED"]
        assert all(ack.ok for ack in await four.sleep())
        await four.wake_up()
        await four.resume_generation()
        assert all([(await r)[-1].images for r in requests])

    asyncio.run(run())


@pytest.mark.rule(Rule.FAILED_STAYS_CLOSED, Rule.RETRY_OR_RESUME)
def test_a_rank_that_dies_while_pausing_fails_the_pause_at_once_and_restart_and_resume_help(four: AsyncOmni) -> None:
    async def run() -> None:
        before = await golden(four)
        with held(four, PAINTER):
            requests = await both_replicas_busy(four)
            pause = asyncio.create_task(four.pause_generation("keep", [PAINTER]))
            await until(lambda: pause_states(four)[PAINTER] == "PAUSING")
            started = time.monotonic()
            os.kill(faults.pid_of(four), signal.SIGKILL)
            await until(lambda: stage(four).state == "FAILED")
            ends = await asyncio.gather(*requests, return_exceptions=True)
            assert all("restart(1)" in str(end) for end in ends)
        with pytest.raises(PauseError, match=r"rank 1.*killed by SIGKILL.*PAUSE_FAILED"):
            await asyncio.wait_for(pause, 30)
        assert time.monotonic() - started < 20
        await four.restart(PAINTER)
        await faults.learn(four)
        assert pause_states(four)[PAINTER] == "PAUSE_FAILED"
        await four.resume_generation()
        assert await golden(four) == before

    asyncio.run(run())


@pytest.mark.rule(Rule.NEVER_ACROSS, Rule.EVERY_STEP)
def test_no_request_of_any_replica_denoises_across_a_weight_change(four: AsyncOmni, other_weights: Path) -> None:
    async def run() -> None:
        wishes = [{"seed": n, "num_inference_steps": 2 + n % 4} for n in range(24)]
        requests = [asyncio.create_task(collect(four, sampling_params=wish)) for wish in wishes]
        for change in range(5):
            await until(lambda: executing(four) or all(r.done() for r in requests))
            await four.pause_generation("keep")
            if change == 2:
                await four.sleep([PAINTER], level=2)
                await four.wake_up([PAINTER])
            await four.load_weights(PAINTER, (other_weights, SHIPPED)[change % 2], version=f"v{change}")
            await four.resume_generation()
        ends = [(await r)[-1] for r in requests]
        for wish, end in zip(wishes, ends, strict=True):
            assert end.state == "finished"
            assert end.metrics["step_weight_versions"] == [[end.weight_version, wish["num_inference_steps"]]]
        assert len({end.weight_version for end in ends}) >= 3
        await four.load_weights(PAINTER, SHIPPED)

    asyncio.run(run())
