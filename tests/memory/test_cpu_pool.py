"""Sleep and wake of the CPU pool: what leaves, what comes back, byte for byte, at the same addresses."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from omni_notebook.errors import ArgumentError
from omni_notebook.memory.base import TransitionCancelledError
from tests.memory.pools import MIB, filled, sleep, wake


def test_level_1_brings_every_byte_back_and_drops_only_the_recomputable(pool):
    weights, kv = filled(pool, 5 * MIB + 77), pool.empty((3 * MIB,), torch.uint8)
    kv.fill_(9)
    before, addresses = weights.clone(), (weights.data_ptr(), kv.data_ptr())

    prepared, unmapped = sleep(pool)

    assert prepared.backup == {"weights": "spill", "kv_cache": None}
    assert prepared.copied_bytes == 5 * MIB + 128
    assert unmapped.freed == {"weights": 6 * MIB, "kv_cache": 4 * MIB}
    assert unmapped.expected_bytes == unmapped.observed_bytes == 10 * MIB
    assert unmapped.scope == "mapping"
    assert {name: tag.resident_bytes for name, tag in pool.memory().items()} == {"weights": 0, "kv_cache": 0}

    mapped, restored = wake(pool)

    assert mapped.mapped_bytes == 10 * MIB
    assert restored.copied_bytes == 5 * MIB + 128
    assert restored.needs_reload == ()
    assert torch.equal(weights, before)
    assert not kv.any()
    assert (weights.data_ptr(), kv.data_ptr()) == addresses


def test_level_2_discards_all_but_kept_tensors(pool):
    weights, ballast = filled(pool, 4 * MIB), filled(pool, 2 * MIB, tag="ballast", seed=2)
    kept = weights[MIB : MIB + 1000]
    pool.keep("weights", [kept])
    expected = kept.clone()
    pool.write_ahead()
    assert pool.wait_write_ahead(10)

    prepared, _ = sleep(pool, 2)

    assert prepared.backup == {"weights": "host", "ballast": None}
    assert prepared.host_backup_bytes == pool.host_backup_bytes() == 1000
    _, restored = wake(pool)
    assert restored.needs_reload == ("weights", "ballast")
    assert restored.copied_bytes == 1000
    assert torch.equal(kept, expected)
    assert weights.count_nonzero() == expected.count_nonzero()
    assert not ballast.any()
    assert pool.host_backup_bytes() == 0


def test_mapped_tags_are_zero_and_resident_until_restored(pool):
    weights = filled(pool, 4 * MIB)
    sleep(pool)
    weights[5] = 1  # a stray write while asleep
    assert pool.map().mapped_bytes == 4 * MIB
    assert not weights.any()
    assert pool.memory()["weights"].resident_bytes == 4 * MIB


def test_map_restore_is_map_and_restore(pool):
    weights, kv = filled(pool, 9 * MIB), pool.empty((MIB,), torch.uint8)
    before = weights.clone()
    sleep(pool)
    mapped, restored = pool.map_restore()
    pool.commit_wake()
    assert mapped.mapped_bytes == 12 * MIB
    assert restored.copied_bytes == 9 * MIB
    assert torch.equal(weights, before)
    assert not kv.any()
    prepared, _ = sleep(pool)
    assert prepared.copied_bytes == 0


@pytest.mark.parametrize("first", ["weights", "kv_cache"])
def test_tags_wake_in_any_order(pool, first):
    weights, kv = filled(pool, 4 * MIB), pool.empty((2 * MIB,), torch.uint8)
    before = weights.clone()
    sleep(pool)
    second = {"weights": "kv_cache", "kv_cache": "weights"}[first]

    wake(pool, [first])
    resident = {name: tag.resident_bytes for name, tag in pool.memory().items()}
    assert resident[second] == 0
    assert resident[first] == pool.tags()[first].span_bytes
    assert [name for name, tag in pool.tags().items() if tag.mapped] == [first]
    wake(pool, [second])

    assert torch.equal(weights, before)
    assert not kv.any()


def test_only_the_named_tags_sleep(pool):
    filled(pool, 2 * MIB)
    pool.empty((2 * MIB,), torch.uint8)
    _, unmapped = sleep(pool, 1, ["kv_cache"])
    assert unmapped.freed == {"kv_cache": 2 * MIB}
    _, unmapped = sleep(pool)
    assert unmapped.freed == {"weights": 2 * MIB}


def write_data(weights):
    weights.data[12345] ^= 1


def write_numpy(weights):
    weights.numpy()[3 * MIB + 1] ^= 255


def write_pointer(weights):
    ctypes.memset(weights.data_ptr() + 5 * MIB - 3, 0xA5, 6)


def write_kernel(weights):
    with open("/dev/zero", "rb", buffering=0) as zeros:  # noqa: PTH123
        zeros.readinto(memoryview(weights.numpy())[MIB : MIB + 5])


@pytest.mark.parametrize("write", [write_data, write_numpy, write_pointer, write_kernel])
def test_a_write_between_two_sleeps_is_kept_and_only_its_chunks_copied(pool, write):
    weights = filled(pool, 8 * MIB)
    sleep(pool)
    wake(pool)
    write(weights)
    before = weights.clone()

    prepared, _ = sleep(pool)

    assert 2 * MIB <= prepared.copied_bytes <= 4 * MIB
    assert prepared.skipped_clean_bytes == 8 * MIB - prepared.copied_bytes
    weights.fill_(0)
    wake(pool)
    assert torch.equal(weights, before)


def test_a_clean_repeat_copies_nothing(pool):
    weights = filled(pool, 8 * MIB)
    before = weights.clone()
    for _ in range(3):
        sleep(pool)
        wake(pool)
    prepared, _ = sleep(pool)
    assert (prepared.copied_bytes, prepared.skipped_clean_bytes) == (0, 8 * MIB)
    wake(pool)
    assert torch.equal(weights, before)


def test_plan_changes_nothing_and_is_what_happens(pool):
    filled(pool, 5 * MIB)
    pool.keep("weights", [filled(pool, 640, seed=3)])
    pool.empty((MIB,), torch.uint8)
    before = pool.memory()

    one, two = pool.plan(1), pool.plan(2, ["weights"])

    assert pool.memory() == before
    assert one.tags == {"weights": 8 * MIB, "kv_cache": 2 * MIB}
    assert (one.expected_bytes, one.backup_bytes, one.kept_bytes) == (10 * MIB, 5 * MIB + 640, 0)
    assert (two.expected_bytes, two.backup_bytes, two.kept_bytes) == (8 * MIB, 0, 640)
    prepared, unmapped = sleep(pool)
    assert prepared.copied_bytes == one.backup_bytes
    assert unmapped.freed == one.tags


def test_abort_of_a_prepared_sleep_leaves_memory_and_loses_no_write(pool):
    weights = filled(pool, 6 * MIB)
    before = weights.clone()
    assert pool.prepare_sleep(1).copied_bytes == 6 * MIB
    pool.abort_sleep()
    assert torch.equal(weights, before)
    assert pool.memory()["weights"].resident_bytes == 6 * MIB
    weights[MIB] ^= 1
    before = weights.clone()
    sleep(pool)
    wake(pool)
    assert torch.equal(weights, before)


def test_abort_of_a_wake_unmaps_and_a_later_wake_works(pool):
    weights = filled(pool, 6 * MIB)
    before = weights.clone()
    sleep(pool)
    backup = pool.host_backup_bytes()
    for step in (pool.map, pool.restore):
        if step == pool.restore:
            pool.map()
        step()
        weights[7] ^= 3
        pool.abort_wake()
        assert pool.memory()["weights"].resident_bytes == 0
        assert pool.host_backup_bytes() == backup
    wake(pool)
    assert torch.equal(weights, before)


def test_a_cancelled_sleep_leaves_everything_as_before(pool):
    weights = filled(pool, 16 * MIB)
    before = weights.clone()
    asked = iter([False, *[True] * 20])  # a helper may copy all the rest: the copying thread asks twice for sure
    with pytest.raises(TransitionCancelledError, match="memory is as before"):
        pool.prepare_sleep(1, cancelled=lambda: next(asked))
    assert pool.host_backup_bytes() == 0
    assert torch.equal(weights, before)
    prepared, _ = sleep(pool)
    assert prepared.copied_bytes == 16 * MIB
    wake(pool)
    assert torch.equal(weights, before)


def test_drop_backup_turns_level_1_into_level_2_and_saves_kept_tensors(pool):
    weights = filled(pool, 6 * MIB)
    kept = weights[2 * MIB - 100 : 2 * MIB + 100]  # over a chunk's border
    pool.keep("weights", [kept])
    expected = kept.clone()
    sleep(pool)
    before = pool.host_backup_bytes()
    assert pool.drop_backup() == before - 200
    assert pool.host_backup_bytes() == 200
    _, restored = wake(pool)
    assert restored.needs_reload == ("weights",)
    assert torch.equal(kept, expected)
    assert weights.count_nonzero() == expected.count_nonzero()


def test_modified_is_told_at_level_2(pool):
    weights = filled(pool, 6 * MIB)
    assert pool.prepare_sleep(2).modified is None  # nothing recorded
    pool.abort_sleep()
    pool.record_checksum()
    assert pool.prepare_sleep(2).modified is False
    pool.abort_sleep()
    weights.data[5 * MIB] ^= 1
    assert pool.prepare_sleep(2).modified is True
    pool.abort_sleep()
    weights.data[5 * MIB] ^= 1  # written, and yet the same
    assert pool.prepare_sleep(2).modified is False


def test_modified_in_backup_looks_into_the_spill(pool):
    weights = filled(pool, 6 * MIB)
    pool.record_checksum()
    sleep(pool)
    assert pool.modified_in_backup() is False
    wake(pool)
    weights.data[3] ^= 1
    sleep(pool)
    assert pool.modified_in_backup() is True


def test_checksum_is_verified_after_a_level_2_reload(pool):
    weights = filled(pool, 6 * MIB)
    before = weights.clone()
    digest = pool.record_checksum()
    assert len(digest) == 16
    assert pool.verify_checksum()
    sleep(pool, 2)
    wake(pool)
    assert not pool.verify_checksum()
    weights.copy_(before)
    assert pool.verify_checksum()
    assert pool.record_checksum() == digest


def test_memory_answers_from_another_thread_during_transitions(pool):
    filled(pool, 64 * MIB)
    stop, seen, errors = threading.Event(), [], []

    def watch():
        try:
            while not stop.is_set():
                seen.append(pool.memory()["weights"].resident_bytes)
                pool.host_backup_bytes()
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3):
        sleep(pool)
        wake(pool)
    stop.set()
    watcher.join()
    assert not errors
    assert all(0 <= n_bytes <= 64 * MIB for n_bytes in seen)


def test_the_room_for_a_backup_grows_with_the_tag(pool):
    first = filled(pool, 2 * MIB)
    sleep(pool)
    wake(pool)
    second = filled(pool, 4 * MIB, seed=5)
    before = first.clone(), second.clone()
    prepared, unmapped = sleep(pool)
    assert (prepared.copied_bytes, unmapped.observed_bytes) == (4 * MIB, 6 * MIB)
    wake(pool)
    assert torch.equal(first, before[0])
    assert torch.equal(second, before[1])


def test_two_pools_share_nothing(make_pool):
    one, two = make_pool(), make_pool()
    first, second = filled(one, 4 * MIB, seed=1), filled(two, 4 * MIB, seed=2)
    before = second.clone()
    sleep(one)
    one.close()
    assert torch.equal(second, before)
    sleep(two)
    wake(two)
    assert torch.equal(second, before)
    assert not first.any()


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_a_tag_is_either_recomputable_or_not(pool, tag):
    filled(pool, 10)
    pool.empty((4,), torch.float32)
    with pytest.raises(ArgumentError, match="can not be both"):
        pool.empty((4,), torch.float32, tag, recomputable=tag == "weights")


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64])
def test_every_kind_of_tensor_can_be_had(pool, dtype):
    tensor = pool.empty((3, 5), dtype)
    assert tensor.dtype is dtype
    assert tensor.shape == (3, 5)
    assert tensor.data_ptr() % 64 == 0
    assert not tensor.to(torch.complex64).any()
    assert pool.empty((0, 3), dtype).numel() == 0
    assert pool.empty((), dtype).numel() == 1


def test_a_negative_size_is_refused(pool):
    with pytest.raises(ArgumentError, match="negative"):
        pool.empty((2, -1), torch.float32)
