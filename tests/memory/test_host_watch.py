"""A host that runs short: what waits for a sleep goes back by itself, what a wake needs stays."""

from __future__ import annotations

import errno
import itertools
import logging
import threading

import pytest

from omni_notebook.memory.base import HostMemory
from omni_notebook.memory.device import ahead, copies
from tests.memory.fake_cuda import MIB, Rig
from tests.memory.fake_ranges import OwnMachine, OwnRig
from tests.memory.machines import MACHINES, all_equal
from tests.memory.pools import sleep, wake

PLATFORMS = ("cuda-own", "cuda", "npu")
"""Segments of our own, vLLM's, and a platform that locks no memory."""
TURN_S = 0.002
TOTAL = 160 * MIB
LOW = TOTAL // 20
OTHERS_AT_REST = 40 * MIB


class Host:
    """RAM that copies and other programs take; who asks is counted."""

    def __init__(self, rig) -> None:
        self.rig, self.others, self.short = rig, OTHERS_AT_REST, threading.Event()
        self.asked = itertools.count(1)
        self.turns = 0
        rig.pool._core.room = self.room

    def room(self):
        self.turns = next(self.asked)
        return HostMemory(limit_bytes=TOTAL, available_bytes=TOTAL - self.others - self.rig.pool.host_backup_bytes())


def until(predicate, seconds=10.0):
    ended = threading.Event()
    for _ in range(int(seconds / TURN_S)):
        if predicate():
            return
        ended.wait(TURN_S)
    pytest.fail("it did not come about")


def looked(host, times=5):
    """The host was looked at so many times more."""
    before = host.turns
    until(lambda: host.turns >= before + times)


@pytest.fixture(params=[MACHINES[name] for name in PLATFORMS], ids=PLATFORMS)
def rig(request):
    rig = OwnRig() if request.param is OwnMachine else Rig(machine=request.param())
    yield rig
    rig.pool.close()


@pytest.fixture
def host(rig):
    """One whose pool looks at it, with all room for a level 1 taken."""
    host = Host(rig)
    rig.pool.watch_host(TURN_S)
    rig.pool.write_ahead()
    assert rig.pool.wait_write_ahead(10)
    assert rig.pool.host_backup_bytes() == 12 * MIB
    return host


def test_a_host_with_enough_keeps_what_waits(rig, host):
    host.others = TOTAL - 12 * MIB - LOW
    looked(host)
    assert rig.pool.host_backup_bytes() == 12 * MIB


def test_a_host_that_runs_short_gets_back_what_waits_is_told_and_a_sleep_takes_it_again(rig, host, caplog):
    before = rig.copies()
    host.others = TOTAL - 12 * MIB - LOW + MIB
    until(lambda: rig.pool.host_backup_bytes() < 12 * MIB)
    until(lambda: "the host runs short of memory" in caplog.text)
    assert sum(rig.machine.pinned.values()) in {0, rig.pool.host_backup_bytes()}  # some platforms lock nothing
    looked(host)
    assert rig.pool.host_backup_bytes() < 12 * MIB  # and it is not taken at once again
    host.others = OTHERS_AT_REST
    sleep(rig.pool)
    assert rig.pool.host_backup_bytes() == 12 * MIB
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


def test_no_more_goes_back_than_the_host_lacks(rig, host):
    host.others = TOTAL - 12 * MIB - 2 * LOW + 6 * MIB + 3 * MIB  # 7 MiB are free: less than 8, and 16 is twice that
    until(lambda: rig.pool.host_backup_bytes() < 12 * MIB)
    looked(host)
    assert host.room().available_bytes >= LOW
    taken = rig.pool.host_backup_bytes()
    assert taken > 0
    host.others -= 3 * MIB
    looked(host)
    assert rig.pool.host_backup_bytes() == taken


def test_it_is_taken_again_by_itself_once_three_times_the_bound_would_stay_free(rig, host, caplog):
    caplog.set_level(logging.INFO, logger=ahead.__name__)
    host.others = TOTAL
    until(lambda: rig.pool.host_backup_bytes() == 0)
    host.others = TOTAL - 12 * MIB - 3 * LOW + MIB
    looked(host)
    assert rig.pool.host_backup_bytes() == 0
    host.others -= MIB
    until(lambda: rig.pool.host_backup_bytes() == 12 * MIB)
    assert "the host has plenty of memory again" in caplog.text


def test_copies_that_were_dropped_are_not_taken_again_by_themselves(rig, host):
    rig.pool.drop_copies()
    looked(host)
    assert rig.pool.host_backup_bytes() == 0


