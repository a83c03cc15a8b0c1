"""One of four ranks (2 replicas of TP 2) fails in every step: a named state, an answer a rank, a way out, no leak."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from omni_notebook.errors import OmniError, StageFailedError
from tests.engine.engine_helpers import collect, golden, rank_fault, slow, tell, until
from tests.engine.faults import (
    CULPRIT,
    FAULTS,
    LATEST_S,
    PLACES,
    STAGE,
    STOPPED,
    TIMEOUT_S,
    Fault,
    brought_back,
    culprits_ack,
    goldens,
    happens,
    outcome,
    pid_of,
    places,
    residents,
    serves,
    spans,
    state_of,
)

if TYPE_CHECKING:
    from omni_notebook.engine.async_omni import AsyncOmni

AT_REST = {"AWAKE", "ASLEEP", "NEEDS_WEIGHTS", "FAILED"}


@pytest.fixture
def engine(four: AsyncOmni) -> AsyncOmni:
    return four


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_rank_that_fails_is_named_and_the_stage_moves_as_one_or_not_at_all(engine: AsyncOmni, fault: Fault) -> None:
    async def run() -> None:
        before = residents(engine)
        assert before == spans(engine)
        seen = await happens(engine, fault)
        assert places(seen.acks) == PLACES
        assert len({ack.task_id for ack in seen.acks}) == 1
        assert {ack.status for ack in seen.acks} == {"ERROR"}
        mine = culprits_ack(seen.acks)
        assert mine.metadata["error_code"] == fault.code
        assert fault.says in str(mine.error_msg)
        assert seen.message.count("rank 1 of replica 1") in {1, 2}
        assert fault.says in seen.message
        assert {ack.metadata["error_code"] for ack in seen.acks if ack is not mine} == {"ROLLED_BACK"}
        for ack in seen.acks:
            assert "rank 1" in str(ack.error_msg)
            assert "replica 1" in str(ack.error_msg)
            assert fault.says in str(ack.error_msg)
        assert (seen.state, seen.level) == (fault.state, seen.level if fault.state == "FAILED" else _level(fault))
        assert seen.seconds < (LATEST_S if fault.hangs else 10)
        await serves(engine)
        if fault.state == "FAILED":
            with pytest.raises(StageFailedError, match=r"restart\(1\)"):
                await collect(engine, admission_timeout=0)
            started = time.monotonic()
            await brought_back(engine)
            assert time.monotonic() - started < 45
            return
        assert residents(engine) == (before if fault.order == "sleep" else [0] * len(PLACES))
        if fault.order == "wake":
            assert all(ack.ok for ack in await engine.wake_up([STAGE]))
        assert await golden(engine) == goldens[id(engine)]

    asyncio.run(run())


def _level(fault: Fault) -> int | None:
    return fault.level if fault.order == "wake" else None


@pytest.mark.parametrize("step", ["abort_sleep", "undo"])
def test_a_rank_that_can_not_take_an_order_back_fails_its_stage(engine: AsyncOmni, step: str) -> None:
    method = "prepare_sleep" if step == "abort_sleep" else "commit_sleep"

    async def run() -> None:
        broken = {"error": "RuntimeError", "args": ["broken"]}
        with (
            rank_fault(engine, STAGE, CULPRIT, method, **broken),
            rank_fault(engine, STAGE, (0, 0), step, error="RuntimeError", args=["stuck"]),
        ):
            seen = await outcome(engine, "sleep", 2)
        assert seen.state == "FAILED"
        assert culprits_ack(seen.acks).metadata["error_code"] == "RuntimeError"
        assert places(seen.acks) == PLACES
        await serves(engine)
        await brought_back(engine)

    asyncio.run(run())


@pytest.mark.parametrize("level", [1, 2])
def test_a_rank_killed_before_or_after_a_sleep_fails_its_stage_at_once(engine: AsyncOmni, level: int) -> None:
    async def run() -> None:
        await engine.sleep([STAGE], level=level)
        os.kill(pid_of(engine), signal.SIGKILL)
        await until(lambda: state_of(engine) == "FAILED", 5)
        stage = engine.status().stages[STAGE]
        assert [(r.replica, r.rank) for r in stage.ranks if not r.alive] == [CULPRIT]
        for call in (engine.wake_up([STAGE]), engine.sleep([STAGE]), engine.load_weights(STAGE, "nowhere")):
            with pytest.raises(StageFailedError, match=r"restart\(1\)"):
                await call
        assert residents(engine) == [0] * 3
        await serves(engine)
        await brought_back(engine)

    asyncio.run(run())


def test_a_rank_that_hangs_before_an_order_is_named_and_the_order_is_as_if_not_given(engine: AsyncOmni) -> None:
    async def run() -> None:
        before = residents(engine)
        os.kill(pid_of(engine), signal.SIGSTOP)
        try:
            seen = await outcome(engine, "sleep", timeout=TIMEOUT_S)
            assert (seen.state, seen.level) == ("AWAKE", None)
            assert seen.seconds < LATEST_S
            assert culprits_ack(seen.acks).metadata["error_code"] == "DEADLINE"
            assert [ack.metadata["error_code"] for ack in seen.acks].count("DEADLINE") == 1
            assert all("rank 1 of replica 1" in str(ack.error_msg) for ack in seen.acks)
            assert residents(engine) == before
            await serves(engine)
        finally:
            os.kill(pid_of(engine), signal.SIGCONT)
        assert all(ack.ok for ack in await engine.sleep([STAGE]))
        await engine.wake_up([STAGE])
        assert await golden(engine) == goldens[id(engine)]

    asyncio.run(run())


@pytest.mark.parametrize("stage_id", [0, 1])
def test_a_rank_that_hangs_in_a_batch_ends_the_request_and_its_stage_restarts_soon(
    engine: AsyncOmni, stage_id: int
) -> None:
    async def run() -> None:
        for place in ((0, 1), (1, 1)):  # whichever replica takes it
            tell(engine, stage_id, place, "execute", **STOPPED)
        with pytest.raises(OmniError, match=rf"rank 1 of (replica 1 of )?stage {stage_id} did not answer"):
            await asyncio.wait_for(collect(engine), 30)
        assert state_of(engine, stage_id) == "FAILED"
        started = time.monotonic()
        await engine.restart(stage_id)
        assert time.monotonic() - started < 45
        assert await golden(engine) == goldens[id(engine)]

    asyncio.run(run())


def test_two_callers_sleep_and_wake_one_stage_at_once_and_every_answer_is_whole(engine: AsyncOmni) -> None:
    async def run() -> None:
        calls = [engine.sleep([STAGE], level=1 + n % 2) if n % 2 else engine.wake_up([STAGE]) for n in range(8)]
        for acks in await asyncio.gather(*calls):
            assert places(acks) == PLACES
            assert all(ack.ok for ack in acks)
            assert len({(ack.metadata["noop"], ack.task_id) for ack in acks}) == 1
        assert residents(engine) == (spans(engine) if state_of(engine) == "AWAKE" else [0] * 4)
        await engine.wake_up()
        assert await golden(engine) == goldens[id(engine)]

    asyncio.run(run())


def test_a_sleep_of_one_stage_and_a_wake_of_another_run_at_the_same_time(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.sleep([1], level=1)
        with slow(engine, 0, 2.0, "prepare_sleep"), slow(engine, 1, 2.0, "prepare_wake"):
            started = time.monotonic()
            slept, woken = await asyncio.gather(engine.sleep([0], level=1), engine.wake_up([1]))
            took = time.monotonic() - started
        assert 2.0 <= took < 3.5, took
        assert all(ack.ok for ack in (*slept, *woken))
        assert (state_of(engine, 0), state_of(engine, 1)) == ("ASLEEP", "AWAKE")

    asyncio.run(run())


@pytest.mark.parametrize("order", ["sleep", "wake"])
def test_an_order_over_four_ranks_cancelled_at_20_points_is_whole_or_not_at_all(engine: AsyncOmni, order: str) -> None:
    points = random.Random(11)

    async def run() -> None:
        for _ in range(20):
            if order == "wake":
                await engine.sleep([STAGE], level=points.choice([1, 2]))
            call = engine.sleep([STAGE], level=points.choice([1, 2])) if order == "sleep" else engine.wake_up([STAGE])
            task = asyncio.create_task(call)
            await asyncio.sleep(points.uniform(0, 0.08))
            started = time.monotonic()
            task.cancel()
            await asyncio.wait({task}, timeout=10)
            assert time.monotonic() - started < 2
            await until(lambda: state_of(engine) in AT_REST)
            assert state_of(engine) in {"AWAKE", "ASLEEP"}
            assert residents(engine) == (spans(engine) if state_of(engine) == "AWAKE" else [0] * 4)
            await engine.wake_up([STAGE])
        assert await golden(engine) == goldens[id(engine)]

    asyncio.run(run())


def test_an_order_cancelled_while_a_rank_fails_its_commit_is_taken_back(engine: AsyncOmni) -> None:
    """The cancel reaches ranks that have committed; it must not stop them from taking that back."""

    async def run() -> None:
        with (
            rank_fault(engine, STAGE, CULPRIT, "commit_sleep", error="RuntimeError", args=["broken"]),
            slow_rank(engine, (0, 0), "commit_sleep", 0.5),
        ):
            task = asyncio.create_task(engine.sleep([STAGE], level=2))
            await until(lambda: residents(engine)[1] == 0)  # a rank has committed, another is about to
            task.cancel()
            await asyncio.wait({task}, timeout=10)
            await until(lambda: state_of(engine) in AT_REST)
        assert state_of(engine) == "AWAKE"
        assert residents(engine) == spans(engine)
        assert await golden(engine) == goldens[id(engine)]

    asyncio.run(run())


def slow_rank(engine: AsyncOmni, place: tuple[int, int], method: str, seconds: float):
    return rank_fault(engine, STAGE, place, method, seconds=seconds)
