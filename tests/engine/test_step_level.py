"""Step-level execution: requests join and end between denoise steps, previews stream, keep is refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import StageBusyError
from omni_notebook.protocol import LoRARequest, RequestEvent
from tests import adapters
from tests.engine.engine_helpers import collect, golden, reset, slow, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from omni_notebook.protocol import OmniRequestOutput

PARAMS = {"seed": 5, "num_inference_steps": 10}


@pytest.fixture(scope="module", params=["uni", "mp", "mp, TP 2"])
def shared_steps(request: pytest.FixtureRequest) -> Iterator[AsyncOmni]:
    """Engines whose painter runs single steps."""
    executor, _, parallel = request.param.partition(", TP ")
    with AsyncOmni("demo", executor=executor, tensor_parallel_size=int(parallel or 1), step_execution=True) as engine:
        yield engine


@pytest.fixture
def steps(shared_steps: AsyncOmni) -> Iterator[AsyncOmni]:
    asyncio.run(reset(shared_steps))
    yield shared_steps
    asyncio.run(reset(shared_steps))


def previews(outputs: list[OmniRequestOutput]) -> list[OmniRequestOutput]:
    return [o for o in outputs if o.images and not o.finished]


def distance(one: Any, other: Any) -> float:
    return float(np.abs(np.asarray(one, "float32") - np.asarray(other, "float32")).mean())


def begun(engine: AsyncOmni) -> int:
    """Half denoised images that the painter's first rank holds; None of a rank in another process."""
    worker: Any = engine._core.stages[1].replicas[0].executor._worker  # type: ignore[attr-defined]
    return len(worker._runner._steps)


def test_an_image_drawn_step_by_step_is_the_one_drawn_in_a_batch_of_its_own(shared_steps: AsyncOmni) -> None:
    config = shared_steps._core.stages[1].config
    with AsyncOmni("demo", executor=config.executor, tensor_parallel_size=config.tensor_parallel_size) as whole:
        wanted = asyncio.run(golden(whole, sampling_params=PARAMS))
    assert asyncio.run(golden(shared_steps, sampling_params=PARAMS)) == wanted


def test_previews_stream_and_come_closer_to_the_image(steps: AsyncOmni) -> None:
    async def run() -> None:
        events = steps.subscribe()
        with slow(steps, 1, 0.03):
            outputs = await collect(steps, sampling_params=PARAMS)
        events.close()
        seen = previews(outputs)
        progress = [e.progress async for e in events if isinstance(e, RequestEvent) and e.progress is not None]
        final = outputs[-1]
        done = [o.metrics["step"] for o in seen]
        assert done == sorted(set(done))
        assert len(done) >= 5
        assert max(done) < PARAMS["num_inference_steps"]
        assert progress == [step / 10 for step in range(1, 10)]
        far, near = (distance(o.images[0], final.images[0]) for o in (seen[0], seen[-1]))
        assert near < far / 2
        assert final.png[0][:8] == b"\x89PNG\r\n\x1a\n"
        assert final.metrics["step_weight_versions"] == [[final.weight_version, 10]]

    asyncio.run(run())


def test_a_request_joins_between_two_steps_of_another(steps: AsyncOmni) -> None:
    async def run() -> None:
        with slow(steps, 1, 0.03):
            first = asyncio.create_task(collect(steps, sampling_params={**PARAMS, "num_inference_steps": 40}))
            await until(lambda: steps.status().stages[1].running == 1)
            second = (await collect(steps, sampling_params=PARAMS))[-1]
            assert not first.done()
            assert second.metrics["batch_size"] == 2
            assert (await first)[-1].metrics["num_inference_steps"] == 40

    asyncio.run(run())


def test_requests_of_other_lengths_and_guidances_get_their_own_pictures(steps: AsyncOmni) -> None:
    wishes = [{"seed": n, "num_inference_steps": 6 + n, "guidance_scale": 1.0 + n % 2} for n in range(6)]

    async def run() -> None:
        alone = [(await collect(steps, sampling_params=wish))[-1].images[0] for wish in wishes]
        together = await asyncio.gather(*(collect(steps, sampling_params=wish) for wish in wishes))
        for one, outputs in zip(alone, together, strict=True):
            assert distance(one, outputs[-1].images[0]) < 0.5  # another batch composition: up to rounding

    asyncio.run(run())


