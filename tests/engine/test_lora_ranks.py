"""Adapters on 2 stages × 2 replicas × 2 ranks: each rank its part, none silently off, and all or nothing over ranks."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import DeadlineError, LoRAError, StageFailedError, WorkerDiedError
from omni_notebook.executors.base import RankAnswer
from omni_notebook.protocol import LoRARequest, RankId
from omni_notebook.stages import weights
from tests import adapters
from tests.engine.engine_helpers import collect, golden, rank_fault, reset
from tests.engine.faults import CULPRIT, KILLED, LATEST_S, PLACES, RAISES, STAGE, STOPPED, TIMEOUT_S, goldens, places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAMED = r"rank 1 of replica 1 of stage 1"
CULPRIT_ID = RankId(STAGE, *CULPRIT)


@pytest.fixture
def engine(four: AsyncOmni) -> Iterator[AsyncOmni]:
    yield four
    asyncio.run(_clear(four))


async def _clear(engine: AsyncOmni) -> None:
    await reset(engine)
    for lora_id in await engine.list_loras():
        await engine.remove_lora(lora_id)


@pytest.fixture
def make(engine: AsyncOmni, tmp_path: Path) -> Callable[[int, int], LoRARequest]:
    def make(lora_id: int, stage_id: int) -> LoRARequest:
        layers = engine._core.stages[stage_id].model.adaptable
        path = adapters.write(tmp_path / f"style-{lora_id}", adapters.matrices(layers, seed=lora_id, size=2.0))
        return LoRARequest(f"style-{lora_id}", lora_id, str(path))

    return make


async def both(engine: AsyncOmni, **known: Any) -> list[tuple[list[int], bytes]]:
    """A request to each replica at once: both answers."""
    return list(await asyncio.gather(*(golden(engine, **known) for _ in range(2))))


def holds(engine: AsyncOmni, stage_id: int) -> list[bool]:
    """Whether each rank of a stage has memory for adapters."""
    return ["lora" in rank.tags for rank in engine.status().stages[stage_id].ranks]


@pytest.mark.parametrize("stage_id", [0, 1])
@pytest.mark.parametrize("level", [1, 2])
def test_no_rank_forgets_its_part_of_an_adapter_in_a_sleep(
    engine: AsyncOmni, make: Callable[[int, int], LoRARequest], stage_id: int, level: int
) -> None:
    async def run() -> None:
        await engine.add_lora(make(1, stage_id))
        assert holds(engine, stage_id) == [True] * 4
        changed = await both(engine, lora_request=1)
        assert changed[0] == changed[1]
        assert changed[0][1] != goldens[id(engine)][1]
        acks = await engine.sleep([stage_id], level=level)
        assert places(acks) == PLACES
        spans = {ack.metadata["tags"]["lora"]["freed"] for ack in acks}
        assert spans == {engine._core.stages[stage_id].tags["lora"]}
        await engine.wake_up([stage_id])
        assert await both(engine, lora_request=1) == changed
        assert await golden(engine) == goldens[id(engine)]

    asyncio.run(run())


def test_two_ranks_write_what_one_rank_writes(engine: AsyncOmni, make: Callable[[int, int], LoRARequest]) -> None:
    async def run() -> None:
        requests = [make(1, 0), make(2, 1)]
        with AsyncOmni("demo") as single:
            for request in requests:
                await single.add_lora(request)
            wanted = [await golden(single, lora_request=lora_id) for lora_id in (1, 2)]
        for request in requests:
            await engine.add_lora(request)
        split = [await golden(engine, lora_request=lora_id) for lora_id in (1, 2)]
        assert [tokens for tokens, _picture in split] == [tokens for tokens, _picture in wanted]
        assert split[0][0] != goldens[id(engine)][0]

    asyncio.run(run())


@pytest.mark.parametrize("after", [False, True], ids=["before it took it", "after it took it"])
@pytest.mark.parametrize("method", ["prepare_lora", "commit_lora"])
def test_a_rank_that_can_not_take_an_adapter_leaves_it_on_none_and_is_named(
    engine: AsyncOmni, make: Callable[[int, int], LoRARequest], method: str, after: bool
) -> None:
    async def run() -> None:
        await engine.add_lora(make(1, STAGE))
        kept = await golden(engine, lora_request=1)
        request = make(2, STAGE)
        says = rf"{NAMED} could not take adapter 'style-2' \(id 2\): RuntimeError: broken; .*nothing changed"
        with (
            rank_fault(engine, STAGE, CULPRIT, method, **{**RAISES, "after": after}),
            pytest.raises(LoRAError, match=says),
        ):
            await engine.add_lora(request)
        assert engine.status().stages[STAGE].state == "AWAKE"
        assert await engine.list_loras() == [1]
        assert await both(engine, lora_request=1) == [kept] * 2
        assert await engine.add_lora(request)
        assert await golden(engine, lora_request=2) != kept

    asyncio.run(run())


def test_a_first_adapter_that_fails_on_one_rank_leaves_no_memory_on_any(
    engine: AsyncOmni, make: Callable[[int, int], LoRARequest]
) -> None:
    async def run() -> None:
        with (
            rank_fault(engine, STAGE, CULPRIT, "commit_lora", **RAISES),
            pytest.raises(LoRAError, match=NAMED),
        ):
            await engine.add_lora(make(1, STAGE))
        assert holds(engine, STAGE) == [False] * 4
        assert set(engine.status().stages[STAGE].awake_tags) == set(engine._core.stages[STAGE].tags) == {"weights"}
        acks = await engine.sleep([STAGE], level=2)
        assert all(ack.ok and "lora" not in ack.metadata["tags"] for ack in acks)

    asyncio.run(run())


@pytest.mark.parametrize("what", [KILLED, STOPPED], ids=["dies", "hangs"])
def test_a_rank_that_is_lost_in_commit_fails_its_stage_and_the_restart_has_what_was_there_before(
    engine: AsyncOmni, make: Callable[[int, int], LoRARequest], what: dict[str, Any]
) -> None:
    async def run() -> None:
        await engine.add_lora(make(1, STAGE))
        await engine.pin_lora(1)
        kept = await golden(engine, lora_request=1)
        started = time.monotonic()
        with (
            rank_fault(engine, STAGE, CULPRIT, "commit_lora", **what),
            pytest.raises((WorkerDiedError, DeadlineError), match=r"rank 1 of replica 1"),
        ):
            await engine.add_lora(make(2, STAGE), timeout=TIMEOUT_S)
        assert time.monotonic() - started < LATEST_S
        assert engine.status().stages[STAGE].state == "FAILED"
        assert await engine.list_loras() == [1]
        for call in (engine.remove_lora(1), engine.pin_lora(1)):
            with pytest.raises(StageFailedError, match=r"restart\(1\)"):
                await call
        await engine.restart(STAGE)
        assert [(one.lora_int_id, one.pinned) for one in engine.status().stages[STAGE].loras] == [(1, True)]
        assert await both(engine, lora_request=1) == [kept] * 2
        assert await golden(engine) == goldens[id(engine)]

    asyncio.run(run())


@pytest.mark.parametrize("what", [KILLED, STOPPED], ids=["dies", "hangs"])
def test_a_rank_that_is_lost_while_it_pins_fails_its_stage_and_the_error_says_so(
    engine: AsyncOmni, make: Callable[[int, int], LoRARequest], what: dict[str, Any]
) -> None:
    async def run() -> None:
        await engine.add_lora(make(1, STAGE))
        started = time.monotonic()
        with (
            rank_fault(engine, STAGE, CULPRIT, "pin_lora", **what),
            pytest.raises(LoRAError, match=r"rank 1 of replica 1.*; stage 1 has FAILED, call restart\(1\)$"),
        ):
            await engine.pin_lora(1, timeout=TIMEOUT_S)
        assert time.monotonic() - started < LATEST_S
        failed = engine.status().stages[STAGE]
        assert (failed.state, "rank 1 of replica 1" in str(failed.last_error)) == ("FAILED", True)
        await engine.restart(STAGE)
        assert [one.pinned for one in engine.status().stages[STAGE].loras] == [False]

    asyncio.run(run())


@pytest.mark.parametrize("method", ["prepare_lora", "commit_lora", "pin_lora", "remove_lora"])
def test_a_rank_that_hangs_over_its_adapters_after_a_restart_does_not_hold_the_stage(
    engine: AsyncOmni, make: Callable[[int, int], LoRARequest], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "ADAPTERS_S", 1.0)
    stage = engine._core.stages[STAGE]
    call_all = stage.call_all

    async def stopped(called: str, *args: Any, **known: Any) -> Any:
        if called == method:
            os.kill(engine.status().stages[STAGE].ranks[-1].pid, signal.SIGSTOP)
        if (called, method) == ("commit_lora", "remove_lora"):
            return [RankAnswer(CULPRIT_ID, None, LoRAError("no room"))]  # so that what others took is taken back
        return await call_all(called, *args, **known)

    async def run() -> None:
        await engine.add_lora(make(1, STAGE))
        await engine.pin_lora(1)
        with monkeypatch.context() as patch:
            patch.setattr(stage, "call_all", stopped)
            with pytest.raises(DeadlineError, match=rf"rank 1 of replica 1.*'{method}'"):
                await asyncio.wait_for(engine.restart(STAGE, timeout=1), 60)
        assert engine.status().stages[STAGE].state == "FAILED"
        await engine.restart(STAGE)
        assert engine.status().stages[STAGE].state == "AWAKE"

    asyncio.run(run())


def test_a_rank_that_can_not_bring_an_adapter_back_costs_the_stage_the_adapter_not_the_restart(
    engine: AsyncOmni, make: Callable[[int, int], LoRARequest]
) -> None:
    async def run() -> None:
        requests = [make(1, STAGE), make(2, STAGE)]
        for request in requests:
            await engine.add_lora(request)
        kept = await golden(engine, lora_request=2)
        shutil.rmtree(requests[0].lora_path)
        await engine.restart(STAGE)
        assert await engine.list_loras() == [2]
        assert "style-1" in str(engine.status().stages[STAGE].last_error)
        assert await both(engine, lora_request=2) == [kept] * 2
        assert (await collect(engine))[-1].finished

    asyncio.run(run())
