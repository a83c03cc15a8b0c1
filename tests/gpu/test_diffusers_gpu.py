"""A diffusers pipeline of 12 GB on a real GPU: what its rank says against NVML, the same picture after, and how fast.

With `-s` the last line is what was measured, as JSON.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time

import pytest
import torch

from omni_notebook import AsyncOmni
from omni_notebook.config import PipelineConfig, StageConfig
from omni_notebook.errors import AsleepError
from tests.diffusers.drawing import picture
from tests.gpu.large_pipelines import COMPONENTS, LARGE, SMALL, write_pipeline
from tests.gpu.watch import DEVICE, ON_CUDA, REHEARSAL, give_back, link_gb_per_s, seen_from_outside

MIB = 1024**2
NEAR = 64 * MIB if ON_CUDA else 2 * MIB
BUILD_S = 90.0
AHEAD_S = 30.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not (ON_CUDA or REHEARSAL), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed"),
]


@pytest.fixture(scope="module")
def figures():
    """What was measured; one line of JSON at the end."""
    found = {"what": "diffusers", "device": DEVICE, "link_gb_per_s": link_gb_per_s(), "orders": []}
    if ON_CUDA:
        found["device"] = torch.cuda.get_device_name()
    yield found
    print(f"\nFIGURES {json.dumps(found)}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, figures):
    folder = tmp_path_factory.mktemp("large") / "pipeline"
    began_s = time.perf_counter()
    figures["parameter_bytes"] = write_pipeline(folder, LARGE if ON_CUDA else SMALL, DEVICE)
    figures["build_s"] = time.perf_counter() - began_s
    give_back()
    print("built in", figures["build_s"], "s,", figures["parameter_bytes"], "bytes")
    return folder


@pytest.fixture(scope="module")
def shared(folder, figures):
    """The pipeline, awake, with a picture drawn and the host memory of a level 1 ready."""
    stage = StageConfig(
        kind="diffusion", model=str(folder), runtime="diffusers", executor="mp", device=DEVICE, dtype="bfloat16"
    )
    began_s = time.perf_counter()
    with AsyncOmni(pipeline=PipelineConfig(stages=(stage,))) as engine:
        figures["start_s"] = time.perf_counter() - began_s
        began_s = time.perf_counter()
        asyncio.run(picture(engine))  # libraries take memory with the first batch
        figures["first_picture_s"] = time.perf_counter() - began_s
        yield engine


def rank(engine):
    (one,) = engine.status().stages[0].ranks
    return one


def wait_for_host_memory(engine, n_bytes):
    """Seconds until a level 1 finds all host memory that it needs; None: not within `AHEAD_S`."""
    began_s = time.perf_counter()
    while (rank(engine).host_backup_bytes or 0) < n_bytes:
        if time.perf_counter() - began_s > AHEAD_S:
            return None
        time.sleep(0.05)
    return time.perf_counter() - began_s


def timed(figures, order, level, run):
    """An order's only ACK; what it took is noted."""
    began_s = time.perf_counter()
    (ack,) = asyncio.run(run)
    took_s = time.perf_counter() - began_s
    moved = ack.freed_bytes or ack.metadata["mapped_bytes"]
    known = ("latency_ms", "copied_bytes", "skipped_clean_bytes", "phases_ms", "residual_bytes", "host_backup_bytes")
    figures["orders"].append(
        {
            "order": order,
            "level": level,
            "seconds": round(took_s, 4),
            "bytes": moved,
            "gb_per_s": round(moved / took_s / 1e9, 2),
            **{name: ack.metadata[name] for name in known},
        }
    )
    return ack


def test_the_pipeline_is_as_large_as_it_says_and_draws_what_its_seed_says(shared, figures):
    assert figures["build_s"] < BUILD_S
    held = {tag: memory.resident_bytes for tag, memory in rank(shared).tags.items()}
    assert set(held) == set(COMPONENTS)
    assert figures["parameter_bytes"] <= sum(held.values()) <= 1.02 * figures["parameter_bytes"] + 16 * MIB
    if ON_CUDA:
        assert held["transformer"] >= 8e9
        assert sum(held.values()) >= 10e9
    first = asyncio.run(picture(shared))
    assert asyncio.run(picture(shared)) == first
    assert asyncio.run(picture(shared, params={"seed": 6})) != first
    assert len(set(first)) > 32  # no black square of what is no number


@pytest.mark.parametrize("level", [1, 2])
def test_nvml_sees_leave_what_the_rank_says_and_the_picture_is_the_same_after(shared, figures, level):
    before, pid = asyncio.run(picture(shared)), rank(shared).pid
    total = sum(memory.resident_bytes for memory in rank(shared).tags.values())
    figures.setdefault("host_memory_ready_s", {})[level] = wait_for_host_memory(shared, figures["parameter_bytes"])
    left = []
    for _ in range(3):
        awake = seen_from_outside(pid)
        ack = timed(figures, "sleep", level, shared.sleep([0], level=level))
        asleep = seen_from_outside(pid)
        assert (ack.status, ack.rank, ack.metadata["pid"]) == ("SUCCESS", 0, pid)
        assert ack.metadata["observed_scope"] == ("process" if ON_CUDA else "mapping")
        assert ack.metadata["expected_bytes"] == total
        assert abs(ack.metadata["observed_bytes"] - total) <= NEAR
        assert total - NEAR <= ack.freed_bytes <= total
        assert sum(tag["freed"] for tag in ack.metadata["tags"].values()) == ack.freed_bytes
        if ON_CUDA:
            assert awake - asleep >= total - NEAR  # what torch had cached leaves too
            assert abs(asleep - ack.metadata["residual_bytes"]) <= NEAR
            figures["orders"][-1]["nvml_left_bytes"] = asleep
        else:
            assert abs(awake - asleep - total) <= NEAR
        left.append(asleep)
        woken = timed(figures, "wake", level, shared.wake_up([0]))
        assert (woken.status, woken.metadata["state"], woken.metadata["mapped_bytes"]) == ("SUCCESS", "WARM", total)
        assert asyncio.run(picture(shared)) == before
    print("left on the device at level", level, [n_bytes // MIB for n_bytes in left], "MiB")
    assert abs(left[-1] - left[1]) <= NEAR


@pytest.mark.parametrize("level", [1, 2])
def test_components_wake_one_by_one_and_it_draws_when_all_are_there(shared, figures, level):
    before, pid = asyncio.run(picture(shared)), rank(shared).pid
    asyncio.run(shared.sleep([0], level=level))
    for place, tag in enumerate(reversed(COMPONENTS), start=1):
        with pytest.raises(AsleepError):
            asyncio.run(picture(shared, admission_timeout=0.0))
        asleep = seen_from_outside(pid)
        ack = timed(figures, f"wake {tag}", level, shared.wake_up([0], tags=[tag]))
        mapped = rank(shared).tags[tag].resident_bytes
        assert ack.metadata["mapped_bytes"] == mapped > 0
        assert abs(seen_from_outside(pid) - asleep - mapped) <= (
            NEAR if level == 1 else 4 * NEAR
        )  # reading takes scratch
        state = "AWAKE" if place == len(COMPONENTS) else "PARTLY_AWAKE"
        assert str(shared.status().stages[0].state) == state
    assert asyncio.run(picture(shared)) == before
