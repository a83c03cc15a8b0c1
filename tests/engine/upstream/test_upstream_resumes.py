"""A resume beside a pause, a sleep or a wake over an upstream engine: it wins, here and there."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from omni_notebook.errors import DeadlineError, PauseError, StageBusyError, StepLevelError
from tests.engine.engine_helpers import collect, until
from tests.engine.upstream.upstream_helpers import calls, held, lies


def stages(engine) -> list[tuple[str, str]]:
    return [(str(stage.state), str(stage.pause_state)) for stage in engine.status().stages]


OPEN = [("AWAKE", "OPEN")] * 2


async def answered(engine) -> bool:
    """Whether a request ends, which it does only where both gates, ours and upstream's, are open."""
    return (await collect(engine, request_id="after", admission_timeout=0.0, timeout=5))[-1].finished


@contextlib.asynccontextmanager
async def under_way(engine, mode="keep", stage_ids=(1,)):
    """A pause that upstream has heard of and holds back until it is let go."""
    with held(engine, "pause_generation") as let_go:
        pause = asyncio.create_task(engine.pause_generation(mode=mode, stage_ids=stage_ids))
        await until(lambda: let_go.reached)
        yield pause, let_go


@pytest.mark.parametrize("mode", ["keep", "wait"])
@pytest.mark.parametrize("lie", [None, "raise:pause"], ids=["it lands late", "it fails late"])
def test_resume_during_a_pause_wins_and_the_pause_says_so(engine, mode, lie):
    async def go():
        async with under_way(engine, mode, [0]) as (pause, let_go):
            await engine.resume_generation()
            assert stages(engine) == OPEN
            if lie is not None:
                lies(engine).add(lie)
            let_go()
            with pytest.raises(PauseError, match=rf"was resumed while .* this pause \({mode}\) does not hold"):
                await pause
        assert stages(engine) == OPEN
        return await answered(engine)

    assert asyncio.run(go())


def test_a_pause_that_lands_while_a_resume_is_under_way_does_not_hold(engine):
    async def go():
        with (
            held(engine, "pause_generation") as let_pause,
            held(engine, "resume_generation", answer=True) as let_resume,
        ):
            pause = asyncio.create_task(engine.pause_generation(mode="keep", stage_ids=[1]))
            await until(lambda: let_pause.reached)
            resume = asyncio.create_task(engine.resume_generation())
            await until(lambda: let_resume.reached)
            let_pause()
            await until(lambda: not engine._core.upstream._paused_stage_ids.isdisjoint({1}))
            let_resume()
            with pytest.raises(PauseError, match="was resumed"):
                await pause
            await resume
        assert stages(engine) == OPEN
        return await answered(engine)

    assert asyncio.run(go())


def test_a_pause_that_lands_after_its_deadline_and_a_resume_closes_nothing(engine):
    async def go():
        with held(engine, "pause_generation") as let_go:
            with pytest.raises(DeadlineError, match="PAUSE_FAILED"):
                await engine.pause_generation(mode="keep", stage_ids=[1], timeout=0.3)
            await engine.resume_generation()
            resumed = len(calls(engine, "resume_generation"))
            let_go()
            await until(lambda: len(calls(engine, "resume_generation")) > resumed)
        assert stages(engine) == OPEN
        return await answered(engine)

    assert asyncio.run(go())


def test_a_pause_during_which_a_resume_failed_is_on_record_as_failed_and_can_be_resumed(engine):
    async def go():
        async with under_way(engine) as (pause, let_go):
            lies(engine).add("raise:resume")
            with pytest.raises(PauseError, match="was not resumed"):
                await engine.resume_generation()
            let_go()
            with pytest.raises(PauseError, match=r"PAUSE_FAILED.* resume_generation\(\)"):
                await pause
        assert stages(engine) == [("AWAKE", "OPEN"), ("AWAKE", "PAUSE_FAILED")]
        lies(engine).clear()
        await engine.resume_generation()
        return await answered(engine)

    assert asyncio.run(go())


