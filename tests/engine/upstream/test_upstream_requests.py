"""Requests and pauses over an upstream engine: gates, deadlines, and errors that it swallows."""

from __future__ import annotations

import asyncio

import pytest

from omni_notebook.errors import (
    ArgumentError,
    AsleepError,
    DeadlineError,
    EngineClosedError,
    PausedError,
    PauseError,
    StageBusyError,
    StepLevelError,
    UnsupportedError,
    UpstreamError,
)
from omni_notebook.protocol import AckEvent, RequestEvent, StateEvent
from tests.engine.engine_helpers import collect, until
from tests.engine.upstream.upstream_helpers import calls, lies

SLOW_S = 0.05


def pauses(engine) -> list[str]:
    return [str(stage.pause_state) for stage in engine.status().stages]


def slow(engine, seconds: float = SLOW_S) -> None:
    """Each token takes so long."""
    engine._core.upstream.token_s = seconds


async def begun(engine, request_id: str = "r1", **known):
    """A request that upstream has."""
    task = asyncio.create_task(collect(engine, request_id=request_id, **known))
    await until(lambda: engine.status().stages[0].in_transit == 1 and calls(engine, "generate"))
    return task


def test_text_grows_then_the_image_ends_the_request_and_nothing_before_it_says_finished(engine):
    outputs = asyncio.run(collect(engine, request_id="r1", sampling_params={"max_tokens": 3, "width": 16}))
    assert [len(o.outputs[0].token_ids) for o in outputs if o.outputs] == [1, 2, 3, 3]
    assert [o.finished for o in outputs] == [False] * 4 + [True]
    assert {o.request_id for o in outputs} == {"r1"}
    assert (outputs[-1].state, outputs[-1].stage_id, outputs[-1].images[0].size) == ("finished", 1, (16, 8))
    assert outputs[-1].png[0].startswith(b"\x89PNG")


def test_a_text_request_ends_with_the_text(engine):
    outputs = asyncio.run(collect(engine, output_modalities=["text"]))
    assert (outputs[-1].stage_id, outputs[-1].finished, outputs[-1].final_output_type) == (0, True, "text")


def test_only_what_was_named_replaces_a_stages_own_defaults(engine):
    params = {"seed": 7, "temperature": 0.0, "num_inference_steps": 5, "stop_token_ids": [9]}
    asyncio.run(collect(engine, sampling_params=params))
    ((_, (text, image), _),) = calls(engine, "generate")
    assert (text.seed, text.temperature, text.top_p, text.top_k, text.max_tokens) == (7, 0.0, 1.0, 0, 4)
    assert (text.output_kind.name, text._all_stop_token_ids) == ("CUMULATIVE", {9})
    assert (image.seed, image.num_inference_steps, image.guidance_scale) == (7, 5, 1.0)
    defaults = engine._core.upstream.default_sampling_params_list
    assert (defaults[0].seed, defaults[1].num_inference_steps) == (None, 2)


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": ""},
        {"prompt": {"prompt_token_ids": []}},
        {"sampling_params": {"sead": 1}},
        {"output_modalities": ["audio"]},
        {"lora_request": 3},
        {"request_id": ""},
    ],
)
def test_a_wrong_argument_is_refused_before_upstream_hears_of_it(engine, asked):
    with pytest.raises(ArgumentError):
        asyncio.run(collect(engine, **asked))
    assert calls(engine, "generate") == []


def test_a_stage_error_inside_an_output_is_raised(engine):
    lies(engine).add("stage_error")
    with pytest.raises(UpstreamError, match="failed in stage 1: CUDA out of memory"):
        asyncio.run(collect(engine))


@pytest.mark.parametrize("modalities", [["text"], None], ids=["text", "image"])
def test_what_upstreams_own_vllm_gave_up_is_an_error_and_no_text(engine, modalities):
    lies(engine).add("given up")
    with pytest.raises(UpstreamError, match=r"request r: .* in stage 0 with an error, the log of .* says why"):
        asyncio.run(collect(engine, request_id="r", output_modalities=modalities))
    lies(engine).clear()
    assert asyncio.run(collect(engine, request_id="r"))[-1].state == "finished"


def test_a_stream_that_just_ends_is_an_error(engine):
    lies(engine).add("silent")
    with pytest.raises(UpstreamError, match="without a finished output"):
        asyncio.run(collect(engine))


def test_what_generate_raises_is_one_line_of_ours(engine):
    lies(engine).add("raise:generate")
    with pytest.raises(UpstreamError, match="RuntimeError: generate went wrong inside") as raised:
        asyncio.run(collect(engine))
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_hung_request_ends_at_its_timeout_and_is_gone(engine):
    lies(engine).add("hang:generate")
    with pytest.raises(DeadlineError, match="aborted"):
        asyncio.run(collect(engine, timeout=0.3))
    asyncio.run(until(lambda: engine.status().stages[0].in_transit == 0))
    assert engine._core.upstream._requests == {}


