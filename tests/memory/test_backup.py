"""Where backups are: unnamed files, made ahead, refused when there is no room, given back."""

from __future__ import annotations

import errno
import os
import threading

import pytest
import torch

from omni_notebook.errors import ArgumentError, OutOfMemoryError
from omni_notebook.memory import spill
from omni_notebook.memory.base import BackupError
from omni_notebook.memory.spill import Spill
from tests.memory.pools import MIB, filled, sleep, wake


def test_a_backup_written_ahead_leaves_nothing_to_copy(pool, tmp_path):
    weights = filled(pool, 8 * MIB)
    before = weights.clone()
    pool.write_ahead()
    assert pool.wait_write_ahead(10)
    assert pool.host_backup_bytes() >= 8 * MIB
    assert list(tmp_path.iterdir()) == []
    prepared, _ = sleep(pool)
    assert (prepared.copied_bytes, prepared.skipped_clean_bytes) == (0, 8 * MIB)
    assert prepared.backup_location == str(tmp_path)
    wake(pool)
    assert torch.equal(weights, before)


def test_writes_during_the_write_ahead_are_never_lost(pool):
    weights = filled(pool, 32 * MIB)
    step = 1000003
    for round_ in range(4):
        pool.write_ahead()
        at = round_
        while not pool.wait_write_ahead(0):
            weights[at % len(weights)] ^= 255
            at += step
        before = weights.clone()
        sleep(pool)
        weights.zero_()
        wake(pool)
        assert torch.equal(weights, before)
        weights.random_(0, 256)


def test_a_write_while_its_chunk_is_being_copied_counts(make_pool, monkeypatch):
    pool = make_pool(tracking="userfaultfd")
    weights = filled(pool, 4 * MIB)
    write = Spill.write

    def write_and_change(self, chunk, data):
        write(self, chunk, data)
        if chunk.index == 1:
            weights[3 * MIB] ^= 255

    monkeypatch.setattr(Spill, "write", write_and_change)
    pool.write_ahead()
    assert pool.wait_write_ahead(10)
    monkeypatch.setattr(Spill, "write", write)
    before = weights.clone()
    prepared, _ = sleep(pool)
    assert prepared.copied_bytes == 2 * MIB
    wake(pool)
    assert torch.equal(weights, before)


def test_a_sleep_takes_over_a_write_ahead(pool, monkeypatch):
    weights = filled(pool, 16 * MIB)
    before = weights.clone()
    first_copied, go_on = threading.Event(), threading.Event()
    write = Spill.write

    def slow_write(self, chunk, data):
        write(self, chunk, data)
        first_copied.set()
        go_on.wait(10)

    monkeypatch.setattr(Spill, "write", slow_write)
    pool.write_ahead()
    assert first_copied.wait(10)
    monkeypatch.setattr(Spill, "write", write)
    threading.Timer(0.05, go_on.set).start()
    prepared, _ = sleep(pool)
    assert prepared.copied_bytes in {14 * MIB, 16 * MIB}
    assert not [thread for thread in threading.enumerate() if thread.name == "omni-write-ahead"]
    wake(pool)
    assert torch.equal(weights, before)


