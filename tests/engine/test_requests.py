"""Requests: routes, parameters, gates, aborts; every client gets an end, every wait has a bound."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import (
    ArgumentError,
    AsleepError,
    DeadlineError,
    EngineClosedError,
    PausedError,
    StageFailedError,
)
from omni_notebook.protocol import OmniSamplingParams, RequestEvent
from tests.engine.engine_helpers import PROMPT, collect, fault, golden, slow, until

if TYPE_CHECKING:
    from collections.abc import Sequence


def test_a_request_gives_text_then_an_image(engine: AsyncOmni) -> None:
    outputs = asyncio.run(collect(engine))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    text = next(o for o in reversed(outputs) if o.stage_id == 0)
    assert (text.state, text.final_output_type) == ("finished", "image")
    assert text.text
    assert text.outputs[0].token_ids
    last = outputs[-1]
    assert (last.stage_id, last.images[0].size, last.metrics["seed"]) == (1, (64, 64), 42)
    assert last.weight_version == engine.status().stages[1].weight_version


def test_a_text_request_ends_at_stage_0_and_needs_no_image_stage(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.sleep([1], level=2)
        last = (await collect(engine, output_modalities=["text"], admission_timeout=0))[-1]
        assert (last.stage_id, last.finished, last.final_output_type) == (0, True, "text")

    asyncio.run(run())


def test_many_requests_at_once_each_draw_what_they_draw_alone(engine: AsyncOmni) -> None:
    async def run() -> None:
        params = [{"seed": n, "num_inference_steps": 4} for n in range(5)]
        texts = [(await collect(engine, sampling_params=p))[-2].text for p in params]
        together = await asyncio.gather(*(collect(engine, sampling_params=p) for p in params))
        assert [outputs[-1].metrics["seed"] for outputs in together] == list(range(5))
        assert [outputs[-2].text for outputs in together] == texts

    asyncio.run(run())


def test_the_same_seed_draws_the_same_bytes_and_another_does_not(engine: AsyncOmni) -> None:
    async def run() -> None:
        first, again = await golden(engine), await golden(engine)
        other = await golden(engine, sampling_params={"seed": 43, "num_inference_steps": 6})
        assert first == again
        assert other[1] != first[1]

    asyncio.run(run())


def test_a_request_without_a_seed_reports_the_one_it_drew(engine: AsyncOmni) -> None:
    async def run() -> None:
        outputs = await collect(engine, sampling_params={"num_inference_steps": 4})
        seed = outputs[-1].metrics["seed"]
        again = await collect(engine, sampling_params=OmniSamplingParams(seed=seed, num_inference_steps=4))
        assert again[-1].images[0].tobytes() == outputs[-1].images[0].tobytes()

    asyncio.run(run())


def test_temperature_draws_depend_on_the_seed_alone(engine: AsyncOmni) -> None:
    async def run() -> None:
        async def tokens(seed: int) -> list[int]:
            params = {"seed": seed, "temperature": 5.0}
            return (await collect(engine, sampling_params=params, output_modalities="text"))[-1].outputs[0].token_ids

        drawn = [await tokens(seed) for seed in range(8)]
        assert drawn == [await tokens(seed) for seed in range(8)]
        assert len({tuple(t) for t in drawn}) > 1

    asyncio.run(run())


def test_token_ids_are_a_prompt_too(engine: AsyncOmni) -> None:
    async def run() -> None:
        ids = engine._core.stages[0].model._tokenizer.encode(PROMPT)
        by_ids = await collect(engine, {"prompt_token_ids": ids}, output_modalities="text")
        by_text = await collect(engine, output_modalities="text")
        assert by_ids[-1].outputs[0].token_ids == by_text[-1].outputs[0].token_ids

    asyncio.run(run())


BAD = [
    ("", {}, "prompt is empty"),
    ("   ", {}, "prompt is empty"),
    (7, {}, "a prompt is a string"),
    ({"prompt_token_ids": []}, {}, "a prompt is a string"),
    ({"prompt_token_ids": [10**9]}, {}, "this model knows"),
    ({"prompt_token_ids": [1] * 100_000}, {}, "at most"),
    (PROMPT, {"sampling_params": {"num_inference_steps": 10**6}}, "out of range"),
    (PROMPT, {"sampling_params": {"num_inference_steps": 0}}, "out of range"),
    (PROMPT, {"sampling_params": {"guidance_scale": float("nan")}}, "out of range"),
    (PROMPT, {"sampling_params": {"steps": 3}}, "unknown sampling parameter 'steps'"),
    (PROMPT, {"sampling_params": {"seed": "x"}}, "seed"),
    (PROMPT, {"sampling_params": {"seed": -1}}, "out of range"),
    (PROMPT, {"sampling_params": {"width": 8}}, "64 × 64"),
    (PROMPT, {"output_modalities": ["sound"]}, "this pipeline gives text, image"),
    (PROMPT, {"request_id": ""}, "request_id"),
    (PROMPT, {"request_id": "a\ud800"}, "request_id.*is not a non-empty string of Unicode text"),
    (PROMPT, {"admission_timeout": -1}, "admission_timeout"),
]


@pytest.mark.parametrize(("prompt", "known", "message"), BAD, ids=[m for _, _, m in BAD])
def test_bad_requests_get_one_clear_line(engine: AsyncOmni, prompt: Any, known: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        asyncio.run(collect(engine, prompt, **known))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cancelled", [False, True], ids=["refused", "cancelled"])
def test_a_client_that_gives_up_at_the_gates_does_not_end_anothers_request_of_its_id(
    engine: AsyncOmni, cancelled: bool
) -> None:
    async def run() -> None:
        await engine.sleep([1])
        at_the_gate = asyncio.create_task(collect(engine, request_id="same", admission_timeout=60 if cancelled else 1))
        await until(lambda: engine.status().stages[1].waiting_at_gate)
        with slow(engine, 0, 0.2):
            text = asyncio.create_task(collect(engine, request_id="same", output_modalities="text"))
            await until(lambda: engine.status().stages[0].running)
            if cancelled:
                at_the_gate.cancel()
            with pytest.raises(asyncio.CancelledError if cancelled else AsleepError):
                await at_the_gate
            assert not text.done()
            await until(lambda: not engine.status().stages[1].waiting_at_gate)
        assert (await text)[-1].state == "finished"

    asyncio.run(run())


@pytest.mark.parametrize("prompt", [PROMPT * 400, {"prompt_token_ids": [5] * 20_000}], ids=["text", "ids"])
def test_a_long_prompt_is_read_once_and_never_on_the_engines_loop(
    engine: AsyncOmni, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    model, readers = engine._core.stages[0].model, []
    first = model.first

    def noted(*args: Any) -> Any:
        readers.append(threading.current_thread().name)
        return first(*args)

    monkeypatch.setattr(model, "first", noted)

    async def run() -> None:
        if isinstance(prompt, dict):
            with pytest.raises(ArgumentError, match="the prompt has 20000 tokens; this model takes at most"):
                await collect(engine, prompt)
            return
        await engine.sleep([0])
        waiting = asyncio.create_task(collect(engine, prompt))
        await until(lambda: engine.status().stages[0].waiting_at_gate)
        await engine.wake_up()
        assert (await waiting)[-1].images

    asyncio.run(run())
    assert len(readers) == 1
    assert readers[0] != engine._loop._thread.name


def test_a_request_id_in_progress_is_refused(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 0.2):
            first = asyncio.create_task(collect(engine, request_id="one"))
            await until(lambda: "one" in engine._core._flows)
            with pytest.raises(ArgumentError, match="already in progress"):
                await collect(engine, request_id="one")
            await first
        await collect(engine, request_id="one")

    asyncio.run(run())


def test_closed_gates_refuse_at_once_and_name_the_call(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.sleep([0])
        with pytest.raises(AsleepError, match=r"wake_up\(\[0\]\)"):
            await collect(engine, admission_timeout=0)
        await engine.wake_up([0])
        await engine.pause_generation(mode="keep", stage_ids=[1])
        with pytest.raises(PausedError, match="resume_generation"):
            await collect(engine, admission_timeout=0, output_modalities="text")

    asyncio.run(run())


def test_a_closed_gate_holds_requests_until_it_opens_and_counts_them(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.sleep([0])
        held = [asyncio.create_task(collect(engine)) for _ in range(3)]
        await until(lambda: engine.status().stages[0].waiting_at_gate == 3)
        assert engine.status().stages[1].waiting_at_gate == 3
        await engine.wake_up([0])
        assert all([(await h)[-1].images for h in held])
        assert engine.status().stages[0].waiting_at_gate == 0

    asyncio.run(run())


@pytest.mark.parametrize("closed", ["asleep", "paused"])
def test_a_request_that_is_aborted_at_a_gate_ends_with_that_output_and_never_runs(
    engine: AsyncOmni, closed: str
) -> None:
    async def run() -> None:
        if closed == "asleep":
            await engine.sleep([1])
        else:
            await engine.pause_generation("keep", [1])
        events = engine.subscribe()
        known = {"request_id": "held", "sampling_params": {"seed": 7}}
        held, other = asyncio.create_task(collect(engine, **known)), asyncio.create_task(collect(engine))
        await until(lambda: engine.status().stages[1].waiting_at_gate == 2)
        assert await engine.abort("held")
        (output,) = await held
        assert (output.request_id, output.state, output.finished) == ("held", "aborted", True)
        assert (output.stage_id, output.final_output_type, output.images) == (0, "image", [])
        assert output.outputs[0].finish_reason == "abort"
        assert output.metrics["seed"] == 7
        assert not await engine.abort("held")
        assert [s.waiting_at_gate for s in engine.status().stages] == [1, 1]
        await engine.wake_up()
        await engine.resume_generation()
        assert (await other)[-1].images
        assert (await collect(engine, **known))[-1].images
        events.close()
        states = [e.state async for e in events if isinstance(e, RequestEvent) and e.request_id == "held"]
        assert states[:2] == ["aborted", "waiting"]
        assert states[-1] == "finished"

    asyncio.run(run())


def test_an_abort_ends_all_that_have_its_id_at_a_gate_and_past_it(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.sleep([1])
        at_gates = [asyncio.create_task(collect(engine, request_id="same")) for _ in range(2)]
        await until(lambda: engine.status().stages[1].waiting_at_gate == 2)
        with slow(engine, 0, 0.2):
            text = asyncio.create_task(collect(engine, request_id="same", output_modalities="text"))
            await until(lambda: engine.status().stages[0].running)
            assert await engine.abort("same")
            assert [(await one)[-1].state for one in (*at_gates, text)] == ["aborted"] * 3

    asyncio.run(run())


def test_a_wait_at_a_gate_has_a_bound(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.sleep([0])
        started = time.monotonic()
        with pytest.raises(AsleepError, match=r"waited 0\.2 s"):
            await collect(engine, admission_timeout=0.2)
        assert 0.15 < time.monotonic() - started < 5

    asyncio.run(run())


def test_a_request_has_a_bound_if_the_client_wants_one(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 2.5):
            with pytest.raises(DeadlineError, match="it is in stage 1"):
                await collect(engine, timeout=1.5)
            await until(lambda: not engine._core._flows)
            await until(lambda: not engine.status().stages[1].running)

    asyncio.run(run())


@pytest.mark.parametrize("stage_id", [0, 1])
def test_abort_ends_a_running_request_with_a_terminal_output(engine: AsyncOmni, stage_id: int) -> None:
    async def run() -> None:
        with slow(engine, stage_id, 0.1):
            request = asyncio.create_task(collect(engine, request_id="gone"))
            await until(lambda: engine.status().stages[stage_id].running)
            assert await engine.abort("gone") is True
            last = (await request)[-1]
            assert (last.finished, last.state, last.images) == (True, "aborted", [])
            assert await engine.abort("gone") is False
        await golden(engine)

    asyncio.run(run())


def test_an_aborted_batch_stops_at_its_next_step(engine: AsyncOmni) -> None:
    async def run() -> None:
        params = {"seed": 1, "num_inference_steps": 1000}
        request = asyncio.create_task(collect(engine, request_id="long", sampling_params=params))
        await until(lambda: engine.status().stages[1].running)
        started = time.monotonic()
        await engine.abort("long")
        assert (await request)[-1].state == "aborted"
        await golden(engine)
        assert time.monotonic() - started < 3

    asyncio.run(run())


def test_abort_ends_a_queued_request_while_paused(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 0, 0.05):
            request = asyncio.create_task(collect(engine, request_id="queued"))
            await until(lambda: engine.status().stages[0].running)
            await engine.pause_generation(mode="keep")
        assert await engine.abort("queued")
        assert (await request)[-1].state == "aborted"

    asyncio.run(run())


def test_a_client_that_goes_away_frees_its_place(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 0.1):
            async for output in engine.generate(PROMPT, sampling_params={"seed": 1}):
                assert not output.finished
                break
        await until(lambda: not engine._core._flows)
        await until(lambda: engine.status().stages[1].running == 0)

    asyncio.run(run())


def test_a_cancelled_client_frees_its_place(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 0.2):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            await until(lambda: not engine._core._flows)

    asyncio.run(run())


def test_a_batch_that_fails_ends_its_requests_and_nobody_elses(engine: AsyncOmni) -> None:
    async def run() -> None:
        with (
            fault(engine, 1, "execute", RuntimeError("bad kernel")),
            pytest.raises(RuntimeError, match="bad kernel"),
        ):
            await collect(engine)
        await golden(engine)

    asyncio.run(run())


def test_a_closed_downstream_stage_holds_back_the_65th_request(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.pause_generation(mode="keep", stage_ids=[1])
        stages = engine._core.stages
        assert stages[0].connector is not None
        for stage in stages:  # as for requests admitted just before the pause
            stage.pause_state = type(stage.pause_state)("OPEN")
        requests = [asyncio.create_task(collect(engine, sampling_params={"num_inference_steps": 1})) for _ in range(70)]
        await until(lambda: engine.status().stages[1].queued == 64)
        await asyncio.sleep(0.1)
        status = engine.status()
        assert (status.stages[1].queued, status.stages[0].running, status.stages[0].queued) == (64, 0, 6)
        text = await collect(engine, output_modalities="text")
        assert text[-1].finished
        stages[1].pause_state = type(stages[1].pause_state)("PAUSED")
        await engine.resume_generation()
        ends = [(await r)[-1] for r in requests]
        assert all(e.images for e in ends)

    asyncio.run(run())


def test_a_closed_engine_refuses_and_ends_its_clients() -> None:
    async def run() -> Sequence[Any]:
        engine = AsyncOmni("demo")
        with slow(engine, 1, 0.3):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            engine.shutdown()
        outputs = await request
        assert (outputs[-1].finished, outputs[-1].state) == (True, "aborted")
        with pytest.raises(EngineClosedError):
            await engine.sleep()
        with pytest.raises(EngineClosedError):
            await collect(engine)
        assert engine.status().closed
        engine.shutdown()
        return outputs

    asyncio.run(run())


def test_a_failed_stage_ends_its_clients_and_those_on_their_way_with_the_call_that_helps(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.pause_generation(mode="keep", stage_ids=[1])
        engine._core.stages[1].pause_state = type(engine._core.stages[1].pause_state)("OPEN")
        queued = [asyncio.create_task(collect(engine)) for _ in range(3)]
        await until(lambda: engine.status().stages[1].queued == 3)
        with slow(engine, 0, 0.05):
            coming = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[0].running)
            gone = RuntimeError("the driver is gone")
            with fault(engine, 1, "commit_sleep", gone), fault(engine, 1, "undo", gone):
                await engine.sleep([1], mode="keep", raise_on_error=False)
        assert engine.status().stages[1].state == "FAILED"
        for client in (*queued, coming):
            with pytest.raises(StageFailedError, match=r"restart\(1\)"):
                await client
        text = await collect(engine, output_modalities="text")
        assert text[-1].finished
        engine._core.stages[1].pause_state = type(engine._core.stages[1].pause_state)("PAUSED")
        await engine.resume_generation()
        await engine.restart(1)
        await golden(engine)

    asyncio.run(run())


def test_restart_serves_the_requests_that_waited(engine: AsyncOmni) -> None:
    async def run() -> None:
        alone = await golden(engine)
        await engine.pause_generation(mode="keep", stage_ids=[1])
        engine._core.stages[1].pause_state = type(engine._core.stages[1].pause_state)("OPEN")
        queued = asyncio.create_task(collect(engine))
        await until(lambda: engine.status().stages[1].queued == 1)
        engine._core.stages[1].pause_state = type(engine._core.stages[1].pause_state)("PAUSED")
        await engine.restart(1)
        assert engine.status().stages[1].queued == 1
        await engine.resume_generation()
        assert (await queued)[-1].images[0].tobytes() == alone[1]

    asyncio.run(run())
