"""Sleeps and wakes of every pool over vLLM's allocators, on all platforms, against fakes of their modules."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from omni_notebook.errors import ArgumentError, OutOfMemoryError
from omni_notebook.memory.base import DeviceError, TransitionCancelledError, TransitionOrderError
from tests.memory.fake_cuda import CONTEXT_BYTES, INVALID, MIB, OUT_OF_MEMORY
from tests.memory.fake_devices import OldCudaMachine
from tests.memory.fake_npu import NpuMachine
from tests.memory.machines import SPANS, all_equal, resident
from tests.memory.pools import sleep, wake

# --------------------------------------------------------------------------------------- both levels


def test_level_1_gives_all_memory_back_and_brings_all_contents_back_at_the_same_addresses(rig):
    before, addresses = rig.copies(), [t.data_ptr() for t in rig.tensors()]
    assert {name: info.span_bytes for name, info in rig.pool.tags().items()} == SPANS

    prepared, unmapped = sleep(rig.pool)

    assert prepared.backup == {"weights": rig.machine.backup_kind, "kv_cache": None}
    assert (prepared.copied_bytes, prepared.skipped_clean_bytes, prepared.modified) == (12 * MIB, 0, None)
    assert (prepared.host_backup_bytes, prepared.backup_location) == (12 * MIB, "host memory")
    assert unmapped.freed == SPANS
    assert (unmapped.expected_bytes, unmapped.observed_bytes, unmapped.scope) == (16 * MIB, 16 * MIB, "process")
    assert unmapped.note is None
    assert rig.gpu.ours_bytes == CONTEXT_BYTES
    assert resident(rig.pool) == {"weights": 0, "kv_cache": 0}

    mapped, restored = wake(rig.pool)

    assert mapped.mapped_bytes == 16 * MIB
    assert (restored.copied_bytes, restored.needs_reload) == (12 * MIB, ())
    assert all_equal(rig.copies(), before)
    assert not rig.cache.kv.any()
    assert [t.data_ptr() for t in rig.tensors()] == addresses
    assert rig.machine.complaints == []


def test_level_2_keeps_only_what_no_checkpoint_has_and_says_what_to_reload(rig):
    table, scale = rig.model.table.clone(), rig.model.scale.clone()
    prepared, unmapped = sleep(rig.pool, 2)
    assert prepared.backup == {"weights": "host", "kv_cache": None}
    assert prepared.copied_bytes == rig.pool.host_backup_bytes() == 64 * 4 + 3 * 4
    assert unmapped.freed == SPANS

    _, restored = wake(rig.pool)

    assert (restored.needs_reload, restored.copied_bytes) == (("weights",), 64 * 4 + 3 * 4)
    assert torch.equal(rig.model.table, table)
    assert torch.equal(rig.model.scale, scale)
    assert not rig.model.big.any()
    assert not rig.cache.kv.any()
    assert rig.pool.host_backup_bytes() == 0


def test_the_pool_says_which_platform_and_device_it_is_on(rig):
    machine = rig.machine
    assert rig.pool.platform == machine.name
    assert rig.pool.device == ("cuda:0" if machine.name == "rocm" else f"{machine.name}:0")
    assert rig.pool.device_name == machine.torch_device.get_device_name(0)


def test_vllms_own_books_say_asleep_where_its_version_has_such_books(rig):
    entries = [data for data in rig.machine.allocator.pointer_to_data.values() if hasattr(data, "is_asleep")]
    assert len(entries) == (0 if isinstance(rig.machine, OldCudaMachine | NpuMachine) else 5)
    sleep(rig.pool, 1, ["weights"])
    assert all(entry.is_asleep is (entry.tag == "weights") for entry in entries)
    wake(rig.pool)
    assert not any(entry.is_asleep for entry in entries)


@pytest.mark.parametrize("level", [1, 2])
def test_tags_that_are_neither_weights_nor_cache_are_kept_whole_and_workspaces_dropped(rig, level):
    state, scratch = rig.machine.tensor("runtime", (1000,)), rig.machine.tensor("workspace", (1000,))
    state.fill_(3)
    scratch.fill_(4)
    prepared, _ = sleep(rig.pool, level)
    assert (prepared.backup["runtime"], prepared.backup["workspace"]) == (rig.machine.backup_kind, None)
    assert resident(rig.pool) == {"weights": 0, "kv_cache": 0, "runtime": 0, "workspace": 0}
    _, restored = wake(rig.pool)
    assert "runtime" not in restored.needs_reload
    assert (state == 3).all()
    assert not scratch.any()


def test_a_tensor_of_a_model_that_lies_in_another_tag_is_kept_there(rig):
    stray = nn.Module()
    stray.register_buffer("odd", rig.machine.tensor("kv_cache", (10,)))
    stray.odd.fill_(9)
    rig.pool.adopt(stray)
    prepared, _ = sleep(rig.pool, 1)
    assert prepared.backup["kv_cache"] == "host"
    wake(rig.pool)
    assert (stray.odd == 9).all()
    assert not rig.cache.kv.any()


def test_every_order_of_waking_by_tags_gives_the_same(rig):
    before = rig.copies()
    for level, order in itertools.product([1, 2], [("weights", "kv_cache"), ("kv_cache", "weights")]):
        sleep(rig.pool, level)
        for tag in order:
            _, restored = wake(rig.pool, [tag])
            if restored.needs_reload:
                rig.fill()
        assert all_equal(rig.copies(), before)
        rig.cache.kv.zero_()
        assert resident(rig.pool) == SPANS


def test_ten_cycles_leave_no_byte_behind_on_the_device_or_the_host(rig):
    before = rig.copies()
    sleep(rig.pool)
    residual, host = rig.gpu.ours_bytes, rig.pool.host_backup_bytes()
    wake(rig.pool)
    for _ in range(10):
        sleep(rig.pool)
        assert (rig.gpu.ours_bytes, rig.pool.host_backup_bytes()) == (residual, host)
        wake(rig.pool)
    assert all_equal(rig.copies(), before)
    assert len(rig.machine.pinned) == (4 if rig.machine.backup_kind == "pinned" else 0)


# ----------------------------------------------------------------------------- one step at a time


def test_steps_out_of_order_are_refused_and_change_nothing(rig):
    for step in (rig.pool.commit_sleep, rig.pool.map, rig.pool.restore, rig.pool.commit_wake, rig.pool.drop_backup):
        with pytest.raises(TransitionOrderError, match="nothing changed"):
            step()
    rig.pool.abort_sleep()
    rig.pool.abort_wake()
    sleep(rig.pool)
    with pytest.raises(TransitionOrderError, match="no tag is awake"):
        rig.pool.prepare_sleep(1)
    with pytest.raises(TransitionOrderError, match="asleep"):
        rig.pool.record_checksum()
    wake(rig.pool)
    with pytest.raises(TransitionOrderError, match="no tag is asleep"):
        rig.pool.map()
    with pytest.raises(ArgumentError, match="unknown tag"):
        rig.pool.prepare_sleep(1, ["other"])
    with pytest.raises(ArgumentError, match="level=3"):
        rig.pool.prepare_sleep(3)
    assert resident(rig.pool) == SPANS


def test_a_wake_that_restored_nothing_can_not_be_committed(rig):
    sleep(rig.pool)
    rig.pool.map()
    with pytest.raises(TransitionOrderError, match="not restored"):
        rig.pool.commit_wake()


@pytest.mark.parametrize("level", [1, 2])
def test_an_aborted_sleep_leaves_memory_contents_and_host_as_before_it(rig, level):
    before = rig.copies()
    rig.pool.prepare_sleep(level)
    rig.pool.abort_sleep()
    assert rig.pool.host_backup_bytes() == 0
    assert rig.machine.pinned == {}
    assert all_equal(rig.copies(), before)
    assert (rig.cache.kv == 5).all()
    sleep(rig.pool)
    wake(rig.pool)
    rig.pool.prepare_sleep(level)
    rig.pool.abort_sleep()
    assert rig.pool.host_backup_bytes() == 12 * MIB  # the copies of the sleep before


def test_a_sleep_that_can_not_copy_changes_nothing(rig):
    before = rig.copies()
    rig.machine.fail("memcpy", 3)
    with pytest.raises(DeviceError):
        rig.pool.prepare_sleep(1)
    assert rig.pool.host_backup_bytes() == 0
    assert all_equal(rig.copies(), before)
    sleep(rig.pool)
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


def test_a_wake_in_one_pass_fills_while_it_maps(rig):
    before = rig.copies()
    sleep(rig.pool)
    mapped, restored = rig.pool.map_restore()
    assert (mapped.mapped_bytes, restored.copied_bytes, restored.needs_reload) == (16 * MIB, 12 * MIB, ())
    rig.pool.commit_wake()
    assert all_equal(rig.copies(), before)
    assert not rig.cache.kv.any()


def test_a_wake_in_one_pass_of_a_level_2_sleep_zeroes_first_and_brings_kept_tensors_back_after(rig):
    table, scale = rig.model.table.clone(), rig.model.scale.clone()
    sleep(rig.pool, 2)
    _, restored = rig.pool.map_restore()
    rig.pool.commit_wake()
    assert restored.needs_reload == ("weights",)
    assert torch.equal(rig.model.table, table)
    assert torch.equal(rig.model.scale, scale)
    assert not rig.model.big.any()


def test_a_cancelled_sleep_changes_nothing(rig):
    asked = iter([False, False, True])
    with pytest.raises(TransitionCancelledError):
        rig.pool.prepare_sleep(1, cancelled=lambda: next(asked))
    assert rig.pool.host_backup_bytes() == 0
    assert rig.pool.plan(1).expected_bytes == 16 * MIB


def test_a_sleep_without_room_on_the_host_is_refused_with_the_figures(rig):
    rig.machine.host_bytes = 12 * MIB - 1
    with pytest.raises(OutOfMemoryError) as caught:
        rig.pool.prepare_sleep(1)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (12 * MIB, 12 * MIB - 1)
    rig.machine.host_bytes = 12 * MIB
    sleep(rig.pool)
    wake(rig.pool)
    rig.machine.host_bytes = 0
    sleep(rig.pool)  # the copies' memory is there already


def test_a_commit_that_the_driver_refuses_whole_can_be_aborted_unless_it_has_lost_contents(rig):
    before = rig.copies()
    rig.pool.prepare_sleep(1)
    for number in range(1, 8):
        rig.machine.fail("unmap", number)
    if rig.machine.abortable:
        with pytest.raises(DeviceError, match="driver refused to unmap"):
            rig.pool.commit_sleep()
        rig.pool.abort_sleep()
        assert resident(rig.pool) == SPANS
        assert all_equal(rig.copies(), before)
        return
    unmapped = rig.pool.commit_sleep()
    assert (sum(unmapped.freed.values()), unmapped.observed_bytes) == (0, 0)  # the ACK of that is an error
    assert "refused to unmap" in unmapped.note
    with pytest.raises(DeviceError, match="refused to map"):
        rig.pool.map()


def test_a_commit_that_the_driver_refuses_in_part_counts_only_what_left(rig):
    before = rig.copies()
    rig.pool.prepare_sleep(1)
    rig.machine.fail("unmap", 1)  # of the 6 MiB, on ROCm the first 4
    unmapped = rig.pool.commit_sleep()
    assert unmapped.freed == {"weights": 6 * MIB, "kv_cache": 4 * MIB}
    assert unmapped.observed_bytes == (10 * MIB if rig.machine.abortable else 12 * MIB)
    assert unmapped.expected_bytes == 16 * MIB
    assert "refused to unmap" in unmapped.note
    if rig.machine.abortable:
        assert resident(rig.pool) == {"weights": 6 * MIB, "kv_cache": 0}
        mapped, _ = wake(rig.pool)
        assert mapped.mapped_bytes == 10 * MIB
        assert all_equal(rig.copies(), before)


@pytest.mark.parametrize("level", [1, 2])
def test_an_aborted_wake_maps_nothing_and_a_later_one_works(rig, level):
    before = rig.copies()
    sleep(rig.pool, level)
    for steps in ([rig.pool.map], [rig.pool.map, rig.pool.restore], [rig.pool.map_restore]):
        for step in steps:
            step()
        rig.pool.abort_wake()
        assert resident(rig.pool) == {"weights": 0, "kv_cache": 0}
        assert rig.gpu.pool_bytes == 0
    wake(rig.pool)
    if level == 1:
        assert all_equal(rig.copies(), before)
    assert torch.equal(rig.model.table, before[2])


def test_a_wake_that_is_cancelled_or_can_not_copy_maps_nothing(rig):
    before = rig.copies()
    sleep(rig.pool)
    for turns in (0, 3, 5):
        asked = itertools.count()
        with pytest.raises(TransitionCancelledError):
            rig.pool.map_restore(cancelled=lambda asked=asked, turns=turns: next(asked) >= turns)
        assert rig.gpu.pool_bytes == 0
    for name in ("memcpy", "memset"):
        rig.machine.fail(name)
        with pytest.raises(DeviceError):
            rig.pool.map_restore()
        assert rig.gpu.pool_bytes == 0
    rig.pool.map_restore()
    rig.pool.commit_wake()
    assert all_equal(rig.copies(), before)


def test_a_wake_without_room_says_how_much_is_needed_maps_nothing_and_works_later(rig):
    before = rig.copies()
    sleep(rig.pool)
    rig.gpu.others_bytes = rig.gpu.capacity - CONTEXT_BYTES - 10 * MIB
    with pytest.raises(OutOfMemoryError, match="wake again") as caught:
        rig.pool.map_restore()
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (16 * MIB, 10 * MIB)
    assert rig.gpu.ours_bytes == CONTEXT_BYTES
    rig.gpu.others_bytes = 0
    rig.pool.map_restore()
    rig.pool.commit_wake()
    assert all_equal(rig.copies(), before)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("call", ["create", "map"])
def test_room_that_goes_while_a_wake_maps_leaves_nothing_half_mapped(rig, call, number):
    before = rig.copies()
    sleep(rig.pool)
    rig.machine.fail(call, number, OUT_OF_MEMORY)
    with pytest.raises(OutOfMemoryError):
        rig.pool.map()
    assert rig.gpu.mappings == {}
    assert resident(rig.pool) == {"weights": 0, "kv_cache": 0}
    if call == "create" or rig.machine.name in {"rocm", "npu"}:
        assert rig.gpu.pool_bytes == 0  # elsewhere the extension keeps the piece that it could not map
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


def test_another_error_of_the_driver_while_a_wake_maps_is_called_what_it_is(rig):
    sleep(rig.pool)
    rig.machine.fail("create", 2, INVALID)
    with pytest.raises(DeviceError, match="driver refused to map: ") as caught:
        rig.pool.map()
    assert not caught.value.no_room
    assert rig.gpu.mappings == {}


def test_a_wake_asks_torch_to_give_back_what_it_caches_before_it_says_that_there_is_no_room(rig):
    sleep(rig.pool)
    rig.gpu.torch_bytes = rig.machine.torch_device.cached_bytes = 50 * MIB
    rig.pool.map()
    assert rig.gpu.torch_bytes < 50 * MIB


def test_level_1_becomes_level_2_but_for_what_is_kept(rig):
    table, scale = rig.model.table.clone(), rig.model.scale.clone()
    state = rig.machine.tensor("runtime", (1000,)).fill_(3)
    sleep(rig.pool)
    assert rig.pool.drop_backup() == 12 * MIB - 64 * 4 - 3 * 4
    _, restored = wake(rig.pool)
    assert restored.needs_reload == ("weights",)
    assert torch.equal(rig.model.table, table)
    assert torch.equal(rig.model.scale, scale)
    assert (state == 3).all()
    assert not rig.model.big.any()
