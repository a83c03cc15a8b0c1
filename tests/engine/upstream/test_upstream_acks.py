"""What ranks answer over an upstream engine: every byte is seen from outside, whatever upstream says."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from omni_notebook.errors import (
    AsleepError,
    SleepError,
    StageFailedError,
    UnsupportedError,
    WakeError,
    WorkerDiedError,
)
from omni_notebook.protocol import AckMetadata, MemoryState
from tests.engine.engine_helpers import collect, until
from tests.engine.upstream.upstream_helpers import HELD, MIB, calls, lies


def anonymous_bytes(pid: int) -> int:
    """By another way than the engine's: the sum over single mappings."""
    return sum(one.anonymous for one in psutil.Process(pid).memory_maps(grouped=True))


def states(engine) -> list[str]:
    return [str(stage.state) for stage in engine.status().stages]


def test_every_rank_answers_a_sleep_with_what_was_seen_to_leave_its_process(engine):
    pids = [rank.pid for stage in engine.status().stages for rank in stage.ranks]
    before = {pid: anonymous_bytes(pid) for pid in pids}
    acks = asyncio.run(engine.sleep())
    assert [(ack.stage_id, ack.rank, ack.status) for ack in acks] == [
        (0, 0, "SUCCESS"),
        (1, 0, "SUCCESS"),
        (1, 1, "SUCCESS"),
    ]
    assert len({ack.task_id for ack in acks}) == 1
    assert [ack.metadata["pid"] for ack in acks] == pids
    for ack in acks:
        now = anonymous_bytes(ack.metadata["pid"])
        assert ack.freed_bytes == pytest.approx(HELD, abs=MIB)
        assert ack.freed_bytes == pytest.approx(before[ack.metadata["pid"]] - now, abs=MIB)
        assert ack.metadata["residual_bytes"] == pytest.approx(now, abs=MIB)
        assert ack.metadata["observed_scope"] == "process"
        assert (ack.metadata["expected_bytes"], ack.metadata["host_backup_bytes"]) == (None, None)
    assert states(engine) == ["ASLEEP", "ASLEEP"]


def test_an_ack_has_all_keys_and_says_who_measured_and_what_upstream_said(engine):
    thinker, first, second = asyncio.run(engine.sleep())
    keys = set(AckMetadata(source="x").to_dict())
    assert all(set(ack.metadata) == keys for ack in (thinker, first, second))
    assert thinker.metadata["note"] == "measured from outside by smaps; upstream gave no number"
    together = (
        f"measured from outside by smaps; upstream said 48.0 MiB ({2 * HELD} bytes) for the stage's 2 ranks together"
    )
    assert first.metadata["note"] == second.metadata["note"] == together
    assert first.metadata["rank_residual_gib"] != "9.99"


def test_a_wake_answers_with_what_came_back_and_the_same_output_follows(engine):
    async def cycle():
        before = await collect(engine)
        await engine.sleep()
        acks = await engine.wake_up()
        return before, acks, await collect(engine)

    before, acks, after = asyncio.run(cycle())
    assert [(ack.status, ack.freed_bytes) for ack in acks] == [("SUCCESS", 0)] * 3
    assert all(ack.metadata["mapped_bytes"] == pytest.approx(HELD, abs=MIB) for ack in acks)
    assert states(engine) == ["AWAKE", "AWAKE"]
    assert after[-1].png == before[-1].png
    assert [o.text for o in after] == [o.text for o in before]


def test_invented_bytes_are_an_error_and_not_one_of_them_is_freed(engine):
    lies(engine).add("sleep")
    with pytest.raises(SleepError) as raised:
        asyncio.run(engine.sleep([1]))
    acks = raised.value.acks
    assert [(ack.status, ack.metadata["error_code"]) for ack in acks] == [("ERROR", "NOT_OBSERVED")] * 2
    assert all(ack.freed_bytes < MIB for ack in acks)
    assert "upstream said 48.0 MiB" in acks[0].metadata["note"]
    assert states(engine) == ["AWAKE", "ASLEEP"]


def test_a_claim_above_what_was_seen_is_an_error_with_the_measured_bytes(engine):
    lies(engine).add("inflated")
    acks = asyncio.run(engine.sleep([1], raise_on_error=False))
    assert {(ack.status, ack.metadata["error_code"]) for ack in acks} == {("ERROR", "NOT_OBSERVED")}
    assert [ack.freed_bytes for ack in acks] == [pytest.approx(HELD, abs=MIB)] * 2
    assert "144.0 MiB" in acks[0].error_msg
    assert "saw 48.0 MiB" in acks[0].error_msg
    lies(engine).clear()
    assert all(ack.ok for ack in asyncio.run(engine.wake_up([1])))


