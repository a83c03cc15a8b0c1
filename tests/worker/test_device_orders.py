"""A rank's sleep and wake orders over the pool for CUDA: what its answers say of the device."""

from __future__ import annotations

import pytest

from omni_notebook.errors import OmniError
from omni_notebook.memory.base import DeviceError
from omni_notebook.protocol import SleepTask, WakeTask
from tests.memory.fake_cuda import CONTEXT_BYTES, MIB, Rig
from tests.memory.fake_ranges import OwnRig
from tests.worker.device_rank import Books, control_of, sleep


@pytest.fixture(
    params=[(Rig, False), (Rig, True), (OwnRig, False), (OwnRig, True)], ids=lambda one: f"{one[0].__name__} {one[1]}"
)
def ordered(request):
    make, alone = request.param
    rig = make()
    return rig, control_of(rig, Books(), alone=alone)


def wake(control):
    control.waking.prepare_wake(WakeTask(task_id="w"))
    return control.waking.commit_wake("w")


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_says_what_left_the_device_and_what_is_left_by_cause(ordered, level):
    rig, control = ordered
    rig.gpu.torch_bytes = 3 * MIB
    rig.machine.cuda.segments = [{"device": 0, "address": 1, "total_size": 3 * MIB, "segment_pool_id": (0, 0)}]
    before = rig.copies()
    ack = sleep(control, level)
    metadata = ack.metadata
    assert (ack.status, ack.freed_bytes, ack.error_msg) == ("SUCCESS", 16 * MIB, None)
    assert (metadata["source"], metadata["device"], metadata["observed_scope"]) == (
        "Platform_Fake_H200",
        "cuda:0",
        "process",
    )
    assert metadata["residual_bytes"] == CONTEXT_BYTES + 3 * MIB
    assert metadata["residual"]["untagged"] == 3 * MIB
    assert metadata["residual"]["other"] == CONTEXT_BYTES
    assert metadata["tags"]["weights"]["backup"] == ("pinned" if level == 1 else "host")
    again = wake(control)
    assert (again.status, again.metadata["mapped_bytes"], again.metadata["state"]) == ("SUCCESS", 16 * MIB, "WARM")
    assert all((one == other).all() for one, other in zip(rig.copies(), before, strict=True))


def test_memory_that_was_unmapped_and_not_seen_to_leave_is_no_success(ordered):
    rig, control = ordered
    rig.machine.nvml.ours = lambda: max(rig.gpu.ours_bytes, CONTEXT_BYTES + 13 * MIB)
    ack = sleep(control, 1)
    assert (ack.status, ack.metadata["error_code"], ack.freed_bytes) == ("ERROR", "NOT_OBSERVED", 3 * MIB)


def test_a_sleep_that_the_driver_refuses_leaves_the_rank_awake(ordered):
    rig, control = ordered
    before = rig.copies()
    control.sleeping.prepare_sleep(SleepTask(task_id="s", level=1))
    for number in range(1, 6):
        rig.cumem.fail("unmap", number)
    with pytest.raises(DeviceError):
        control.sleeping.commit_sleep("s")
    assert all((one == other).all() for one, other in zip(rig.copies(), before, strict=True))
    assert sleep(control, 1).status == "SUCCESS"


def test_an_order_that_is_taken_back_after_it_committed_restores_all(ordered):
    rig, control = ordered
    before = rig.copies()
    sleep(control, 1)
    control.undo("s")
    assert all((one == other).all() for one, other in zip(rig.copies(), before, strict=True))


def test_a_rank_that_moves_alone_copies_while_it_unmaps_and_says_as_much(ordered):
    rig, control = ordered
    alone = control._rank.alone
    control.sleeping.prepare_sleep(SleepTask(task_id="s", level=1))
    assert (rig.cumem.calls["memcpy"] == 0) is alone
    ack = control.sleeping.commit_sleep("s")
    metadata = ack.metadata
    assert (metadata["copied_bytes"], metadata["skipped_clean_bytes"]) == (12 * MIB, 0)
    assert metadata["phases_ms"]["copy"] > 0
    assert metadata["phases_ms"]["unmap"] > 0
    assert sum(value or 0 for value in metadata["phases_ms"].values()) <= metadata["latency_ms"] + 1


