"""A pause while another is in progress or holds: the same mode, another mode, its own deadline (issue 4, item 5)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from omni_notebook.errors import DeadlineError, PauseError
from tests.engine.engine_helpers import held, slow, until
from tests.engine.painting import (
    MODES,
    PAINTER,
    THINKER,
    journal,
    one_running_and,
    pauses,
    pausing,
    places,
    stage,
    tokens,
    write,
)
from tests.engine.rules import Rule

if TYPE_CHECKING:
    from omni_notebook.engine.async_omni import AsyncOmni


@pytest.mark.rule(Rule.SAME_TWICE)
@pytest.mark.parametrize("mode", MODES)
def test_two_equal_pauses_one_after_the_other_are_one(painter: AsyncOmni, mode: str) -> None:
    async def run() -> None:
        await painter.pause_generation(mode)
        await journal(painter)
        await painter.pause_generation(mode)
        assert pauses(painter) == [("PAUSED", mode)] * 2
        assert not places(await journal(painter), "barrier begins")
        await painter.resume_generation()
        assert not await painter.is_paused()

    asyncio.run(run())


@pytest.mark.rule(Rule.SAME_TWICE)
def test_two_equal_pauses_at_once_are_one_barrier_and_both_return_after_it(painter: AsyncOmni) -> None:
    async def run() -> None:
        with held(painter, PAINTER):
            requests = await one_running_and(painter, "queued")
            both = [await pausing(painter), asyncio.create_task(painter.pause_generation("keep", [PAINTER]))]
            await painter.list_loras()  # the second has arrived: calls reach the engine in order
        await asyncio.gather(*both)
        assert len(places(await journal(painter), "barrier begins")) == 1
        await painter.resume_generation()
        assert all([(await r)[-1].images for r in requests])

    asyncio.run(run())


@pytest.mark.rule(Rule.SAME_TWICE)
def test_a_pause_that_joined_another_ends_by_its_own_deadline(painter: AsyncOmni) -> None:
    async def run() -> None:
        with held(painter, PAINTER):
            await one_running_and(painter)
            first = await pausing(painter)
            with pytest.raises(DeadlineError, match="did not complete"):
                await painter.pause_generation("keep", [PAINTER], timeout=0.05)
            assert pauses(painter)[PAINTER] == ("PAUSING", "keep")
        await first
        assert pauses(painter)[PAINTER] == ("PAUSED", "keep")

    asyncio.run(run())


@pytest.mark.rule(Rule.SAME_TWICE, Rule.CANCELLED)
@pytest.mark.parametrize("how", ["cancelled", "too late"])
def test_a_pause_that_joined_one_that_failed_goes_on_by_itself(painter: AsyncOmni, how: str) -> None:
    async def run() -> None:
        with held(painter, PAINTER):
            await one_running_and(painter)
            first = await pausing(painter, timeout=0.5 if how == "too late" else None)
            others = [asyncio.create_task(painter.pause_generation("keep", [PAINTER])) for _ in range(2)]
            await painter.list_loras()
            if how == "cancelled":
                first.cancel()
            with pytest.raises((asyncio.CancelledError, DeadlineError)):
                await first
        await asyncio.gather(*others)
        assert pauses(painter)[PAINTER] == ("PAUSED", "keep")
        assert len(places(await journal(painter), "barrier begins")) == 1

    asyncio.run(run())


@pytest.mark.rule(Rule.OTHER_MODE)
def test_an_abort_takes_over_from_a_wait_at_once(painter: AsyncOmni) -> None:
    async def run() -> None:
        with held(painter, THINKER):
            request = write(painter)
            await until(lambda: stage(painter, THINKER).running)
            wait = await pausing(painter, "wait", THINKER)
            abort = await pausing(painter, "abort", THINKER)
            with pytest.raises(PauseError, match=r"another pause \(abort\) took over"):
                await asyncio.wait_for(wait, 5)
        await abort
        assert (await request)[-1].state == "aborted"
        assert pauses(painter)[THINKER] == ("PAUSED", "abort")

    asyncio.run(run())


@pytest.mark.rule(Rule.OTHER_MODE)
@pytest.mark.parametrize(("then", "state"), [("abort", "aborted"), ("wait", "finished")])
def test_frozen_requests_of_a_paused_ar_stage_follow_the_next_pauses_mode(
    painter: AsyncOmni, then: str, state: str
) -> None:
    async def run() -> None:
        alone = await tokens(painter)
        with slow(painter, THINKER, 0.02):
            request = write(painter)
            await until(lambda: stage(painter, THINKER).running)
            await painter.pause_generation("keep", [THINKER])
            assert not request.done()
            await painter.pause_generation(then, [THINKER])
        end = (await asyncio.wait_for(request, 5))[-1]
        assert end.state == state
        assert end.outputs[0].token_ids == (alone if state == "finished" else alone[: len(end.outputs[0].token_ids)])
        assert pauses(painter)[THINKER] == ("PAUSED", then)

    asyncio.run(run())


@pytest.mark.rule(Rule.OTHER_MODE)
@pytest.mark.parametrize("then", ["abort", "wait"])
def test_a_kept_diffusion_stage_stays_kept_whatever_pause_comes_after(painter: AsyncOmni, then: str) -> None:
    async def run() -> None:
        with held(painter, PAINTER):
            requests = await one_running_and(painter, "queued")
            keep = await pausing(painter)
            await asyncio.wait_for(painter.pause_generation(then, [PAINTER]), 5)  # admission is closed already
            assert not keep.done()
        await keep
        await painter.pause_generation(then)
        assert pauses(painter) == [("PAUSED", then), ("PAUSED", "keep")]
        assert not requests[1].done()
        assert stage(painter).queued == 1
        await painter.sleep([PAINTER])
        await painter.wake_up([PAINTER])
        assert len(places(await journal(painter), "execute begins")) == 1
        await painter.resume_generation()
        assert (await requests[1])[-1].images

    asyncio.run(run())


@pytest.mark.rule(Rule.OTHER_MODE)
def test_a_keep_after_a_wait_stops_the_diffusion_stage_too(painter: AsyncOmni) -> None:
    async def run() -> None:
        with held(painter, PAINTER):
            requests = await one_running_and(painter, "queued")
            await painter.pause_generation("wait", [PAINTER])
            keep = await pausing(painter)
        await keep
        assert (pauses(painter)[PAINTER], stage(painter).queued) == (("PAUSED", "keep"), 1)
        await painter.resume_generation()
        assert all([(await r)[-1].images for r in requests])

    asyncio.run(run())