def test_an_engine_that_dies_ends_the_requests_that_wait(engine):
    async def go():
        lies(engine).add("hang:generate")
        task = await begun(engine)
        engine._core.upstream.errored = True
        with pytest.raises(UpstreamError, match="has ended"):
            async with asyncio.timeout(5):
                await task

    asyncio.run(go())


def test_an_aborted_request_ends_with_a_terminal_output(engine):
    async def go():
        slow(engine)
        task = await begun(engine, sampling_params={"max_tokens": 200})
        assert await engine.abort("r1")
        assert not await engine.abort("nobody")
        return await task

    assert [(o.finished, str(o.state)) for o in asyncio.run(go())][-1] == (True, "aborted")


def test_a_client_that_leaves_ends_its_request_in_upstream(engine):
    async def go():
        slow(engine)
        stream = engine.generate("p", request_id="r1", sampling_params={"max_tokens": 200})
        await anext(stream)
        await stream.aclose()
        await until(lambda: engine.status().stages[0].in_transit == 0)

    asyncio.run(go())
    assert engine._core.upstream._requests == {}


def test_a_shutdown_ends_requests_with_an_error(engine):
    async def go():
        slow(engine)
        task = await begun(engine, sampling_params={"max_tokens": 200})
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineClosedError):
            await task

    asyncio.run(go())


# ------------------------------------------------------------------------------- sleeping with requests


def test_a_busy_stage_is_not_put_to_sleep(engine):
    async def go():
        slow(engine)
        task = await begun(engine)
        with pytest.raises(StageBusyError, match="mode='keep'") as raised:
            await engine.sleep([1])
        await task
        return raised.value

    assert asyncio.run(go()).in_transit == 1
    assert calls(engine, "sleep") == []


@pytest.mark.parametrize(("mode", "state"), [("wait", "finished"), ("abort", "aborted")])
def test_a_sleep_with_a_mode_brings_requests_to_their_end_first(engine, mode, state):
    async def go():
        slow(engine)
        task = await begun(engine, sampling_params={"max_tokens": 8})
        acks = await engine.sleep([0], mode=mode)
        return await task, acks

    outputs, acks = asyncio.run(go())
    assert str(outputs[-1].state) == state
    assert all(ack.ok for ack in acks)


def test_no_request_slips_in_while_a_sleep_waits_for_those_before_it(engine):
    async def go():
        slow(engine)
        task = await begun(engine, sampling_params={"max_tokens": 8})
        sleeping = asyncio.create_task(engine.sleep([1], mode="wait"))
        await until(lambda: str(engine.status().stages[1].state) == "FALLING_ASLEEP")
        with pytest.raises(AsleepError):
            await collect(engine, request_id="late", admission_timeout=0.0)
        held = asyncio.create_task(collect(engine, request_id="held", admission_timeout=30.0))
        acks = await sleeping
        assert (await task)[-1].finished
        assert len(calls(engine, "generate")) == 1
        await engine.wake_up([1])
        return acks, await held

    acks, outputs = asyncio.run(go())
    assert all(ack.ok for ack in acks)
    assert outputs[-1].images


def test_a_sleep_with_keep_freezes_requests_and_the_wake_lets_them_go_on(engine):
    async def go():
        slow(engine)
        task = await begun(engine, sampling_params={"max_tokens": 8})
        acks = await engine.sleep([1], mode="keep")
        assert calls(engine, "pause_generation")[-1] == ("pause_generation", "keep", [1])
        assert calls(engine, "sleep")[-1] == ("sleep", [1], 1, "keep")
        await engine.wake_up([1])
        assert pauses(engine) == ["OPEN", "OPEN"]
        return acks, await task, await collect(engine)

    acks, _, outputs = asyncio.run(go())
    assert all(ack.ok for ack in acks)
    assert outputs[-1].finished


def test_a_keep_that_upstream_refuses_leaves_the_stage_awake_and_open(engine):
    async def go():
        slow(engine)
        task = await begun(engine, sampling_params={"max_tokens": 8})
        lies(engine).add("raise:pause")
        with pytest.raises(UpstreamError, match="pause went wrong inside"):
            await engine.sleep([1], mode="keep")
        await task
        return await collect(engine, admission_timeout=0.0)

    assert asyncio.run(go())[-1].finished
    assert calls(engine, "sleep") == []


def test_a_version_that_can_not_pause_single_stages_says_so_and_stays_open(engine, monkeypatch):
    async def pause_generation(*, mode="abort", wait_for_inflight_requests=False, clear_cache=True):  # as 0.24 has it
        raise AssertionError

    monkeypatch.setattr(engine._core.upstream, "pause_generation", pause_generation)
    with pytest.raises(
        UnsupportedError, match=r"has no pause_generation\(stage_ids=…\), which 0.30 has; nothing changed"
    ):
        asyncio.run(engine.pause_generation())
    assert pauses(engine) == ["OPEN", "OPEN"]
    assert asyncio.run(collect(engine, admission_timeout=0.0))[-1].finished