@pytest.mark.parametrize("level", [1, 2])
def test_orders_may_be_repeated_with_nothing_left_to_copy(ordered, level):
    rig, control = ordered
    before = rig.copies()
    for turn in range(3):
        ack = sleep(control, level)
        assert (ack.status, ack.freed_bytes) == ("SUCCESS", 16 * MIB)
        assert (ack.metadata["copied_bytes"] == 0) is (level == 1 and turn > 0)
        assert wake(control).status == "SUCCESS"
    assert all((one == other).all() for one, other in zip(rig.copies(), before, strict=True))


@pytest.mark.parametrize("ordered", [(Rig, True), (OwnRig, True)], ids=["vllm", "own"], indirect=True)
def test_a_copy_that_fails_in_the_commit_leaves_the_rank_awake(ordered):
    rig, control = ordered
    before = rig.copies()
    control.sleeping.prepare_sleep(SleepTask(task_id="s", level=1))
    rig.cumem.fail("wait", 2)
    with pytest.raises(DeviceError):
        control.sleeping.commit_sleep("s")
    assert rig.pool.host_backup_bytes() == 0
    assert all((one == other).all() for one, other in zip(rig.copies(), before, strict=True))
    assert sleep(control, 1).status == "SUCCESS"


def test_a_commit_that_the_rank_took_back_itself_may_be_taken_back_again(ordered):
    """The engine tells every rank to, the one that failed among them; it must not call the stage FAILED for that."""
    rig, control = ordered
    before = rig.copies()
    control.sleeping.prepare_sleep(SleepTask(task_id="s", level=2))
    for number in range(1, 6):
        rig.cumem.fail("unmap", number)
    with pytest.raises(DeviceError):
        control.sleeping.commit_sleep("s")
    control.undo("s")
    assert all((one == other).all() for one, other in zip(rig.copies(), before, strict=True))
    with pytest.raises(OmniError, match="no order other"):
        control.undo("other")
    assert sleep(control, 1).status == "SUCCESS"
    control.undo("s")
    assert all((one == other).all() for one, other in zip(rig.copies(), before, strict=True))


@pytest.mark.parametrize("ordered", [(OwnRig, True)], ids=["own"], indirect=True)
def test_a_commit_that_lost_memory_can_not_be_taken_back(ordered):
    rig, control = ordered
    control.sleeping.prepare_sleep(SleepTask(task_id="s", level=1))
    rig.cumem.fail("wait", 2)
    rig.cumem.fail("create", 1)
    with pytest.raises(DeviceError, match="restart the stage"):
        control.sleeping.commit_sleep("s")
    with pytest.raises(OmniError, match="no order s was prepared"):
        control.undo("s")


@pytest.mark.parametrize("levels", [(2,), (1, 2)], ids=["at_once", "over_level_1"])
def test_level_2_gives_graphs_and_their_memory_back_and_level_1_keeps_them(ordered, levels):
    rig, control = ordered
    books = control._rank.runner
    rig.gpu.torch_bytes = books.graphs_bytes = 3 * MIB
    for level in levels:
        if level == levels[0]:
            ack = sleep(control, level)
        else:
            assert rig.gpu.ours_bytes == CONTEXT_BYTES + 3 * MIB
            ack = control.sleeping.drop_backup(SleepTask(task_id="d", level=level))
    assert rig.gpu.ours_bytes == CONTEXT_BYTES
    assert ack.metadata["residual_bytes"] == CONTEXT_BYTES
    assert ack.freed_bytes == (16 * MIB if len(levels) == 1 else 0), "what graphs held is no part of it"
    assert wake(control).status == "SUCCESS"


def test_a_level_2_that_is_refused_keeps_graphs(ordered):
    rig, control = ordered
    books = control._rank.runner
    sleep(control, 1)
    rig.gpu.torch_bytes = books.graphs_bytes = 3 * MIB
    books.why_unrecoverable = lambda *, modified: "no path"
    with pytest.raises(OmniError, match="no path"):
        control.sleeping.drop_backup(SleepTask(task_id="d", level=2, discard=False))
    assert books.graphs_bytes == 3 * MIB
