"""The pool over vLLM's CUDA allocator, against fakes that behave as vLLM 0.24's extension and NVML were recorded to."""

from __future__ import annotations

import gc
import itertools
import threading

import numpy as np
import pytest
import torch
from torch import nn

from omni_notebook.errors import ArgumentError, OutOfMemoryError, UnsupportedError
from omni_notebook.memory.base import DeviceError, TransitionCancelledError, TransitionOrderError
from omni_notebook.memory.checksum import sum_bytes
from omni_notebook.memory.device.checksum import Summer, pieces
from omni_notebook.protocol import TagMemory
from tests.memory.fake_cuda import CONTEXT_BYTES, GRANULE, INVALID, MIB, OUT_OF_MEMORY, Machine, NewData, OldData, Rig
from tests.memory.pools import sleep, wake


@pytest.fixture(params=[OldData, NewData], ids=["vllm-0.24", "vllm-later"])
def rig(request):
    return Rig(request.param)


def all_equal(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def resident(pool):
    return {name: memory.resident_bytes for name, memory in pool.memory().items()}


# --------------------------------------------------------------------------------------- both levels


def test_level_1_gives_all_memory_back_and_brings_all_contents_back_at_the_same_addresses(rig):
    before, addresses = rig.copies(), [t.data_ptr() for t in rig.tensors()]
    spans = {name: info.span_bytes for name, info in rig.pool.tags().items()}
    assert spans == {"weights": 12 * MIB, "kv_cache": 4 * MIB}

    prepared, unmapped = sleep(rig.pool)

    assert prepared.backup == {"weights": "pinned", "kv_cache": None}
    assert (prepared.copied_bytes, prepared.skipped_clean_bytes, prepared.modified) == (12 * MIB, 0, None)
    assert (prepared.host_backup_bytes, prepared.backup_location) == (12 * MIB, "host memory")
    assert unmapped.freed == spans
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
    assert rig.cumem.printed == []


def test_level_2_keeps_only_what_no_checkpoint_has_and_says_what_to_reload(rig):
    table, scale = rig.model.table.clone(), rig.model.scale.clone()
    prepared, unmapped = sleep(rig.pool, 2)
    assert prepared.backup == {"weights": "host", "kv_cache": None}
    assert prepared.copied_bytes == rig.pool.host_backup_bytes() == 64 * 4 + 3 * 4
    assert unmapped.freed == {"weights": 12 * MIB, "kv_cache": 4 * MIB}

    _, restored = wake(rig.pool)

    assert (restored.needs_reload, restored.copied_bytes) == (("weights",), 64 * 4 + 3 * 4)
    assert torch.equal(rig.model.table, table)
    assert torch.equal(rig.model.scale, scale)
    assert not rig.model.big.any()
    assert not rig.cache.kv.any()
    assert rig.pool.host_backup_bytes() == 0


def test_vllms_own_books_say_asleep_where_its_version_has_such_books():
    rig = Rig(NewData)
    entries = rig.cumem.allocator.pointer_to_data.values()
    sleep(rig.pool, 1, ["weights"])
    assert {entry.tag: entry.is_asleep for entry in entries} == {"weights": True, "kv_cache": False}
    wake(rig.pool)
    assert not any(entry.is_asleep for entry in entries)


@pytest.mark.parametrize("level", [1, 2])
def test_tags_that_are_neither_weights_nor_cache_are_kept_whole_and_workspaces_dropped(level):
    rig = Rig()
    state, scratch = rig.machine.tensor("runtime", (1000,)), rig.machine.tensor("workspace", (1000,))
    state.fill_(3)
    scratch.fill_(4)
    prepared, _ = sleep(rig.pool, level)
    assert (prepared.backup["runtime"], prepared.backup["workspace"]) == ("pinned", None)
    assert resident(rig.pool) == {"weights": 0, "kv_cache": 0, "runtime": 0, "workspace": 0}
    _, restored = wake(rig.pool)
    assert "runtime" not in restored.needs_reload
    assert (state == 3).all()
    assert not scratch.any()


def test_a_tensor_of_a_model_that_lies_in_another_tag_is_kept_there():
    rig = Rig()
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
        assert resident(rig.pool) == {"weights": 12 * MIB, "kv_cache": 4 * MIB}


def test_twenty_cycles_leave_no_byte_behind_on_the_device_or_the_host(rig):
    before = rig.copies()
    sleep(rig.pool)
    residual, host = rig.gpu.ours_bytes, rig.pool.host_backup_bytes()
    wake(rig.pool)
    for _ in range(20):
        sleep(rig.pool)
        assert (rig.gpu.ours_bytes, rig.pool.host_backup_bytes()) == (residual, host)
        wake(rig.pool)
    assert all_equal(rig.copies(), before)
    assert len(rig.machine.cuda.pinned) == 4


def test_locked_host_memory_outlives_a_level_2_sleep_and_serves_the_next_level_1(rig):
    before = rig.copies()
    sleep(rig.pool)
    wake(rig.pool)
    pinned, kept = dict(rig.machine.cuda.pinned), 64 * 4 + 3 * 4
    prepared, _ = sleep(rig.pool, 2)
    assert prepared.backup["weights"] == "host"
    assert prepared.host_backup_bytes == rig.pool.host_backup_bytes() == 12 * MIB + kept
    _, restored = wake(rig.pool)
    assert (restored.needs_reload, restored.copied_bytes) == (("weights",), kept)
    assert not rig.model.big.any()
    rig.fill()
    sleep(rig.pool)
    wake(rig.pool)
    assert rig.machine.cuda.pinned == pinned
    assert all_equal(rig.copies(), before)


def test_locked_host_memory_goes_with_a_level_2_sleep_where_the_host_has_little_to_spare(rig):
    sleep(rig.pool)
    wake(rig.pool)
    rig.machine.host_bytes = 4 * 12 * MIB - 1
    prepared, _ = sleep(rig.pool, 2)
    assert prepared.host_backup_bytes == rig.pool.host_backup_bytes() == 64 * 4 + 3 * 4
    assert rig.machine.cuda.pinned == {}


def test_memory_that_can_not_be_pinned_is_copied_all_the_same_and_called_pageable(rig):
    rig.machine.cuda.pin_error = 2
    before = rig.copies()
    prepared, _ = sleep(rig.pool)
    assert prepared.backup["weights"] == "pageable"
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


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
    assert resident(rig.pool) == {"weights": 12 * MIB, "kv_cache": 4 * MIB}


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
    assert rig.machine.cuda.pinned == {}
    assert all_equal(rig.copies(), before)
    assert (rig.cache.kv == 5).all()
    sleep(rig.pool)
    wake(rig.pool)
    rig.pool.prepare_sleep(level)
    rig.pool.abort_sleep()
    assert rig.pool.host_backup_bytes() == 12 * MIB  # the copies of the sleep before


def test_a_sleep_that_can_not_copy_changes_nothing(rig):
    before = rig.copies()
    rig.cumem.fail("memcpy", 3)
    with pytest.raises(DeviceError, match="cuMemcpyAsync: CUDA driver error 1"):
        rig.pool.prepare_sleep(1)
    assert rig.pool.host_backup_bytes() == 0
    assert all_equal(rig.copies(), before)
    sleep(rig.pool)
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


def test_copies_that_fail_after_they_were_begun_end_a_sleep_and_a_wake_that_change_nothing(rig):
    before = rig.copies()
    rig.cumem.fail("wait", 1)
    with pytest.raises(DeviceError, match="cuStreamSynchronize"):
        rig.pool.prepare_sleep(1)
    assert (rig.pool.host_backup_bytes(), rig.machine.cuda.pinned) == (0, {})
    sleep(rig.pool)
    for step in (rig.pool.map_restore, rig.pool.map):
        rig.cumem.fail("wait", 1)
        with pytest.raises(DeviceError, match="cuStreamSynchronize"):
            step()
        assert rig.gpu.mappings == {}
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


def test_a_wake_in_one_pass_fills_while_it_maps_and_zeroes_only_what_has_no_copy(rig):
    before = rig.copies()
    sleep(rig.pool)
    zeroed = rig.cumem.calls["memset"]
    mapped, restored = rig.pool.map_restore()
    assert (mapped.mapped_bytes, restored.copied_bytes, restored.needs_reload) == (16 * MIB, 12 * MIB, ())
    assert rig.cumem.calls["memset"] == zeroed + 1
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


def test_a_commit_that_the_driver_refuses_whole_can_be_aborted(rig):
    before = rig.copies()
    rig.pool.prepare_sleep(1)
    for number in range(1, 6):
        rig.cumem.fail("unmap", number)
    with pytest.raises(DeviceError, match="refused to unmap: CUDA Error: invalid argument"):
        rig.pool.commit_sleep()
    rig.pool.abort_sleep()
    assert resident(rig.pool) == {"weights": 12 * MIB, "kv_cache": 4 * MIB}
    assert all_equal(rig.copies(), before)


def test_a_commit_that_the_driver_refuses_in_part_counts_only_what_left_and_wakes_whole(rig):
    before = rig.copies()
    rig.pool.prepare_sleep(1)
    rig.cumem.fail("unmap", 1)  # the 6 MiB
    unmapped = rig.pool.commit_sleep()
    assert unmapped.freed == {"weights": 6 * MIB, "kv_cache": 4 * MIB}
    assert (unmapped.observed_bytes, unmapped.expected_bytes) == (10 * MIB, 16 * MIB)
    assert "invalid argument" in unmapped.note
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
        assert rig.gpu.ours_bytes == CONTEXT_BYTES
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
        assert rig.gpu.ours_bytes == CONTEXT_BYTES
    rig.cumem.fail("memcpy", 2)
    with pytest.raises(DeviceError):
        rig.pool.map_restore()
    assert rig.gpu.ours_bytes == CONTEXT_BYTES
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


@pytest.mark.parametrize("call", ["create", "map"])
def test_room_that_goes_while_a_wake_maps_leaves_nothing_half_mapped(rig, call):
    before = rig.copies()
    sleep(rig.pool)
    rig.cumem.fail(call, 3, OUT_OF_MEMORY)
    with pytest.raises(OutOfMemoryError):
        rig.pool.map()
    assert rig.gpu.mappings == {}
    assert resident(rig.pool) == {"weights": 0, "kv_cache": 0}
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


def test_another_error_of_the_driver_while_a_wake_maps_is_called_what_it_is(rig):
    sleep(rig.pool)
    rig.cumem.fail("create", 2, INVALID)
    with pytest.raises(DeviceError, match="refused to map: CUDA Error: invalid argument") as caught:
        rig.pool.map()
    assert not caught.value.no_room
    assert rig.gpu.mappings == {}


def test_a_wake_asks_torch_to_give_back_what_it_caches_before_it_says_that_there_is_no_room(rig):
    sleep(rig.pool)
    rig.gpu.torch_bytes = rig.machine.cuda.cached_bytes = 50 * MIB
    wake(rig.pool)
    assert rig.gpu.torch_bytes == 0


# ------------------------------------------------------------------------------- level 1 to level 2


def test_level_1_becomes_level_2_but_for_what_is_kept(rig):
    table, scale = rig.model.table.clone(), rig.model.scale.clone()
    state = rig.machine.tensor("runtime", (1000,)).fill_(3)
    sleep(rig.pool)
    assert rig.pool.drop_backup() == 12 * MIB - 64 * 4 - 3 * 4
    assert len(rig.machine.cuda.pinned) == 1  # of "runtime"
    _, restored = wake(rig.pool)
    assert restored.needs_reload == ("weights",)
    assert torch.equal(rig.model.table, table)
    assert torch.equal(rig.model.scale, scale)
    assert (state == 3).all()
    assert not rig.model.big.any()


def test_a_copy_that_differs_from_the_weights_as_loaded_is_found_before_it_is_dropped(rig):
    sleep(rig.pool)
    assert rig.pool.modified_in_backup()  # no record: nobody knows
    wake(rig.pool)
    rig.pool.record_checksum()
    sleep(rig.pool)
    assert not rig.pool.modified_in_backup()
    wake(rig.pool)
    rig.model.turned[3, 3] += 1
    sleep(rig.pool)
    assert rig.pool.modified_in_backup()


# ---------------------------------------------------------------------------------------- checksums


def test_the_checksum_sees_every_write_and_is_the_same_for_the_same_contents(rig):
    first = rig.pool.record_checksum()
    assert len(first) == 16
    assert rig.pool.verify_checksum()
    assert rig.pool.prepare_sleep(2).modified is False
    rig.pool.abort_sleep()
    for tensor in (rig.model.big, rig.model.turned, rig.model.table):
        old = tensor.view(-1)[0].clone() if tensor.is_contiguous() else tensor[0, 0].clone()
        place = (0,) * tensor.dim()
        tensor[place] += 1
        assert not rig.pool.verify_checksum()
        assert rig.pool.prepare_sleep(2).modified is True
        rig.pool.abort_sleep()
        tensor[place] = old
    assert rig.pool.verify_checksum()
    assert rig.pool.record_checksum() == first


def test_two_swapped_values_change_the_checksum(rig):
    rig.pool.record_checksum()
    rig.model.big[[0, 1]] = rig.model.big[[1, 0]].clone()
    assert not rig.pool.verify_checksum()


def test_gaps_between_tensors_do_not_count(rig):
    rig.pool.record_checksum()
    sleep(rig.pool, 2)
    wake(rig.pool)
    rig.fill()  # what is between the tensors is zero now, and was not
    assert rig.pool.verify_checksum()


def test_without_a_record_nothing_is_called_modified(rig):
    with pytest.raises(TransitionOrderError, match="record_checksum"):
        rig.pool.verify_checksum()
    assert rig.pool.prepare_sleep(2).modified is None


def sums_of(data):
    summer = Summer(torch.device("cpu"))
    rows = summer.add([data])
    return summer.result().view(np.uint64)[rows]


@pytest.mark.parametrize("n_bytes", [8, 24, 2 * MIB, 2 * MIB + 8, 37 * MIB + 16])
def test_the_devices_sums_are_those_of_the_hosts_checksum(n_bytes):
    data = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n_bytes))
    sums = sums_of(data)
    view = memoryview(data.numpy())
    expected = [sum_bytes(view[start : start + 2 * MIB]) for start in range(0, n_bytes, 2 * MIB)]
    assert [tuple(row.tolist()) for row in sums] == expected


