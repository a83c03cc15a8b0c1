"""Two ranks of a stage of ours on two GPUs: nccl in the forward pass, an ACK a rank, and a rank whose GPU is full."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from omni_notebook import AsyncOmni
from omni_notebook.errors import WakeError
from tests.engine.engine_helpers import golden, until
from tests.gpu.watch import HOG, seen_by_nvml

MIB = 1024**2
NEAR = 64 * MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]


@pytest.fixture(scope="module")
def two():
    with AsyncOmni("demo", device="cuda", tensor_parallel_size=2, ballast_bytes=256 * MIB) as engine:
        asyncio.run(golden(engine))
        yield engine


def held(engine):
    """What each rank's process holds on its GPU, by (stage, rank)."""
    return {
        (stage.stage_id, rank.rank): seen_by_nvml(rank.pid, int(rank.device.split(":")[1]))
        for stage in engine.status().stages
        for rank in stage.ranks
    }


def test_each_rank_answers_for_its_gpu_and_nvml_sees_the_same_leave(two):
    before = asyncio.run(golden(two))
    left = []
    for cycle in range(10):
        awake = held(two)
        acks = asyncio.run(two.sleep(level=1 + cycle % 2))
        asleep = held(two)
        assert {(ack.stage_id, ack.rank, ack.metadata["device"]) for ack in acks} == {
            (stage, rank, f"cuda:{rank}") for stage in (0, 1) for rank in (0, 1)
        }
        for ack in acks:
            place = ack.stage_id, ack.rank
            assert (ack.status, ack.metadata["observed_scope"]) == ("SUCCESS", "process")
            assert abs(awake[place] - asleep[place] - ack.freed_bytes) <= NEAR
            assert abs(asleep[place] - ack.metadata["residual_bytes"]) <= NEAR
        left.append(max(asleep.values()))
        asyncio.run(two.wake_up())
        assert asyncio.run(golden(two)) == before
    print("left a rank", [n_bytes // MIB for n_bytes in left])
    assert max(left[2:]) - min(left[2:]) <= 4 * MIB


def test_two_ranks_draw_what_one_draws(two):
    tokens, pixels = asyncio.run(golden(two))
    with AsyncOmni("demo", device="cuda:0") as one:
        alone, picture = asyncio.run(golden(one))
    apart = np.abs(np.frombuffer(pixels, np.uint8).astype(int) - np.frombuffer(picture, np.uint8))
    print("tokens equal", tokens == alone, "pixels apart at most", apart.max())
    assert tokens == alone
    assert apart.max() <= 24  # half types, sums in another order


def test_a_rank_that_finds_no_room_leaves_both_asleep(two):
    before = asyncio.run(golden(two))
    asyncio.run(two.sleep([1], level=1))
    everything = held(two)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    hog = subprocess.Popen(
        [sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    with hog:
        assert hog.stdout.readline() == "full\n"
        with pytest.raises(WakeError, match=r"rank 1.*GiB of cuda:1's memory are needed"):
            asyncio.run(two.wake_up([1]))
        assert two.status().stages[1].state == "ASLEEP"
        assert held(two)[1, 0] <= everything[1, 0] + NEAR  # what rank 0 had mapped is given back
        hog.communicate("\n")
    deadline = time.monotonic() + 30
    while torch.cuda.mem_get_info(1)[0] < 1024 * MIB and time.monotonic() < deadline:
        time.sleep(0.05)
    asyncio.run(two.wake_up([1]))
    assert asyncio.run(golden(two)) == before


def test_a_rank_that_hangs_in_a_batch_costs_the_stage_and_no_process_and_a_restart_brings_it_back(two):
    before = asyncio.run(golden(two))
    whole, hung = (rank.pid for rank in two.status().stages[1].ranks)
    os.kill(hung, signal.SIGSTOP)
    began_s = time.monotonic()
    with pytest.raises(Exception, match=r"lost its tensor-parallel peers|did not answer"):
        asyncio.run(golden(two))
    assert time.monotonic() - began_s < 60
    os.kill(whole, 0)  # neither torch's watchdog nor nccl has ended it
    assert two.status().stages[1].state == "FAILED"
    asyncio.run(two.restart(1))
    assert asyncio.run(golden(two)) == before


def test_a_rank_that_is_killed_fails_its_stage_and_a_restart_brings_it_back(two):
    before = asyncio.run(golden(two))
    os.kill(two.status().stages[1].ranks[1].pid, signal.SIGKILL)
    asyncio.run(until(lambda: two.status().stages[1].state == "FAILED"))
    asyncio.run(two.restart(1))
    assert asyncio.run(golden(two)) == before
