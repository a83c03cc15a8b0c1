"""Segments that come and go, measurements and the end of every pool over vLLM's allocators, on all platforms."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest

from omni_notebook.errors import UnsupportedError
from omni_notebook.memory.base import TransitionOrderError
from omni_notebook.protocol import TagMemory
from tests.memory.fake_cuda import CONTEXT_BYTES, GRANULE, MIB
from tests.memory.machines import SPANS, all_equal, resident
from tests.memory.pools import sleep, wake

# --------------------------------------------------------------------- segments that come and go


def test_freeing_while_asleep_leaves_no_trace_and_the_rest_wakes(rig):
    before = rig.copies()
    sleep(rig.pool)
    big = rig.model.big
    rig.gpu.others_bytes = rig.gpu.free_bytes - GRANULE  # room for the least that can be mapped
    rig.machine.free(big)
    assert len(rig.machine.complaints) == rig.machine.complains_of_sleeping_frees
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


@pytest.mark.parametrize("late", [False, True], ids=["prepare copies", "commit copies"])
@pytest.mark.parametrize("begun", [1, 0], ids=["its copy was begun", "its copy comes next"])
def test_a_free_while_its_copy_is_on_the_way_waits_for_the_copy(rig, monkeypatch, late, begun):
    before = rig.copies()
    begin, count = rig.pool._core.copies.begin, itertools.count()

    def begin_and_free(run):
        for freed in (0, 1):
            if next(count) == begun:
                rig.machine.free(rig.model.big)  # the first segment
            if not freed:
                begin(run)

    monkeypatch.setattr(rig.pool._core.copies, "begin", begin_and_free)
    rig.pool.prepare_sleep(1, late_copy=late)
    rig.pool.commit_sleep()
    wake(rig.pool)
    assert all_equal(rig.copies()[1:], before[1:])
    assert rig.pool.tags()["weights"].span_bytes == 6 * MIB


def test_freeing_while_awake_is_vllms_alone(rig):
    rig.machine.free(rig.model.scale)
    assert rig.machine.complaints == []
    sleep(rig.pool)
    wake(rig.pool)
    assert rig.pool.tags()["weights"].span_bytes == 10 * MIB


def test_a_segment_that_was_woken_is_freed_with_its_pages(rig):
    sleep(rig.pool)
    wake(rig.pool)
    rig.machine.free(rig.model.big)
    assert rig.machine.complaints == []
    assert rig.gpu.pool_bytes == 10 * MIB


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


def test_a_later_memory_pool_of_vllm_keeps_our_guard(rig):
    allocator = rig.machine.allocator
    rig.machine.cumem.init_module(allocator.python_malloc_callback, allocator.python_free_callback)
    gc.collect()
    sleep(rig.pool)
    rig.machine.free(rig.model.big)
    assert len(rig.machine.complaints) == rig.machine.complains_of_sleeping_frees
    wake(rig.pool)


def test_vllms_own_sleep_underneath_is_seen_and_ours_refused(rig):
    if not rig.machine.tells_strangers:
        assert rig.pool.foreign_changes() is None  # vllm-ascend keeps no books of it, and CANN does not tell
        return
    assert rig.pool.foreign_changes() is None
    (entry,) = [data for data in rig.machine.allocator.pointer_to_data.values() if data.tag == "kv_cache"]
    rig.machine.sleep_by_vllm(entry)
    assert "kv_cache were unmapped by somebody else" in rig.pool.foreign_changes()
    with pytest.raises(TransitionOrderError, match="vLLM's own wake_up"):
        rig.pool.prepare_sleep(1)
    rig.machine.wake_by_vllm(entry)
    assert rig.pool.foreign_changes() is None
    sleep(rig.pool)
    wake(rig.pool)


def test_vllms_own_wake_underneath_is_seen_and_ours_leaks_nothing(rig):
    if not rig.machine.tells_strangers:
        return
    before = rig.copies()
    sleep(rig.pool)
    for entry in rig.machine.allocator.pointer_to_data.values():
        rig.machine.wake_by_vllm(entry)
    assert "were mapped by somebody else" in rig.pool.foreign_changes()
    mapped, _ = wake(rig.pool)
    assert mapped.mapped_bytes == 0
    assert all_equal(rig.copies(), before)
    assert rig.gpu.pool_bytes == 16 * MIB
    assert not rig.cache.kv.any()


# ---------------------------------------------------------------------------------------- measuring


def test_no_more_is_called_freed_than_was_seen_to_leave(rig):
    rig.machine.show_bytes(lambda: max(rig.gpu.ours_bytes, CONTEXT_BYTES + 13 * MIB))
    _, unmapped = sleep(rig.pool)
    assert (unmapped.expected_bytes, unmapped.observed_bytes) == (16 * MIB, 3 * MIB)
    assert sum(unmapped.freed.values()) == 3 * MIB


def test_what_another_process_frees_meanwhile_is_not_counted(rig):
    rig.gpu.others_bytes = 20 * MIB
    rig.pool.prepare_sleep(1)
    rig.gpu.others_bytes = 0
    assert sum(rig.pool.commit_sleep().freed.values()) == 16 * MIB


def test_memory_that_torch_cached_is_given_back_before_the_measurement(rig):
    rig.gpu.torch_bytes = rig.machine.torch_device.cached_bytes = 8 * MIB
    _, unmapped = sleep(rig.pool)
    assert unmapped.observed_bytes == unmapped.expected_bytes == 16 * MIB
    assert rig.gpu.torch_bytes == 0


@pytest.mark.parametrize("shown", ["nothing", "another process of the same id", "an error"])
def test_where_the_driver_does_not_show_this_process_the_device_is_measured_and_the_answer_says_so(rig, shown):
    if shown == "nothing":
        rig.machine.hide_process()
    elif shown == "an error" and rig.machine.name != "rocm":  # there the device is asked of the same library
        rig.machine.break_probe()
    else:
        rig.machine.show_bytes(lambda: MIB)
    _, unmapped = sleep(rig.pool)
    assert unmapped.scope == "device"
    assert sum(unmapped.freed.values()) == unmapped.observed_bytes == 16 * MIB
    assert f"measured on the whole device by {rig.machine.device_source}" in unmapped.note
    if shown == "nothing":
        held = rig.pool.held()
        assert (held.scope, held.total_bytes, held.parts.other) == ("device", CONTEXT_BYTES, None)


def test_what_a_probe_could_not_see_leave_is_not_called_freed(rig):
    rig.pool.prepare_sleep(1)
    seen = iter([CONTEXT_BYTES + 16 * MIB])

    def ours():
        rig.machine.break_probe()
        return next(seen)

    rig.machine.show_bytes(ours)
    unmapped = rig.pool.commit_sleep()
    assert (unmapped.scope, unmapped.observed_bytes, sum(unmapped.freed.values())) == ("process", 0, 0)
    assert "could not be measured by" in unmapped.note
    wake(rig.pool)


def test_what_the_process_holds_is_told_by_cause(rig):
    machine = rig.machine
    rig.gpu.torch_bytes = 10 * MIB
    pool, graphs = (0, 1), (0, 2)
    machine.allocator.allocator_and_pools = {"weights": ((type("Pool", (), {"id": pool})()), None)}
    machine.torch_device.segments = [
        {"device": 0, "address": 1, "total_size": 3 * MIB, "segment_pool_id": (0, 0)},
        {"device": 0, "address": 2, "total_size": 5 * MIB, "segment_pool_id": graphs},
        {"device": 0, "address": 3, "total_size": 99 * MIB, "segment_pool_id": pool},
        {"device": 1, "address": 4, "total_size": 99 * MIB, "segment_pool_id": (0, 0)},
        {"device": 0, "address": rig.model.big.data_ptr(), "total_size": 6 * MIB, "segment_pool_id": (0, 7)},
    ]
    held = rig.pool.held()
    rig.pool.held()
    assert machine.torch_device.snapshots == 1  # torch's totals are what they were
    assert (held.total_bytes, held.scope) == (CONTEXT_BYTES + 26 * MIB, "process")
    assert (held.parts.untagged, held.parts.graphs, held.parts.other) == (3 * MIB, 5 * MIB, CONTEXT_BYTES + 2 * MIB)
    sleep(rig.pool)
    assert rig.pool.held().total_bytes == CONTEXT_BYTES + 10 * MIB
    assert rig.pool.held().parts.other == CONTEXT_BYTES + 2 * MIB
    machine.allocator.allocator_and_pools = {"weights": [((type("Pool", (), {"id": pool})()), None)]}  # later vLLM
    machine.torch_device.segments[1]["total_size"] = 7 * MIB
    assert rig.pool.held().parts.graphs == 7 * MIB


def test_memory_can_be_read_while_another_thread_is_in_a_transition(rig):
    inside, go_on = threading.Event(), threading.Event()

    def cancelled():
        inside.set()
        return not go_on.wait(10)

    thread = threading.Thread(target=lambda: rig.pool.prepare_sleep(1, cancelled=cancelled))
    thread.start()
    assert inside.wait(10)
    assert resident(rig.pool) == SPANS
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


@pytest.mark.parametrize(
    "name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"]
)
def test_expandable_segments_are_refused_by_the_name_of_the_variable(rig, name):
    with pytest.raises(UnsupportedError, match=name):
        rig.machine.pool({name: "max_split_size_mb:20, expandable_segments:True"})
    rig.machine.pool({name: "expandable_segments:False"})


@pytest.mark.parametrize("asleep", [False, True])
def test_closing_gives_device_and_host_memory_back_and_freeing_after_is_clean(rig, asleep):
    if asleep:
        sleep(rig.pool)
    rig.pool.close()
    rig.pool.close()
    assert rig.gpu.ours_bytes == CONTEXT_BYTES
    assert rig.pool.host_backup_bytes() == 0
    assert rig.machine.pinned == {}
    with pytest.raises(TransitionOrderError, match="closed"):
        rig.pool.prepare_sleep(1)
    for tensor in [*rig.tensors(), rig.cache.kv]:
        rig.machine.free(tensor)
    assert len(rig.machine.complaints) == 5 * rig.machine.complains_of_sleeping_frees
    assert rig.gpu.reserved == {}