@pytest.mark.parametrize(("offset", "n_bytes"), [(1, 100), (2, 4 * MIB), (4, 4 * MIB + 3), (0, 5)])
def test_bytes_that_are_not_aligned_or_no_whole_words_are_summed_as_if_they_were(offset, n_bytes):
    data = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n_bytes))
    moved = torch.zeros(offset + n_bytes, dtype=torch.uint8)
    moved[offset:] = data
    padded = torch.cat([data, torch.zeros(-n_bytes % 8, dtype=torch.uint8)])
    assert (sums_of(moved[offset:]) == sums_of(padded)).all()


def test_many_tensors_in_one_go_have_the_sums_that_each_has_alone():
    generator = torch.Generator().manual_seed(1)
    sizes = [5, 2 * MIB, 16, 2 * MIB + 9, *range(1, 20), 33 * MIB + 1]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    summer = Summer(torch.device("cpu"))
    rows = [summer.add([tensor]) for tensor in tensors]
    table = summer.result().view(np.uint64)
    for tensor, several in zip(tensors, rows, strict=True):
        assert (table[several] == sums_of(tensor)).all()


def test_a_tensor_with_gaps_is_summed_without_them_in_pieces_of_whole_chunks():
    base = torch.arange(6000 * 1048, dtype=torch.int32).view(6000, 1048)[:, :1000]
    flat = torch.empty(0, dtype=torch.uint8).set_(base.untyped_storage(), 0, (base.stride(0) * 5999 * 4 + 4000,), (1,))
    parts = list(pieces(flat, base))
    assert torch.equal(torch.cat(parts).view(torch.int32), base.reshape(-1))
    assert len(parts) > 1
    assert all(part.numel() % (2 * MIB) == 0 for part in parts[:-1])


