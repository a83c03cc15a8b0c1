"""Pause, keep barrier and resume."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from omni_notebook.errors import ArgumentError, DeadlineError, PauseError
from tests.engine.engine_helpers import collect, golden, slow, until
from tests.engine.rules import Rule

if TYPE_CHECKING:
    from omni_notebook.engine.async_omni import AsyncOmni

PARAMS = {"seed": 3, "num_inference_steps": 8}


@pytest.mark.rule(Rule.FINISHES, Rule.STAY_QUEUED)
def test_keep_delivers_the_running_batch_and_holds_the_queue(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 0.2):
            requests = [asyncio.create_task(collect(engine, sampling_params=PARAMS)) for _ in range(6)]
            await until(lambda: engine.status().stages[1].running and engine.status().stages[1].queued)
            await engine.pause_generation(mode="keep", stage_ids=[1])
            stage = engine.status().stages[1]
            assert (stage.pause_state, stage.pause_mode, stage.running) == ("PAUSED", "keep", 0)
            await until(lambda: engine.status().stages[1].in_transit == 0)
            held = engine.status().stages[1].queued
            assert held > 0
            await until(lambda: sum(r.done() for r in requests) == 6 - held)
        assert await engine.is_paused()
        await engine.resume_generation()
        assert all([(await r)[-1].images for r in requests])

    asyncio.run(run())


@pytest.mark.rule(Rule.UPDATE, Rule.NEW_WEIGHTS)
def test_the_specifications_order_of_a_weight_update(engine: AsyncOmni) -> None:
    async def run() -> None:
        before = await golden(engine)
        with slow(engine, 1, 0.1):
            requests = [asyncio.create_task(collect(engine, sampling_params=PARAMS)) for _ in range(5)]
            await until(lambda: engine.status().stages[1].queued)
            await engine.pause_generation(mode="keep", clear_cache=False)
            await engine.sleep(level=1)
            await engine.wake_up()
            assert await engine.is_paused()
            await engine.load_weights(1, engine.status().stages[1].model, version="v2")
            await engine.resume_generation()
            versions = {(await r)[-1].weight_version for r in requests}
        assert "v2" in versions
        assert await golden(engine) == before
        await engine.restart(1)

    asyncio.run(run())


@pytest.mark.rule(Rule.FRONTEND_ONLY)
@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_abort_and_wait_pause_only_the_frontend_of_a_diffusion_stage(engine: AsyncOmni, mode: str) -> None:
    async def run() -> None:
        with slow(engine, 1, 0.1):
            requests = [asyncio.create_task(collect(engine, sampling_params=PARAMS)) for _ in range(6)]
            await until(lambda: engine.status().stages[1].queued and not engine.status().stages[0].running)
            await engine.pause_generation(mode=mode, stage_ids=[1])
            assert await engine.is_paused()
            ends = [(await r)[-1] for r in requests]
        assert all(e.images for e in ends)

    asyncio.run(run())


@pytest.mark.parametrize(("mode", "state"), [("abort", "aborted"), ("wait", "finished"), ("keep", "finished")])
def test_an_ar_stage_aborts_drains_or_freezes(engine: AsyncOmni, mode: str, state: str) -> None:
    async def run() -> None:
        alone = (await collect(engine, output_modalities="text"))[-1].outputs[0].token_ids
        with slow(engine, 0, 0.03):
            requests = [asyncio.create_task(collect(engine, output_modalities="text")) for _ in range(12)]
            await until(lambda: engine.status().stages[0].running and engine.status().stages[0].queued)
            await engine.pause_generation(mode=mode, stage_ids=[0])
            if mode == "keep":
                frozen = engine.status().stages[0]
                assert frozen.running + frozen.queued > 0
            else:
                await until(lambda: all(r.done() for r in requests))
        await engine.resume_generation()
        ends = [(await r)[-1] for r in requests]
        assert {e.state for e in ends} == {state}
        if state == "finished":
            assert all(e.outputs[0].token_ids == alone for e in ends)

    asyncio.run(run())


@pytest.mark.rule(Rule.INFLIGHT)
def test_wait_for_inflight_requests_is_wait(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 0, 0.02):
            request = asyncio.create_task(collect(engine, output_modalities="text"))
            await until(lambda: engine.status().stages[0].running)
            await engine.pause_generation(stage_ids=[0], wait_for_inflight_requests=True)
        assert engine.status().stages[0].pause_mode == "wait"
        await until(request.done)
        assert (await request)[-1].state == "finished"

    asyncio.run(run())


def test_a_paused_stage_counts_as_quiesced_and_may_sleep_with_its_queue(engine: AsyncOmni) -> None:
    async def run() -> None:
        alone = (await collect(engine, sampling_params=PARAMS))[-1].images[0].tobytes()
        with slow(engine, 1, 0.1):
            requests = [asyncio.create_task(collect(engine, sampling_params=PARAMS)) for _ in range(5)]
            await until(lambda: engine.status().stages[1].queued)
            await engine.pause_generation(mode="keep")
            await engine.sleep(level=2)
        await engine.wake_up()
        assert await engine.is_paused()
        assert engine.status().stages[1].queued > 0
        await engine.resume_generation()
        ends = [(await r)[-1] for r in requests]
        assert any(e.images[0].tobytes() == alone for e in ends)
        assert all(e.images for e in ends)

    asyncio.run(run())


def test_resume_of_a_sleeping_stage_opens_its_scheduler_after_the_wake(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 0.1):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            await engine.pause_generation(mode="keep")
            second = asyncio.create_task(collect(engine))
            await engine.sleep(level=1)
        await engine.resume_generation()
        assert not await engine.is_paused()
        assert engine.status().stages[1].state == "ASLEEP"
        await engine.wake_up()
        assert (await request)[-1].images
        assert (await second)[-1].images

    asyncio.run(run())


@pytest.mark.rule(Rule.PARTIAL_RESUME, Rule.LAST_RESUME)
def test_admission_stays_closed_until_every_paused_stage_is_resumed(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.pause_generation(mode="keep")
        await engine.resume_generation(stage_ids=[0])
        assert await engine.is_paused()
        await engine.resume_generation(stage_ids=[1])
        assert not await engine.is_paused()

    asyncio.run(run())


def test_pausing_twice_is_one_pause(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.pause_generation(mode="keep")
        await engine.pause_generation(mode="keep")
        await engine.resume_generation()
        assert not await engine.is_paused()

    asyncio.run(run())


@pytest.mark.rule(Rule.FAILED_STAYS_CLOSED, Rule.NO_SLEEP_AFTER_FAILURE, Rule.RETRY_OR_RESUME)
def test_a_pause_that_times_out_stays_closed_refuses_sleep_and_can_be_retried(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 0.6):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            with pytest.raises(DeadlineError, match="did not complete"):
                await engine.pause_generation(mode="keep", stage_ids=[1], timeout=0.1)
            assert engine.status().stages[1].pause_state == "PAUSE_FAILED"
            assert await engine.is_paused()
            for call in (engine.sleep([1]), engine.load_weights(1, engine.status().stages[1].model)):
                with pytest.raises(PauseError, match="resume_generation"):
                    await call
            await engine.pause_generation(mode="keep", stage_ids=[1])
            assert engine.status().stages[1].pause_state == "PAUSED"
        assert (await request)[-1].images
        await engine.resume_generation()
        await golden(engine)

    asyncio.run(run())


@pytest.mark.rule(Rule.RETRY_OR_RESUME)
def test_resume_after_a_failed_pause_opens_everything(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 0.4):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            with pytest.raises(DeadlineError):
                await engine.pause_generation(mode="keep", stage_ids=[1], timeout=0.05)
            await engine.resume_generation()
        assert (await request)[-1].images
        await golden(engine)

    asyncio.run(run())


@pytest.mark.rule(Rule.RESUME_WINS)
def test_resume_during_a_pause_wins_and_the_pause_says_so(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 0.4):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            pause = asyncio.create_task(engine.pause_generation(mode="keep", stage_ids=[1]))
            await until(lambda: engine.status().stages[1].pause_state == "PAUSING")
            with pytest.raises(PauseError, match="PAUSING"):
                await engine.sleep([1])
            await engine.resume_generation()
            with pytest.raises(PauseError, match="was resumed"):
                await pause
        assert (await request)[-1].images
        assert not await engine.is_paused()
        await golden(engine)

    asyncio.run(run())


@pytest.mark.rule(Rule.CANCELLED)
def test_a_cancelled_pause_is_on_record_and_resume_helps(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 0.5):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            pause = asyncio.create_task(engine.pause_generation(mode="keep", stage_ids=[1]))
            await until(lambda: engine.status().stages[1].pause_state == "PAUSING")
            pause.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pause
            await until(lambda: engine.status().stages[1].pause_state == "PAUSE_FAILED")
            await engine.resume_generation()
        assert (await request)[-1].images

    asyncio.run(run())


@pytest.mark.parametrize("bad", [{"mode": "stop"}, {"stage_ids": []}, {"stage_ids": [9]}, {"timeout": -2}], ids=str)
def test_bad_pauses_are_refused_before_a_gate_moves(engine: AsyncOmni, bad: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match="othing changed"):
        asyncio.run(engine.pause_generation(**bad))  # type: ignore[arg-type]
    assert not asyncio.run(engine.is_paused())


@pytest.mark.rule(Rule.CONTROL_CALLS)
def test_control_calls_keep_working_while_paused(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.pause_generation(mode="keep")
        assert await engine.list_loras() == []
        await engine.sleep(level=1)
        await engine.wake_up()
        await engine.check_health()
        await engine.resume_generation()
        await golden(engine)

    asyncio.run(run())
