"""Outputs leave, and conditioning comes, behind the running batch; a bounded connector between the stages."""

from __future__ import annotations

import asyncio
import io
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from omni_notebook.executors.mp import executor as mp_executor
from omni_notebook.executors.mp.wire import INLINE_BYTES, Packet
from omni_notebook.stages.replica import MAX_LEAVING
from tests.engine.engine_helpers import ask, collect, fault, golden, held, in_processes, slow, until
from tests.engine.faulty_worker import FETCH, OUTPUT, TAKEN
from tests.engine.painting import (
    PAINTER,
    draw,
    journal,
    one_running_and,
    paused_behind,
    pausing,
    pausing_behind,
    places,
    replicas,
    stage,
)
from tests.engine.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_notebook.engine.async_omni import AsyncOmni


def replica(engine: AsyncOmni) -> Any:
    return replicas(engine)[0]


async def leaving(engine: AsyncOmni) -> None:
    """Until a batch is off the device and its output on the way; not one whose client has it already."""
    flows, painting = engine._core._flows, replica(engine)
    await until(lambda: any(flow.at == PAINTER for flow in list(flows.values())))
    await until(lambda: painting._leaving and not painting._executing)


# ------------------------------------------------------------------------------------------ outputs


def test_the_next_batch_starts_while_the_outputs_of_the_last_are_copied(painter: AsyncOmni) -> None:
    async def run() -> None:
        with slow(painter, PAINTER, 1.0, OUTPUT):
            ends = await asyncio.gather(draw(painter, 4), draw(painter, 5))
        assert all(end[-1].images for end in ends)
        seen = await journal(painter)
        assert places(seen, "execute begins")[1] < places(seen, "output ends")[0]

    asyncio.run(run())


@pytest.mark.rule(Rule.AFTER_THE_COPIES)
def test_a_keep_pause_returns_after_the_copies_are_done_and_the_outputs_handed_over(painter: AsyncOmni) -> None:
    async def run() -> None:
        with slow(painter, PAINTER, 1.0, OUTPUT):
            request = draw(painter, request_id="leaving")
            await leaving(painter)
            started = time.monotonic()
            await painter.pause_generation(mode="keep")
            assert "leaving" not in painter._core._flows  # its last output is in the client's queue
            assert stage(painter).running == 0
            assert time.monotonic() - started > 0.2
        assert (await request)[-1].images
        seen = await journal(painter)
        assert places(seen, "output ends")[-1] < places(seen, "barrier begins")[-1]

    asyncio.run(run())


@pytest.mark.rule(Rule.ORDERS_AFTER)
@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_ordered_after_the_pause_runs_after_the_outputs(painter: AsyncOmni, level: int) -> None:
    async def run() -> None:
        alone = (await draw(painter))[-1].images[0].tobytes()
        with slow(painter, PAINTER, 1.0, OUTPUT):
            request = draw(painter)
            await leaving(painter)
            await painter.pause_generation(mode="keep")
            await painter.sleep([PAINTER], level=level)
        assert (await request)[-1].images[0].tobytes() == alone
        seen = await journal(painter)
        assert places(seen, "output ends")[-1] < places(seen, "prepare_sleep begins")[-1]

    asyncio.run(run())


def test_a_sleep_that_keeps_waits_for_the_outputs_itself(painter: AsyncOmni) -> None:
    async def run() -> None:
        with slow(painter, PAINTER, 1.0, OUTPUT):
            request = draw(painter)
            await leaving(painter)
            acks = await painter.sleep([PAINTER], mode="keep")
        assert acks[0].metadata["phases_ms"]["quiesce"] > 100
        assert (await request)[-1].images
        seen = await journal(painter)
        assert places(seen, "output ends")[-1] < places(seen, "commit_sleep begins")[-1]

    asyncio.run(run())


