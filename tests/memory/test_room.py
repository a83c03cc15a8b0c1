"""A wake without room: refused with bytes, memory as before, and later it works."""

from __future__ import annotations

import errno
import gc
import os

import psutil
import pytest
import torch

from omni_notebook.errors import OutOfMemoryError
from omni_notebook.memory import libc
from omni_notebook.memory.arena import Segment
from omni_notebook.memory.base import HostMemory
from tests.memory.pools import MIB, filled, sleep, wake


@pytest.mark.parametrize("step", ["map", "map_restore"])
def test_too_little_ram_is_refused_before_a_page_is_taken(make_pool, step):
    room = [2**40]
    pool = make_pool(room=lambda: HostMemory(limit_bytes=2**40, available_bytes=room[0]))
    weights = filled(pool, 16 * MIB)
    before = weights.clone()
    sleep(pool)
    backup = pool.host_backup_bytes()
    room[0] = 10 * MIB
    with pytest.raises(OutOfMemoryError, match=r"0\.02 GiB of host memory are needed and 0\.01 GiB are free") as caught:
        getattr(pool, step)()
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (16 * MIB, 10 * MIB)
    assert pool.memory()["weights"].resident_bytes == 0
    assert (pool.host_backup_bytes(), pool.tags()["weights"].mapped) == (backup, False)
    room[0] = 2**40
    wake(pool)
    assert torch.equal(weights, before)


@pytest.mark.parametrize("step", ["map", "map_restore"])
def test_memory_that_runs_out_half_way_is_given_back(make_pool, monkeypatch, step):
    pool = make_pool()
    weights = filled(pool, 16 * MIB)
    pool.empty((8 * MIB,), torch.uint8)
    before = weights.clone()
    sleep(pool)
    advise, populated = libc.advise, []

    def out_of_memory(address, n_bytes, advice):
        if advice == libc.MADV_POPULATE_WRITE:
            populated.append(address)
            if len(populated) > 9:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        advise(address, n_bytes, advice)

    monkeypatch.setattr(libc, "advise", out_of_memory)
    with pytest.raises(OutOfMemoryError, match="Cannot allocate memory") as caught:
        getattr(pool, step)()
    assert caught.value.needed_bytes == 24 * MIB
    assert {name: tag.resident_bytes for name, tag in pool.memory().items()} == {"weights": 0, "kv_cache": 0}
    monkeypatch.undo()
    wake(pool)
    assert torch.equal(weights, before)


def test_a_disk_error_in_a_wake_is_no_memory_error(make_pool, monkeypatch):
    pool = make_pool()
    weights = filled(pool, 8 * MIB)
    before = weights.clone()
    sleep(pool)

    def broken(_fd, _buffers, _offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output") as caught:
        pool.map_restore()
    assert not isinstance(caught.value, OutOfMemoryError)
    assert pool.memory()["weights"].resident_bytes == 0
    monkeypatch.undo()
    wake(pool)
    assert torch.equal(weights, before)


def test_a_segment_that_can_not_be_filled_leaves_nothing(monkeypatch):
    advise, reserve, unmap, reserved, released = libc.advise, libc.reserve, libc.unmap, [], []

    def noted(n_bytes):
        reserved.append((reserve(n_bytes), n_bytes))
        return reserved[-1][0]

    def out_of_memory(address, n_bytes, advice):
        if advice == libc.MADV_POPULATE_WRITE and n_bytes:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        advise(address, n_bytes, advice)

    monkeypatch.setattr(libc, "advise", out_of_memory)
    monkeypatch.setattr(libc, "reserve", noted)
    monkeypatch.setattr(libc, "unmap", lambda base, n_bytes: (released.append((base, n_bytes)), unmap(base, n_bytes)))
    with pytest.raises(OutOfMemoryError) as caught:
        Segment(4 * MIB)
    assert caught.value.needed_bytes == 4 * MIB
    del caught
    gc.collect()
    assert [n_bytes for _, n_bytes in reserved] == [10 * MIB]
    assert released.count(reserved[0]) == 1  # earlier tests' segments may go at this moment too


def test_pages_that_will_not_leave_are_reported_and_not_claimed(make_pool, monkeypatch):
    pool = make_pool()
    filled(pool, 4 * MIB)
    pool.prepare_sleep(1)
    advise = libc.advise

    def held(address, n_bytes, advice):
        if advice in {libc.MADV_DONTNEED, libc.MADV_DONTNEED_LOCKED}:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        advise(address, n_bytes, advice)

    monkeypatch.setattr(libc, "advise", held)
    unmapped = pool.commit_sleep()
    monkeypatch.undo()
    assert (unmapped.expected_bytes, unmapped.observed_bytes) == (4 * MIB, 0)
    assert "weights" in unmapped.note


def test_an_allocation_that_does_not_fit_is_refused_before_a_page_is_touched(make_pool):
    pool = make_pool()
    before = psutil.Process().memory_info().rss
    with pytest.raises(OutOfMemoryError, match="nothing changed") as caught:
        pool.empty((2**50,), torch.uint8, "ballast", recomputable=False)
    assert caught.value.needed_bytes == 2**50
    assert 0 < caught.value.free_bytes < 2**50
    assert psutil.Process().memory_info().rss - before < 64 * MIB
    assert dict(pool.tags()) == {}
