"""Orders in the wrong state: a typed answer each time, and nothing changed by it."""

from __future__ import annotations

import threading

import pytest
import torch

from omni_notebook.errors import ArgumentError
from omni_notebook.memory.base import TransitionOrderError
from tests.memory.pools import MIB, filled, sleep, wake


def awake(pool):
    pass


def prepared(pool):
    pool.prepare_sleep(1)


def asleep(pool):
    sleep(pool)


def mapped(pool):
    sleep(pool)
    pool.map()


STEPS = {
    "prepare_sleep": lambda pool: pool.prepare_sleep(1),
    "commit_sleep": lambda pool: pool.commit_sleep(),
    "drop_backup": lambda pool: pool.drop_backup(),
    "modified_in_backup": lambda pool: pool.modified_in_backup(),
    "map": lambda pool: pool.map(),
    "map_restore": lambda pool: pool.map_restore(),
    "restore": lambda pool: pool.restore(),
    "commit_wake": lambda pool: pool.commit_wake(),
}
LEGAL = {
    awake: {"prepare_sleep"},
    prepared: {"commit_sleep"},
    asleep: {"drop_backup", "modified_in_backup", "map", "map_restore"},
    mapped: {"restore"},
}
REFUSED = [(state, step) for state, legal in LEGAL.items() for step in STEPS if step not in legal]


@pytest.mark.parametrize(("state", "step"), REFUSED)
def test_a_step_out_of_order_is_refused_and_changes_nothing(make_pool, state, step):
    pool = make_pool()
    weights = filled(pool, 4 * MIB)
    before = weights.clone()
    state(pool)
    books, memory, backup = pool.tags(), pool.memory(), pool.host_backup_bytes()

    with pytest.raises(TransitionOrderError):
        STEPS[step](pool)

    assert (pool.tags(), pool.memory(), pool.host_backup_bytes()) == (books, memory, backup)
    pool.abort_sleep()
    pool.abort_wake()
    if not pool.tags()["weights"].mapped:
        wake(pool)
    assert torch.equal(weights, before)


@pytest.mark.parametrize("state", [awake, asleep])
def test_an_abort_without_a_transition_does_nothing(make_pool, state):
    pool = make_pool()
    filled(pool, MIB)
    state(pool)
    books, memory = pool.tags(), pool.memory()
    pool.abort_sleep()
    pool.abort_wake()
    assert (pool.tags(), pool.memory()) == (books, memory)


@pytest.mark.parametrize("tags", [["kv"], ["weights", "nothing"], [], "weights"])
@pytest.mark.parametrize("step", ["plan", "prepare_sleep", "map", "drop_backup", "restore"])
def test_unknown_tags_are_refused(make_pool, step, tags):
    pool = make_pool()
    filled(pool, MIB)
    levels = (1,) if step in {"plan", "prepare_sleep"} else ()
    with pytest.raises(ArgumentError, match="weights"):
        getattr(pool, step)(*levels, tags)
    assert pool.memory()["weights"].resident_bytes == 2 * MIB


@pytest.mark.parametrize("level", [0, 3, -1, True, "1"])
def test_unknown_levels_are_refused(make_pool, level):
    pool = make_pool()
    filled(pool, MIB)
    for step in (pool.plan, pool.prepare_sleep):
        with pytest.raises(ArgumentError, match="level"):
            step(level)


def test_an_empty_pool_has_nothing_to_put_to_sleep(make_pool):
    pool = make_pool()
    assert pool.plan(1).expected_bytes == 0
    assert pool.memory() == {}
    with pytest.raises(TransitionOrderError, match="empty"):
        pool.prepare_sleep(1)


def test_a_sleeping_tag_takes_no_new_tensors_and_no_checksum(make_pool):
    pool = make_pool()
    filled(pool, MIB)
    pool.record_checksum()
    sleep(pool)
    with pytest.raises(TransitionOrderError, match="asleep"):
        filled(pool, MIB)
    with pytest.raises(TransitionOrderError, match="asleep"):
        pool.record_checksum()
    with pytest.raises(TransitionOrderError, match="asleep"):
        pool.verify_checksum()


def test_verifying_without_a_record_says_what_to_call(make_pool):
    pool = make_pool()
    filled(pool, MIB)
    with pytest.raises(TransitionOrderError, match="record_checksum"):
        pool.verify_checksum()


def test_a_wake_of_recomputable_memory_needs_no_restore(make_pool):
    pool = make_pool()
    pool.empty((MIB,), torch.uint8)
    sleep(pool)
    pool.map()
    pool.commit_wake()
    assert pool.tags()["kv_cache"].mapped


def test_restoring_twice_does_not_overwrite_what_the_caller_filled_in(make_pool):
    pool = make_pool()
    weights = filled(pool, MIB)
    sleep(pool)
    pool.map()
    pool.restore()
    weights.fill_(3)
    assert pool.restore().copied_bytes == 0
    pool.commit_wake()
    assert weights.eq(3).all()


@pytest.mark.parametrize("state", [awake, prepared, asleep, mapped])
def test_close_in_any_state_gives_everything_back(make_pool, state):
    pool = make_pool()
    weights = filled(pool, 8 * MIB)
    content = pool._core.books["weights"].contents[0]
    threads = threading.active_count()
    pool.write_ahead()
    state(pool)
    pool.close()
    pool.close()
    assert content.segment.resident_bytes() == 0
    assert (pool.host_backup_bytes(), pool.memory(), pool.tags()) == (0, {}, {})
    assert threading.active_count() == threads
    assert not weights.any()  # a late look sees zeros, it does not crash
    weights.fill_(1)
    pool.abort_sleep()
    pool.abort_wake()


@pytest.mark.parametrize("step", ["write_ahead", "prepare_sleep", "adopt", "empty", "map"])
def test_a_closed_pool_refuses(make_pool, step):
    pool = make_pool()
    filled(pool, MIB)
    pool.close()
    arguments = {"prepare_sleep": (1,), "adopt": (torch.nn.Linear(2, 2),), "empty": ((2,), torch.float32)}
    with pytest.raises(TransitionOrderError, match=r"closed|empty"):
        getattr(pool, step)(*arguments.get(step, ()))


def test_close_from_another_thread_ends_a_running_copy(make_pool):
    pool = make_pool()
    filled(pool, 32 * MIB)
    copying, answers = threading.Event(), []

    def cancelled():
        copying.set()
        closer.join(0.01) if closer.is_alive() else None
        return False

    def order():
        try:
            pool.prepare_sleep(1, cancelled=cancelled)
        except Exception as error:  # noqa: BLE001
            answers.append(type(error).__name__)

    closer = threading.Thread(target=lambda: copying.wait(10) and pool.close())
    sleeper = threading.Thread(target=order)
    closer.start()
    sleeper.start()
    sleeper.join(20)
    closer.join(20)
    assert answers == ["TransitionCancelledError"]
    assert pool.host_backup_bytes() == 0