def test_a_stage_whose_outputs_are_on_their_way_counts_them_as_running_and_is_busy(painter: AsyncOmni) -> None:
    async def run() -> None:
        with slow(painter, PAINTER, 1.0, OUTPUT):
            request = draw(painter)
            await leaving(painter)
            assert (stage(painter).running, stage(painter).queued) == (1, 0)
            with pytest.raises(Exception, match="1 running, 0 queued") as caught:
                await painter.sleep([PAINTER])
            assert type(caught.value).__name__ == "StageBusyError"
        assert (await request)[-1].images

    asyncio.run(run())


def test_the_output_of_a_request_that_was_aborted_on_its_way_out_is_dropped(painter: AsyncOmni) -> None:
    async def run() -> None:
        with slow(painter, PAINTER, 1.0, OUTPUT):
            requests = [draw(painter, request_id=f"r{n}") for n in range(3)]
            await leaving(painter)
            here = [f"r{n}" for n in range(3) if f"r{n}" in replica(painter).scheduler.request_ids()]
            assert await painter.abort(here[0])
            outputs = await requests[int(here[0][1])]
            assert [(o.state, o.images) for o in outputs if o.finished] == [("aborted", [])]
            others = [await request for n, request in enumerate(requests) if f"r{n}" != here[0]]
        assert all(o[-1].images for o in others)
        await until(lambda: stage(painter).running == 0)

    asyncio.run(run())


def test_a_copy_that_fails_ends_its_batch_and_nobody_elses(painter: AsyncOmni) -> None:
    async def run() -> None:
        before = await golden(painter)
        with fault(painter, PAINTER, OUTPUT, OSError("the copy failed"), times=1):
            first = draw(painter, 4)
            await until(lambda: stage(painter).running)
            second = draw(painter, 5)
            with pytest.raises(OSError, match="the copy failed"):
                await first
            assert (await second)[-1].images
        assert (stage(painter).state, stage(painter).running) == ("AWAKE", 0)
        await painter.pause_generation(mode="keep")
        await painter.resume_generation()
        assert await golden(painter) == before

    asyncio.run(run())


def test_no_more_batches_leave_at_once_than_are_allowed(painter: AsyncOmni) -> None:
    async def run() -> None:
        with slow(painter, PAINTER, 1.0, OUTPUT):
            ends = await asyncio.gather(*(draw(painter, steps) for steps in (2, 3, 4, 5, 6)))
        assert all(end[-1].images for end in ends)

    asyncio.run(run())
    behind, most, at_start = 0, 0, []
    for _, what, _ in asyncio.run(journal(painter)):
        behind += (what == "execute ends") - (what == "output ends")
        most = max(most, behind)
        if what == "execute begins":
            at_start.append(behind)
    assert len(at_start) == 5
    assert max(at_start) == MAX_LEAVING - 1
    assert most == MAX_LEAVING


def test_the_png_of_an_output_decodes_to_its_very_pixels(painter: AsyncOmni) -> None:
    output = asyncio.run(collect(painter))[-1]
    assert len(output.png) == len(output.images) == 1
    decoded = Image.open(io.BytesIO(output.png[0]))
    assert (decoded.format, decoded.mode, decoded.size) == ("PNG", "RGB", output.images[0].size)
    assert np.array_equal(np.asarray(decoded), np.asarray(output.images[0]))


# ----------------------------------------------------------------------------------------- prefetch


def test_a_queued_requests_conditioning_is_on_the_rank_before_its_batch_starts(painter: AsyncOmni) -> None:
    async def run() -> None:
        with slow(painter, PAINTER, 1.0):
            requests = await one_running_and(painter, "b", "c")
            pictures = [(await r)[-1].images[0].tobytes() for r in requests]
        taken = [there for _, what, there in await journal(painter) if what == TAKEN]
        assert taken == [[False], [True, True]]
        assert pictures[1] == pictures[2] == (await draw(painter, 4))[-1].images[0].tobytes()

    asyncio.run(run())