# ----------------------------------------------------------------------------- what belongs to whom


def test_tensors_outside_vllms_segments_are_named_with_their_bytes_and_left_alone():
    rig = Rig()
    rig.model.register_buffer("elsewhere", torch.full((10,), 2.0))
    assert rig.pool.untagged() == {"0.elsewhere": 40}
    rig.pool.keep("weights", [rig.model.elsewhere])
    sleep(rig.pool, 2)
    assert (rig.model.elsewhere == 2).all()
    wake(rig.pool)


@pytest.mark.parametrize("frozen", [False, True])
def test_living_tensors_that_no_module_has_are_found_in_a_frozen_heap_too(rig, frozen):
    scratch = rig.machine.tensor("kv_cache", (7,)).fill_(1)
    if frozen:
        gc.freeze()
    try:
        (found,) = rig.pool.loose_tensors("kv_cache")
        assert (gc.get_freeze_count() > 0) is frozen
    finally:
        gc.unfreeze()
    assert (found.data_ptr(), found.numel()) == (scratch.data_ptr(), 28)
    (scale,) = rig.pool.loose_tensors("weights")
    assert scale.data_ptr() == rig.model.scale.data_ptr()
    rig.pool.keep("kv_cache", [found])
    sleep(rig.pool, 2)
    wake(rig.pool)
    assert (scratch == 1).all()