def test_to_wait_for_requests_that_a_pause_holds_is_refused(engine):
    async def go():
        slow(engine)
        task = await begun(engine, sampling_params={"max_tokens": 8})
        await engine.pause_generation(mode="keep")
        with pytest.raises(StageBusyError):
            await engine.sleep([0], mode="wait")
        await engine.resume_generation()
        await task

    asyncio.run(go())
    assert calls(engine, "sleep") == []


def test_a_sleep_that_waits_too_long_for_requests_changes_nothing(engine):
    async def go():
        slow(engine)
        task = await begun(engine, sampling_params={"max_tokens": 40})
        with pytest.raises(DeadlineError, match="nothing slept"):
            await engine.sleep([0], mode="wait", timeout=0.2)
        await engine.abort("r1")
        await task

    asyncio.run(go())
    assert calls(engine, "sleep") == []
    assert asyncio.run(collect(engine, admission_timeout=0.0))[-1].finished


# ------------------------------------------------------------------------------------- pauses


def test_a_paused_engine_refuses_by_our_gate_and_lets_in_after_the_resume(engine):
    async def go():
        await engine.pause_generation(mode="keep")
        assert await engine.is_paused()
        with pytest.raises(PausedError, match="resume_generation"):
            await collect(engine, admission_timeout=0.0)
        await engine.resume_generation()
        return await collect(engine)

    assert asyncio.run(go())[-1].finished
    assert pauses(engine) == ["OPEN", "OPEN"]


def test_a_wake_lifts_no_pause_that_the_user_made(engine):
    async def go():
        await engine.pause_generation(mode="keep")
        await engine.sleep()
        await engine.wake_up()
        assert pauses(engine) == ["PAUSED", "PAUSED"]
        assert calls(engine, "resume_generation") == []
        assert calls(engine, "pause_generation")[-1] == ("pause_generation", "keep", [0])
        await engine.resume_generation()
        return await collect(engine)

    assert asyncio.run(go())[-1].finished


def test_a_resume_of_a_stage_that_sleeps_does_not_start_its_scheduler(engine):
    async def go():
        await engine.pause_generation(mode="keep")
        await engine.sleep()
        await engine.resume_generation()
        assert calls(engine, "resume_generation") == []
        await engine.wake_up()
        return await collect(engine)

    assert asyncio.run(go())[-1].finished


def test_a_failed_pause_is_on_record_forbids_a_sleep_and_can_be_resumed(engine):
    async def go():
        lies(engine).add("raise:pause")
        with pytest.raises(PauseError, match="PAUSE_FAILED"):
            await engine.pause_generation(mode="keep", stage_ids=[0])
        with pytest.raises(PauseError, match="until the pause holds"):
            await engine.sleep([0])
        lies(engine).clear()
        await engine.resume_generation()
        return await collect(engine)

    assert asyncio.run(go())[-1].finished


def test_a_hung_pause_ends_at_its_deadline(engine):
    lies(engine).add("hang:pause")
    with pytest.raises(DeadlineError, match="PAUSE_FAILED"):
        asyncio.run(engine.pause_generation(mode="keep", stage_ids=[1], timeout=0.3))
    assert pauses(engine) == ["OPEN", "PAUSE_FAILED"]


def test_keep_on_a_step_level_stage_changes_nothing_and_admission_is_open_again(engine):
    lies(engine).add("step_level")
    with pytest.raises(NotImplementedError) as raised:
        asyncio.run(engine.pause_generation(mode="keep", stage_ids=[1]))
    assert isinstance(raised.value, StepLevelError)
    assert pauses(engine) == ["OPEN", "OPEN"]
    assert asyncio.run(collect(engine, admission_timeout=0.0))[-1].finished


# -------------------------------------------------------------------------------------- events


def test_subscribers_hear_every_ack_state_and_request(engine):
    async def go():
        events, heard = engine.subscribe(), []

        async def listen():
            heard.extend([event async for event in events])

        listening = asyncio.create_task(listen())
        await engine.sleep([1])
        await engine.wake_up([1])
        await collect(engine)
        events.close()
        await listening
        return heard

    heard = asyncio.run(go())
    assert [(e.order, e.ack.rank) for e in heard if isinstance(e, AckEvent)] == [
        ("sleep", 0),
        ("sleep", 1),
        ("wake", 0),
        ("wake", 1),
    ]
    assert [str(e.state) for e in heard if isinstance(e, StateEvent)] == [
        "FALLING_ASLEEP",
        "ASLEEP",
        "WAKING",
        "AWAKE",
    ]
    assert [str(e.state) for e in heard if isinstance(e, RequestEvent)][-1] == "finished"