@pytest.mark.rule(Rule.JOINS_PREFETCH)
def test_a_pause_joins_a_prefetch_in_flight(painter: AsyncOmni) -> None:
    async def run() -> None:
        with held(painter, PAINTER, FETCH):
            requests, pause = await pausing_behind(painter, "b")
            await until(lambda: painter._core.stages[PAINTER].at_rest)
            await asyncio.sleep(0.1)
            assert not pause.done()
        await pause
        seen = await journal(painter)
        assert len(places(seen, "fetch begins")) == 1
        assert places(seen, "fetch ends")[-1] < places(seen, "barrier ends")[-1]
        await painter.resume_generation()
        assert all([(await r)[-1].images for r in requests])

    asyncio.run(run())


@pytest.mark.rule(Rule.JOINS_PREFETCH)
def test_a_pause_joins_a_prefetch_that_nobody_wants_any_more(painter: AsyncOmni) -> None:
    async def begun_in_time() -> bool:
        """Whether the fetch had begun when its request was aborted; if it had, what must be so."""
        with held(painter, PAINTER, FETCH):
            with held(painter, PAINTER):
                requests = await one_running_and(painter, "b")
                await painter.abort("b")
                pause = await pausing(painter)
            await until(lambda: painter._core.stages[PAINTER].at_rest)
            await asyncio.sleep(0.1)
            early = pause.done()
        await pause
        seen = await journal(painter)
        assert (await requests[1])[-1].state == "aborted"
        assert ask(painter, PAINTER, "fetched") == 0
        await painter.resume_generation()
        await requests[0]
        if not places(seen, "fetch begins"):
            return False
        assert not early
        assert places(seen, "fetch ends")[-1] < places(seen, "barrier ends")[-1]
        return True

    async def run() -> None:
        tries = 0
        while not await begun_in_time():
            tries += 1
            assert tries < 20

    asyncio.run(run())


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_drops_what_was_prefetched_and_the_picture_is_the_same(painter: AsyncOmni, level: int) -> None:
    async def run() -> None:
        alone = (await draw(painter, 4))[-1].images[0].tobytes()
        requests = await paused_behind(painter, "b")
        assert ask(painter, PAINTER, "fetched") == 1
        await painter.sleep([PAINTER], level=level)
        assert ask(painter, PAINTER, "fetched") == 0
        await painter.wake_up([PAINTER])
        await painter.resume_generation()
        assert (await requests[1])[-1].images[0].tobytes() == alone

    asyncio.run(run())


def test_new_weights_use_what_was_prefetched_or_fetch_it_again(painter: AsyncOmni) -> None:
    async def run() -> None:
        alone = (await draw(painter, 4))[-1].images[0].tobytes()
        requests = await paused_behind(painter, "b")
        await painter.load_weights(PAINTER, stage(painter).model, version="again")
        await painter.resume_generation()
        end = (await requests[1])[-1]
        assert (end.images[0].tobytes(), end.weight_version) == (alone, "again")
        assert ask(painter, PAINTER, "fetched") == 0
        await painter.restart(PAINTER)

    asyncio.run(run())


def test_the_abort_of_a_prefetched_request_leaves_nothing_behind(painter: AsyncOmni) -> None:
    async def run() -> None:
        with slow(painter, PAINTER, 0.4):
            requests = await one_running_and(painter, "b")
            await painter.abort("b")
            ends = [(await r)[-1].state for r in requests]
        assert ends == ["finished", "aborted"]
        assert ask(painter, PAINTER, "fetched") == 0

    asyncio.run(run())


def test_conditioning_that_can_not_be_fetched_ends_its_batch_and_nobody_elses(painter: AsyncOmni) -> None:
    async def run() -> None:
        before = await golden(painter)
        with slow(painter, PAINTER, 0.3), fault(painter, PAINTER, FETCH, MemoryError("no room"), times=1):
            requests = await one_running_and(painter, "b")
            assert (await requests[0])[-1].images
            with pytest.raises(MemoryError, match="no room"):
                await requests[1]
        assert stage(painter).state == "AWAKE"
        assert await golden(painter) == before

    asyncio.run(run())


# ---------------------------------------------------------------------------------------- connector


