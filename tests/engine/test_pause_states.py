"""The pause states and the global gate: what each pause, retry, resume and cancellation leaves (issue 4, item 5)."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.errors import ArgumentError, DeadlineError, PausedError, PauseError
from omni_notebook.protocol import StateEvent
from tests.engine.engine_helpers import collect, fault, golden, held, slow, until
from tests.engine.painting import (
    MODES,
    PAINTER,
    THINKER,
    draw,
    executing,
    journal,
    one_running_and,
    paused_behind,
    pauses,
    pausing,
    pausing_behind,
    places,
    stage,
    tokens,
    write,
)
from tests.engine.rules import Rule

if TYPE_CHECKING:
    from omni_notebook.engine.async_omni import AsyncOmni


class StepLevel:
    """A stage's config that says it runs single steps."""

    step_execution = True

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


async def refused_at_the_gate(engine: AsyncOmni) -> None:
    for route in ("text", "image"):
        with pytest.raises(PausedError, match=r"stage 1 PAUS\w+ \(\w+\); call resume_generation"):
            await collect(engine, output_modalities=route, admission_timeout=0)


# ------------------------------------------------------------------------------------------ the gate


@pytest.mark.rule(Rule.GLOBAL_GATE)
@pytest.mark.parametrize("mode", MODES)
def test_one_paused_stage_closes_admission_for_every_route(painter: AsyncOmni, mode: str) -> None:
    async def run() -> None:
        assert not await painter.is_paused()
        await painter.pause_generation(mode, [PAINTER])
        assert pauses(painter) == [("OPEN", None), ("PAUSED", mode)]
        assert await painter.is_paused()
        assert painter.status().paused
        await refused_at_the_gate(painter)
        await painter.resume_generation()
        assert pauses(painter) == [("OPEN", None)] * 2
        assert (await draw(painter))[-1].images

    asyncio.run(run())


@pytest.mark.rule(Rule.GLOBAL_GATE)
def test_admission_is_closed_while_a_stage_is_pausing_and_after_the_pause_failed(painter: AsyncOmni) -> None:
    async def run() -> None:
        with held(painter, PAINTER):
            requests = await one_running_and(painter)
            pause = await pausing(painter, timeout=0.5)
            await refused_at_the_gate(painter)
            with pytest.raises(DeadlineError):
                await pause
            assert pauses(painter)[PAINTER] == ("PAUSE_FAILED", "keep")
            await refused_at_the_gate(painter)
        assert (await requests[0])[-1].images

    asyncio.run(run())


@pytest.mark.rule(Rule.COUNTED)
def test_requests_that_arrive_while_paused_are_counted_and_run_after_the_resume(painter: AsyncOmni) -> None:
    async def run() -> None:
        await painter.pause_generation("keep", [PAINTER])
        arrived = [draw(painter), draw(painter), write(painter)]
        await until(lambda: stage(painter, THINKER).waiting_at_gate == 3)
        assert stage(painter).waiting_at_gate == 2
        assert (stage(painter).queued, stage(painter, THINKER).queued) == (0, 0)
        await painter.resume_generation()
        ends = [(await r)[-1] for r in arrived]
        assert [bool(end.images) for end in ends] == [True, True, False]
        assert [s.waiting_at_gate for s in painter.status().stages] == [0, 0]

    asyncio.run(run())


@pytest.mark.rule(Rule.ABORT_WHILE_PAUSED)
@pytest.mark.parametrize("where", [THINKER, PAINTER])
def test_the_abort_of_a_request_that_a_pause_holds_gives_its_client_an_end(painter: AsyncOmni, where: int) -> None:
    async def run() -> None:
        if where == PAINTER:
            waiting = (await paused_behind(painter, "held", stage_id=None))[1]
        else:
            with held(painter, THINKER):
                waiting = draw(painter, request_id="held")
                await until(lambda: stage(painter, THINKER).running)
                pause = await pausing(painter, stage_id=None)
            await pause
        assert await painter.abort("held")
        outputs = await asyncio.wait_for(waiting, 5)
        assert [o.state for o in outputs if o.finished] == ["aborted"]
        assert not await painter.abort("held")
        assert [(s.running, s.queued, s.in_transit) for s in painter.status().stages] == [(0, 0, 0)] * 2
        assert pauses(painter) == [("PAUSED", "keep")] * 2

    asyncio.run(run())


