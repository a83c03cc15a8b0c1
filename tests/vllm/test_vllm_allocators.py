"""The pool over the Python side of vLLM's own allocators, as it is installed, above fakes of their extensions.

The contract's tests do this with fakes of both; here what vLLM's next version changes is seen without its hardware.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.memory.fake_cuda import CONTEXT_BYTES, MIB, Rig
from tests.memory.fake_rocm import RocmMachine
from tests.memory.fake_xpu import XpuMachine
from tests.memory.machines import SPANS, all_equal, resident
from tests.memory.pools import sleep, wake


def rocm_machine(monkeypatch):
    from vllm.device_allocator import cumem

    def module(extension, library):
        for name in ("init_module", "python_create_and_map", "python_unmap_and_release"):
            assert hasattr(cumem, name)
            monkeypatch.setattr(cumem, name, getattr(extension, name))
        monkeypatch.setattr(cumem, "libcudart", type("Runtime", (), {"lib": library})())
        monkeypatch.setattr(cumem, "cumem_available", True)
        monkeypatch.setattr(cumem, "current_platform", type("Rocm", (), {"is_rocm": lambda _self: True})())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
        monkeypatch.setattr(cumem.CuMemAllocator, "instance", None)
        return cumem

    return RocmMachine(module=module)


def xpu_machine(monkeypatch):
    from vllm.device_allocator import xpumem

    def module(extension):
        assert hasattr(xpumem, "xpumem_allocator")
        monkeypatch.setattr(xpumem, "xpumem_allocator", extension)
        monkeypatch.setattr(xpumem, "xpumem_available", True)
        monkeypatch.setattr(xpumem.XpuMemAllocator, "instance", None)
        return xpumem

    return XpuMachine(module=module)


@pytest.fixture(params=[rocm_machine, xpu_machine], ids=["rocm", "xpu"])
def rig(request, monkeypatch):
    return Rig(machine=request.param(monkeypatch))


@pytest.mark.parametrize("level", [1, 2])
def test_memory_leaves_and_comes_back_at_the_same_addresses_and_vllms_books_follow(rig, level):
    before, addresses = rig.copies(), [tensor.data_ptr() for tensor in rig.tensors()]
    for _ in range(3):
        _, unmapped = sleep(rig.pool, level)
        assert (unmapped.freed, unmapped.observed_bytes, unmapped.scope) == (SPANS, 16 * MIB, "process")
        assert rig.gpu.ours_bytes == CONTEXT_BYTES
        assert all(data.is_asleep for data in rig.machine.allocator.pointer_to_data.values())
        wake(rig.pool)
        assert not any(data.is_asleep for data in rig.machine.allocator.pointer_to_data.values())
        if level == 2:
            rig.fill()
        assert all_equal(rig.copies(), before)
    assert [tensor.data_ptr() for tensor in rig.tensors()] == addresses
    assert rig.machine.complaints == []


@pytest.mark.parametrize("asleep", [False, True])
def test_vllm_frees_its_segments_through_our_guard_asleep_or_awake(rig, asleep):
    if asleep:
        sleep(rig.pool)
    for tensor in (rig.model.big, rig.cache.kv):
        rig.machine.free(tensor)
    if asleep:
        wake(rig.pool)
    assert rig.machine.complaints == []
    assert rig.gpu.pool_bytes == 6 * MIB
    assert rig.pool.tags()["weights"].span_bytes == (6 if asleep else 12) * MIB  # as of the last order
    rig.pool.close()
    assert rig.gpu.pool_bytes == 0


def test_a_refused_wake_maps_nothing_and_a_later_one_brings_all_back(rig):
    before = rig.copies()
    sleep(rig.pool)
    for call, number in itertools.product(["create", "memcpy"], [1, 3]):
        rig.machine.fail(call, number)
        with pytest.raises(Exception, match=r"driver refused|HIP error"):
            rig.pool.map_restore()
        assert (rig.gpu.pool_bytes, resident(rig.pool)) == (0, {"weights": 0, "kv_cache": 0})
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


def test_a_new_memory_pool_of_vllm_takes_our_guard_over(rig):
    allocator = rig.machine.allocator
    rig.machine.cumem.init_module(allocator.python_malloc_callback, allocator.python_free_callback)
    sleep(rig.pool)
    rig.machine.free(rig.model.big)
    assert rig.machine.complaints == []
    wake(rig.pool)