def test_parameters_that_a_loader_replaced_are_the_ones_that_count(rig):
    rig.pool.record_checksum()
    rig.model.big = nn.Parameter(rig.machine.tensor("weights", (1024, 1536)).fill_(1), requires_grad=False)
    assert not rig.pool.verify_checksum()
    rig.pool.record_checksum()
    assert rig.pool.verify_checksum()
    assert rig.pool.tags()["weights"].span_bytes == 18 * MIB


def test_used_bytes_count_bytes_that_have_several_names_once():
    rig = Rig()
    rig.model.tied = rig.model.big
    rig.model.register_buffer("part", rig.model.big[:3])
    rig.pool.adopt(rig.cache, "kv_cache")
    rig.pool.record_checksum()
    assert rig.pool.tags()["weights"].used_bytes == 6 * MIB + 256 * 100 * 4 + 64 * 4


def test_what_is_vllms_to_make_and_to_free_is_refused(rig):
    with pytest.raises(UnsupportedError, match="ballast_bytes"):
        rig.pool.empty((4,), torch.uint8)
    with pytest.raises(UnsupportedError, match="alone can free it"):
        rig.pool.discard("weights")
    with pytest.raises(ArgumentError, match="unknown tag"):
        rig.pool.adopt(nn.Linear(1, 1), "lora")


