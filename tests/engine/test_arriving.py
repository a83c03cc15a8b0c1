"""Requests that wait for a wake begin while memory still comes; nothing of them is seen before its commit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import AsleepError, StageFailedError, WakeError
from omni_notebook.executors.mp import executor as mp_executor
from omni_notebook.memory import cuda
from omni_notebook.stages import transitions
from omni_notebook.worker import worker
from tests.engine.arriving_worker import ARRIVING, ArrivingWorker
from tests.engine.engine_helpers import PARAMS, PROMPT, collect, golden, held, reset, slow, tell, until
from tests.engine.faulty_worker import CANCELLED
from tests.engine.painting import PAINTER, THINKER, draw, journal, picture, places, stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

ONLY = (0, 0)


@pytest.fixture(scope="module", params=["uni", "mp"])
def shared_engine(request: pytest.FixtureRequest) -> Iterator[AsyncOmni]:
    """Both stages on GPUs in host memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "create_pool", worker.create_pool)  # what the worker puts there goes with the module
        patch.setattr(cuda, "PART_BYTES", cuda.PART_BYTES)
        patch.setattr(mp_executor, "WORKER", ARRIVING)
        patch.setattr(worker, "Worker", ArrivingWorker)
        with AsyncOmni(model="demo", enable_sleep_mode=True, executor=request.param) as engine:
            yield engine


@pytest.fixture(autouse=True)
def sound(engine: AsyncOmni) -> Iterator[tuple[list[int], bytes]]:
    """What a request gives, before the test and after it."""
    before = asyncio.run(golden(engine))
    yield before
    asyncio.run(reset(engine))
    assert asyncio.run(golden(engine)) == before


def written(outputs: list[Any]) -> tuple[list[int], bytes]:
    """As `golden`."""
    return next(o.outputs[0].token_ids for o in reversed(outputs) if o.outputs), outputs[-1].images[0].tobytes()


def resident(engine: AsyncOmni, stage_id: int = THINKER) -> int:
    return sum(tag.resident_bytes for tag in stage(engine, stage_id).ranks[0].tags.values())


def at_rest(engine: AsyncOmni, stage_id: int = THINKER) -> tuple[str, int | None, int, int]:
    """State, level, resident bytes, and how many requests are queued."""
    now = stage(engine, stage_id)
    return str(now.state), now.level, resident(engine, stage_id), now.queued


async def waiting(engine: AsyncOmni, seen: list[Any], **known: Any) -> asyncio.Task[None]:
    """The thinker asleep at level 1, and a request that waits at its gate; what it gives is put into `seen`."""
    await engine.sleep([THINKER])

    async def read() -> None:
        async for output in engine.generate(PROMPT, sampling_params=PARAMS, admission_timeout=30, **known):
            seen.append(output)  # noqa: PERF401  (each is looked for as it comes)

    task = asyncio.create_task(read())
    await until(lambda: stage(engine, THINKER).waiting_at_gate == 1)
    await journal(engine, THINKER)
    return task


async def noted(engine: AsyncOmni, stage_id: int, what: str) -> None:
    """Wait until the rank has this in its journal."""
    async with asyncio.timeout(20):
        while not places(await journal(engine, stage_id), what):  # noqa: ASYNC110 (a rank signals nothing here)
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def half_way(engine: AsyncOmni, stage_id: int = THINKER) -> AsyncIterator[asyncio.Task[Any]]:
    """A wake whose copies are held, beside which a batch has been computed; no other begins."""
    with held(engine, stage_id, "finish_wake"):
        waking = asyncio.create_task(engine.wake_up([stage_id]))
        await noted(engine, stage_id, "execute ends")
        later = [entry for _ in range(20) for entry in await journal(engine, stage_id)]  # time for its answer
        assert not places(later, "execute begins")
        assert stage(engine, stage_id).state == "WAKING"
        yield waking


def test_a_first_token_is_computed_beside_the_copies_and_handed_over_behind_the_commit(
    engine: AsyncOmni, sound: tuple[list[int], bytes]
) -> None:
    async def run() -> None:
        seen: list[Any] = []
        request = await waiting(engine, seen)
        async with half_way(engine) as waking:
            assert (stage(engine, THINKER).running, seen, waking.done()) == (1, [], False)
            with pytest.raises(AsleepError):  # who has not waited is refused as ever
                await collect(engine, admission_timeout=0)
        (ack,) = await waking
        assert (ack.status, ack.metadata["state"]) == ("SUCCESS", "WARM")
        assert ack.metadata["mapped_bytes"] == resident(engine) > ack.metadata["copied_bytes"] > 0
        await request
        assert written(seen) == sound

    asyncio.run(run())