def test_an_engine_core_that_only_says_it_slept_is_not_believed(engine):
    lies(engine).add("sleep")
    (ack,) = asyncio.run(engine.sleep([0], raise_on_error=False))
    assert (ack.status, ack.metadata["error_code"]) == ("ERROR", "NOT_OBSERVED")


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("swallowed", "worker 1 is out of host memory"),
        ("error_ack", "cumem failed"),
        ("mute", "no rank answered"),
    ],
)
def test_an_error_that_upstream_counts_as_an_answer_is_every_ranks_error(engine, lie, words):
    lies(engine).add(lie)
    acks = asyncio.run(engine.sleep([1], raise_on_error=False))
    assert [(ack.stage_id, ack.rank, ack.status) for ack in acks] == [(1, 0, "ERROR"), (1, 1, "ERROR")]
    assert all(words in ack.error_msg and ack.metadata["error_code"] == "UPSTREAM" for ack in acks)
    assert states(engine)[1] == "FAILED"
    for refused in (engine.wake_up, engine.sleep, lambda: collect(engine), engine.check_health):
        with pytest.raises(StageFailedError, match="start the engine anew") as raised:
            asyncio.run(refused())
        assert "restart(" not in str(raised.value)


def test_a_sleep_that_raises_before_anything_moved_leaves_the_stage_awake_and_open(engine):
    lies(engine).add("raise:sleep")
    (ack,) = asyncio.run(engine.sleep([0], raise_on_error=False))
    assert (ack.status, ack.metadata["error_code"], ack.freed_bytes) == ("ERROR", "UPSTREAM", 0)
    assert "sleep went wrong inside" in ack.error_msg
    assert states(engine) == ["AWAKE", "AWAKE"]
    lies(engine).clear()
    assert asyncio.run(collect(engine))[-1].images


def test_the_stage_before_the_one_that_fails_stays_asleep_and_its_answer_is_kept(engine):
    lies(engine).add("swallowed")
    with pytest.raises(SleepError) as raised:
        asyncio.run(engine.sleep())
    assert [ack.status for ack in raised.value.acks] == ["SUCCESS", "ERROR", "ERROR"]
    assert states(engine) == ["ASLEEP", "FAILED"]


def test_a_wake_that_maps_nothing_is_an_error_and_no_request_gets_in(engine):
    asyncio.run(engine.sleep([1]))
    lies(engine).add("wake")
    with pytest.raises(WakeError) as raised:
        asyncio.run(engine.wake_up([1]))
    assert {ack.metadata["error_code"] for ack in raised.value.acks} == {"NOT_OBSERVED"}
    assert "of 24.0 MiB that left" in raised.value.acks[0].error_msg
    with pytest.raises(StageFailedError):
        asyncio.run(collect(engine))


def test_level_2_is_refused_before_anything_sleeps_also_with_discard(engine):
    for discard in (True, False):
        with pytest.raises(UnsupportedError, match=r"can not wake from level 2.*Nothing changed; use sleep\(level=1\)"):
            asyncio.run(engine.sleep([0], level=2, discard=discard))
    assert calls(engine, "sleep") == []
    assert states(engine) == ["AWAKE", "AWAKE"]


def test_orders_with_nothing_to_do_ask_nobody_and_say_so(engine):
    woken = asyncio.run(engine.wake_up())
    asyncio.run(engine.sleep())
    asked = len(calls(engine, "sleep"))
    slept = asyncio.run(engine.sleep())
    assert len(calls(engine, "sleep")) == asked
    assert calls(engine, "wake_up") == []
    for acks, level in ((woken, None), (slept, 1)):
        assert [(ack.status, ack.freed_bytes, ack.metadata["noop"]) for ack in acks] == [("SUCCESS", 0, True)] * 3
        assert all(ack.metadata["level"] == level and ack.metadata["observed_bytes"] == 0 for ack in acks)