# --------------------------------------------------------------------- segments that come and go


def test_freeing_while_asleep_leaves_no_trace_and_the_rest_wakes(rig):
    before = rig.copies()
    sleep(rig.pool)
    big = rig.model.big
    rig.gpu.others_bytes = rig.gpu.free_bytes - GRANULE  # room for the least that can be mapped
    rig.machine.free(big)
    assert rig.cumem.printed == []
    assert rig.gpu.ours_bytes == CONTEXT_BYTES
    assert big.data_ptr() not in rig.gpu.reserved
    rig.gpu.others_bytes = 0
    wake(rig.pool)
    assert all_equal(rig.copies()[1:], before[1:])
    assert rig.pool.tags()["weights"].span_bytes == 6 * MIB
    assert rig.pool.host_backup_bytes() == 6 * MIB


def test_freeing_while_asleep_on_a_full_device_does_not_spoil_the_next_wake(rig):
    before = rig.copies()
    sleep(rig.pool)
    rig.gpu.others_bytes = rig.gpu.free_bytes
    rig.machine.free(rig.model.big)
    assert rig.model.big.data_ptr() not in rig.gpu.reserved
    rig.gpu.others_bytes = 0
    wake(rig.pool)
    assert all_equal(rig.copies()[1:], before[1:])
    assert rig.gpu.pool_bytes == 10 * MIB


def test_a_free_while_its_copy_is_on_the_way_waits_for_the_copy(rig):
    before = rig.copies()
    asked = itertools.count()

    def cancelled():
        if next(asked) == 2:
            rig.machine.free(rig.model.big)  # the first segment, whose copy was begun
        return False

    rig.pool.prepare_sleep(1, cancelled=cancelled)
    rig.pool.commit_sleep()
    wake(rig.pool)
    assert all_equal(rig.copies()[1:], before[1:])
    assert rig.pool.tags()["weights"].span_bytes == 6 * MIB


def test_freeing_while_awake_is_vllms_alone(rig):
    rig.machine.free(rig.model.scale)
    assert rig.cumem.printed == []
    sleep(rig.pool)
    wake(rig.pool)
    assert rig.pool.tags()["weights"].span_bytes == 10 * MIB


