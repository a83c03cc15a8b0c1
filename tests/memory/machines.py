"""A machine of every platform, and what tests over all of them ask."""

from __future__ import annotations

import torch

from tests.memory.fake_cuda import MIB
from tests.memory.fake_devices import NewCudaMachine, OldCudaMachine
from tests.memory.fake_npu import NpuMachine
from tests.memory.fake_ranges import OwnMachine
from tests.memory.fake_rocm import RocmMachine
from tests.memory.fake_xpu import XpuMachine

MACHINES = {
    "cuda-vllm-0.24": OldCudaMachine,
    "cuda": NewCudaMachine,
    "rocm": RocmMachine,
    "xpu": XpuMachine,
    "npu": NpuMachine,
    "cuda-own": OwnMachine,
}
SPANS = {"weights": 12 * MIB, "kv_cache": 4 * MIB}


def all_equal(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def resident(pool):
    return {name: memory.resident_bytes for name, memory in pool.memory().items()}