def test_the_copy_of_a_sleeping_tag_stays_and_its_wake_has_every_byte(rig, host):
    before = rig.copies()
    sleep(rig.pool)
    host.others = TOTAL
    looked(host)
    assert rig.pool.host_backup_bytes() == 12 * MIB
    wake(rig.pool)
    until(lambda: rig.pool.host_backup_bytes() == 0)
    assert all_equal(rig.copies(), before)


def test_locked_memory_that_a_level_2_left_goes_back_and_what_it_kept_stays(rig, host):
    table = rig.model.table.clone()
    sleep(rig.pool, 2)
    held = rig.pool.host_backup_bytes()
    assert held > 12 * MIB
    host.others = TOTAL
    until(lambda: rig.pool.host_backup_bytes() == held - 12 * MIB)
    wake(rig.pool)
    assert (rig.model.table == table).all()


@pytest.mark.parametrize("late", [False, True])
def test_a_sleep_between_its_two_steps_loses_nothing(rig, host, late):
    before = rig.copies()
    rig.pool.prepare_sleep(1, late_copy=late)
    host.others = TOTAL
    looked(host)
    assert rig.pool.host_backup_bytes() == 12 * MIB
    rig.pool.commit_sleep()
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(TOTAL - LOW // 2, id="short"),
        pytest.param(TOTAL - 2 * LOW, id="no plenty"),  # not short, and less than three times that would stay free
    ],
)
def test_memory_that_a_host_has_not_for_a_load_is_taken_once_it_has(rig, others):
    host = Host(rig)
    host.others = others
    rig.pool.watch_host(TURN_S)
    rig.pool.write_ahead()
    assert not rig.pool.wait_write_ahead(10)
    looked(host)
    assert rig.pool.host_backup_bytes() == 0
    host.others = OTHERS_AT_REST
    until(lambda: rig.pool.host_backup_bytes() == 12 * MIB)


def test_what_a_tensor_that_came_later_needs_is_taken_too(rig, host):
    host.others = TOTAL - 12 * MIB - LOW
    later = rig.machine.tensor("later", (MIB,)).fill_(1)
    assert rig.pool.plan(1).backup_bytes == 16 * MIB
    rig.pool.write_ahead()
    looked(host)
    assert rig.pool.host_backup_bytes() == 12 * MIB
    host.others = OTHERS_AT_REST
    until(lambda: rig.pool.host_backup_bytes() == 16 * MIB)
    assert (later == 1).all()


def test_memory_that_can_not_be_had_is_told_once_and_not_tried_again_by_itself(rig, monkeypatch, caplog):
    def refuse(_address, _n_bytes):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    host = Host(rig)
    monkeypatch.setattr(copies, "populate", refuse)
    rig.pool.watch_host(TURN_S)
    rig.pool.write_ahead()
    until(lambda: "the backup ahead of a sleep was not made" in caplog.text)
    looked(host, 20)
    assert caplog.text.count("the backup ahead of a sleep was not made") == 1
    monkeypatch.undo()
    rig.pool._core.room = host.room
    rig.pool.write_ahead()
    assert rig.pool.wait_write_ahead(10)


def test_a_driver_that_will_not_unlock_is_logged_and_the_pool_goes_on(host, monkeypatch, caplog):
    rig = host.rig
    before = rig.copies()
    monkeypatch.setattr(rig.pool._core.driver, "attach", lambda: (_ for _ in ()).throw(RuntimeError("no device")))
    host.others = TOTAL
    until(lambda: "the host's memory could not be looked after: no device" in caplog.text)
    looked(host)
    assert caplog.text.count("no device") == 1
    monkeypatch.undo()
    host.others = OTHERS_AT_REST
    rig.pool._core.room = host.room
    sleep(rig.pool)
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


def test_the_thread_ends_with_the_pool(rig, host):
    def watches():
        return [one for one in threading.enumerate() if one.name == "omni-host-watch"]

    assert len(watches()) == 1
    rig.pool.watch_host(TURN_S)
    rig.pool.write_ahead()
    assert len(watches()) == 1
    rig.pool.close()
    assert watches() == []


@pytest.mark.parametrize(("limit_gib", "low_gib"), [(16, 0.8), (128, 6.4), (1024, 8)])
def test_the_bound_is_a_twentieth_of_what_the_host_may_use_at_most_8_gib(limit_gib, low_gib):
    room = HostMemory(limit_bytes=limit_gib << 30, available_bytes=0)
    assert ahead.low_bytes(room) == int(low_gib * (1 << 30))