def test_a_segment_that_comes_between_prepare_and_commit_stays_as_it_is(rig):
    rig.pool.prepare_sleep(1)
    late = rig.machine.tensor("weights", (5,)).fill_(1)
    unmapped = rig.pool.commit_sleep()
    assert unmapped.freed["weights"] == 12 * MIB
    assert (late == 1).all()
    assert rig.pool.memory()["weights"] == TagMemory(12 * MIB, 0)  # books as of the last order
    wake(rig.pool)
    assert (late == 1).all()
    sleep(rig.pool)
    assert resident(rig.pool)["weights"] == 0
    wake(rig.pool)
    assert (late == 1).all()


def test_a_later_memory_pool_of_vllm_keeps_our_guard():
    rig = Rig()
    rig.cumem.init_module(rig.cumem.allocator.python_malloc_callback, rig.cumem.allocator.python_free_callback)
    sleep(rig.pool)
    rig.machine.free(rig.model.big)
    assert rig.cumem.printed == []


def test_vllms_own_sleep_underneath_is_seen_and_ours_refused(rig):
    assert rig.pool.foreign_changes() is None
    handles = [entry.handle for entry in rig.cumem.allocator.pointer_to_data.values() if entry.tag == "kv_cache"]
    rig.cumem.unmap_and_release(handles[0])
    assert "kv_cache" in rig.pool.foreign_changes()
    assert "unmapped by somebody else" in rig.pool.foreign_changes()
    with pytest.raises(TransitionOrderError, match="vLLM's own wake_up"):
        rig.pool.prepare_sleep(1)
    rig.cumem.create_and_map(handles[0])
    assert rig.pool.foreign_changes() is None
    sleep(rig.pool)
    wake(rig.pool)


def test_vllms_own_wake_underneath_is_seen_and_ours_leaks_nothing(rig):
    before = rig.copies()
    sleep(rig.pool)
    for entry in rig.cumem.allocator.pointer_to_data.values():
        rig.cumem.create_and_map(entry.handle)
    assert "were mapped by somebody else" in rig.pool.foreign_changes()
    mapped, _ = wake(rig.pool)
    assert mapped.mapped_bytes == 0
    assert all_equal(rig.copies(), before)
    assert rig.gpu.pool_bytes == 16 * MIB
    assert not rig.cache.kv.any()


# ---------------------------------------------------------------------------------------- measuring


def test_no_more_is_called_freed_than_was_seen_to_leave(rig):
    rig.machine.nvml.ours = lambda: max(rig.gpu.ours_bytes, CONTEXT_BYTES + 13 * MIB)
    _, unmapped = sleep(rig.pool)
    assert (unmapped.expected_bytes, unmapped.observed_bytes) == (16 * MIB, 3 * MIB)
    assert sum(unmapped.freed.values()) == 3 * MIB


def test_what_another_process_frees_meanwhile_is_not_counted(rig):
    rig.gpu.others_bytes = 20 * MIB
    rig.pool.prepare_sleep(1)
    rig.gpu.others_bytes = 0
    assert sum(rig.pool.commit_sleep().freed.values()) == 16 * MIB


def test_memory_that_torch_cached_is_given_back_before_the_measurement(rig):
    rig.gpu.torch_bytes = rig.machine.cuda.cached_bytes = 8 * MIB
    _, unmapped = sleep(rig.pool)
    assert unmapped.observed_bytes == unmapped.expected_bytes == 16 * MIB
    assert rig.gpu.torch_bytes == 0


@pytest.mark.parametrize("shown", ["nothing", "another process of the same id"])
def test_where_the_driver_hides_this_process_the_device_is_measured_and_the_answer_says_so(rig, shown):
    if shown == "nothing":
        rig.machine.nvml.pid = None
    else:
        rig.machine.nvml.ours = lambda: MIB
    _, unmapped = sleep(rig.pool)
    assert unmapped.scope == "device"
    assert sum(unmapped.freed.values()) == unmapped.observed_bytes == 16 * MIB
    assert "measured on the whole device" in unmapped.note
    held = rig.pool.held()
    if shown == "nothing":
        assert (held.scope, held.total_bytes, held.parts.other) == ("device", CONTEXT_BYTES, None)