@pytest.fixture
def narrow(painter: AsyncOmni) -> Iterator[Callable[[], int]]:
    """The connector in front of the painter holds three; how many it held at most."""
    connector: Any = painter._core.stages[0].connector
    most = 0

    def started(request_id: str) -> None:
        nonlocal most
        type(connector).started(connector, request_id)
        most = max(most, connector._parked() + len(connector._started))

    connector._capacity, connector.started = 3, started
    yield lambda: most
    del connector.started
    connector._capacity = 64


def twelve(engine: AsyncOmni) -> list[asyncio.Task[list[Any]]]:
    return [draw(engine, 2, request_id=f"r{n}") for n in range(12)]


def test_a_slow_painter_holds_the_thinker_back(painter: AsyncOmni, narrow: Callable[[], int]) -> None:
    async def run() -> None:
        with slow(painter, PAINTER, 0.15):
            ends = await asyncio.wait_for(asyncio.gather(*twelve(painter)), 60)
        assert [end[-1].state for end in ends] == ["finished"] * 12
        assert narrow() == 3

    asyncio.run(run())


@pytest.mark.parametrize("level", [1, 2])
def test_a_painter_that_sleeps_meanwhile_holds_the_thinker_back(
    painter: AsyncOmni, narrow: Callable[[], int], level: int
) -> None:
    async def run() -> None:
        with slow(painter, PAINTER, 0.1):
            requests = twelve(painter)
            await until(lambda: stage(painter).running)
            await painter.sleep([PAINTER], level=level, mode="keep")
            await until(lambda: stage(painter).queued == 3 and stage(painter, 0).running == 0)
            assert stage(painter, 0).queued == stage(painter).in_transit > 0
            text = await asyncio.wait_for(collect(painter, output_modalities="text"), 20)
            assert text[-1].finished
            await painter.wake_up([PAINTER])
            ends = await asyncio.wait_for(asyncio.gather(*requests), 60)
        assert [end[-1].state for end in ends] == ["finished"] * 12
        assert narrow() == 3

    asyncio.run(run())


def test_the_end_of_a_parked_request_makes_room_for_the_next_one(painter: AsyncOmni, narrow: Callable[[], int]) -> None:
    async def run() -> None:
        with held(painter, PAINTER):
            requests = twelve(painter)
            await until(lambda: replica(painter)._executing and stage(painter).queued == 3)
            for _ in range(2):  # the first batch runs; nobody it could make room for would be told by a next one
                for request_id in replica(painter).scheduler.request_ids()[-3:]:
                    await painter.abort(request_id)
                await until(lambda: stage(painter).queued == 3)
        ends = await asyncio.wait_for(asyncio.gather(*requests), 60)
        states = [end[-1].state for end in ends]
        assert (states.count("aborted"), states.count("finished")) == (6, 6)
        assert narrow() == 3

    asyncio.run(run())


def test_hidden_states_cross_to_the_painters_process_in_shared_memory(
    engine: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests that waited for a sleeping painter go to it in one batch, 9 states of 1 KiB each."""
    sent: list[tuple[str, Packet]] = []
    real = mp_executor.pack

    def pack(message: Any) -> Packet:
        packet = real(message)
        sent.append((getattr(message, "method", ""), packet))
        return packet

    monkeypatch.setattr(mp_executor, "pack", pack)

    async def run() -> list[bytes]:
        alone = (await draw(engine))[-1].images[0].tobytes()
        with slow(engine, 0, 0.05):
            requests = [draw(engine) for _ in range(4)]
            await until(lambda: stage(engine, 0).running == 4)
            await engine.sleep([PAINTER], mode="keep")
            await until(lambda: stage(engine).queued == 4)
        await engine.wake_up([PAINTER])
        pictures = [(await r)[-1].images[0].tobytes() for r in requests]
        assert {alone, *pictures} == {alone}
        return pictures

    asyncio.run(run())
    frames = [packet for method, packet in sent if method == "execute" and packet.fd is not None]
    assert [packet.n_bytes > max(INLINE_BYTES, 4 * 9 * 1024) for packet in frames] == [True] * in_processes(engine)
