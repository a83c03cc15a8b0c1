"""Stages of our own on a real GPU: the pool watched by NVML from another process, and whole engines."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import torch

from omni_notebook import AsyncOmni
from omni_notebook.errors import WakeError
from tests.engine.engine_helpers import golden, until
from tests.gpu.watch import ROOT, Child, full_device, seen_by_nvml

SCENARIOS = "tests.gpu.own_child"
MIB = 1024**2
NEAR = 64 * MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_a_hundred_cycles_bring_back_every_byte_and_leave_nothing_behind():
    awake, *asleep, done, closed = (
        {**facts, "nvml": seen_by_nvml(facts["pid"])} for facts in Child(SCENARIOS, "cycles")
    )
    assert awake["ready"]
    for facts in asleep:
        assert (facts["scope"], facts["note"]) == ("process", None)
        assert facts["freed"] == facts["expected"] == facts["observed"] == awake["span"]
        assert facts["nvml"] == facts["held"]
        assert facts["nvml"] <= awake["nvml"] - facts["freed"] + NEAR
        written = facts["number"] % 3 == 0
        if facts["number"]:
            assert facts["copied"] == (2 * MIB if written else 0)
            assert facts["clean"] + facts["copied"] == done["host"]
    assert max(facts["nvml"] for facts in asleep) - min(facts["nvml"] for facts in asleep[1:]) <= 4 * MIB
    assert asleep[-1]["rss"] - asleep[1]["rss"] <= 64 * MIB
    assert (done["same"], done["zero"], done["addresses"]) == (True, True, True)
    assert closed["host"] == 0


def test_level_2_keeps_buffers_alone_and_says_what_is_not_as_it_was():
    asleep, filled = Child(SCENARIOS, "second_level")
    assert asleep["freed"] == asleep["observed"] == asleep["expected"]
    assert asleep["copied"] == 64 * 4
    assert (filled["empty"], filled["kept"], filled["stale"]) == (True, True, False)
    assert (filled["verified"], filled["equal"]) == (True, True)


def test_a_wake_on_a_full_device_maps_nothing_and_works_once_there_is_room():
    refused, awake = Child(SCENARIOS, "full")
    assert refused["refused"]
    assert refused["needed"] > refused["free"]
    assert "wake again" in refused["message"]
    assert refused["mapped"] == 0
    assert awake["equal"]


def test_pools_of_one_process_account_for_their_own():
    done, closed = Child(SCENARIOS, "apart")
    assert done["freed"] == done["observed"]
    assert (done["untouched"], done["equal"], done["apart"]) == (True, True, True)
    assert "closed" in closed["says"]


@pytest.fixture(scope="module", params=["mp", "uni"])
def shared(request):
    with AsyncOmni("demo", device="cuda", executor=request.param, ballast_bytes=256 * MIB) as engine:
        asyncio.run(golden(engine))  # libraries take memory with the first batch
        yield engine


def test_a_pipeline_on_the_gpu_gives_back_what_nvml_sees_leave_and_answers_the_same(shared):
    before = asyncio.run(golden(shared))
    left = []
    for cycle in range(10):
        pids = {rank.pid for stage in shared.status().stages for rank in stage.ranks}
        awake = sum(map(seen_by_nvml, pids))
        acks = asyncio.run(shared.sleep(level=1 + cycle % 2))
        asleep = sum(map(seen_by_nvml, pids))
        assert [ack.status for ack in acks] == ["SUCCESS"] * 2
        assert {ack.metadata["device"] for ack in acks} == {"cuda:0"}
        for ack in acks:
            assert ack.metadata["observed_scope"] == "process"
            assert ack.freed_bytes == ack.metadata["expected_bytes"] >= 256 * MIB
        assert abs(awake - asleep - sum(ack.freed_bytes for ack in acks)) <= NEAR
        residual = {ack.metadata["pid"]: ack.metadata["residual_bytes"] for ack in acks}
        assert abs(asleep - sum(residual.values())) <= NEAR
        left.append(asleep)
        woken = asyncio.run(shared.wake_up())
        assert [ack.metadata["state"] for ack in woken] == ["WARM"] * 2
        assert asyncio.run(golden(shared)) == before
    for level in (left[2::2], left[3::2]):  # level 1 keeps graphs, level 2 does not
        assert max(level) - min(level) <= 4 * MIB


def test_a_stage_that_finds_no_room_stays_asleep_says_how_much_and_wakes_later(shared):
    before = asyncio.run(golden(shared))
    asyncio.run(shared.sleep([1], level=1))
    with full_device():
        with pytest.raises(WakeError, match=r"GiB of cuda:0's memory are needed .* are free"):
            asyncio.run(shared.wake_up([1]))
        assert shared.status().stages[1].state == "ASLEEP"
    asyncio.run(shared.wake_up([1]))
    assert asyncio.run(golden(shared)) == before


def test_new_weights_from_tensors_on_the_gpu_are_taken_and_given_back_by_level_1(shared):
    from safetensors.torch import load_file

    folder = ROOT / "omni_notebook" / "models" / "demo" / "dit"
    before = asyncio.run(golden(shared))
    tensors = [(name, (tensor * 1.05).cuda()) for name, tensor in load_file(folder / "model.safetensors").items()]
    asyncio.run(shared.load_weights(1, tensors))
    other = asyncio.run(golden(shared))
    assert other[1] != before[1]
    asyncio.run(shared.sleep([1], level=1))
    asyncio.run(shared.wake_up([1]))
    assert asyncio.run(golden(shared)) == other
    asyncio.run(shared.load_weights(1, folder))
    assert asyncio.run(golden(shared)) == before


def test_a_rank_that_is_killed_leaves_the_gpu_and_a_restart_brings_it_back():
    with AsyncOmni("demo", device="cuda") as engine:
        before = asyncio.run(golden(engine))
        asyncio.run(engine.sleep([1], level=2))
        pid = engine.status().stages[1].ranks[0].pid
        os.kill(pid, signal.SIGKILL)
        asyncio.run(until(lambda: engine.status().stages[1].state == "FAILED"))
        asyncio.run(engine.restart(1))
        assert seen_by_nvml(pid) == 0
        assert asyncio.run(golden(engine)) == before


def test_a_device_that_is_not_there_is_refused_with_what_is():
    with pytest.raises(Exception, match=r"torch sees \d+ CUDA devices"):
        AsyncOmni("demo", device="cuda:77")