# -------------------------------------------------------------------------------------- all or none


@pytest.mark.rule(Rule.ALL_OR_NONE, Rule.STEP_LEVEL)
@pytest.mark.parametrize("stage_ids", [None, [THINKER, PAINTER], [PAINTER]], ids=str)
def test_one_step_level_stage_refuses_keep_for_all_and_nothing_moves(
    painter: AsyncOmni, stage_ids: Any, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    part = painter._core.stages[PAINTER]
    monkeypatch.setattr(part, "config", StepLevel(part.config))

    async def run() -> None:
        async with painter.subscribe() as events:
            with slow(painter, PAINTER, 0.2):
                requests = await one_running_and(painter, "queued")
                with pytest.raises(NotImplementedError, match=r"stage 1 runs single steps.*Nothing changed") as caught:
                    await painter.pause_generation("keep", stage_ids)
                record_property("cell", f"{type(caught.value).__name__} before anything moves")
                assert pauses(painter) == [("OPEN", None)] * 2
                assert [(await r)[-1].state for r in requests] == ["finished"] * 2
            await painter.pause_generation("wait")
            moved = await anext(e async for e in events if isinstance(e, StateEvent))
        assert (moved.pause_state, moved.reason) == ("PAUSING", "pause wait")  # the first that moved anything

    asyncio.run(run())
    seen = [asyncio.run(journal(painter, stage_id)) for stage_id in (THINKER, PAINTER)]
    assert [len(places(entries, "barrier begins")) for entries in seen] == [1, 0]  # the thinker's, of the wait


@pytest.mark.rule(Rule.ALL_OR_NONE)
@pytest.mark.parametrize("bad", [{"stage_ids": [THINKER, 9]}, {"mode": "stop"}], ids=str)
def test_a_wrong_argument_pauses_no_stage(painter: AsyncOmni, bad: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="othing changed"):
        asyncio.run(painter.pause_generation(**{"mode": "keep", **bad}))
    assert pauses(painter) == [("OPEN", None)] * 2


@pytest.mark.rule(Rule.INFLIGHT)
@pytest.mark.parametrize("mode", MODES)
def test_wait_for_inflight_requests_overrides_the_mode(painter: AsyncOmni, mode: str) -> None:
    asyncio.run(painter.pause_generation(mode, wait_for_inflight_requests=True))
    assert pauses(painter) == [("PAUSED", "wait")] * 2


# ------------------------------------------------------------------------- resume, failure, cancellation


@pytest.mark.rule(Rule.RESUME_WINS)
def test_a_pause_after_a_resume_during_a_pause_takes_one_batch_and_not_the_whole_queue(painter: AsyncOmni) -> None:
    async def run() -> None:
        with held(painter, PAINTER):
            requests = [draw(painter, steps) for steps in range(2, 10)]  # eight batches
            await until(lambda: stage(painter).queued == 7)
            first = await pausing(painter)
            await painter.resume_generation()
            with pytest.raises(PauseError, match="was resumed while it was pausing"):
                await asyncio.wait_for(first, 5)
            second = await pausing(painter)
        await second
        assert (stage(painter).queued, pauses(painter)[PAINTER]) == (7, ("PAUSED", "keep"))
        await painter.resume_generation()
        assert all([(await r)[-1].images for r in requests])

    asyncio.run(run())


@pytest.mark.rule(Rule.FAILED_STAYS_CLOSED, Rule.RETRY_OR_RESUME)
@pytest.mark.parametrize("way_out", ["retry", "resume"])
def test_a_rank_that_can_not_come_to_rest_fails_the_pause_and_the_scheduler_stays_closed(
    painter: AsyncOmni, way_out: str
) -> None:
    async def run() -> None:
        before = await golden(painter)
        with fault(painter, PAINTER, "barrier", RuntimeError("device lost")):
            requests, pause = await pausing_behind(painter, "queued", stage_id=None)
            with pytest.raises(PauseError, match=r"device lost; it is PAUSE_FAILED.*resume_generation"):
                await pause
        assert pauses(painter) == [("PAUSED", "keep"), ("PAUSE_FAILED", "keep")]
        assert (await requests[0])[-1].images
        await until(lambda: not executing(painter))
        assert stage(painter).queued == 1
        assert len(places(await journal(painter), "execute begins")) == 2  # golden's, and the one that ran
        if way_out == "retry":
            await painter.pause_generation("keep")
            assert pauses(painter) == [("PAUSED", "keep")] * 2
            await painter.sleep()
            await painter.wake_up()
        await painter.resume_generation()
        assert (await requests[1])[-1].images
        assert await golden(painter) == before

    asyncio.run(run())


@pytest.mark.rule(Rule.RETRY_OR_RESUME)
@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_failed_keep_is_not_made_good_by_a_pause_that_only_closes_admission(painter: AsyncOmni, mode: str) -> None:
    async def run() -> None:
        with held(painter, PAINTER):
            await one_running_and(painter)
            with pytest.raises(DeadlineError):
                await painter.pause_generation("keep", [PAINTER], timeout=0.05)
            with pytest.raises(PauseError, match=r"stage 1 is PAUSE_FAILED.*mode='keep'.*resume_generation.*Nothing"):
                await painter.pause_generation(mode)
            assert pauses(painter) == [("OPEN", None), ("PAUSE_FAILED", "keep")]
        await painter.pause_generation("keep")
        assert pauses(painter) == [("PAUSED", "keep")] * 2

    asyncio.run(run())


@pytest.mark.quiet
@pytest.mark.rule(Rule.CANCELLED)
@pytest.mark.parametrize("way_out", ["retry", "resume"])
def test_a_cancelled_pause_leaves_the_scheduler_closed_until_a_retry_or_a_resume(
    painter: AsyncOmni, way_out: str
) -> None:
    async def run() -> None:
        with held(painter, PAINTER):
            requests = await one_running_and(painter, "queued")
            pause = await pausing(painter)
            started = time.monotonic()
            pause.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pause
            assert time.monotonic() - started < 1
            await until(lambda: pauses(painter)[PAINTER] == ("PAUSE_FAILED", "keep"))
        assert (await requests[0])[-1].images
        await until(lambda: not executing(painter))
        assert (stage(painter).queued, requests[1].done()) == (1, False)
        if way_out == "retry":
            await painter.pause_generation("keep")
            assert pauses(painter) == [("PAUSED", "keep")] * 2
        await painter.resume_generation()
        assert (await requests[1])[-1].images

    asyncio.run(run())


@pytest.mark.rule(Rule.RESUME_WINS)
@pytest.mark.parametrize("clear_cache", [True, False])
def test_a_resume_during_the_barrier_of_an_ar_stage_loses_no_token(painter: AsyncOmni, clear_cache: bool) -> None:
    async def run() -> None:
        alone = await tokens(painter)
        await journal(painter, THINKER)
        with slow(painter, THINKER, 0.4, "barrier"):
            with slow(painter, THINKER, 0.05):
                request = write(painter)
                await until(lambda: stage(painter, THINKER).running)
                pause = await pausing(painter, "keep", THINKER, clear_cache=clear_cache)
                await until(lambda: painter._core.stages[THINKER].at_rest)
                await painter.resume_generation()
            with pytest.raises(PauseError, match="was resumed"):
                await pause
            assert (await request)[-1].outputs[0].token_ids == alone
        seen = await journal(painter, THINKER)
        assert len(places(seen, "execute begins")) == len(alone) + 1  # nothing was computed twice

    asyncio.run(run())
