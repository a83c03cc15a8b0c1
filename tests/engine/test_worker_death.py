"""Ranks in processes of their own that die or hang under an engine: a named state, answers for all, a way out."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import (
    ArgumentError,
    OmniError,
    SleepError,
    StageFailedError,
    UnsupportedError,
    WakeError,
    WorkerDiedError,
)
from omni_notebook.executors.mp import executor as mp_executor
from omni_notebook.protocol import StateEvent
from tests.engine.engine_helpers import collect, golden, reset, slow, until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def shared() -> Iterator[AsyncOmni]:
    with AsyncOmni("demo", executor="mp") as engine:
        yield engine


@pytest.fixture
def engine(shared: AsyncOmni) -> AsyncOmni:
    asyncio.run(reset(shared))
    return shared


def pid_of(engine: AsyncOmni, stage_id: int, place: int = 0) -> int:
    pid = engine.status().stages[stage_id].ranks[place].pid
    assert pid is not None
    return pid


def state_of(engine: AsyncOmni, stage_id: int) -> str:
    return str(engine.status().stages[stage_id].state)


async def killed(engine: AsyncOmni, stage_id: int) -> float:
    """Kill a stage's rank; seconds until the stage has FAILED."""
    started = time.monotonic()
    os.kill(pid_of(engine, stage_id), signal.SIGKILL)
    await until(lambda: state_of(engine, stage_id) == "FAILED")
    return time.monotonic() - started


def test_every_rank_is_a_child_process(engine: AsyncOmni) -> None:
    pids = {pid_of(engine, stage_id) for stage_id in (0, 1)}
    assert len(pids) == 2
    assert pids <= {child.pid for child in psutil.Process().children()}


@pytest.mark.quiet
def test_a_killed_rank_fails_its_stage_at_once_others_serve_and_restart_helps(engine: AsyncOmni) -> None:
    async def run() -> None:
        before = await golden(engine)
        async with engine.subscribe() as events:
            assert await killed(engine, 1) < 0.2
            event = await anext(events)
            assert isinstance(event, StateEvent)
            assert (event.stage_id, event.state) == (1, "FAILED")
        stage = engine.status().stages[1]
        assert [rank.alive for rank in stage.ranks] == [False]
        assert "killed by SIGKILL" in str(stage.last_error)
        with pytest.raises(StageFailedError, match=r"restart\(1\)"):
            await engine.check_health()
        with pytest.raises(StageFailedError, match=r"restart\(1\)"):
            await engine.sleep([1])
        assert (await collect(engine, output_modalities="text"))[-1].text
        await engine.restart(1)
        await engine.check_health()
        assert await golden(engine) == before

    asyncio.run(run())


def test_a_rank_killed_in_a_batch_ends_its_requests_with_the_reason(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 5.0):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            await asyncio.sleep(0.1)
            await killed(engine, 1)
            with pytest.raises(StageFailedError, match=r"rank 0 of stage 1 was killed by SIGKILL.*call restart\(1\)"):
                await asyncio.wait_for(request, 1)
        await engine.restart(1)
        await golden(engine)

    asyncio.run(run())


@pytest.mark.parametrize("order", ["prepare_sleep", "commit_sleep"])
def test_a_rank_killed_in_a_sleep_answers_error_and_the_other_stage_sleeps(engine: AsyncOmni, order: str) -> None:
    async def run() -> None:
        with slow(engine, 1, 3.0, order):
            call = asyncio.create_task(engine.sleep(level=1))
            await until(lambda: state_of(engine, 1) == "FALLING_ASLEEP" and state_of(engine, 0) == "ASLEEP")
            await asyncio.sleep(0.1)
            await killed(engine, 1)
            with pytest.raises(SleepError) as caught:
                await asyncio.wait_for(call, 1)
        acks = caught.value.acks
        assert [(a.stage_id, a.status, a.metadata["error_code"]) for a in acks] == [
            (0, "SUCCESS", None),
            (1, "ERROR", "WORKER_DIED"),
        ]
        assert "rank 0" in str(acks[1].error_msg)
        assert (state_of(engine, 0), state_of(engine, 1)) == ("ASLEEP", "FAILED")
        await engine.wake_up([0])
        await engine.restart(1)
        await golden(engine)

    asyncio.run(run())


@pytest.mark.parametrize("order", ["prepare_wake", "commit_wake"])
def test_a_rank_killed_in_a_wake_fails_its_stage_and_restart_brings_it_back(engine: AsyncOmni, order: str) -> None:
    async def run() -> None:
        before = await golden(engine)
        await engine.sleep([1], level=2)
        with slow(engine, 1, 3.0, order):
            call = asyncio.create_task(engine.wake_up([1]))
            await until(lambda: state_of(engine, 1) == "WAKING")
            await asyncio.sleep(0.1)
            await killed(engine, 1)
            with pytest.raises(WakeError, match="rank 0"):
                await asyncio.wait_for(call, 1)
        assert state_of(engine, 1) == "FAILED"
        await engine.restart(1)
        assert await golden(engine) == before

    asyncio.run(run())


