"""Sleeps and wakes of the pool of our own segments on a GPU: levels, tags, what is kept, ends, several pools."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

from omni_notebook.errors import ArgumentError
from omni_notebook.memory.base import DeviceError, TransitionOrderError
from tests.memory.fake_cuda import CONTEXT_BYTES, MIB
from tests.memory.fake_ranges import OwnMachine, OwnRig
from tests.memory.machines import SPANS, all_equal, resident
from tests.memory.pools import filled, sleep, wake


@pytest.fixture
def machine():
    return OwnMachine()


@pytest.fixture
def pool(machine):
    return machine.pool()


@pytest.fixture
def rig():
    return OwnRig()


# --------------------------------------------------------------------------------------------- levels


@pytest.mark.parametrize("how", ["steps", "one pass"])
@pytest.mark.parametrize("level", [1, 2])
def test_both_levels_give_all_of_it_back_and_addresses_stay(rig, level, how):
    before, addresses = rig.copies(), [t.data_ptr() for t in rig.tensors()]
    _, unmapped = sleep(rig.pool, level)
    assert (unmapped.freed, rig.gpu.ours_bytes) == (SPANS, CONTEXT_BYTES)
    if how == "steps":
        _, restored = wake(rig.pool)
    else:
        _, restored = rig.pool.map_restore()
        rig.pool.commit_wake()
    assert [t.data_ptr() for t in rig.tensors()] == addresses
    assert restored.needs_reload == (("weights",) if level == 2 else ())
    assert all_equal(rig.copies()[2:], before[2:])  # what was kept
    assert all_equal(rig.copies()[:2], before[:2]) is (level == 1)
    assert not rig.cache.kv.any()


@pytest.mark.parametrize("level", [1, 2])
def test_a_tag_that_a_checkpoint_does_not_have_is_refilled_or_copied_as_the_level_says(pool, level):
    ballast = filled(pool, 3 * MIB, tag="ballast")
    before = ballast.clone()
    prepared, _ = sleep(pool, level)
    assert prepared.backup == {"ballast": "pinned" if level == 1 else None}
    _, restored = wake(pool)
    assert restored.needs_reload == (() if level == 1 else ("ballast",))
    assert torch.equal(ballast, before if level == 1 else torch.zeros_like(before))


def test_tags_sleep_and_wake_one_by_one_with_levels_of_their_own(rig):
    ballast = filled(rig.pool, 2 * MIB, tag="ballast")
    before = [*rig.copies(), ballast.clone()]
    sleep(rig.pool, 2, ["ballast"])
    sleep(rig.pool, 1, ["weights"])
    assert resident(rig.pool) == {"weights": 0, "kv_cache": 4 * MIB, "ballast": 0}
    assert (rig.cache.kv == 5).all()
    _, restored = wake(rig.pool, ["weights"])
    assert (restored.needs_reload, all_equal(rig.copies(), before[:4])) == ((), True)
    sleep(rig.pool, 1, ["kv_cache"])
    _, restored = wake(rig.pool, ["ballast"])
    assert restored.needs_reload == ("ballast",)
    assert resident(rig.pool) == {"weights": 12 * MIB, "kv_cache": 0, "ballast": 2 * MIB}
    with pytest.raises(TransitionOrderError):
        wake(rig.pool, ["weights"])
    wake(rig.pool)
    assert not rig.cache.kv.any()


def test_ten_cycles_of_everything_leave_nothing_on_the_device_the_host_or_among_addresses(rig):
    def cycle():
        lora = rig.machine.tensor("lora", (100,)).fill_(3)
        rig.pool.keep("lora", [lora])
        for level, late in ((1, True), (2, False), (1, False), (2, True)):
            rig.pool.prepare_sleep(level, late_copy=late)
            rig.pool.commit_sleep()
            rig.pool.map_restore()
            rig.pool.commit_wake()
            assert (lora == 3).all()
            rig.fill()
        rig.pool.discard("lora")

    def held():
        gc.collect()
        figures = rig.gpu.ours_bytes, dict(rig.gpu.reserved), rig.pool.host_backup_bytes(), rig.machine.pinned
        return *map(repr, figures), rig.machine.libcuda.events, len(rig.machine.libcuda.streams)

    before = rig.copies()
    cycle()
    first = held()
    for _ in range(10):
        cycle()
        assert held() == first
    assert all_equal(rig.copies(), before)


# ----------------------------------------------------------------------------------------------- kept


@pytest.mark.parametrize("count", [1, 25, 16, 512 * 1024 + 7], ids=str)
@pytest.mark.parametrize("level", [1, 2])
def test_a_tag_that_is_kept_whole_is_backed_up_at_every_level_whatever_its_size(rig, level, count):
    lora = rig.machine.tensor("lora", (count,)).fill_(3)
    rig.pool.keep("lora", [lora])
    plan = rig.pool.plan(level, ["lora"])
    assert (plan.backup_bytes, plan.kept_bytes) == (rig.pool.tags()["lora"].span_bytes, 0)
    prepared, _ = sleep(rig.pool, level)
    assert prepared.backup["lora"] == "pinned"
    if level == 1:
        rig.pool.drop_backup()
    _, restored = wake(rig.pool)
    assert restored.needs_reload == ("weights",)
    assert (lora == 3).all()


def test_a_tag_is_kept_whole_only_while_all_its_tensors_are(rig):
    lora = rig.machine.tensor("lora", (100,)).fill_(3)
    rig.pool.keep("lora", [lora])
    other = rig.machine.tensor("lora", (100,)).fill_(4)
    prepared, _ = sleep(rig.pool, 2)
    assert prepared.backup["lora"] == "host"
    wake(rig.pool)
    assert (lora == 3).all()
    assert not other.any()
    rig.pool.keep("lora", [other])
    other.fill_(4)
    prepared, _ = sleep(rig.pool, 2)
    assert prepared.backup["lora"] == "pinned"
    wake(rig.pool)
    assert (other == 4).all()


def test_the_same_bytes_kept_under_several_names_do_not_count_for_others(rig):
    table = rig.model.table
    rig.pool.keep("weights", [table, table[:60], table[1:], rig.model.big[:512], rig.model.big[:500]] * 3)
    prepared, _ = sleep(rig.pool, 2)
    assert prepared.backup["weights"] == "host"
    wake(rig.pool)
    assert rig.model.big[:512].any()
    assert not rig.model.big[512:].any()


def test_all_tensors_of_a_module_kept_one_by_one_are_the_whole_tag(pool):
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))
    pool.adopt(module, "extra")
    before = [tensor.detach().clone() for tensor in module.parameters()]
    pool.keep("extra", list(module.parameters()))
    prepared, _ = sleep(pool, 2)
    assert prepared.backup["extra"] == "pinned"
    wake(pool)
    assert all_equal(module.parameters(), before)


def test_keeping_in_a_tag_that_is_not_there_is_refused(pool):
    with pytest.raises(ArgumentError, match="unknown tag"):
        pool.keep("lora", [])


# ------------------------------------------------------------------------------------------ checksums


def test_a_parameter_that_was_replaced_is_not_as_recorded_wherever_the_new_one_lies(rig):
    rig.pool.record_checksum()
    assert rig.pool.verify_checksum()
    old = rig.model.big
    for other in (torch.ones(4), old[:1000], rig.machine.tensor("kv_cache", (4,))):
        rig.model.big = nn.Parameter(other, requires_grad=False)
        assert not rig.pool.verify_checksum()
        assert rig.pool.prepare_sleep(2).modified is True
        rig.pool.abort_sleep()
    rig.model.big = old
    assert rig.pool.verify_checksum()


# ----------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("state", ["awake", "prepared", "prepared late", "asleep", "mapped", "slept at 2"])
def test_closing_in_any_state_gives_device_host_and_addresses_back(state):
    rig = OwnRig()
    level = 2 if state == "slept at 2" else 1
    if state != "awake":
        rig.pool.prepare_sleep(level, late_copy=state == "prepared late")
    if state in {"asleep", "mapped", "slept at 2"}:
        rig.pool.commit_sleep()
    if state == "mapped":
        rig.pool.map_restore()
    pool, gpu, machine = rig.pool, rig.gpu, rig.machine
    pool.close()
    pool.close()
    assert gpu.ours_bytes == CONTEXT_BYTES
    assert (pool.host_backup_bytes(), machine.pinned) == (0, {})
    assert resident(pool) == {"weights": 0, "kv_cache": 0}
    for step in (pool.commit_sleep, pool.map, pool.restore, pool.commit_wake, pool.write_ahead, pool.drop_backup):
        with pytest.raises(TransitionOrderError, match="closed"):
            step()
    del rig
    gc.collect()
    assert gpu.reserved == {}


def test_closing_goes_on_past_what_the_driver_refuses(rig):
    rig.machine.fail("unmap", 1)
    rig.pool.close()
    assert rig.gpu.pool_bytes == 6 * MIB
    assert rig.machine.pinned == {}


# ------------------------------------------------------------------------------------- two in a process


def test_two_pools_in_one_process_sleep_and_wake_apart(machine):
    pools = [machine.make_pool() for _ in range(2)]
    tensors = [filled(pool, 4 * MIB, seed=seed) for seed, pool in enumerate(pools)]
    before = [tensor.clone() for tensor in tensors]
    _, unmapped = sleep(pools[0])
    assert (unmapped.observed_bytes, unmapped.scope) == (4 * MIB, "process")
    assert torch.equal(tensors[1], before[1])
    assert (pools[0].held().total_bytes, pools[1].held().total_bytes) == (CONTEXT_BYTES + 4 * MIB,) * 2
    sleep(pools[1], 1)
    assert machine.gpu.ours_bytes == CONTEXT_BYTES
    for pool in pools:
        wake(pool)
    assert all_equal(tensors, before)
    with pytest.raises(ArgumentError, match="unknown tag"):
        pools[0].plan(1, ["kv_cache"])
    pools[0].close()
    assert torch.equal(tensors[1], before[1])
    module = nn.Module()
    module.theirs = nn.Parameter(tensors[1], requires_grad=False)
    pools[0] = machine.make_pool()
    pools[0].adopt(module)  # memory of another pool is copied
    assert torch.equal(module.theirs, before[1])
    assert module.theirs.data_ptr() != tensors[1].data_ptr() or pools[1]._core.table.find(module.theirs.data_ptr(), 1)


@pytest.mark.parametrize("step", ["wake", "wake in steps", "empty", "adopt"])
def test_what_another_pool_of_the_process_takes_meanwhile_is_not_counted_against_a_sleep(machine, monkeypatch, step):
    falling, other = machine.make_pool(), machine.make_pool()
    kept = [filled(falling, 4 * MIB), filled(other, 4 * MIB)]
    sleep(other)
    take = {
        "wake": lambda: (other.map_restore(), other.commit_wake()),
        "wake in steps": lambda: wake(other),
        "empty": lambda: kept.append(other.empty((4 * MIB,), torch.uint8)),
        "adopt": lambda: other.adopt(nn.ParameterList([torch.ones(MIB)]), "extra"),
    }[step]
    thread = threading.Thread(target=take)
    unmap = falling._core.table.unmap

    def unmap_meanwhile(segment):
        released = unmap(segment)
        thread.start()
        thread.join(0.2)
        return released

    monkeypatch.setattr(falling._core.table, "unmap", unmap_meanwhile)
    _, unmapped = sleep(falling)
    thread.join()
    assert (unmapped.observed_bytes, unmapped.freed) == (4 * MIB, {"weights": 4 * MIB})
    assert machine.gpu.pool_bytes == 4 * MIB


# --------------------------------------------------------------------------------------------- driver


def test_waiting_waits_for_every_stream_although_one_has_failed(rig):
    driver, libcuda = rig.pool._core.driver, rig.machine.libcuda
    driver.copy(rig.model.table.data_ptr(), rig.model.scale.data_ptr(), 4)
    driver.zero(rig.model.big.data_ptr(), 4)
    rig.machine.fail("wait", 1)
    with pytest.raises(DeviceError, match="cuStreamSynchronize"):
        driver.finish()
    assert not any(libcuda.streams.values())
    calls = rig.cumem.calls["wait"]
    driver.finish()
    assert rig.cumem.calls["wait"] == calls