def test_a_hung_sleep_ends_at_its_deadline_with_an_error_a_rank_and_what_was_seen(engine):
    lies(engine).add("hang:sleep")
    acks = asyncio.run(engine.sleep([1], timeout=1.0, raise_on_error=False))
    assert [(ack.status, ack.metadata["error_code"]) for ack in acks] == [("ERROR", "DEADLINE")] * 2
    assert states(engine) == ["AWAKE", "FAILED"]


def test_a_stage_that_no_time_is_left_for_is_not_asked_and_stays_awake(engine):
    lies(engine).add("hang:sleep")
    acks = asyncio.run(engine.sleep(timeout=1.0, raise_on_error=False))
    assert [ack.metadata["error_code"] for ack in acks] == ["DEADLINE"] * 3
    assert len(calls(engine, "sleep")) == 1
    assert states(engine) == ["FAILED", "AWAKE"]


def test_a_caller_that_goes_away_returns_at_once_and_the_sleep_completes(engine):
    async def go():
        sleeping = asyncio.create_task(engine.sleep([1]))
        await until(lambda: engine.status().stages[1].state == MemoryState.FALLING_ASLEEP)
        sleeping.cancel()
        async with asyncio.timeout(2):
            with pytest.raises(asyncio.CancelledError):
                await sleeping
        await until(lambda: states(engine)[1] == "ASLEEP")
        return await engine.wake_up([1])

    assert all(ack.ok for ack in asyncio.run(go()))


def test_a_rank_that_dies_is_said_by_status_health_and_its_sleep(engine):
    victim = engine.status().stages[1].ranks[1].pid
    os.kill(victim, signal.SIGKILL)
    asyncio.run(until(lambda: not engine.status().stages[1].ranks[1].alive))
    with pytest.raises(WorkerDiedError, match="start the engine anew"):
        asyncio.run(engine.check_health())
    acks = asyncio.run(engine.sleep([1], timeout=5, raise_on_error=False))
    assert not acks[1].ok
    assert acks[1].freed_bytes == 0
    assert states(engine)[1] == "FAILED"


@pytest.mark.parametrize("order", ["sleep", "wake_up"])
def test_a_rank_that_died_is_no_success_of_an_order_that_has_nothing_to_do(engine, order):
    async def go():
        if order == "sleep":
            await engine.sleep([1])
        os.kill(engine.status().stages[1].ranks[1].pid, signal.SIGKILL)
        await until(lambda: not engine.status().stages[1].ranks[1].alive)
        asked = len(calls(engine, order))
        acks = await getattr(engine, order)([1], raise_on_error=False)
        assert len(calls(engine, order)) == asked
        assert [(ack.status, ack.metadata["error_code"]) for ack in acks] == [
            ("SUCCESS", None),
            ("ERROR", "WORKER_DIED"),
        ]
        assert "has ended" in acks[1].error_msg
        assert states(engine) == ["AWAKE", "FAILED"]
        with pytest.raises(StageFailedError):
            await engine.sleep([1])

    asyncio.run(go())


def test_what_no_process_is_known_of_is_null_and_an_error(engine):
    stage = engine._core.stages[0]
    stage.seats = (stage.seats[0]._replace(pid=None),)
    (ack,) = asyncio.run(engine.sleep([0], raise_on_error=False))
    assert (ack.status, ack.freed_bytes, ack.metadata["error_code"]) == ("ERROR", 0, "NOT_OBSERVED")
    assert (ack.metadata["observed_bytes"], ack.metadata["residual_bytes"], ack.metadata["pid"]) == (None, None, None)
    assert ack.metadata["note"].startswith("not measured (its process is not known)")
    assert states(engine)[0] == "ASLEEP"


def test_restart_weights_logs_and_tags_are_refused_in_one_line(engine):
    for call in (
        lambda: engine.restart(0),
        lambda: engine.load_weights(0, "/somewhere"),
        lambda: engine.wake_up([0], tags=["weights"]),
    ):
        with pytest.raises(UnsupportedError) as raised:
            asyncio.run(call())
        assert "\n" not in str(raised.value)
        assert "Nothing changed" in str(raised.value)
    with pytest.raises(UnsupportedError, match="keeps no lines"):
        engine.logs(0)


def test_a_request_while_a_stage_sleeps_is_refused_by_our_gate_not_held_by_upstream(engine):
    asyncio.run(engine.sleep([1]))
    with pytest.raises(AsleepError, match="wake_up"):
        asyncio.run(collect(engine, output_modalities=["text"], admission_timeout=0.0))
    assert calls(engine, "generate") == []
