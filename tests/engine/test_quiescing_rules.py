"""The specification's "Quiescing a busy diffusion stage", sentence by sentence, over both executors."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.errors import DeadlineError, PausedError, PauseError, StageBusyError
from omni_notebook.protocol import LoRARequest
from tests import adapters
from tests.engine.engine_helpers import ask, collect, held, in_processes, slow, until
from tests.engine.faulty_worker import FETCH, OUTPUT
from tests.engine.painting import (
    PAINTER,
    SHIPPED,
    THINKER,
    draw,
    executing,
    journal,
    one_running_and,
    paused_behind,
    pausing_behind,
    picture,
    places,
    stage,
)
from tests.engine.rules import Rule

if TYPE_CHECKING:
    from pathlib import Path

    from omni_notebook.engine.async_omni import AsyncOmni


def adapter(engine: AsyncOmni, folder: Path) -> LoRARequest:
    """One that fits the painter."""
    tensors = adapters.matrices(engine._core.stages[PAINTER].model.adaptable)
    return LoRARequest("inked", 1, str(adapters.write(folder / "inked", tensors)))


# ---------------------------------------------------------------------------------- the bullets


@pytest.mark.rule(Rule.MADE_QUIET_FIRST)
@pytest.mark.parametrize("busy", ["running", "queued", "in_transit"])
def test_a_sleep_of_a_stage_that_nobody_quiesced_is_refused_and_changes_nothing(painter: AsyncOmni, busy: str) -> None:
    async def run() -> None:
        with held(painter, THINKER if busy == "in_transit" else PAINTER):
            if busy == "in_transit":
                requests = [draw(painter)]
                await until(lambda: stage(painter).in_transit)
            else:
                requests = await one_running_and(painter, *(["behind"] if busy == "queued" else []))
            for order in (painter.sleep([PAINTER]), painter.load_weights(PAINTER, SHIPPED)):
                with pytest.raises(StageBusyError, match=r"pause_generation\(mode='keep'") as caught:
                    await order
                assert getattr(caught.value, busy) == 1
            assert stage(painter).state == "AWAKE"
        assert all([(await r)[-1].images for r in requests])
        await until(lambda: stage(painter).running == 0)
        assert (await painter.sleep([PAINTER]))[0].ok

    asyncio.run(run())


@pytest.mark.rule(Rule.ABORT_DISCARDS)
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_sleep_that_aborts_discards_the_running_batch_and_one_that_keeps_delivers_it(
    painter: AsyncOmni, mode: str
) -> None:
    async def run() -> None:
        with held(painter, PAINTER):
            running, queued = await one_running_and(painter, "queued")
            sleep = asyncio.create_task(painter.sleep([PAINTER], mode=mode))
            await until(lambda: stage(painter).state == "FALLING_ASLEEP")
        await sleep
        end = (await asyncio.wait_for(running, 5))[-1]
        if mode == "abort":
            assert [end.state, (await queued)[-1].state, end.images] == ["aborted", "aborted", []]
            return
        assert (end.state, len(end.images), stage(painter).queued) == ("finished", 1, 1)
        await painter.wake_up([PAINTER])
        assert (await queued)[-1].images

    asyncio.run(run())


@pytest.mark.rule(Rule.FINISHES, Rule.STAY_QUEUED, Rule.NEW_WEIGHTS)
def test_what_runs_ends_on_the_old_weights_and_what_waits_is_drawn_by_the_new_ones(
    painter: AsyncOmni, other_weights: Path
) -> None:
    async def run() -> None:
        old = [await picture(painter, steps) for steps in (4, 5)]
        await painter.load_weights(PAINTER, other_weights, version="new")
        new = await picture(painter, 5)
        await painter.load_weights(PAINTER, SHIPPED, version="old")
        assert new != old[1]
        running, queued = await paused_behind(painter, "queued", steps=5, stage_id=None, clear_cache=False)
        assert not queued.done()
        assert stage(painter).queued == 1
        await painter.load_weights(PAINTER, other_weights, version="new")
        assert stage(painter).queued == 1
        await painter.resume_generation()
        first, second = (await running)[-1], (await queued)[-1]
        assert (first.images[0].tobytes(), first.weight_version) == (old[0], "old")
        assert (second.images[0].tobytes(), second.weight_version) == (new, "new")

    asyncio.run(run())


@pytest.mark.rule(Rule.NEVER_ACROSS, Rule.EVERY_STEP)
def test_no_request_denoises_across_any_of_many_weight_changes(painter: AsyncOmni, other_weights: Path) -> None:
    async def run() -> None:
        wishes = [{"seed": n, "num_inference_steps": 2 + n % 5} for n in range(30)]
        with slow(painter, PAINTER, 0.03):
            requests = [asyncio.create_task(collect(painter, sampling_params=wish)) for wish in wishes]
            for change in range(6):
                await until(lambda: executing(painter) or all(r.done() for r in requests))
                await painter.pause_generation("keep")
                if change % 3 == 2:
                    await painter.sleep([PAINTER], level=1 + change % 2)
                    await painter.wake_up([PAINTER])
                await painter.load_weights(PAINTER, (SHIPPED, other_weights)[change % 2], version=f"v{change}")
                await painter.resume_generation()
            ends = [(await r)[-1] for r in requests]
        for wish, end in zip(wishes, ends, strict=True):
            assert end.state == "finished"
            assert end.metrics["step_weight_versions"] == [[end.weight_version, wish["num_inference_steps"]]]
        assert len({end.weight_version for end in ends}) >= 4

    asyncio.run(run())


@pytest.mark.quiet
@pytest.mark.rule(Rule.AT_THE_BOUNDARY, Rule.STOPS_THE_BACKEND)
def test_keep_returns_at_the_next_batch_boundary_and_no_batch_starts_before_the_resume(painter: AsyncOmni) -> None:
    async def run() -> None:
        with slow(painter, PAINTER, 0.6):
            requests, pause = await pausing_behind(painter, "second", "third")
            started = time.monotonic()
            await pause
            took = time.monotonic() - started
        seen = await journal(painter)
        assert len(places(seen, "execute begins")) == 1
        assert places(seen, "execute ends")[0] < places(seen, "barrier begins")[0]
        left = seen[places(seen, "execute ends")[0]][0] - started  # what was left of the batch
        assert 0.2 < left < took < left + 1.0
        assert stage(painter).queued == 2
        await asyncio.wait_for(asyncio.shield(requests[0]), 5)
        assert not places(await journal(painter), "execute begins")
        await painter.resume_generation()
        assert all([(await r)[-1].images for r in requests])

    asyncio.run(run())


@pytest.mark.rule(Rule.CONTROL_CALLS)
def test_every_control_call_works_while_paused_and_the_pause_holds(painter: AsyncOmni) -> None:
    async def run() -> None:
        requests = await paused_behind(painter, "queued", stage_id=None)
        assert await painter.list_loras() == []
        for level in (1, 2):
            acks = await painter.sleep(level=level)
            assert all(ack.ok for ack in acks)
            assert await painter.is_sleeping()
            assert [(s.state, s.level) for s in painter.status().stages] == [("ASLEEP", level)] * 2
            await painter.wake_up()
        await painter.check_health()
        status = painter.status()
        assert [(s.state, s.pause_state, s.pause_mode) for s in status.stages] == [("AWAKE", "PAUSED", "keep")] * 2
        assert status.stages[PAINTER].queued == 1
        await painter.resume_generation()
        assert all([(await r)[-1].images for r in requests])

    asyncio.run(run())


@pytest.mark.rule(Rule.WAKE_IS_NO_RESUME)
@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_leaves_admission_closed_until_the_resume(painter: AsyncOmni, level: int) -> None:
    async def run() -> None:
        await painter.pause_generation("keep")
        await painter.sleep(level=level)
        await painter.wake_up()
        assert await painter.is_paused()
        with pytest.raises(PausedError, match="resume_generation"):
            await collect(painter, admission_timeout=0)
        await painter.resume_generation()
        assert (await draw(painter))[-1].images

    asyncio.run(run())


# ----------------------------------------------------------------------------------------- the notes


@pytest.mark.rule(Rule.FAILED_STAYS_CLOSED, Rule.NO_SLEEP_AFTER_FAILURE, Rule.RETRY_OR_RESUME)
@pytest.mark.parametrize("way_out", ["retry", "resume"])
def test_a_timed_out_pause_stays_closed_and_refuses_what_needs_a_quiet_stage(
    painter: AsyncOmni, tmp_path: Path, way_out: str
) -> None:
    async def run() -> None:
        with held(painter, PAINTER):
            requests = await one_running_and(painter, "queued")
            with pytest.raises(DeadlineError, match=r"did not complete.*PAUSE_FAILED.*resume_generation"):
                await painter.pause_generation("keep", [PAINTER], timeout=0.1)
            before = stage(painter)
            assert (before.pause_state, before.pause_mode, before.state) == ("PAUSE_FAILED", "keep", "AWAKE")
            calls = [
                painter.sleep([PAINTER]),
                painter.sleep(level=2),
                painter.sleep([PAINTER], mode="keep"),
                painter.load_weights(PAINTER, SHIPPED),
                painter.add_lora(adapter(painter, tmp_path), [PAINTER]),
            ]
            for call in calls:
                with pytest.raises(
                    PauseError, match=r"stage 1 is PAUSE_FAILED.*resume_generation\(\).*Nothing changed"
                ):
                    await call
            assert [s.state for s in painter.status().stages] == ["AWAKE"] * 2
        assert (await requests[0])[-1].images  # what ran is delivered, what waited waits
        await until(lambda: not executing(painter))
        assert (stage(painter).queued, len(places(await journal(painter), "execute begins"))) == (1, 1)
        if way_out == "retry":
            await painter.pause_generation("keep", [PAINTER])
            assert (await painter.sleep([PAINTER]))[0].ok
            await painter.wake_up([PAINTER])
        await painter.resume_generation()
        assert (await requests[1])[-1].images

    asyncio.run(run())


@pytest.mark.rule(Rule.PARTIAL_RESUME, Rule.LAST_RESUME)
@pytest.mark.parametrize("first", [THINKER, PAINTER])
def test_a_resume_of_one_of_two_paused_stages_queues_nothing_on_the_other(painter: AsyncOmni, first: int) -> None:
    async def run() -> None:
        await painter.pause_generation("keep")
        await painter.resume_generation([first])
        assert await painter.is_paused()
        waiting = draw(painter)
        await until(lambda: stage(painter).waiting_at_gate == 1)
        assert [(s.running, s.queued, s.in_transit) for s in painter.status().stages] == [(0, 0, 0)] * 2
        await painter.resume_generation([1 - first])
        assert not await painter.is_paused()
        assert (await waiting)[-1].images

    asyncio.run(run())


@pytest.mark.rule(Rule.CLEAR_CACHE)
def test_clear_cache_makes_no_difference_on_a_diffusion_stage(painter: AsyncOmni) -> None:
    async def run(clear_cache: bool) -> tuple[Any, ...]:
        await journal(painter)
        requests = await paused_behind(painter, "queued", clear_cache=clear_cache)
        there = ask(painter, PAINTER, "fetched")
        await painter.resume_generation()
        pictures = [(await r)[-1].images[0].tobytes() for r in requests]
        orders = Counter(what for _, what, _ in await journal(painter))
        return there, pictures, orders

    seen = [asyncio.run(run(clear_cache=clear_cache)) for clear_cache in (True, False)]
    assert seen[0] == seen[1]
    assert seen[0][0] == 1


@pytest.mark.rule(Rule.UNUSED)
def test_without_a_pause_call_no_barrier_runs_and_requests_run_as_before(
    painter: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: Counter[str] = Counter()
    for part in painter._core.stages:
        for one in part.replicas:
            real = one.executor.call

            async def counting(method: str, *args: Any, real: Any = real, **known: Any) -> Any:
                called[method] += 1
                return await real(method, *args, **known)

            monkeypatch.setattr(one.executor, "call", counting)

    async def run() -> list[str]:
        ended: list[str] = []

        async def one(name: str, steps: int) -> None:
            output = (await draw(painter, steps, request_id=name))[-1]
            ended.append(f"{name} {output.state} {output.metrics.get('batch_size', '')}")

        with held(painter, PAINTER):
            tasks = [asyncio.create_task(one("a", 3))]
            await until(lambda: executing(painter))
            for n, (name, steps) in enumerate((("b", 4), ("c", 5), ("d", 4), ("e", 4)), start=1):
                tasks.append(asyncio.create_task(one(name, steps)))
                await until(lambda n=n: stage(painter).queued == n)
            await painter.abort("d")
        await asyncio.gather(*tasks)
        return ended

    assert asyncio.run(run()) == ["d aborted ", "a finished 1", "b finished 2", "e finished 2", "c finished 1"]
    assert set(called) == {"execute", "collect"}
    assert called["collect"] == 3


# -------------------------------------------------------------------------------- the support matrix


async def keep_works(engine: AsyncOmni, job: str) -> str:
    """Pause while a batch runs, its output leaves, or a prefetch is on its way: what the acknowledgement waited for."""
    alone = [await picture(engine, steps) for steps in (3, 4)]
    await journal(engine)
    with slow(engine, PAINTER, 0.5, job):
        requests, pause = await pausing_behind(engine, "queued")
        await pause
        returned = time.monotonic()
    assert (stage(engine).pause_state, stage(engine).running) == ("PAUSED", 0)
    seen = await journal(engine)
    last = seen[places(seen, f"{job} ends")[-1]][0]
    assert places(seen, f"{job} ends")[-1] < places(seen, "barrier ends")[-1]
    assert len(places(seen, f"{job} begins")) == len(places(seen, f"{job} ends"))
    await engine.resume_generation()
    assert [(await r)[-1].images[0].tobytes() for r in requests] == alone
    return f"supported: acknowledged {(returned - last) * 1000:.0f} ms after the last {job}"


@pytest.mark.rule(Rule.ON_UNI)
@pytest.mark.parametrize("shared_engine", ["uni"], indirect=True)
@pytest.mark.parametrize("job", ["execute", OUTPUT])
def test_matrix_keep_on_the_uni_executor(painter: AsyncOmni, job: str, record_property: Any) -> None:
    record_property("cell", asyncio.run(keep_works(painter, job)))


@pytest.mark.rule(Rule.ON_MP)
@pytest.mark.parametrize("shared_engine", ["mp"], indirect=True)
@pytest.mark.parametrize("job", ["execute", OUTPUT])
def test_matrix_keep_on_the_mp_executor_waits_for_the_output_copies(
    painter: AsyncOmni, job: str, record_property: Any
) -> None:
    assert in_processes(painter)
    record_property("cell", asyncio.run(keep_works(painter, job)))


@pytest.mark.rule(Rule.WITH_PREFETCH)
def test_matrix_keep_joins_an_asynchronous_prefetch(painter: AsyncOmni, record_property: Any) -> None:
    record_property("cell", asyncio.run(keep_works(painter, FETCH)))


@pytest.mark.rule(Rule.FRONTEND_ONLY)
@pytest.mark.parametrize(
    "known", [{"mode": "abort"}, {"mode": "wait"}, {"mode": "keep", "wait_for_inflight_requests": True}], ids=str
)
def test_matrix_other_pauses_close_admission_and_let_the_diffusion_stage_run(
    painter: AsyncOmni, known: dict[str, Any], record_property: Any
) -> None:
    async def run() -> str:
        with held(painter, PAINTER):
            requests = await one_running_and(painter, "second", "third")
            started = time.monotonic()
            await painter.pause_generation(stage_ids=[PAINTER], **known)
            took = time.monotonic() - started
            assert executing(painter)
            with pytest.raises(PausedError):
                await collect(painter, admission_timeout=0)
        assert [(await r)[-1].state for r in requests] == ["finished"] * 3
        assert not places(await journal(painter), "barrier begins")
        return f"admission closed after {took * 1000:.0f} ms, {len(requests)} of 3 requests ran on"

    record_property("cell", asyncio.run(run()))
