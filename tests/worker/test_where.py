"""Where ranks go: what a stage may say of devices, what it means, and who moves alone."""

from __future__ import annotations

import re

import pytest

from omni_notebook.config import DEMO_FOLDER, StageConfig
from omni_notebook.errors import OmniError, UnsupportedError
from omni_notebook.protocol import RankId
from omni_notebook.worker.reports import WorkerSpec
from omni_notebook.worker.worker import Worker


def stage(**options):
    return StageConfig(kind="diffusion", model=str(DEMO_FOLDER / "dit"), **options)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:7", "cuda:1234"])
def test_devices_that_a_stage_of_our_own_runs_on(device):
    assert stage(device=device).device_of(0, 0) == device
    assert stage(devices=(device,)).device_of(0, 0) == device


@pytest.mark.parametrize(
    "device",
    ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:12345", "cuda:0 ", "CUDA", "cuda0", "cpu:0", "auto:1", "rocm", ""],
)
def test_other_devices_are_refused_and_those_that_do_are_named(device):
    for options in ({"device": device}, {"devices": (device,)}):
        with pytest.raises(UnsupportedError, match="'cuda' or 'cuda:0'; nothing was started"):
            stage(**options)


@pytest.mark.parametrize("device", ["cuda:0", "cpu:0", "auto:0", "tpu"])
def test_a_vllm_stage_takes_no_numbers(device, monkeypatch):
    monkeypatch.setattr("omni_notebook.config.has_vllm", lambda: True)
    options = {"kind": "ar", "model": "a/b", "runtime": "vllm"}
    with pytest.raises(UnsupportedError, match="CUDA_VISIBLE_DEVICES"):
        StageConfig(**options, device=device)
    with pytest.raises(UnsupportedError, match="CUDA_VISIBLE_DEVICES"):
        StageConfig(**options, devices=("cuda",))
    assert StageConfig(**options, device="rocm").device == "rocm"


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "rocm", "xpu", "npu"])
def test_a_vllm_stage_is_never_in_this_process(device, monkeypatch):
    monkeypatch.setattr("omni_notebook.config.has_vllm", lambda: True)
    monkeypatch.setattr("omni_notebook.config.has_cuda", lambda: False)
    assert StageConfig(kind="ar", model="a/b", runtime="vllm", device=device).executor_name == "mp"
    assert StageConfig(kind="ar", model="a/b", runtime="torch").executor_name == "uni"


@pytest.mark.parametrize("gpu", [{"device": "cuda"}, {"device": "rocm"}, {"device": "auto"}])
@pytest.mark.parametrize("replicas", [2, 3, 6])
def test_replicas_of_vllm_which_all_begin_at_the_first_gpu_start_only_where_they_fit_on_it(gpu, replicas, monkeypatch):
    for has in ("has_vllm", "has_cuda"):
        monkeypatch.setattr(f"omni_notebook.config.{has}", lambda: True)
    options = {"kind": "ar", "model": "a/b", "runtime": "vllm", "num_replicas": replicas}
    with pytest.raises(UnsupportedError, match=r"on the same GPUs; .*gpu_memory_utilization=") as refused:
        StageConfig(**options, **gpu)
    share = float(re.search(r"=([\d.]+) or less", str(refused.value))[1])
    with pytest.raises(UnsupportedError, match="on the same GPUs"):
        StageConfig(**options, **gpu, gpu_memory_utilization=share, engine_args={"gpu_memory_utilization": share + 0.1})
    for fits in (
        {"gpu_memory_utilization": share},
        {"engine_args": {"gpu_memory_utilization": share}},
        {"engine_args": {"kv_cache_memory_bytes": 1}},
        {"device": "cpu"},
        {"num_replicas": 1},
    ):
        assert StageConfig(**{**options, **gpu, **fits}).model == "a/b"


def test_several_ranks_need_as_many_devices_or_one_name_for_all():
    with pytest.raises(UnsupportedError, match="tensor_parallel_size needs several"):
        stage(device="cuda:0", tensor_parallel_size=2)
    for devices in (("cuda:0",), ("cuda:0", "cuda:1", "cuda:2")):
        with pytest.raises(UnsupportedError, match="one for each of tensor_parallel_size=2"):
            stage(devices=devices, tensor_parallel_size=2)
    assert stage(devices=("cuda:3", "cuda:1"), tensor_parallel_size=2).device_of(1, 1) == "cuda:1"
    assert stage(devices=("cpu", "cpu"), tensor_parallel_size=2).device_of(0, 1) == "cpu"
    assert stage(device="cuda:0", devices=("cuda:1", "cuda:2"), tensor_parallel_size=2).device_of(0, 0) == "cuda:1"


@pytest.mark.parametrize(
    "devices",
    [
        ("cuda:0", "cuda:0"),
        ("cuda:1", "cuda:01"),
        ("cuda", "cuda"),
        ("cuda", "cuda:1"),
        ("auto", "auto"),
        ("cpu", "cuda:0"),
        ("auto", "cpu"),
    ],
)
def test_ranks_that_could_not_exchange_tensors_are_refused_at_once(devices):
    with pytest.raises(UnsupportedError, match="need a GPU each"):
        stage(devices=devices, tensor_parallel_size=2)


def test_ranks_without_numbers_get_gpus_one_after_the_other():
    config = stage(device="cuda", tensor_parallel_size=2, num_replicas=2)
    assert [config.device_of(r, n) for r in range(2) for n in range(2)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    config = stage(tensor_parallel_size=2)
    assert [config.device_of(0, n) for n in range(2)] == ["auto:0", "auto:1"]
    config = stage(device="cpu", tensor_parallel_size=2)
    assert [config.device_of(0, n) for n in range(2)] == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "uni"),
        ({"device": "cpu"}, "uni"),
        ({"device": "cuda"}, "mp"),
        ({"device": "cuda:1"}, "mp"),
        ({"devices": ("cuda:1",)}, "mp"),
        ({"num_replicas": 2}, "mp"),
        ({"device": "cuda", "executor": "uni"}, "uni"),
        ({"executor": "mp"}, "mp"),
    ],
)
def test_what_is_on_a_gpu_has_a_process_of_its_own_unless_it_is_said_otherwise(options, expected):
    assert stage(**options).executor_name == expected


@pytest.mark.parametrize(
    ("ranks", "replicas", "alone"), [(None, 1, True), (1, 1, True), (2, 1, False), (1, 2, False), (None, 2, False)]
)
def test_only_the_one_rank_of_a_stage_moves_alone(ranks, replicas, alone, tmp_path):
    config = stage(device="cpu", num_replicas=replicas, spill_dir=str(tmp_path))
    worker = Worker(WorkerSpec(where=RankId(0, 0, 0), config=config, tensor_parallel_size=ranks))
    try:
        assert worker._control._rank.alone is alone
    finally:
        worker.shutdown()


def test_a_worker_for_a_gpu_that_is_not_there_says_so_at_once():
    config = stage(device="cuda:1")
    with pytest.raises(OmniError, match="cuda"):
        Worker(WorkerSpec(where=RankId(0, 0, 0), config=config))
