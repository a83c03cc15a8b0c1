"""Host memory for copies that is taken ahead of a sleep, in the background."""

from __future__ import annotations

import errno
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from omni_notebook.errors import OutOfMemoryError
from omni_notebook.memory.base import TransitionCancelledError, TransitionOrderError
from omni_notebook.memory.device import copies
from tests.memory.fake_cuda import MIB
from tests.memory.fake_ranges import OwnRig
from tests.memory.machines import all_equal
from tests.memory.pools import sleep, wake


@pytest.fixture
def rig():
    rig = OwnRig()
    yield rig
    rig.pool.close()


@pytest.fixture
def held(rig, monkeypatch):
    """Locking stops before the `n`-th buffer, until it is let go on."""
    pin, numbers = rig.machine.libcuda.pin, itertools.count(1)
    gate = SimpleNamespace(at=2, reached=threading.Event(), go_on=threading.Event())

    def wait_and_pin(address, n_bytes):
        if next(numbers) == gate.at:
            gate.reached.set()
            assert gate.go_on.wait(30)
        return pin(address, n_bytes)

    monkeypatch.setattr(rig.machine.libcuda, "pin", wait_and_pin)
    yield gate
    gate.go_on.set()


@pytest.fixture
def buffers(monkeypatch):
    """Every host buffer that is made; how many bytes of all of them are physically there."""
    made = []

    class Watched(copies.Segment):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(copies, "Segment", Watched)
    return SimpleNamespace(made=made, resident=lambda: sum(one.resident_bytes() for one in made))


def ahead_threads():
    return [one for one in threading.enumerate() if one.name == "omni-write-ahead"]


def test_room_is_there_after_a_while_counts_as_host_memory_and_the_first_sleep_makes_none(rig, buffers):
    before = rig.copies()
    assert not rig.pool.wait_write_ahead(0)
    rig.pool.write_ahead()
    assert rig.pool.wait_write_ahead(10)
    assert rig.pool.host_backup_bytes() == 12 * MIB == buffers.resident()
    assert sum(rig.machine.pinned.values()) == 12 * MIB
    pinned, made = dict(rig.machine.pinned), len(buffers.made)
    prepared, _ = sleep(rig.pool)
    assert (rig.machine.pinned, len(buffers.made)) == (pinned, made)
    assert (prepared.copied_bytes, prepared.backup["weights"]) == (12 * MIB, "pinned")
    wake(rig.pool)
    assert all_equal(rig.copies(), before)
    assert ahead_threads() == []


def test_where_all_room_is_there_nothing_is_begun(rig):
    sleep(rig.pool)
    wake(rig.pool)
    rig.pool.write_ahead()
    assert ahead_threads() == []
    assert rig.pool.wait_write_ahead(0)


def test_room_that_came_ahead_holds_nothing_and_is_copied_into_whole(rig):
    rig.pool.write_ahead()
    assert rig.pool.wait_write_ahead(10)
    rig.pool.prepare_sleep(1)
    rig.pool.abort_sleep()
    assert rig.pool.host_backup_bytes() == 12 * MIB  # it was not the sleep's
    rig.model.big.add_(1)
    before = rig.copies()
    prepared, _ = sleep(rig.pool)
    assert prepared.copied_bytes == 6 * MIB
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


@pytest.mark.parametrize("late", [False, True])
def test_a_sleep_meanwhile_takes_over_what_is_there_and_loses_nothing(rig, held, late):
    before = rig.copies()
    rig.pool.write_ahead()
    assert held.reached.wait(10)
    assert rig.pool.host_backup_bytes() == 6 * MIB
    assert not rig.pool.wait_write_ahead(0.01)
    first = dict(rig.machine.pinned)
    threading.Timer(0.05, held.go_on.set).start()
    rig.pool.prepare_sleep(1, late_copy=late)
    rig.pool.commit_sleep()
    assert ahead_threads() == []
    assert first.items() <= rig.machine.pinned.items()
    assert sum(rig.machine.pinned.values()) == rig.pool.host_backup_bytes() == 12 * MIB
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


