"""An AR stage under abort, wait and keep, as vLLM's `AsyncLLM.pause_generation` has them (issue 4, item 4)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.errors import PausedError, StageBusyError
from tests.engine.engine_helpers import collect, golden, held, slow, until
from tests.engine.painting import PAINTER, THINKER, draw, journal, places, stage, tokens
from tests.engine.rules import Rule

if TYPE_CHECKING:
    from omni_notebook.engine.async_omni import AsyncOmni

PROMPTS = [
    "a red star above a blue circle",
    "two blue squares",
    "a pink heart with a red star to its left",
    "a green square below a yellow triangle",
]
MANY = [*PROMPTS, *PROMPTS, *PROMPTS]
"""More than the stage has slots for: some run, some wait."""


async def texts(engine: AsyncOmni) -> list[list[int]]:
    """What each prompt writes by itself."""
    return [await tokens(engine, prompt=prompt) for prompt in PROMPTS]


def begun(engine: AsyncOmni) -> int:
    """Tokens that the sequences of the thinker have written so far."""
    scheduler = engine._core.stages[THINKER].replicas[0].scheduler
    return sum(len(request.payload.generated) for request in scheduler._running.values())


async def half_way(engine: AsyncOmni, prompts: list[str], **known: Any) -> list[asyncio.Task[list[Any]]]:
    """Requests of which the first have written some of their tokens."""
    requests = [asyncio.create_task(collect(engine, prompt, **known)) for prompt in prompts]
    await until(lambda: begun(engine) >= 3 and stage(engine, THINKER).running == min(len(prompts), 8))
    return requests


@pytest.mark.rule(Rule.AR_ABORT)
def test_abort_ends_running_and_waiting_requests_with_what_they_have(painter: AsyncOmni) -> None:
    async def run() -> None:
        alone = await texts(painter)
        with slow(painter, THINKER, 0.05):
            requests = await half_way(painter, MANY, output_modalities="text")
            await painter.pause_generation("abort", [THINKER])
        ends = [(await asyncio.wait_for(r, 5))[-1] for r in requests]
        assert {(end.state, end.finished, end.outputs[0].finish_reason) for end in ends} == {("aborted", True, "abort")}
        for n, end in enumerate(ends):
            written = end.outputs[0].token_ids
            assert written == alone[n % 4][: len(written)]
        assert sum(len(end.outputs[0].token_ids) for end in ends) >= 3
        assert (stage(painter, THINKER).running, stage(painter, THINKER).queued) == (0, 0)
        await painter.resume_generation()
        assert await texts(painter) == alone

    asyncio.run(run())


@pytest.mark.rule(Rule.AR_WAIT)
@pytest.mark.parametrize("known", [{"mode": "wait"}, {"wait_for_inflight_requests": True}], ids=str)
def test_wait_lets_running_and_waiting_requests_end_then_stops_the_stage(
    painter: AsyncOmni, known: dict[str, Any]
) -> None:
    async def run() -> None:
        alone = await texts(painter)
        with slow(painter, THINKER, 0.02):
            requests = await half_way(painter, MANY, output_modalities="text")
            await painter.pause_generation(stage_ids=[THINKER], **known)
            assert (stage(painter, THINKER).running, stage(painter, THINKER).queued) == (0, 0)
            assert not painter._core.stages[THINKER].open
            with pytest.raises(PausedError):
                await collect(painter, admission_timeout=0)
        ends = [(await asyncio.wait_for(r, 5))[-1] for r in requests]
        assert [end.outputs[0].token_ids for end in ends] == [alone[n % 4] for n in range(len(MANY))]
        assert {end.state for end in ends} == {"finished"}

    asyncio.run(run())


@pytest.mark.rule(Rule.AR_KEEP)
@pytest.mark.parametrize("clear_cache", [True, False])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], MANY], ids=["one", "many"])
def test_keep_freezes_requests_and_after_the_resume_they_go_on_token_for_token(
    painter: AsyncOmni, prompts: list[str], clear_cache: bool
) -> None:
    async def run() -> None:
        alone = await texts(painter)
        with slow(painter, THINKER, 0.02):
            requests = await half_way(painter, prompts, output_modalities="text")
            await painter.pause_generation("keep", [THINKER], clear_cache=clear_cache)
        await journal(painter, THINKER)
        frozen = stage(painter, THINKER)
        assert frozen.running + frozen.queued == len(prompts) - sum(r.done() for r in requests) > 0
        await painter.list_loras()
        assert not places(await journal(painter, THINKER), "execute begins")
        await painter.resume_generation()
        ends = [(await r)[-1] for r in requests]
        assert [end.outputs[0].token_ids for end in ends] == [alone[n % 4] for n in range(len(prompts))]

    asyncio.run(run())


@pytest.mark.rule(Rule.AR_CLEAR_CACHE)
def test_clear_cache_computes_frozen_requests_again_and_without_it_their_keys_and_values_stay(
    painter: AsyncOmni,
) -> None:
    async def steps(clear_cache: bool) -> tuple[int, int, list[int]]:
        """Tokens when frozen, steps after the resume, the whole text."""
        with slow(painter, THINKER, 0.05):
            request = (await half_way(painter, PROMPTS[:1], output_modalities="text"))[0]
            await painter.pause_generation("keep", [THINKER], clear_cache=clear_cache)
        scheduler = painter._core.stages[THINKER].replicas[0].scheduler
        (held_one,) = [*scheduler._running.values(), *scheduler._waiting]
        frozen = len(held_one.payload.generated)
        await journal(painter, THINKER)
        await painter.resume_generation()
        written = (await request)[-1].outputs[0].token_ids
        return frozen, len(places(await journal(painter, THINKER), "execute begins")), written

    async def run() -> None:
        alone = await tokens(painter)
        for clear_cache in (True, False):
            frozen, taken, written = await steps(clear_cache)
            assert written == alone
            left = len(alone) + 1 - frozen  # the last step finds the end
            assert taken == left + (frozen if clear_cache else 0)

    asyncio.run(run())


@pytest.mark.rule(Rule.AR_SLEPT)
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("clear_cache", [True, False])
def test_a_frozen_request_of_a_stage_that_slept_writes_the_same_and_its_picture_is_the_same(
    painter: AsyncOmni, level: int, clear_cache: bool
) -> None:
    async def run() -> None:
        alone = await golden(painter)
        with slow(painter, THINKER, 0.03):
            request = (await half_way(painter, PROMPTS[:1]))[0]
            await painter.pause_generation("keep", clear_cache=clear_cache)
        await painter.sleep(level=level)
        await painter.wake_up()
        assert not request.done()
        await painter.resume_generation()
        outputs = await request
        written = next(o.outputs[0].token_ids for o in reversed(outputs) if o.outputs)
        assert (written, outputs[-1].images[0].tobytes()) == alone

    asyncio.run(run())


@pytest.mark.rule(Rule.AR_SLEPT)
@pytest.mark.parametrize("level", [1, 2])
def test_many_frozen_requests_of_a_stage_that_slept_twice_each_write_what_they_write_alone(
    painter: AsyncOmni, level: int
) -> None:
    async def run() -> None:
        alone = await texts(painter)
        requests: list[asyncio.Task[list[Any]]] = []
        with slow(painter, THINKER, 0.02):
            requests = await half_way(painter, MANY, output_modalities="text")
            for _ in range(2):
                await painter.pause_generation("keep", [THINKER])
                await painter.sleep([THINKER], level=level)
                await painter.wake_up([THINKER])
                await painter.resume_generation()
                await until(lambda: stage(painter, THINKER).running or all(r.done() for r in requests))
        ends = [(await r)[-1] for r in requests]
        assert [end.outputs[0].token_ids for end in ends] == [alone[n % 4] for n in range(len(MANY))]

    asyncio.run(run())


@pytest.mark.rule(Rule.AR_KEEP)
def test_every_token_of_a_frozen_request_tells_the_weights_that_it_came_from(painter: AsyncOmni) -> None:
    async def run() -> None:
        folder = stage(painter, THINKER).model
        alone = await tokens(painter)
        before = stage(painter, THINKER).weight_version
        with slow(painter, THINKER, 0.05):
            request = (await half_way(painter, PROMPTS[:1], output_modalities="text"))[0]
            await painter.pause_generation("keep", [THINKER])
            await painter.load_weights(THINKER, folder, version="again")
        await painter.resume_generation()
        end = (await request)[-1]
        versions = end.metrics["token_weight_versions"]
        assert [version for version, _ in versions] == [before, "again"]
        assert sum(count for _, count in versions) == len(alone) + 1
        assert end.outputs[0].token_ids == alone
        await painter.load_weights(THINKER, folder)

    asyncio.run(run())


@pytest.mark.rule(Rule.AR_KEEP, Rule.STAY_QUEUED)
def test_what_a_running_thinker_step_ends_is_handed_to_a_paused_painter_and_waits_there(painter: AsyncOmni) -> None:
    async def run() -> None:
        alone = await golden(painter)
        with held(painter, THINKER):
            request = draw(painter, 6, seed=42)
            await until(lambda: stage(painter, THINKER).running)
            pause = asyncio.create_task(painter.pause_generation("keep", [PAINTER]))
            await until(lambda: stage(painter).pause_state == "PAUSED")
            assert stage(painter).in_transit == 1
        await pause
        await until(lambda: stage(painter).queued == 1)
        assert not request.done()
        await painter.resume_generation()
        assert (await request)[-1].images[0].tobytes() == alone[1]

    asyncio.run(run())


@pytest.mark.parametrize("stage_id", [THINKER, PAINTER])
def test_a_sleep_that_would_wait_for_what_a_pause_holds_is_refused_at_once(painter: AsyncOmni, stage_id: int) -> None:
    async def run() -> None:
        with slow(painter, THINKER, 0.05):
            requests = await half_way(painter, PROMPTS)
            await painter.pause_generation("keep")
        with pytest.raises(StageBusyError, match=r"can not end: .* Call resume_generation\(\) first"):
            await asyncio.wait_for(painter.sleep([stage_id], mode="wait"), 5)
        assert stage(painter, stage_id).state == "AWAKE"
        await painter.sleep([stage_id], mode="keep")
        await painter.wake_up([stage_id])
        await painter.resume_generation()
        assert all([(await request)[-1].finished for request in requests])

    asyncio.run(run())
