"""The pool over vLLM's CUDA allocator on a real device, with the real extension, watched by NVML from this process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from tests.gpu.watch import ROOT, Child, seen_by_nvml

SCENARIOS = "tests.gpu.cumem_child"
MIB = 1024**2
TOLERANCE = 64 * MIB


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    return None


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(_why_not() is not None, reason=_why_not() or ""),
]


def test_both_levels_give_back_what_nvml_sees_leave_and_bring_back_what_they_must():
    child = Child(SCENARIOS, "levels")
    story = [{**facts, "nvml": seen_by_nvml(facts["pid"])} for facts in child]
    awake, *turns, closed = story
    spans = sum(awake["spans"].values())
    assert spans >= (768 + 1024) * MIB
    assert (awake["untagged"], awake["foreign"], awake["verified"]) == ({}, None, True)
    assert awake["scratch"] <= 64 * MIB
    last_awake = awake["nvml"]
    for asleep, again in zip(turns[::2], turns[1::2], strict=True):
        assert asleep["step"] == "asleep"
        assert (asleep["scope"], asleep["note"], asleep["resident"]) == ("process", None, 0)
        assert asleep["freed"] == asleep["expected"] == spans
        assert abs((last_awake - asleep["nvml"]) - asleep["freed"]) <= TOLERANCE
        assert abs(asleep["nvml"] - asleep["held"]) <= TOLERANCE
        assert asleep["foreign"] is None  # the driver says "unmapped" as the books do
        assert again["mapped"] == spans
        assert again["addresses"]
        assert again["verified"]
        last_awake = again["nvml"]
    first, second, third = turns[::2]
    for asleep, again in ((first, turns[1]), (second, turns[3])):
        assert asleep["backup"] == {"weights": "pinned", "kv_cache": None}
        assert again["equal"]
        assert again["kv_zero"]
        assert again["graph"]
        assert again["reload"] == []
    assert second["host_bytes"] == first["host_bytes"] == awake["spans"]["weights"]
    assert abs(second["nvml"] - first["nvml"]) <= TOLERANCE
    assert third["modified"] is False
    idle = awake["spans"]["weights"]  # locked memory of the copies before, on a host that has plenty
    assert third["host_bytes"] == idle + 64 * 4 + 3 * 4
    assert turns[5]["reload"] == ["weights"]
    assert turns[5]["empty"]
    assert turns[5]["kept"]
    assert turns[5]["same_digest"]
    assert closed["host_bytes"] == 0
    assert "CUDA Error" not in child.errors


def test_a_wake_on_a_full_device_is_refused_maps_nothing_and_works_once_there_is_room():
    refused, by_driver, awake = Child(SCENARIOS, "full")
    assert refused["needed"] > refused["free"]
    assert "wake again" in refused["message"]
    assert "wake again" in by_driver["message"]
    assert awake["resident"] == [0, 0]
    assert awake["equal"]


def test_freeing_while_asleep_leaves_no_error_and_no_memory_behind():
    child = Child(SCENARIOS, "freeing")
    (awake,) = child
    assert awake["freed"]
    assert awake["freed_segments"] >= 1
    assert awake["equal"]
    assert "CUDA Error" not in child.errors


def test_freeing_while_asleep_on_a_device_without_a_granule_of_room_does_not_spoil_the_wake():
    (awake,) = Child(SCENARIOS, "without_room")
    assert awake["freed"]
    assert awake["equal"]


def test_vllms_own_sleep_underneath_is_seen_and_ours_refused_until_its_own_wake():
    done, awake = Child(SCENARIOS, "foreign")
    assert "unmapped by somebody else" in done["found"]
    assert "wake_up" in done["refused"]
    assert done["after"] is None
    assert awake["equal"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_refused(name):
    script = "from omni_notebook.memory.cumem import cumem_pool; cumem_pool(0)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, name: "expandable_segments:True"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode != 0
    assert f"UnsupportedError: {name} turns expandable_segments on" in done.stderr
