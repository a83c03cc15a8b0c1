"""A rank's wake that leaves copies to its commit: when it does, what that answers, when graphs are checked."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future

import pytest

from omni_notebook.memory.base import LORA, DeviceError, TransitionCancelledError
from omni_notebook.protocol import GIB, OmniACK, SleepTask, WakeTask
from omni_notebook.worker.graphs import Recall
from tests.memory.fake_cuda import MIB
from tests.memory.fake_ranges import OwnRig
from tests.worker.device_rank import Books, control_of, sleep


class EarlyBooks(Books):
    """A runner whose batches can follow copies."""

    def __init__(self):
        self.did = []

    def tensors_in_order(self):
        return self.rig.tensors()

    @contextlib.contextmanager
    def arriving(self, arrivals):
        arrivals.follow_all()
        self.did.append("followed")
        yield

    def recall_later(self):
        self.did.append("put off")
        return Recall(None, "later")

    def recall_graphs(self):
        self.did.append("recalled")
        return Recall(True, None)


@pytest.fixture
def early():
    rig, books = OwnRig(), EarlyBooks()
    books.rig = rig
    control = control_of(rig, books, alone=True)
    yield rig, books, control
    control.waking.close()


def same(rig, before):
    return all((one == other).all() for one, other in zip(rig.copies(), before, strict=True))


def resident(rig):
    return sum(held.resident_bytes for held in rig.pool.memory().values())


def test_a_commit_answers_later_and_a_batch_before_it_follows_the_copies(early):
    rig, books, control = early
    before = rig.copies()
    sleep(control, 1)
    outlook = control.waking.begin_wake(WakeTask(task_id="w"))
    assert (outlook.arriving, outlook.all_awake, outlook.weights_valid) == (True, True, True)
    with control.waking.beside():
        assert same(rig, before)
    answer = control.waking.commit_wake("w")
    assert isinstance(answer, Future)
    ack = answer.result(10)
    assert (ack.status, ack.metadata["state"], ack.metadata["mapped_bytes"]) == ("SUCCESS", "WARM", 16 * MIB)
    assert ack.metadata["copied_bytes"] == 12 * MIB
    assert (ack.metadata.get("cuda_graph_recalled"), ack.metadata["note"]) == (None, "later")
    assert same(rig, before)
    assert control.waking._rank.levels == {}
    assert books.did == ["put off", "followed"]


def test_copies_take_from_when_they_began_on_however_late_the_commit_comes(early):
    _rig, _books, control = early
    sleep(control, 1)
    control.waking.begin_wake(WakeTask(task_id="w"))
    time.sleep(0.2)
    told = control.waking.commit_wake("w").result(10).metadata
    assert told["phases_ms"]["copy"] >= 200
    assert told["copy_gib_per_s"] <= 12 * MIB / GIB / 0.2
    assert told["phases_ms"]["map"] + told["phases_ms"]["copy"] <= told["latency_ms"]


def test_graphs_are_put_off_before_any_batch_and_never_replayed_beside_what_batches_wrote(early):
    _rig, books, control = early
    sleep(control, 1)
    control.waking.begin_wake(WakeTask(task_id="w"))
    control.waking.commit_wake("w").result(10)
    for _ in range(2):
        with control.waking.beside():
            pass
    assert books.did == ["put off"]


def test_a_copy_that_fails_leaves_all_mapped_until_the_order_is_taken_back(early):
    rig, _books, control = early
    before = rig.copies()
    sleep(control, 1)
    control.waking.begin_wake(WakeTask(task_id="w"))
    rig.cumem.fail("wait", 1)
    with pytest.raises(DeviceError):
        control.waking.commit_wake("w").result(10)
    assert resident(rig) == 16 * MIB
    control.undo("w")
    assert resident(rig) == 0
    control.waking.begin_wake(WakeTask(task_id="again"))
    assert control.waking.commit_wake("again").result(10).status == "SUCCESS"
    assert same(rig, before)


def test_an_order_that_is_cancelled_while_copies_come_does_not_commit(early):
    rig, _books, control = early
    sleep(control, 1)
    control.waking.begin_wake(WakeTask(task_id="w"))
    control.cancel("w")
    with pytest.raises(TransitionCancelledError):
        control.waking.commit_wake("w").result(10)
    control.undo("w")
    assert (resident(rig), control.waking._rank.level) == (0, 1)


@pytest.mark.parametrize("why", ["not alone", "level 2", "some tags", "adapters", "no weights", "the runner can not"])
def test_a_wake_that_no_batch_can_follow_is_prepared_as_ever(why):
    rig = OwnRig()
    books = Books() if why == "the runner can not" else EarlyBooks()
    books.rig = rig
    control = control_of(rig, books, alone=why != "not alone")
    if why == "adapters":
        rig.pool.empty((MIB,), rig.cache.kv.dtype, LORA, recomputable=False)
    sleep(control, 2 if why == "level 2" else 1)
    if why == "no weights":
        books.missing = frozenset({"weights"})
    tags = ("weights",) if why == "some tags" else None
    assert not control.waking.begin_wake(WakeTask(task_id="w", tags=tags)).arriving
    ack = control.waking.commit_wake("w")
    assert isinstance(ack, OmniACK)
    assert ack.status == "SUCCESS"


def test_a_sleep_right_after_an_early_wake_is_as_any(early):
    rig, books, control = early
    before = rig.copies()
    for turn in ("a", "b"):
        sleep(control, 1)
        control.waking.begin_wake(WakeTask(task_id=turn))
        control.waking.commit_wake(turn).result(10)
    control.sleeping.prepare_sleep(SleepTask(task_id="s", level=2))
    assert control.sleeping.commit_sleep("s").freed_bytes == 16 * MIB
    control.waking.begin_wake(WakeTask(task_id="w"))
    assert control.waking.commit_wake("w").status == "SUCCESS"
    assert books.did == ["put off", "put off", "recalled"]
    assert same(rig, before)
