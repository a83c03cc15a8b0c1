"""Sleep and wake through the engine: measured ACKs, exact restoration, refusals that change nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import (
    ArgumentError,
    DeadlineError,
    OutOfMemoryError,
    SleepError,
    StageBusyError,
    UnsupportedError,
    WakeError,
)
from omni_notebook.memory import cpu
from omni_notebook.protocol import AckMetadata, OmniACK
from tests.engine.engine_helpers import ask, collect, fault, golden, slow, until

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1024**2
RSS = "import psutil, sys; print(psutil.Process(int(sys.argv[1])).memory_info().rss)"


def rss_from_outside(pid: int) -> int:
    """A process's RSS as psutil sees it from another process."""
    out = subprocess.run([sys.executable, "-c", RSS, str(pid)], capture_output=True, text=True, check=True)
    return int(out.stdout)


def spans(engine: AsyncOmni, stage_id: int) -> int:
    return sum(tag.mapped_bytes for tag in engine.status().stages[stage_id].ranks[0].tags.values())


@pytest.mark.parametrize("level", [1, 2])
def test_both_stages_sleep_and_wake_and_draw_the_same_bytes(engine: AsyncOmni, level: int) -> None:
    async def run() -> None:
        before = await golden(engine)
        addresses = [ask(engine, stage_id, "addresses") for stage_id in (0, 1)]
        acks = await engine.sleep(level=level)
        assert [(a.stage_id, a.rank, a.status) for a in acks] == [(0, 0, "SUCCESS"), (1, 0, "SUCCESS")]
        assert len({a.task_id for a in acks}) == 1
        for ack in acks:
            assert ack.freed_bytes == ack.metadata["expected_bytes"] == ack.metadata["observed_bytes"] > 0
            resident = engine.status().stages[ack.stage_id].ranks[0].tags
            assert sum(tag.resident_bytes for tag in resident.values()) == 0
        woken = await engine.wake_up()
        assert [a.metadata["mapped_bytes"] for a in woken] == [a.freed_bytes for a in acks]
        assert [a.freed_bytes for a in woken] == [0, 0]
        assert await golden(engine) == before
        assert [ask(engine, stage_id, "addresses") for stage_id in (0, 1)] == addresses

    asyncio.run(run())


def test_an_ack_has_the_specifications_fields_and_all_metadata_keys(engine: AsyncOmni) -> None:
    acks = asyncio.run(engine.sleep([0], level=2))
    noop = asyncio.run(engine.sleep([0], level=2))
    woken = asyncio.run(engine.wake_up([0]))
    names = [field.name for field in fields(OmniACK)]
    assert names == ["task_id", "status", "stage_id", "rank", "freed_bytes", "metadata", "error_msg"]
    for ack in (*acks, *noop, *woken):
        assert set(asdict(ack)["metadata"]) == set(AckMetadata.__struct_fields__)
    assert acks[0].metadata["total_freed_gib"] == f"{acks[0].freed_bytes / 1024**3:.2f}"
    assert acks[0].metadata["source"].startswith("Platform_")
    assert " " not in acks[0].metadata["source"]
    assert (acks[0].metadata["state"], woken[0].metadata["state"]) == ("COLD", "WARM")
    quiet = noop[0].metadata
    assert (noop[0].freed_bytes, quiet["noop"], quiet["level"], quiet["expected_bytes"]) == (0, True, 2, 0)