@pytest.mark.parametrize("order", ["pause_generation", "sleep"])
def test_keep_is_refused_before_anything_moves(steps: AsyncOmni, order: str) -> None:
    async def run() -> None:
        with slow(steps, 1, 0.03):
            request = asyncio.create_task(collect(steps, sampling_params=PARAMS))
            await until(lambda: steps.status().stages[1].running == 1)
            with pytest.raises(NotImplementedError, match=r"stage 1 runs single steps .* Nothing changed"):
                await getattr(steps, order)(mode="keep")
            status = steps.status()
            assert {(s.pause_state, s.state) for s in status.stages} == {("OPEN", "AWAKE")}
            assert not await steps.is_paused()
            assert (await request)[-1].state == "finished"

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_abort_and_wait_still_close_admission_only(steps: AsyncOmni, mode: str) -> None:
    async def run() -> None:
        with slow(steps, 1, 0.02):
            requests = [asyncio.create_task(collect(steps, sampling_params=PARAMS)) for _ in range(5)]
            await until(lambda: steps.status().stages[1].running and not steps.status().stages[0].running)
            await steps.pause_generation(mode=mode, stage_ids=[1])
            assert await steps.is_paused()
            assert {(await r)[-1].state for r in requests} == {"finished"}

    asyncio.run(run())


@pytest.mark.parametrize(("mode", "state"), [("wait", "finished"), ("abort", "aborted")])
@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_waits_or_aborts_loses_nothing(steps: AsyncOmni, mode: str, state: str, level: int) -> None:
    async def run() -> None:
        before = await golden(steps)
        with slow(steps, 1, 0.02):
            requests = [asyncio.create_task(collect(steps, sampling_params=PARAMS)) for _ in range(5)]
            await until(lambda: steps.status().stages[1].running and not steps.status().stages[0].running)
            acks = await steps.sleep([1], level=level, mode=mode)
            assert all(ack.ok and ack.freed_bytes > 0 for ack in acks)
            assert {(await r)[-1].state for r in requests} == {state}
        await steps.wake_up([1])
        assert await golden(steps) == before

    asyncio.run(run())


def test_a_busy_stage_refuses_new_weights(steps: AsyncOmni) -> None:
    async def run() -> None:
        with slow(steps, 1, 0.03):
            request = asyncio.create_task(collect(steps, sampling_params=PARAMS))
            await until(lambda: steps.status().stages[1].running == 1)
            with pytest.raises(StageBusyError, match="1 running"):
                await steps.load_weights(1, steps.status().stages[1].model)
            assert (await request)[-1].state == "finished"

    asyncio.run(run())


def test_an_aborted_request_takes_no_further_step_and_the_ranks_forget_it(steps: AsyncOmni) -> None:
    async def run() -> None:
        with slow(steps, 1, 0.03):
            long = {**PARAMS, "num_inference_steps": 1000}
            request = asyncio.create_task(collect(steps, request_id="long", sampling_params=long))
            await until(lambda: steps.status().stages[1].running == 1)
            await steps.abort("long")
            assert (await request)[-1].state == "aborted"
            await until(lambda: steps.status().stages[1].running == 0)
        assert (await collect(steps, sampling_params=PARAMS))[-1].state == "finished"
        if steps._core.stages[1].config.executor == "uni":
            assert begun(steps) == 0

    asyncio.run(run())


def test_a_restart_begins_a_half_drawn_image_again(steps: AsyncOmni) -> None:
    async def run() -> None:
        before = await golden(steps, sampling_params=PARAMS)
        with slow(steps, 1, 0.03):
            request = asyncio.create_task(golden(steps, sampling_params=PARAMS))
            await until(lambda: steps.status().stages[1].running == 1)
            await steps.restart(1)
        assert await request == before

    asyncio.run(run())


def test_adapters_are_on_at_every_step_and_only_for_who_named_them(steps: AsyncOmni, tmp_path: Path) -> None:
    tensors = adapters.matrices(steps._core.stages[1].model.adaptable, size=2.0)
    adapter = LoRARequest("inked", 1, str(adapters.write(tmp_path / "inked", tensors)))

    async def run() -> None:
        plain = await golden(steps, sampling_params=PARAMS)
        await steps.add_lora(adapter, [1])
        try:
            inked = await golden(steps, sampling_params=PARAMS, lora_request=adapter)
            assert distance(list(inked[1]), list(plain[1])) > 1
            both = await asyncio.gather(
                collect(steps, sampling_params=PARAMS, lora_request=adapter), collect(steps, sampling_params=PARAMS)
            )
            for outputs, alone in zip(both, (inked, plain), strict=True):  # another batch of the thinker: rounding
                assert distance(list(outputs[-1].images[0].tobytes()), list(alone[1])) < 0.5
        finally:
            await steps.remove_lora(1)

    asyncio.run(run())