def test_an_image_that_a_sleep_kept_is_drawn_beside_the_copies_of_the_other_stage(engine: AsyncOmni) -> None:
    async def run() -> None:
        before = await picture(engine, 6), await picture(engine, 5)
        with held(engine, PAINTER):
            running = draw(engine, 6)
            await until(lambda: stage(engine).running == 1)
            kept = draw(engine, 5)
            await until(lambda: stage(engine).queued == 1)
            sleeping = asyncio.create_task(engine.sleep([PAINTER], mode="keep"))
            await until(lambda: stage(engine).state == "FALLING_ASLEEP")
        await sleeping
        await journal(engine)
        async with half_way(engine, PAINTER) as waking:
            assert not kept.done()
        assert (await waking)[0].ok
        drawn = (await running)[-1].images[0].tobytes(), (await kept)[-1].images[0].tobytes()
        assert drawn == before

    asyncio.run(run())


def test_a_copy_that_fails_takes_what_was_computed_with_it_and_the_request_is_queued_as_before(
    engine: AsyncOmni, sound: tuple[list[int], bytes]
) -> None:
    async def run() -> None:
        seen: list[Any] = []
        request = await waiting(engine, seen)
        async with half_way(engine) as waking:
            tell(engine, THINKER, ONLY, "finish_wake", error="RuntimeError", args=["a copy failed"])
            with pytest.raises(WakeError, match="a copy failed"):
                await waking
            assert at_rest(engine) == ("ASLEEP", 1, 0, 1)
            assert (seen, stage(engine, THINKER).running) == ([], 0)
        assert (await engine.wake_up([THINKER]))[0].ok
        await request
        assert written(seen) == sound

    asyncio.run(run())


def test_a_batch_that_outlasts_the_failure_of_its_wake_ends_before_memory_goes(engine: AsyncOmni) -> None:
    async def run() -> None:
        seen: list[Any] = []
        request = await waiting(engine, seen)
        with held(engine, THINKER, "execute"):
            tell(engine, THINKER, ONLY, "finish_wake", error="RuntimeError", args=["a copy failed"])
            waking = asyncio.create_task(engine.wake_up([THINKER]))
            await until(lambda: stage(engine, THINKER).running == 1 and not engine._core.stages[THINKER].arriving)
            assert (stage(engine, THINKER).state, resident(engine) > 0) == ("WAKING", True)
        with pytest.raises(WakeError, match="a copy failed"):
            await waking
        tell(engine, THINKER, ONLY, "finish_wake")
        told = [name for _, name, _ in await journal(engine, THINKER)]
        assert told.index("execute ends") < told.index("undo begins")
        assert at_rest(engine) == ("ASLEEP", 1, 0, 1)
        await engine.wake_up([THINKER])
        await request

    asyncio.run(run())


def test_a_wake_that_is_cancelled_beside_a_batch_is_taken_back(engine: AsyncOmni) -> None:
    async def run() -> None:
        seen: list[Any] = []
        request = await waiting(engine, seen)
        async with half_way(engine) as waking:
            waking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waking
            await noted(engine, THINKER, CANCELLED)  # else the copies may be done before it hears
        await until(lambda: stage(engine, THINKER).state == "ASLEEP")
        assert at_rest(engine) == ("ASLEEP", 1, 0, 1)
        assert seen == []
        await engine.wake_up([THINKER])
        await request
        assert seen[-1].finished

    asyncio.run(run())


def test_a_deadline_that_passes_beside_a_batch_takes_the_wake_back(engine: AsyncOmni) -> None:
    async def run() -> None:
        seen: list[Any] = []
        request = await waiting(engine, seen)
        with slow(engine, THINKER, 3.5, "finish_wake"):
            with pytest.raises(WakeError) as raised:
                await engine.wake_up([THINKER], timeout=2.0)
            assert [ack.metadata["error_code"] for ack in raised.value.acks] == ["DEADLINE"]
            assert at_rest(engine) == ("ASLEEP", 1, 0, 1)
        assert seen == []
        await engine.wake_up([THINKER])
        await request

    asyncio.run(run())