def test_an_order_with_nothing_to_do_walks_no_page_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading smaps takes milliseconds a rank, and more the more it holds."""
    with AsyncOmni("demo", executor="uni") as engine:
        monkeypatch.setattr(cpu, "process_memory", _walks)
        acks = asyncio.run(engine.wake_up())
        resident = psutil.Process().memory_info().rss
        assert [ack.metadata["noop"] for ack in acks] == [True, True]
        for ack in acks:
            assert float(ack.metadata["current_vram_gib"]) == pytest.approx(resident / 1024**3, abs=0.02)
        with pytest.raises(SleepError, match="walks the page table"):
            asyncio.run(engine.sleep([0]))


def _walks() -> None:
    msg = "walks the page table"
    raise AssertionError(msg)


@pytest.mark.alone
def test_the_process_really_gives_the_bytes_back() -> None:
    async def run(engine: AsyncOmni) -> None:
        pid = psutil.Process().pid
        awake = rss_from_outside(pid)
        acks = await engine.sleep(level=2)
        asleep = rss_from_outside(pid)
        freed = sum(a.freed_bytes for a in acks)
        assert freed > 2 * 128 * MIB
        assert awake - asleep == pytest.approx(freed, abs=8 * MIB)
        assert acks[-1].metadata["residual_bytes"] == pytest.approx(asleep, abs=freed // 2 + 8 * MIB)
        await engine.wake_up()
        assert rss_from_outside(pid) == pytest.approx(awake, abs=16 * MIB)

    with AsyncOmni("demo", ballast_bytes="128MiB") as engine:
        asyncio.run(run(engine))


@pytest.mark.alone
@pytest.mark.parametrize("level", [1, 2])
def test_ten_cycles_leave_a_flat_residual_and_identical_outputs(engine: AsyncOmni, level: int) -> None:
    async def run() -> None:
        before = await golden(engine)
        residuals = []
        for _ in range(10):
            acks = await engine.sleep(level=level)
            residuals.append(sum(rss_from_outside(pid) for pid in {ack.metadata["pid"] for ack in acks}))
            assert all(a.ok and a.freed_bytes == a.metadata["expected_bytes"] for a in acks)
            await engine.wake_up()
            assert await golden(engine) == before
        assert max(residuals[2:]) - residuals[1] < 4 * MIB  # it may fall, it must not grow

    asyncio.run(run())


@pytest.mark.parametrize("how", ["data", "numpy", "raw"])
def test_level_1_restores_what_was_written_past_every_counter(engine: AsyncOmni, how: str) -> None:
    async def run() -> None:
        await engine.sleep([1], level=1)
        await engine.wake_up([1])
        before = ask(engine, 1, "first_weight")
        ask(engine, 1, "scribble", how)
        wanted = ask(engine, 1, "first_weight")
        assert not np.array_equal(before, wanted)
        await engine.sleep([1], level=1)
        await engine.wake_up([1])
        assert np.array_equal(ask(engine, 1, "first_weight"), wanted)
        await engine.restart(1)

    asyncio.run(run())


def test_level_2_of_weights_written_in_memory_says_so_and_never_brings_back_old_ones(engine: AsyncOmni) -> None:
    async def run() -> None:
        ask(engine, 1, "scribble", "data")
        with pytest.raises(SleepError, match="changed in memory") as caught:
            await engine.sleep([1], level=2, discard=False)
        assert [a.metadata["error_code"] for a in caught.value.acks] == ["UNRECOVERABLE"]
        assert engine.status().stages[1].state == "AWAKE"
        acks = await engine.sleep([1], level=2)
        assert [a.metadata["recoverable"] for a in acks] == [False]
        woken = await engine.wake_up([1])
        assert engine.status().stages[1].state == "NEEDS_WEIGHTS"
        assert "load_weights" in woken[0].metadata["note"]
        await engine.load_weights(1, engine.status().stages[1].model)
        assert engine.status().stages[1].state == "AWAKE"

    asyncio.run(run())


def test_level_1_then_level_2_drops_the_backup_and_still_wakes(engine: AsyncOmni) -> None:
    async def run() -> None:
        before = await golden(engine)
        first = (await engine.sleep([0], level=1))[0]
        second = (await engine.sleep([0], level=2))[0]
        assert second.freed_bytes == 0
        assert second.metadata["host_freed_bytes"] > 0
        assert second.metadata["host_backup_bytes"] < first.metadata["host_backup_bytes"]
        await engine.wake_up([0])
        assert await golden(engine) == before

    asyncio.run(run())


def test_tags_wake_in_any_order_and_generate_waits_for_the_last(engine: AsyncOmni) -> None:
    async def run() -> None:
        before = await golden(engine)
        for order in (["kv_cache", "weights"], ["weights", "kv_cache"]):
            await engine.sleep([0], level=2)
            await engine.wake_up([0], tags=order[:1])
            stage = engine.status().stages[0]
            assert (stage.state, stage.awake_tags) == ("PARTLY_AWAKE", (order[0],))
            noop = await engine.wake_up([0], tags=order[:1])
            assert noop[0].metadata["noop"]
            await engine.wake_up([0], tags=order[1:])
            assert engine.status().stages[0].state == "AWAKE"
            assert await golden(engine) == before

    asyncio.run(run())


BAD = [
    {"stage_ids": []},
    {"stage_ids": [2]},
    {"stage_ids": [-1]},
    {"stage_ids": ["0"]},
    {"level": 0},
    {"level": 3},
    {"level": "x"},
    {"level": True},
    {"mode": "hard"},
    {"timeout": -1},
    {"timeout": "soon"},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_arguments_are_value_errors_and_change_nothing(engine: AsyncOmni, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="othing changed"):
        asyncio.run(engine.sleep(**bad))
    assert [s.state for s in engine.status().stages] == ["AWAKE", "AWAKE"]


@pytest.mark.parametrize("tags", [[], ["wheels"]])
def test_unknown_tags_are_refused(engine: AsyncOmni, tags: list[str]) -> None:
    with pytest.raises(ArgumentError, match="these stages have"):
        asyncio.run(engine.wake_up(tags=tags))


def test_one_bad_stage_moves_none(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.sleep([1], level=2)
        with pytest.raises(Exception, match="weights are gone"):
            await engine.sleep([0, 1], level=1)
        assert [s.state for s in engine.status().stages] == ["AWAKE", "ASLEEP"]

    asyncio.run(run())


def test_a_busy_stage_refuses_with_counts_and_keeps_serving(engine: AsyncOmni) -> None:
    async def run() -> None:
        long = asyncio.create_task(collect(engine, sampling_params={"num_inference_steps": 200, "seed": 1}))
        await until(lambda: engine.status().stages[1].running)
        with pytest.raises(StageBusyError, match="1 running, 0 queued, 0 in transit") as caught:
            await engine.sleep([1])
        assert (caught.value.running, caught.value.queued, caught.value.in_transit) == (1, 0, 0)
        assert (await long)[-1].images

    asyncio.run(run())


@pytest.mark.parametrize("order", ["sleep", "load_weights"])
def test_an_order_after_an_abort_waits_for_the_batch_that_nobody_waits_for(engine: AsyncOmni, order: str) -> None:
    async def run() -> None:
        with slow(engine, 0, 1.0):
            begun = asyncio.create_task(collect(engine, request_id="left", sampling_params={"seed": 1}))
            await until(lambda: engine.status().stages[0].running)
            await engine.abort("left")
            await begun
            if order == "sleep":
                await engine.sleep([0])
                await engine.wake_up([0])
            else:
                await engine.load_weights(0, engine.status().stages[0].model)
        assert (await collect(engine, sampling_params={"num_inference_steps": 2}))[-1].images

    asyncio.run(run())


def test_a_request_on_its_way_makes_the_next_stage_busy(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.pause_generation(mode="keep", stage_ids=[0])
        await engine.resume_generation()
        stage = engine._core.stages[0]
        stage.close("test")  # the thinker is held, so the request stays on its way
        request = asyncio.create_task(collect(engine))
        await until(lambda: engine.status().stages[1].in_transit == 1)
        with pytest.raises(StageBusyError, match="1 in transit"):
            await engine.sleep([1])
        engine._loop.loop.call_soon_threadsafe(stage.reopen, "test")
        assert (await request)[-1].images

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_sleep_with_a_mode_quiesces_a_busy_stage_first(engine: AsyncOmni, mode: str) -> None:
    async def run() -> None:
        alone = await golden(engine, sampling_params={"seed": 5, "num_inference_steps": 30})
        params = {"seed": 5, "num_inference_steps": 30}
        with slow(engine, 1, 0.5):
            requests = [asyncio.create_task(collect(engine, sampling_params=params)) for _ in range(7)]
            await until(lambda: engine.status().stages[1].queued and not engine.status().stages[1].in_transit)
            await engine.sleep([1], level=2, mode=mode)
        assert engine.status().stages[1].state == "ASLEEP"
        await engine.wake_up([1])
        ends = [(await r)[-1] for r in requests]
        assert all(end.finished for end in ends)
        states = {end.state for end in ends}
        assert states == ({"aborted"} if mode == "abort" else {"finished"})
        if mode != "abort":
            assert len(ends) == 7
            assert all(end.images for end in ends)
        assert await golden(engine, sampling_params=params) == alone

    asyncio.run(run())


def test_a_kept_ar_sequence_goes_on_token_exact_after_a_sleep(engine: AsyncOmni) -> None:
    async def run() -> None:
        alone = (await collect(engine, output_modalities="text"))[-1].outputs[0].token_ids
        with slow(engine, 0, 0.05):
            request = asyncio.create_task(collect(engine, output_modalities="text"))
            await until(lambda: engine.status().stages[0].running)
            await engine.sleep([0], level=2, mode="keep")
        assert not request.done()
        assert engine.status().stages[0].queued == 1
        await engine.wake_up([0])
        assert (await request)[-1].outputs[0].token_ids == alone

    asyncio.run(run())


def test_a_rank_that_fails_in_prepare_leaves_everything_as_it_was(engine: AsyncOmni) -> None:
    async def run() -> None:
        before = await golden(engine)
        with (
            fault(engine, 1, "prepare_sleep", OSError(5, "the disk failed")),
            pytest.raises(SleepError, match="the disk failed") as caught,
        ):
            await engine.sleep([0, 1], level=1)
        assert [(a.stage_id, a.status) for a in caught.value.acks] == [(0, "SUCCESS"), (1, "ERROR")]
        assert [s.state for s in engine.status().stages] == ["ASLEEP", "AWAKE"]
        await engine.wake_up([0])
        assert await golden(engine) == before

    asyncio.run(run())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("order", ["sleep", "wake"])
def test_a_rank_that_fails_in_commit_takes_the_order_back(engine: AsyncOmni, order: str, when: str) -> None:
    """`before` and `after` its memory moved: either way the stage is as before the order."""

    async def run() -> None:
        before = await golden(engine)
        if order == "wake":
            await engine.sleep([1], level=2)
        name = f"commit_{order}"
        with fault(engine, 1, name, RuntimeError("lost"), after=when == "after"):
            call = engine.sleep([1], level=2) if order == "sleep" else engine.wake_up([1])
            with pytest.raises((SleepError, WakeError), match="lost"):
                await call
        stage = engine.status().stages[1]
        assert stage.state == ("AWAKE" if order == "sleep" else "ASLEEP")
        resident = sum(tag.resident_bytes for tag in stage.ranks[0].tags.values())
        assert resident == (sum(tag.mapped_bytes for tag in stage.ranks[0].tags.values()) if order == "sleep" else 0)
        await engine.wake_up([1])
        assert await golden(engine) == before

    asyncio.run(run())


def test_a_wake_that_fails_leaves_the_stage_asleep_and_wakeable(engine: AsyncOmni) -> None:
    async def run() -> None:
        before = await golden(engine)
        await engine.sleep([1], level=1)
        with (
            fault(engine, 1, "prepare_wake", MemoryError("no room")),
            pytest.raises(WakeError, match="no room"),
        ):
            await engine.wake_up([1])
        stage = engine.status().stages[1]
        assert (stage.state, stage.level) == ("ASLEEP", 1)
        assert sum(tag.resident_bytes for tag in stage.ranks[0].tags.values()) == 0
        await engine.wake_up([1])
        assert await golden(engine) == before

    asyncio.run(run())


def test_a_checkpoint_changed_between_sleep_and_wake_is_never_taken_silently(tmp_path: Any) -> None:
    import shutil

    from omni_notebook.config import DEMO_FOLDER

    shutil.copytree(DEMO_FOLDER / "dit", tmp_path / "dit")
    file = tmp_path / "dit" / "model.safetensors"
    original = file.read_bytes()

    async def run(engine: AsyncOmni) -> None:
        await engine.sleep([0], level=2)
        broken = bytearray(original)
        broken[-1000:] = bytes(1000)
        file.write_bytes(bytes(broken))
        with pytest.raises(WakeError, match="checksum differs") as caught:
            await engine.wake_up([0])
        assert caught.value.acks[0].metadata["error_code"] == "CHECKSUM"
        assert engine.status().stages[0].state == "ASLEEP"
        file.unlink()
        with pytest.raises(WakeError, match=r"model\.safetensors"):
            await engine.wake_up([0])
        file.write_bytes(original)
        await engine.wake_up([0])
        assert engine.status().stages[0].state == "AWAKE"

    with AsyncOmni(tmp_path / "dit") as engine:
        asyncio.run(run(engine))


def test_sleep_mode_off_is_refused_with_the_reason() -> None:
    with (
        AsyncOmni("demo", enable_sleep_mode=False) as engine,
        pytest.raises(UnsupportedError, match="enable_sleep_mode"),
    ):
        asyncio.run(engine.sleep())


def test_two_callers_of_one_stage_wait_for_each_other_and_both_get_an_answer(engine: AsyncOmni) -> None:
    async def run() -> None:
        answers = await asyncio.gather(*(engine.sleep([0], level=1) for _ in range(4)))
        real = [acks for acks in answers if not acks[0].metadata["noop"]]
        assert len(real) == 1
        await asyncio.gather(*(engine.wake_up([0]) for _ in range(4)))
        assert engine.status().stages[0].state == "AWAKE"

    asyncio.run(run())


def test_an_order_that_meets_a_transition_gives_up_at_its_own_deadline(engine: AsyncOmni) -> None:
    async def run() -> None:
        stage = engine._core.stages[0]
        engine._loop.submit(stage.order_lock.acquire()).result(5)
        with pytest.raises(DeadlineError, match="nothing changed"):
            await engine.sleep([0], timeout=0.05)
        engine._loop.loop.call_soon_threadsafe(stage.order_lock.release)
        await engine.sleep([0])

    asyncio.run(run())


def test_raise_on_error_false_returns_the_answers(engine: AsyncOmni) -> None:
    with fault(engine, 0, "prepare_sleep", RuntimeError("broken")):
        acks = asyncio.run(engine.sleep([0], raise_on_error=False))
    assert [(a.status, a.freed_bytes) for a in acks] == [("ERROR", 0)]
    assert "broken" in str(acks[0].error_msg)


@pytest.fixture(params=["spill", "checkpoint"])
def backup_engine(request: pytest.FixtureRequest) -> Iterator[AsyncOmni]:
    with AsyncOmni("demo", backup=request.param) as engine:
        engine.wanted_backup = request.param  # type: ignore[attr-defined]
        yield engine


def test_level_1_backs_weights_up_as_configured(backup_engine: AsyncOmni) -> None:
    async def run() -> None:
        before = await golden(backup_engine)
        acks = await backup_engine.sleep(level=1)
        assert {a.metadata["tags"]["weights"]["backup"] for a in acks} == {backup_engine.wanted_backup}  # type: ignore[attr-defined]
        await backup_engine.wake_up()
        assert await golden(backup_engine) == before

    asyncio.run(run())


def test_a_start_that_does_not_fit_into_memory_is_refused_and_leaves_nothing() -> None:
    with pytest.raises(OutOfMemoryError, match="GiB are free"):
        AsyncOmni("demo", ballast_bytes="900TiB")