def test_the_pause_of_a_sleep_that_lands_after_its_deadline_closes_nothing(engine):
    async def go():
        engine._core.upstream.token_s = 0.05
        request = asyncio.create_task(collect(engine, request_id="r", sampling_params={"max_tokens": 200}))
        await until(lambda: calls(engine, "generate"))
        with held(engine, "pause_generation") as let_go:
            with pytest.raises(DeadlineError):
                await engine.sleep([1], mode="keep", timeout=0.3)
            assert stages(engine) == OPEN
            let_go()
            await until(lambda: calls(engine, "pause_generation"))
        await engine.abort("r")
        await request
        return await answered(engine)

    assert asyncio.run(go())
    assert calls(engine, "sleep") == []


def test_a_pause_does_not_begin_at_a_stage_that_was_resumed_before_its_turn(engine):
    async def go():
        async with under_way(engine, stage_ids=None) as (pause, let_go):
            await engine.resume_generation([1])
            let_go()
            with pytest.raises(PauseError, match="stage 1 was resumed"):
                await pause
        assert stages(engine) == [("AWAKE", "PAUSED"), ("AWAKE", "OPEN")]
        await engine.resume_generation()
        return await answered(engine)

    assert asyncio.run(go())


def test_a_resumed_stage_that_could_not_be_kept_is_not_put_back_to_its_pause_before(engine):
    async def go():
        await engine.pause_generation(mode="abort", stage_ids=[1])
        lies(engine).add("step_level")
        async with under_way(engine) as (pause, let_go):
            await engine.resume_generation()
            let_go()
            with pytest.raises((PauseError, StepLevelError)):
                await pause
        assert stages(engine) == OPEN
        return await answered(engine)

    assert asyncio.run(go())


def test_a_stage_that_upstream_does_not_open_after_such_a_pause_is_on_record_as_closed(engine):
    async def go():
        async with under_way(engine) as (pause, let_go):
            await engine.resume_generation()
            lies(engine).add("raise:resume")
            let_go()
            with pytest.raises(PauseError, match=r"went wrong inside; it is PAUSE_FAILED.* resume_generation\(\)"):
                await pause
        assert stages(engine) == [("AWAKE", "OPEN"), ("AWAKE", "PAUSE_FAILED")]
        lies(engine).clear()
        await engine.resume_generation()
        return await answered(engine)

    assert asyncio.run(go())


def test_a_stage_that_is_being_resumed_is_no_kept_one_for_a_sleep(engine):
    async def go():
        engine._core.upstream.token_s = 0.05
        request = asyncio.create_task(collect(engine, request_id="r", sampling_params={"max_tokens": 100}))
        await until(lambda: calls(engine, "generate"))
        await engine.pause_generation(mode="keep")
        with held(engine, "resume_generation", answer=True) as let_go:
            resume = asyncio.create_task(engine.resume_generation([1]))
            await until(lambda: let_go.reached)
            sleep = asyncio.create_task(engine.sleep([1]))
            await until(engine._core._order_lock.locked)
            let_go()
            with pytest.raises(StageBusyError):
                await sleep
            await resume
        assert calls(engine, "sleep") == []
        await engine.resume_generation()
        await engine.abort("r")
        await request

    asyncio.run(go())


def test_a_stage_resumed_while_it_waited_to_sleep_and_was_not_asked_takes_requests(engine):
    async def go():
        await engine.pause_generation(mode="keep")
        with held(engine, "sleep") as let_go:
            sleep = asyncio.create_task(engine.sleep())
            await until(lambda: let_go.reached)
            await engine.resume_generation()
            sleep.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sleep
            let_go()
            await until(lambda: stages(engine)[0][0] == "ASLEEP" and stages(engine)[1][0] == "AWAKE")
        assert len(calls(engine, "sleep")) == 1
        await engine.wake_up([0])
        assert stages(engine) == OPEN
        return await answered(engine)

    assert asyncio.run(go())


def test_a_stage_resumed_while_its_wake_closes_it_again_is_open_after_it(engine):
    async def go():
        await engine.pause_generation(mode="keep", stage_ids=[0])
        await engine.sleep([0])
        with held(engine, "pause_generation") as let_go:
            wake = asyncio.create_task(engine.wake_up([0]))
            await until(lambda: let_go.reached)
            await engine.resume_generation()
            let_go()
            await wake
        assert stages(engine) == OPEN
        return await answered(engine)

    assert asyncio.run(go())
