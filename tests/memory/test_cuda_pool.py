"""What the pool of our own segments on a GPU keeps beside the contract of all platforms: allocating, freeing, ends."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from torch import nn

from omni_notebook.errors import ArgumentError, OutOfMemoryError
from omni_notebook.memory import cuda
from omni_notebook.memory.base import DeviceError, TransitionOrderError
from tests.memory.fake_cuda import CONTEXT_BYTES, GRANULE, MIB, OUT_OF_MEMORY
from tests.memory.fake_ranges import OwnMachine, OwnRig
from tests.memory.machines import all_equal, resident
from tests.memory.pools import filled, sleep, wake


@pytest.fixture
def machine():
    return OwnMachine()


@pytest.fixture
def pool(machine):
    return machine.pool()


class Tied(nn.Module):
    """Ties, a view of a part, a buffer, a transposed parameter, a strided one, numbers of several types."""

    def __init__(self, device=None):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(64, 32, device=device))
        self.head = self.embed
        self.turned = nn.Parameter(torch.randn(8, 24, device=device).t())
        self.register_buffer("table", torch.arange(10, device=device))
        self.register_buffer("part", self.table[2:5])
        self.register_buffer("flag", torch.ones(3, dtype=torch.bool, device=device))
        self.small = nn.Parameter(torch.randn(5, device=device).bfloat16())


def snapshot(machine, pool):
    return machine.gpu.ours_bytes, dict(machine.gpu.reserved), pool.tags(), pool.memory(), pool.host_backup_bytes()


def assert_nothing_left(machine, pool, before):
    gc.collect()
    assert snapshot(machine, pool) == before


# ---------------------------------------------------------------------------------------------- adopt


def test_an_adopted_module_keeps_values_ties_and_views_and_lies_in_the_pool(pool, machine):
    module = Tied()
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    pool.adopt(module)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert module.head is module.embed
    assert not module.embed.requires_grad
    module.table[3] = 77
    assert module.part[1] == 77
    assert all(machine.gpu.is_mapped(tensor.data_ptr()) for tensor in module.state_dict().values())
    info = pool.tags()["weights"]
    assert (info.span_bytes, info.mapped, info.recomputable) == (GRANULE, True, False)
    assert 64 * 32 * 4 + 24 * 8 * 4 + 10 * 8 + 3 + 10 <= info.used_bytes < 10 * 1024


def test_meta_tensors_get_memory_and_become_one_parameter_for_all_their_names(pool, machine):
    module = Tied(device="meta")
    pool.adopt(module)
    assert module.head is module.embed
    assert machine.gpu.is_mapped(module.embed.data_ptr())
    assert not module.embed.any()
    assert module.turned.shape == (24, 8)


def test_adopting_twice_moves_nothing(pool, machine):
    module = Tied()
    pool.adopt(module)
    addresses, held = [t.data_ptr() for t in module.parameters()], machine.gpu.ours_bytes
    pool.adopt(module)
    assert ([t.data_ptr() for t in module.parameters()], machine.gpu.ours_bytes) == (addresses, held)


def test_a_large_module_is_cut_into_segments_that_are_full_at_the_size_of_a_part(pool, monkeypatch):
    monkeypatch.setattr(cuda, "PART_BYTES", 3 * MIB)
    module = nn.ParameterList([torch.randn(MIB // 4 * size) for size in (2, 2, 1, 7, 1, 1)])
    before = [value.detach().clone() for value in module]
    pool.adopt(module)
    segments = pool._core.table.of("weights")
    assert [one.size_bytes for one in segments] == [4 * MIB, 8 * MIB, 2 * MIB]
    sleep(pool)
    wake(pool)
    assert all_equal(module, before)


def test_a_tensor_of_another_device_or_kind_is_refused_by_name_and_nothing_is_adopted(pool, machine):
    module = nn.Module()
    module.good = nn.Parameter(torch.ones(3))
    module.register_buffer("odd", torch.eye(3).to_sparse())
    before = snapshot(machine, pool)
    with pytest.raises(ArgumentError, match="odd is a"):
        pool.adopt(module)
    assert_nothing_left(machine, pool, before)


@pytest.mark.parametrize("known", [False, True], ids=["first of its tag", "tag is there"])
def test_an_adoption_whose_values_can_not_be_copied_leaves_module_and_pool_as_before(pool, machine, monkeypatch, known):
    if known:
        pool.adopt(Tied())
    module, before = Tied(), snapshot(machine, pool)
    address = module.embed.data_ptr()

    def refuse(_block, _segment):
        msg = "CUDA error"
        raise RuntimeError(msg)

    monkeypatch.setattr("omni_notebook.memory.adoption._move_block", refuse)
    with pytest.raises(RuntimeError, match="CUDA error"):
        pool.adopt(module)
    assert module.embed.data_ptr() == address
    assert_nothing_left(machine, pool, before)


# ---------------------------------------------------------------------------------------------- empty


def test_an_empty_tensor_is_zero_although_fresh_device_memory_holds_anything(pool):
    tensor = pool.empty((3, 5), torch.bfloat16)
    assert (tensor.shape, tensor.dtype, tensor.any().item()) == ((3, 5), torch.bfloat16, False)
    assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 3, 2)])
def test_a_tensor_of_no_bytes_takes_no_memory_and_makes_no_tag(pool, machine, shape):
    tensor = pool.empty(shape, torch.float32)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.float32)
    assert (pool.tags(), machine.gpu.reserved) == ({}, {})


def test_sizes_and_kinds_that_can_not_be_are_refused(pool, machine):
    with pytest.raises(ArgumentError, match="negative"):
        pool.empty((2, -1), torch.uint8)
    pool.empty((4,), torch.uint8, "kv_cache")
    before = snapshot(machine, pool)
    with pytest.raises(ArgumentError, match="recomputable=True"):
        pool.empty((4,), torch.uint8, "kv_cache", recomputable=False)
    with pytest.raises(ArgumentError, match="recomputable=True"):
        pool.adopt(nn.Linear(1, 1), "kv_cache")
    assert_nothing_left(machine, pool, before)


def test_used_bytes_are_those_of_all_tensors_whatever_is_adopted_or_checksummed_after(pool):
    pool.empty((1000,), torch.uint8)
    pool.empty((100,), torch.uint8)
    pool.adopt(nn.Linear(8, 8))
    pool.record_checksum()
    assert {name: info.used_bytes for name, info in pool.tags().items()} == {
        "kv_cache": 1024 + 128,
        "weights": 256 + 64,
    }


@pytest.mark.parametrize("state", ["prepared", "asleep", "mapped"])
def test_nothing_is_allocated_in_a_tag_that_is_not_awake(state):
    rig = OwnRig()
    rig.pool.prepare_sleep(1, ["weights"])
    if state != "prepared":
        rig.pool.commit_sleep()
    if state == "mapped":
        rig.pool.map()
    before = snapshot(rig.machine, rig.pool)
    for allocate in (
        lambda: rig.pool.empty((1,), torch.uint8, "weights", recomputable=False),
        lambda: rig.pool.adopt(nn.Linear(1, 1)),
        lambda: rig.pool.discard("weights"),
    ):
        with pytest.raises(TransitionOrderError):
            allocate()
    assert_nothing_left(rig.machine, rig.pool, before)
    rig.pool.empty((1,), torch.uint8, "kv_cache")


# --------------------------------------------------------------------------------------------- no room


@pytest.mark.parametrize("known", [False, True], ids=["first of its tag", "tag is there"])
@pytest.mark.parametrize("how", ["empty", "adopt"])
def test_without_room_nothing_is_left_behind_and_the_error_has_the_figures(pool, machine, monkeypatch, how, known):
    monkeypatch.setattr(cuda, "PART_BYTES", MIB)
    pool.empty((5,), torch.uint8, "kv_cache")
    if known:
        pool.empty((5,), torch.uint8, "weights", recomputable=False)
    machine.gpu.others_bytes = machine.gpu.free_bytes - 5 * MIB
    module = nn.ParameterList([torch.ones(MIB // 4) for _ in range(3)])
    addresses, before = [t.data_ptr() for t in module], snapshot(machine, pool)
    allocate = {
        "empty": lambda: pool.empty((5 * MIB + 1,), torch.uint8, "weights", recomputable=False),
        "adopt": lambda: pool.adopt(module),
    }[how]
    with pytest.raises(OutOfMemoryError, match="try again") as caught:
        allocate()
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (6 * MIB, 5 * MIB)
    assert [t.data_ptr() for t in module] == addresses
    assert_nothing_left(machine, pool, before)
    machine.gpu.others_bytes = 0
    pool.adopt(module)


def test_torch_gives_back_what_it_caches_before_there_is_said_to_be_no_room(pool, machine):
    machine.gpu.torch_bytes = machine.cuda.cached_bytes = machine.gpu.free_bytes
    pool.empty((4 * MIB,), torch.uint8)
    assert machine.gpu.torch_bytes == 0


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", ["reserve", "create", "map", "memset", "wait"])
def test_any_call_that_the_driver_refuses_leaves_nothing_of_an_allocation(pool, machine, monkeypatch, name, number):
    monkeypatch.setattr(cuda, "PART_BYTES", MIB)
    module = nn.ParameterList([torch.ones(MIB // 4) for _ in range(3)])
    before = snapshot(machine, pool)
    machine.fail(name, 1 if name == "wait" else number)
    with pytest.raises(DeviceError):
        pool.adopt(module)
    assert_nothing_left(machine, pool, before)
    pool.adopt(module)


def test_a_piece_that_can_not_be_unmapped_while_an_allocation_is_given_up_does_not_hide_why(pool, machine, monkeypatch):
    monkeypatch.setattr(cuda, "PART_BYTES", MIB)
    machine.fail("create", 3, OUT_OF_MEMORY)
    machine.fail("create", 4, OUT_OF_MEMORY)  # once torch has given back what it caches
    machine.fail("unmap", 1)
    with pytest.raises(OutOfMemoryError):
        pool.adopt(nn.ParameterList([torch.ones(MIB // 4) for _ in range(3)]))
    assert len(machine.gpu.mappings) == 1  # the one that the driver kept


def test_a_wake_without_room_names_it_and_addresses_are_still_ours(machine, pool):
    tensor = filled(pool, 4 * MIB)
    before, address = tensor.clone(), tensor.data_ptr()
    sleep(pool)
    machine.gpu.others_bytes = machine.gpu.free_bytes - 2 * MIB
    for step in (pool.map, pool.map_restore):
        with pytest.raises(OutOfMemoryError, match="wake again") as caught:
            step()
        assert (caught.value.needed_bytes, caught.value.free_bytes) == (4 * MIB, 2 * MIB)
    assert address in machine.gpu.reserved
    machine.gpu.others_bytes = 0
    wake(pool)
    assert (tensor.data_ptr(), torch.equal(tensor, before)) == (address, True)


# ------------------------------------------------------------------------------------------- addresses


def test_addresses_are_given_to_nobody_while_a_tensor_lives_and_go_back_with_the_last_view(pool, machine):
    tensor = pool.empty((4 * MIB,), torch.uint8)
    view, address = tensor.view(torch.float32)[5:], tensor.data_ptr()
    pool.discard("kv_cache")
    assert machine.gpu.ours_bytes == CONTEXT_BYTES
    del tensor
    assert pool.empty((4 * MIB,), torch.uint8).data_ptr() != address
    assert address in machine.gpu.reserved
    del view
    assert address not in machine.gpu.reserved
    assert pool.empty((4 * MIB,), torch.uint8).data_ptr() == address


def test_a_discarded_module_keeps_its_addresses_for_its_own_life_alone(pool, machine):
    module = nn.Linear(8, 8)
    pool.adopt(module, "lora")
    pool.discard("lora")
    assert pool.tags() == {}
    assert len(machine.gpu.reserved) == 1
    del module
    assert machine.gpu.reserved == {}


def test_a_pool_that_is_closed_and_still_held_gives_addresses_back_with_the_tensors(pool, machine):
    tensor = pool.empty((4 * MIB,), torch.uint8)
    sleep(pool)
    pool.close()
    assert (machine.gpu.ours_bytes, len(machine.gpu.reserved)) == (CONTEXT_BYTES, 1)
    del tensor
    assert machine.gpu.reserved == {}


def test_discarding_goes_on_where_a_refused_unmap_had_stopped_it(pool, machine):
    tensors = [pool.empty((MIB,), torch.uint8) for _ in range(3)]
    machine.fail("unmap", 2)
    with pytest.raises(DeviceError, match="refused to unmap"):
        pool.discard("kv_cache")
    assert resident(pool) == {"kv_cache": 4 * MIB}
    assert machine.gpu.pool_bytes == 4 * MIB
    pool.discard("kv_cache")
    assert (pool.tags(), machine.gpu.pool_bytes) == ({}, 0)
    del tensors
    assert machine.gpu.reserved == {}


def test_a_discarded_tag_may_come_again_as_another_kind(pool):
    pool.empty((4,), torch.uint8, "extra")
    pool.discard("extra")
    with pytest.raises(ArgumentError, match=re.escape("unknown tag 'extra'")):
        pool.plan(1, ["extra"])
    tensor = filled(pool, MIB, tag="extra")
    before = tensor.clone()
    sleep(pool)
    wake(pool)
    assert torch.equal(tensor, before)
