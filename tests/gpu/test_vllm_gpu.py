"""One vLLM rank on a real GPU: its ACK against NVML, no room, no answer, and no engine core. One engine for all."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import threading
import time

import psutil
import pytest
import torch

from benchmarks.vllm_models import BIG, SMALL, write_llama
from omni_notebook import AsyncOmni
from omni_notebook.errors import SleepError, StageFailedError, WakeError
from tests.engine.engine_helpers import collect, until
from tests.gpu.watch import DEVICE, ON_CUDA, REHEARSAL, full_device, give_back, seen_from_outside

MIB = 1024**2
KV_BYTES = 4096 * MIB if ON_CUDA else 64 * MIB
SHAPE = {**BIG, "num_hidden_layers": 8} if ON_CUDA else SMALL
NEAR = 64 * MIB if ON_CUDA else 8 * MIB
PROMPT = {"prompt_token_ids": list(range(3, 131))}
LEFT_S = 30.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not (ON_CUDA or REHEARSAL), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def used_bytes() -> int:
    """What all processes hold of the GPU."""
    if not ON_CUDA:
        return 0
    free, total = torch.cuda.mem_get_info(0)
    return total - free


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_llama(tmp_path_factory.mktemp("llama") / "model", SHAPE, device=DEVICE)
    give_back()
    return folder


@pytest.fixture(scope="module")
def before(model):
    """What was used before there was an engine, this process's own context counted."""
    return used_bytes()