def test_a_rank_killed_while_asleep_fails_its_stage(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.sleep([1], level=1)
        await killed(engine, 1)
        with pytest.raises(StageFailedError):
            await engine.wake_up([1])
        await engine.restart(1)
        await golden(engine)

    asyncio.run(run())


def test_a_rank_killed_while_it_quiesces_stays_failed(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 5.0):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            call = asyncio.create_task(engine.sleep([1], mode="keep"))
            await until(lambda: state_of(engine, 1) == "FALLING_ASLEEP")
            await killed(engine, 1)
            with pytest.raises(SleepError):
                await asyncio.wait_for(call, 1)
            with pytest.raises(StageFailedError):
                await request
        assert state_of(engine, 1) == "FAILED"
        await engine.restart(1)
        await golden(engine)

    asyncio.run(run())


def test_a_hung_rank_is_answered_for_at_the_deadline_and_restart_replaces_it(engine: AsyncOmni) -> None:
    async def run() -> None:
        before = await golden(engine)
        pid = pid_of(engine, 1)
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(SleepError, match="did not answer") as caught:
            await engine.sleep([1], timeout=0.5)
        assert time.monotonic() - started < 2
        assert caught.value.acks[0].metadata["error_code"] == "DEADLINE"
        request = asyncio.create_task(collect(engine))
        await until(lambda: engine.status().stages[1].running)
        await engine.restart(1, timeout=0.5)
        assert not psutil.pid_exists(pid)
        assert (await request)[-1].images
        assert await golden(engine) == before

    asyncio.run(run())


def test_restart_of_a_working_stage_gives_it_a_new_process(engine: AsyncOmni) -> None:
    before = pid_of(engine, 0)
    asyncio.run(engine.restart(0))
    assert pid_of(engine, 0) != before
    assert not psutil.pid_exists(before)


def test_a_model_that_does_not_load_leaves_no_process() -> None:
    children = set(psutil.Process().children())
    with pytest.raises(OmniError):
        AsyncOmni("demo", executor="mp", spill_dir="/no/such/folder")
    assert set(psutil.Process().children()) == children


def test_a_rank_that_dies_while_it_loads_fails_the_start_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    children = set(psutil.Process().children())
    monkeypatch.setattr(mp_executor, "WORKER", "tests.executors.echo_worker:DyingWorker")
    with pytest.raises(WorkerDiedError, match="ended with status 1") as caught:
        AsyncOmni("demo", executor="mp")
    assert caught.value.log_lines == ["no strength to load"]
    assert set(psutil.Process().children()) == children


def test_one_death_is_told_once(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 5.0):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            async with engine.subscribe() as events:
                await killed(engine, 1)
                with pytest.raises(StageFailedError):
                    await request
                await engine.restart(1)
                seen: list[str] = []
                async for event in events:
                    if isinstance(event, StateEvent):
                        seen.append(str(event.state))
                    if seen[-1:] == ["AWAKE"]:
                        break
            assert seen == ["FAILED", "WAKING", "AWAKE"]

    asyncio.run(run())


def test_replicas_answer_one_by_one_and_sleep_together() -> None:
    async def run(engine: AsyncOmni) -> None:
        params = [{"seed": n, "num_inference_steps": 4} for n in range(4)]
        alone = [(await collect(engine, sampling_params=p))[-1].images[0].tobytes() for p in params[:1]]
        acks = await engine.sleep(level=1)
        assert [(a.stage_id, a.metadata["replica"], a.rank) for a in acks] == [
            (0, 0, 0),
            (0, 1, 0),
            (1, 0, 0),
            (1, 1, 0),
        ]
        assert len({a.metadata["pid"] for a in acks}) == 4
        assert len({a.task_id for a in acks}) == 1
        assert all(a.ok and a.freed_bytes == a.metadata["expected_bytes"] > 0 for a in acks)
        await engine.wake_up()
        ends = await asyncio.gather(*(collect(engine, sampling_params=p) for p in params))
        assert ends[0][-1].images[0].tobytes() == alone[0]
        os.kill(pid_of(engine, 1, 1), signal.SIGKILL)
        await until(lambda: state_of(engine, 1) == "FAILED")
        assert [rank.alive for rank in engine.status().stages[1].ranks] == [True, False]
        await engine.restart(1)
        assert (await collect(engine))[-1].images

    with AsyncOmni("demo", executor="mp", num_replicas=2) as engine:
        asyncio.run(run(engine))


def test_what_mp_does_not_do_yet_is_refused() -> None:
    for options in ({"executor": "ray"}, {"executor": "uni", "num_replicas": 2}):
        with pytest.raises(UnsupportedError, match="othing was started"):
            AsyncOmni("demo", **options)


def test_a_ranks_own_lines_can_be_read_and_stand_with_its_death(engine: AsyncOmni) -> None:
    async def run() -> None:
        await killed(engine, 1)
        assert isinstance(engine.logs(1), list)
        with pytest.raises(ArgumentError, match="no rank 7"):
            engine.logs(1, rank=7)
        with pytest.raises(ArgumentError, match="no stage 9"):
            engine.logs(9)

    asyncio.run(run())