def test_without_a_nameless_file_kind_the_name_is_gone_at_once(make_pool, tmp_path, monkeypatch):
    real_open = os.open

    def no_tmpfile(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(spill.os, "open", no_tmpfile)
    pool = make_pool()
    weights = filled(pool, 3 * MIB)
    before = weights.clone()
    sleep(pool)
    assert list(tmp_path.iterdir()) == []
    wake(pool)
    assert torch.equal(weights, before)


def test_backups_take_what_they_hold_and_give_it_back(pool):
    filled(pool, 5 * MIB)
    assert pool.host_backup_bytes() == 0
    sleep(pool)
    assert 5 * MIB <= pool.host_backup_bytes() <= 5 * MIB + 64 * 1024
    pool.close()
    assert pool.host_backup_bytes() == 0


def refused(pool, weights):
    before, books, memory, backup = weights.clone(), pool.tags(), pool.memory(), pool.host_backup_bytes()
    with pytest.raises(OutOfMemoryError) as caught:
        pool.prepare_sleep(1)
    assert (pool.tags(), pool.memory(), pool.host_backup_bytes()) == (books, memory, backup)
    assert torch.equal(weights, before)
    return caught.value


def test_too_little_disk_is_refused_before_anything_is_written(make_pool, monkeypatch):
    pool = make_pool()
    weights = filled(pool, 6 * MIB)
    monkeypatch.setattr(spill, "disk_free_bytes", lambda _folder: 5 * MIB)
    error = refused(pool, weights)
    assert (error.needed_bytes, error.free_bytes) == (6 * MIB, 5 * MIB)
    assert "0.01 GiB does not fit" in str(error)
    assert "level 2" in str(error)
    monkeypatch.undo()
    sleep(pool)


def test_a_disk_that_fills_up_in_between_is_refused_too(make_pool, monkeypatch):
    pool = make_pool()
    weights = filled(pool, 6 * MIB)

    def full(_fd, _offset, _n_bytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spill.os, "posix_fallocate", full)
    assert "No space left" in str(refused(pool, weights))


def test_a_failing_disk_leaves_memory_awake_and_the_next_sleep_works(pool, monkeypatch):
    weights = filled(pool, 8 * MIB)
    before = weights.clone()
    write = Spill.write

    def broken(self, chunk, data):
        if chunk.index == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(self, chunk, data)

    monkeypatch.setattr(Spill, "write", broken)
    with pytest.raises(OSError, match="Input/output"):
        pool.prepare_sleep(1)
    assert pool.host_backup_bytes() == 0
    monkeypatch.undo()
    prepared, _ = sleep(pool)
    assert prepared.copied_bytes == 8 * MIB
    wake(pool)
    assert torch.equal(weights, before)


def test_a_failed_update_of_an_old_backup_is_made_good_by_the_next(pool, monkeypatch):
    weights = filled(pool, 8 * MIB)
    sleep(pool)
    wake(pool)
    weights.random_(0, 256)
    before = weights.clone()
    write = Spill.write

    def broken(self, chunk, data):
        if chunk.index == 2:
            write(self, chunk, data[: len(data) // 2])  # torn
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(self, chunk, data)

    monkeypatch.setattr(Spill, "write", broken)
    with pytest.raises(OSError, match="Input/output"):
        pool.prepare_sleep(1)
    monkeypatch.undo()
    assert pool.prepare_sleep(1).copied_bytes >= 2 * MIB
    pool.commit_sleep()
    wake(pool)
    assert torch.equal(weights, before)


def test_a_backup_that_was_cut_short_is_an_error_and_not_zeros(pool, monkeypatch):
    filled(pool, 8 * MIB)
    sleep(pool)
    for fd in pool._core.books["weights"].contents[0].spill._fds:
        os.ftruncate(fd, 100)
    with pytest.raises(BackupError, match="ended early"):
        pool.map_restore()
    assert pool.memory()["weights"].resident_bytes == 0
    pool.map()
    with pytest.raises(BackupError, match="ended early"):
        pool.restore()
    pool.abort_wake()


def test_a_failed_write_ahead_is_logged_and_the_sleep_says_why(make_pool, monkeypatch, caplog):
    pool = make_pool()
    filled(pool, 4 * MIB)
    monkeypatch.setattr(spill, "disk_free_bytes", lambda _folder: MIB)
    pool.write_ahead()
    assert not pool.wait_write_ahead(10)
    assert "ahead of a sleep was not made" in caplog.text
    with pytest.raises(OutOfMemoryError):
        pool.prepare_sleep(1)


@pytest.mark.parametrize("folder", ["/nowhere/at/all", "/proc/self/cmdline"])
def test_a_spill_dir_that_can_not_be_used_is_refused_at_once(make_pool, folder):
    with pytest.raises(ArgumentError, match="spill_dir"):
        make_pool(spill_dir=folder)


def test_an_unknown_backup_is_refused(make_pool):
    with pytest.raises(ArgumentError, match="checkpoint"):
        make_pool(backup="tape")


# ----------------------------------------------------------------------------- backup="checkpoint"


@pytest.fixture
def checkpointed(make_pool, tracking):
    pool = make_pool(backup="checkpoint", tracking=tracking)
    weights = filled(pool, 6 * MIB)
    source = weights.clone()
    pool.record_checksum()
    pool.set_checkpoint_restorer(lambda tag: weights.copy_(source) if tag == "weights" else None)
    return pool, weights, source


def test_checkpoint_backup_copies_nothing_and_takes_no_room(checkpointed):
    pool, weights, source = checkpointed
    pool.write_ahead()
    assert pool.wait_write_ahead(10)
    assert pool.plan(1).backup_bytes == 0
    prepared, _ = sleep(pool)
    assert prepared.backup == {"weights": "checkpoint"}
    assert (prepared.copied_bytes, prepared.modified, pool.host_backup_bytes()) == (0, False, 0)
    _, restored = wake(pool)
    assert restored.needs_reload == ()
    assert torch.equal(weights, source)


def test_modified_weights_fall_back_to_a_spill(checkpointed):
    pool, weights, _ = checkpointed
    weights.data[5] ^= 1
    before = weights.clone()
    prepared, _ = sleep(pool)
    assert (prepared.backup, prepared.modified) == ({"weights": "spill"}, True)
    wake(pool)
    assert torch.equal(weights, before)


def test_kept_tensors_come_back_with_a_checkpoint(checkpointed):
    pool, weights, source = checkpointed
    scale = filled(pool, 640, seed=9)
    pool.keep("weights", [scale])
    pool.record_checksum()
    before = scale.clone()
    assert sleep(pool)[0].backup == {"weights": "checkpoint"}
    pool.map_restore()
    pool.commit_wake()
    assert torch.equal(scale, before)
    assert torch.equal(weights, source)


def test_a_checkpoint_with_other_contents_is_not_taken(checkpointed):
    pool, weights, source = checkpointed
    sleep(pool)
    source[4] ^= 1
    with pytest.raises(BackupError, match="other contents"):
        pool.map_restore()
    assert pool.memory()["weights"].resident_bytes == 0
    source[4] ^= 1
    wake(pool)
    assert torch.equal(weights, source)