@pytest.fixture(scope="module")
def without_flashinfer():
    """Where it is not installed vLLM may want its sampler all the same."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("flashinfer") is None:
            patch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
        yield


@pytest.fixture(scope="module")
def shared(model, before, without_flashinfer):
    arguments = {"enforce_eager": True, "enable_prefix_caching": False, "kv_cache_memory_bytes": KV_BYTES}
    with AsyncOmni(
        str(model), runtime="vllm", max_model_len=1024, gpu_memory_utilization=0.15, engine_args=arguments
    ) as engine:
        asyncio.run(tokens(engine))  # libraries take memory with the first batch
        yield engine


async def tokens(engine, **known):
    known.setdefault("sampling_params", {"max_tokens": 24})
    return (await collect(engine, PROMPT, **known))[-1].outputs[0].token_ids


def state(engine):
    return str(engine.status().stages[0].state)


def core_of(engine):
    """The process id of vLLM's engine core, the host's child: the rank itself, or above it."""
    rank = psutil.Process(engine.status().stages[0].ranks[0].pid)
    chain = [one.pid for one in (rank, *rank.parents())]
    return chain[chain.index(os.getpid()) - 2]


@contextlib.contextmanager
def stopped(pid, seconds=None):
    """A process that does nothing while this block runs, or for so many seconds of it."""
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(seconds or threading.TIMEOUT_MAX, os.kill, (pid, signal.SIGCONT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        os.kill(pid, signal.SIGCONT)
        timer.join()


@pytest.mark.parametrize("level", [1, 2])
def test_nvml_sees_leave_what_the_rank_says_and_the_tokens_are_the_same_after(shared, level):
    golden, pid = asyncio.run(tokens(shared)), shared.status().stages[0].ranks[0].pid
    for cycle in range(3):
        awake = seen_from_outside(pid)
        (ack,) = asyncio.run(shared.sleep([0], level=level))
        asleep = seen_from_outside(pid)
        print("level", level, "left", asleep // MIB, "MiB", ack.metadata["phases_ms"])
        assert (ack.status, ack.metadata["pid"]) == ("SUCCESS", pid)
        assert ack.freed_bytes >= KV_BYTES
        assert abs(ack.metadata["observed_bytes"] - ack.metadata["expected_bytes"]) <= NEAR
        if cycle or level == 1:  # the first sleep after a reload gives back what that left in torch's cache, too
            assert awake - asleep >= ack.freed_bytes - NEAR
        if ON_CUDA:
            assert ack.metadata["observed_scope"] == "process"
            assert abs(asleep - ack.metadata["residual_bytes"]) <= NEAR
        (woken,) = asyncio.run(shared.wake_up([0]))
        assert (woken.status, woken.metadata["state"]) == ("SUCCESS", "WARM")
        assert asyncio.run(tokens(shared)) == golden


@pytest.mark.skipif(not ON_CUDA, reason="fills a GPU")
@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_that_finds_the_gpu_full_is_refused_maps_nothing_and_works_later(shared, level):
    golden, pid = asyncio.run(tokens(shared)), shared.status().stages[0].ranks[0].pid
    asyncio.run(shared.sleep([0], level=level))
    asleep = seen_from_outside(pid)
    with full_device():
        with pytest.raises(WakeError, match=r"GiB of cuda:0's memory are needed .* are free"):
            asyncio.run(shared.wake_up([0]))
        assert state(shared) == "ASLEEP"
        assert seen_from_outside(pid) <= asleep + NEAR
    asyncio.run(shared.wake_up([0]))
    assert asyncio.run(tokens(shared)) == golden


def test_a_core_that_hangs_ends_orders_at_their_deadlines_and_all_goes_on_after(shared):
    golden, core = asyncio.run(tokens(shared)), core_of(shared)
    with stopped(core):
        began_s = time.monotonic()
        with pytest.raises(SleepError) as slept:
            asyncio.run(shared.sleep([0], level=1, timeout=2))
        assert time.monotonic() - began_s < 20
    assert [(ack.status, ack.metadata["error_code"]) for ack in slept.value.acks] == [("ERROR", "DEADLINE")]
    assert state(shared) == "AWAKE"
    assert asyncio.run(tokens(shared)) == golden
    asyncio.run(shared.sleep([0], level=1))
    with stopped(core, seconds=4):  # a rank that does not answer the abort either, for 5 s, is given up
        began_s = time.monotonic()
        with pytest.raises(WakeError) as woken:
            asyncio.run(shared.wake_up([0], timeout=2))
        assert time.monotonic() - began_s < 20
    assert [(ack.status, ack.metadata["error_code"]) for ack in woken.value.acks] == [("ERROR", "DEADLINE")]
    assert state(shared) == "ASLEEP"
    asyncio.run(shared.wake_up([0]))
    assert asyncio.run(tokens(shared)) == golden


def test_a_core_that_is_killed_fails_the_stage_by_name_leaves_nothing_on_the_gpu_and_a_restart_serves_again(
    shared, before
):
    async def scenario():
        golden, core = await tokens(shared), core_of(shared)
        pids = {core, shared.status().stages[0].ranks[0].pid}
        os.kill(core, signal.SIGSTOP)
        running = asyncio.create_task(tokens(shared, sampling_params={"max_tokens": 600}))
        await until(lambda: shared.status().stages[0].running == 1)
        os.kill(core, signal.SIGKILL)
        ended = re.escape(f"(pid {core}) ended")
        with pytest.raises(StageFailedError, match=ended):
            await running
        await until(lambda: state(shared) == "FAILED")
        stage = shared.status().stages[0]
        assert re.search(ended, stage.last_error)
        assert "restart(0)" in stage.last_error
        assert [rank.alive for rank in stage.ranks] == [False]
        with pytest.raises(StageFailedError):
            await shared.sleep([0], level=1)
        await until(lambda: not any(map(psutil.pid_exists, pids)), seconds=LEFT_S)
        await until(lambda: used_bytes() <= before + NEAR, seconds=LEFT_S)
        if ON_CUDA:
            assert sum(map(seen_from_outside, pids)) == 0
        began_s = time.monotonic()
        await shared.restart(0)
        print("restarted in", time.monotonic() - began_s, "s")
        assert state(shared) == "AWAKE"
        assert await tokens(shared) == golden

    asyncio.run(scenario())