def test_without_nvml_the_device_is_measured(rig):
    def unknown(_uuid):
        raise rig.machine.nvml.NVMLError

    rig.machine.nvml.nvmlDeviceGetHandleByUUID = unknown
    pool = rig.machine.pool()
    pool.prepare_sleep(2)
    assert pool.commit_sleep().scope == "device"


def test_what_the_process_holds_is_told_by_cause(rig):
    rig.gpu.torch_bytes = 10 * MIB
    pool, graphs = (0, 1), (0, 2)
    rig.cumem.allocator.allocator_and_pools = {"weights": ((type("Pool", (), {"id": pool})()), None)}
    rig.machine.cuda.segments = [
        {"device": 0, "address": 1, "total_size": 3 * MIB, "segment_pool_id": (0, 0)},
        {"device": 0, "address": 2, "total_size": 5 * MIB, "segment_pool_id": graphs},
        {"device": 0, "address": 3, "total_size": 99 * MIB, "segment_pool_id": pool},
        {"device": 1, "address": 4, "total_size": 99 * MIB, "segment_pool_id": (0, 0)},
        {"device": 0, "address": rig.model.big.data_ptr(), "total_size": 6 * MIB, "segment_pool_id": (0, 7)},
    ]
    held = rig.pool.held()
    rig.pool.held()
    assert rig.machine.cuda.snapshots == 1  # torch's totals are what they were
    assert (held.total_bytes, held.scope) == (CONTEXT_BYTES + 26 * MIB, "process")
    assert (held.parts.untagged, held.parts.graphs, held.parts.other) == (3 * MIB, 5 * MIB, CONTEXT_BYTES + 2 * MIB)
    sleep(rig.pool)
    assert rig.pool.held().total_bytes == CONTEXT_BYTES + 10 * MIB
    assert rig.pool.held().parts.other == CONTEXT_BYTES + 2 * MIB
    rig.cumem.allocator.allocator_and_pools = {"weights": [((type("Pool", (), {"id": pool})()), None)]}  # later vLLM
    rig.machine.cuda.segments[1]["total_size"] = 7 * MIB
    assert rig.pool.held().parts.graphs == 7 * MIB


def test_memory_can_be_read_while_another_thread_is_in_a_transition(rig):
    inside, go_on = threading.Event(), threading.Event()

    def cancelled():
        inside.set()
        return not go_on.wait(10)

    thread = threading.Thread(target=lambda: rig.pool.prepare_sleep(1, cancelled=cancelled))
    thread.start()
    assert inside.wait(10)
    assert resident(rig.pool) == {"weights": 12 * MIB, "kv_cache": 4 * MIB}
    assert rig.pool.host_backup_bytes() == 0
    go_on.set()
    thread.join()
    rig.pool.commit_sleep()


def test_what_a_plan_says_is_what_happens(rig):
    plan = rig.pool.plan(1)
    assert (plan.expected_bytes, plan.backup_bytes, plan.kept_bytes) == (16 * MIB, 12 * MIB, 0)
    plan = rig.pool.plan(2)
    assert (plan.expected_bytes, plan.backup_bytes, plan.kept_bytes) == (16 * MIB, 0, 64 * 4 + 3 * 4)
    sleep(rig.pool, 2, ["kv_cache"])
    assert rig.pool.plan(2).tags == {"weights": 12 * MIB}


# ---------------------------------------------------------------------------------- start and end


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_refused_by_the_name_of_the_variable(name):
    machine = Machine()
    with pytest.raises(UnsupportedError, match=name):
        machine.pool({name: "max_split_size_mb:20, expandable_segments:True"})
    machine.pool({name: "expandable_segments:False"})


@pytest.mark.parametrize("asleep", [False, True])
def test_closing_gives_device_and_host_memory_back_and_freeing_after_is_clean(rig, asleep):
    if asleep:
        sleep(rig.pool)
    rig.pool.close()
    rig.pool.close()
    assert rig.gpu.ours_bytes == CONTEXT_BYTES
    assert rig.pool.host_backup_bytes() == 0
    assert rig.machine.cuda.pinned == {}
    with pytest.raises(TransitionOrderError, match="closed"):
        rig.pool.prepare_sleep(1)
    for tensor in [*rig.tensors(), rig.cache.kv]:
        rig.machine.free(tensor)
    assert rig.cumem.printed == []
    assert rig.gpu.reserved == {}
