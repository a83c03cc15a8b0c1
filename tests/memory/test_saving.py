"""Sleeps sum every byte once: as a group of segments at a time, while earlier ones are copied."""

from __future__ import annotations

import pytest
import torch

from omni_notebook.memory.base import DeviceError
from omni_notebook.memory.device import copies, shadow
from tests.memory.fake_cuda import MIB, Rig
from tests.memory.fake_ranges import OwnRig
from tests.memory.machines import SPANS, all_equal, resident
from tests.memory.pools import late, saved, wake


@pytest.fixture(params=[Rig, OwnRig], ids=["vllm", "own"])
def rig(request):
    return request.param()


def assert_works(rig, before):
    """Awake with its contents, and able to sleep and wake with others."""
    assert resident(rig.pool) == SPANS
    assert all_equal(rig.copies(), before)
    rig.model.big[1000, 1000] += 1
    other = rig.copies()
    late(rig.pool)
    wake(rig.pool)
    assert all_equal(rig.copies(), other)


@pytest.fixture
def small_looks(monkeypatch):
    """Each segment of 2 MiB and more is looked at by itself."""
    monkeypatch.setattr(copies, "_FIRST_LOOK", 2 * MIB)
    monkeypatch.setattr(copies, "_GROWTH", 1)


def changed(rig):
    """Awake, with every chunk another one than its copy."""
    late(rig.pool)
    wake(rig.pool)
    for tensor in rig.tensors():
        tensor.add_(1)
    return rig.copies()


@pytest.mark.parametrize("late_copy", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_each_byte_is_summed_once(rig, monkeypatch, late_copy, times):
    summed, add = [], shadow.ChunkSums.add
    if times == 2:
        changed(rig)
    before = rig.copies()
    monkeypatch.setattr(shadow.ChunkSums, "add", lambda taken, part: (summed.append(len(part)), add(taken, part))[1])
    prepared = rig.pool.prepare_sleep(1, late_copy=late_copy)
    assert summed == [] or not late_copy
    assert saved(prepared, rig.pool.commit_sleep())[0] >= 6 * MIB
    assert sum(summed) == 12 * MIB
    wake(rig.pool)
    assert all_equal(rig.copies(), before)
    assert saved(*late(rig.pool)) == (0, 12 * MIB)
    wake(rig.pool)
    assert_works(rig, before)


@pytest.mark.usefixtures("small_looks")
def test_copies_are_begun_while_later_segments_are_still_summed_and_nothing_goes_before(own, monkeypatch):
    before, order = changed(own), []
    held, table = own.pool._core.copies, own.pool._core.table
    add, begin, unmap = shadow.ChunkSums.add, held.begin, table.unmap
    monkeypatch.setattr(shadow.ChunkSums, "add", lambda taken, part: (order.append("sum"), add(taken, part))[1])
    monkeypatch.setattr(held, "begin", lambda run: (order.append("copy"), begin(run))[1])
    monkeypatch.setattr(table, "unmap", lambda segment: (order.append("unmap"), unmap(segment))[1])
    _, unmapped = late(own.pool)
    looked = [name for name in order if name != "unmap"]
    assert order[: len(looked)] == looked
    assert looked == ["sum", "copy"] * 4
    assert unmapped.checksum_ms > 0
    wake(own.pool)
    assert all_equal(own.copies(), before)


@pytest.mark.usefixtures("small_looks")
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_look_that_fails_while_earlier_segments_are_copied_leaves_all_as_before(own, monkeypatch, number):
    """Nobody can tell whether something reads the segments: no copy is waited for any more, nothing is unmapped."""
    before, calls = changed(own), []

    def refuse(taken, part):
        calls.append(part)
        if len(calls) == number:
            monkeypatch.setattr(own.machine.cuda, "synchronize", lost)
            raise torch.OutOfMemoryError
        return add(taken, part)

    def lost(_index):
        monkeypatch.undo()
        msg = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(msg)

    own.pool.prepare_sleep(1, late_copy=True)
    add = shadow.ChunkSums.add
    monkeypatch.setattr(shadow.ChunkSums, "add", refuse)
    with pytest.raises(DeviceError, match="illegal memory access"):
        own.pool.commit_sleep()
    own.pool.abort_sleep()
    assert own.machine.libcuda.events == 0
    assert_works(own, before)


@pytest.mark.usefixtures("small_looks")
@pytest.mark.parametrize("number", [1, 2, 4])
def test_segments_that_can_not_be_summed_while_others_are_copied_are_copied_whole(rig, monkeypatch, number):
    late(rig.pool)
    wake(rig.pool)
    before, calls, add = rig.copies(), [], shadow.ChunkSums.add

    def refuse(taken, part):
        calls.append(part)
        if len(calls) == number:
            raise torch.OutOfMemoryError
        return add(taken, part)

    monkeypatch.setattr(shadow.ChunkSums, "add", refuse)
    copied, skipped = saved(*late(rig.pool))
    assert (copied in {2 * MIB, 6 * MIB}, copied + skipped) == (True, 12 * MIB)
    monkeypatch.undo()
    wake(rig.pool)
    assert_works(rig, before)