def test_a_request_that_is_aborted_beside_the_copies_ends_at_once_and_the_wake_goes_on(engine: AsyncOmni) -> None:
    async def run() -> None:
        seen: list[Any] = []
        request = await waiting(engine, seen, request_id="gone")
        async with half_way(engine) as waking:
            await engine.abort("gone")
            await request
            assert [str(output.state) for output in seen] == ["aborted"]
        assert (await waking)[0].ok

    asyncio.run(run())


def test_a_pause_beside_the_copies_holds_once_they_have_come(engine: AsyncOmni) -> None:
    async def run() -> None:
        seen: list[Any] = []
        request = await waiting(engine, seen)
        async with half_way(engine) as waking:
            pause = asyncio.create_task(engine.pause_generation("keep", THINKER))
            await until(lambda: stage(engine, THINKER).pause_state == "PAUSING")
        assert (await waking)[0].ok
        await pause
        await until(lambda: bool(seen))
        assert len(seen) == 1  # the token that was computed before
        await engine.resume_generation()
        await request

    asyncio.run(run())


def test_both_stages_wake_and_what_the_first_computes_early_is_drawn_by_the_second(
    engine: AsyncOmni, sound: tuple[list[int], bytes]
) -> None:
    async def run() -> None:
        seen: list[Any] = []
        await engine.sleep([PAINTER])
        request = await waiting(engine, seen)
        with held(engine, THINKER, "finish_wake"):
            waking = asyncio.create_task(engine.wake_up())
            await noted(engine, THINKER, "execute ends")
            assert [str(stage(engine, number).state) for number in (THINKER, PAINTER)] == ["WAKING", "AWAKE"]
        assert [ack.status for ack in await waking] == ["SUCCESS", "SUCCESS"]
        await request
        assert written(seen) == sound

    asyncio.run(run())


def test_a_batch_that_fails_beside_the_copies_ends_its_requests_behind_the_commit(engine: AsyncOmni) -> None:
    async def run() -> None:
        seen: list[Any] = []
        request = await waiting(engine, seen)
        tell(engine, THINKER, ONLY, "execute", error="ValueError", args=["no such token"])
        async with half_way(engine) as waking:
            assert not request.done()
            tell(engine, THINKER, ONLY, "execute")
        assert (await waking)[0].ok
        with pytest.raises(Exception, match="no such token"):
            await request

    asyncio.run(run())


def test_a_batch_that_does_not_end_after_its_wake_has_failed_leaves_a_failed_stage(
    engine: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transitions, "GRACE_S", 0.2)

    async def run() -> None:
        seen: list[Any] = []
        request = await waiting(engine, seen)
        with held(engine, THINKER, "execute"):
            tell(engine, THINKER, ONLY, "finish_wake", error="RuntimeError", args=["a copy failed"])
            with pytest.raises(WakeError, match="a batch had not ended"):
                await engine.wake_up([THINKER], timeout=2.0)
            assert stage(engine, THINKER).state == "FAILED"
            with pytest.raises(StageFailedError):
                await request
            assert seen == []
        tell(engine, THINKER, ONLY, "finish_wake")

    asyncio.run(run())


@pytest.mark.parametrize("shared_engine", ["mp"], indirect=True, scope="module")
def test_a_rank_that_is_killed_beside_a_batch_leaves_a_failed_stage(engine: AsyncOmni) -> None:
    async def run() -> None:
        seen: list[Any] = []
        request = await waiting(engine, seen)
        async with half_way(engine) as waking:
            pid = stage(engine, THINKER).ranks[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WakeError):
                await waking
        with pytest.raises(StageFailedError):
            await request
        assert (str(stage(engine, THINKER).state), seen) == ("FAILED", [])

    asyncio.run(run())


@pytest.mark.parametrize("how", ["nobody waits", "level 2", "a tag"])
def test_other_wakes_are_as_they_were(engine: AsyncOmni, how: str) -> None:
    async def run() -> None:
        seen: list[Any] = []
        request = None
        await journal(engine, THINKER)
        if how == "a tag":
            request = await waiting(engine, seen)
            await engine.wake_up([THINKER], tags=["weights"])
        elif how == "level 2":
            request = await waiting(engine, seen)
            await engine.sleep([THINKER], level=2)
        else:
            await engine.sleep([THINKER])
        await engine.wake_up([THINKER])
        told = [name for _, name, _ in await journal(engine, THINKER)]
        assert "map_restore begins" in told
        assert "begin_wake begins" not in told
        if request is not None:
            await request
            assert seen[-1].finished

    asyncio.run(run())