@pytest.mark.parametrize("step", ["close", "drop_copies", "discard", "write_ahead"])
def test_other_orders_meanwhile_end_it_and_leave_nothing_of_it(rig, held, buffers, step):
    rig.pool.write_ahead()
    assert held.reached.wait(10)
    threading.Timer(0.05, held.go_on.set).start()
    if step == "discard":
        rig.pool.discard("weights")
    else:
        getattr(rig.pool, step)()
    if step == "write_ahead":
        assert rig.pool.wait_write_ahead(10)
        assert rig.pool.host_backup_bytes() == buffers.resident() == 12 * MIB
        return
    assert ahead_threads() == []
    assert (rig.pool.host_backup_bytes(), rig.machine.pinned, buffers.resident()) == (0, {}, 0)


def test_a_tensor_that_is_freed_or_made_meanwhile_is_accounted_for(rig, held):
    extra = rig.machine.tensor("extra", (MIB,), torch.uint8).fill_(4)
    rig.pool.write_ahead()
    assert held.reached.wait(10)
    threading.Timer(0.05, held.go_on.set).start()
    other = rig.machine.tensor("other", (MIB,), torch.uint8).fill_(5)
    rig.pool.discard("extra")
    del extra
    rig.pool.write_ahead()
    assert rig.pool.wait_write_ahead(10)
    assert rig.pool.host_backup_bytes() == 14 * MIB
    sleep(rig.pool)
    wake(rig.pool)
    assert (other == 5).all()


def test_it_is_not_begun_where_the_host_has_less_than_twice_what_is_missing(rig):
    rig.machine.host_bytes = 24 * MIB - 1
    rig.pool.write_ahead()
    assert not rig.pool.wait_write_ahead(10)
    assert (rig.pool.host_backup_bytes(), rig.machine.pinned) == (0, {})
    rig.machine.host_bytes = 24 * MIB
    rig.pool.write_ahead()
    assert rig.pool.wait_write_ahead(10)


def test_it_stops_when_the_host_has_little_and_gives_back_what_was_on_its_way(rig, held, buffers):
    rig.pool.write_ahead()
    assert held.reached.wait(10)
    rig.machine.host_bytes = 2 * 4 * MIB - 1  # the third buffer and the fourth are still to come
    held.go_on.set()
    assert not rig.pool.wait_write_ahead(10)
    assert ahead_threads() == []
    assert rig.pool.host_backup_bytes() == buffers.resident() == 8 * MIB
    before = rig.copies()
    sleep(rig.pool)
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


def test_memory_that_can_not_be_had_ahead_is_logged_and_met_again_by_the_sleep(rig, monkeypatch, buffers, caplog):
    advise = copies.libc.advise

    def refuse(address, n_bytes, advice):
        if advice == copies.libc.MADV_POPULATE_WRITE and any(one.address == address for one in buffers.made[2:]):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        advise(address, n_bytes, advice)

    monkeypatch.setattr(copies.libc, "advise", refuse)
    rig.pool.write_ahead()
    assert not rig.pool.wait_write_ahead(10)
    assert "the backup ahead of a sleep was not made" in caplog.text
    assert rig.pool.host_backup_bytes() == buffers.resident() == 8 * MIB
    with pytest.raises(OutOfMemoryError):
        rig.pool.prepare_sleep(1)
    assert rig.pool.host_backup_bytes() == buffers.resident() == 8 * MIB
    monkeypatch.setattr(copies.libc, "advise", advise)
    before = rig.copies()
    sleep(rig.pool)
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


def test_a_sleep_that_is_cancelled_while_it_makes_room_gives_all_of_it_back(rig, buffers):
    asked = iter([False, False, True])
    with pytest.raises(TransitionCancelledError):
        rig.pool.prepare_sleep(1, cancelled=lambda: next(asked))
    assert (rig.pool.host_backup_bytes(), rig.machine.pinned, buffers.resident()) == (0, {}, 0)


def test_a_closed_pool_begins_nothing(rig):
    rig.pool.close()
    with pytest.raises(TransitionOrderError, match="closed"):
        rig.pool.write_ahead()
