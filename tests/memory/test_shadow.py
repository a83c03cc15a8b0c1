"""Clean shadow: what has changed is copied, and nothing else; what shows in a chunk's sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_notebook.memory.base import DeviceError, TransitionCancelledError
from omni_notebook.memory.device import shadow
from omni_notebook.memory.device.shadow import ChunkSums
from tests.memory.fake_cuda import MIB, Rig
from tests.memory.fake_ranges import OwnRig
from tests.memory.fake_rocm import RocmMachine
from tests.memory.machines import all_equal
from tests.memory.pools import sleep, wake

CHUNK = 2 * MIB
ROW = 8192


@pytest.fixture(params=[Rig, OwnRig], ids=["vllm", "own"])
def rig(request):
    return request.param()


def random_bytes(n_bytes, seed=1):
    return torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def sums(data):
    return all_sums(data)


def all_sums(*parts):
    taken = ChunkSums(parts[0].device)
    for part in parts:
        taken.add(part)
    return taken.result().numpy()


# ------------------------------------------------------------------------------------------ what shows


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, CHUNK - 1), change=st.integers(1, 255), plain=st.booleans())
def test_a_single_changed_byte_shows_in_every_sum(place, change, plain):
    data = torch.zeros(CHUNK, dtype=torch.uint8) if plain else random_bytes(CHUNK)
    before = sums(data)
    data[place] += change
    assert (sums(data) != before).all()


def exchanged(rows, first, other):
    rows[[first, other]] = rows[[other, first]].clone()


@pytest.mark.parametrize(("first", "other"), [(0, 1), (0, 255), (100, 200)])
def test_swapped_rows_and_columns_show(first, other):
    data = random_bytes(CHUNK)
    before = sums(data)
    exchanged(data.view(-1, ROW), first, other)
    assert (sums(data) != before).any()
    exchanged(data.view(-1, ROW), first, other)
    assert (sums(data) == before).all()
    exchanged(data.view(-1, ROW).t(), first, other)
    assert (sums(data) != before).any()


@pytest.mark.parametrize("width", [1, 2, 4, 8, 64, 4096])
def test_swapped_words_in_a_row_show(width):
    data = random_bytes(CHUNK)
    before = sums(data)
    exchanged(data.view(-1, width), 0, ROW // width - 1)
    assert (sums(data) != before).any()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(0, 255), min_size=2, max_size=2, unique=True),
    columns=st.lists(st.integers(0, ROW - 1), min_size=2, max_size=2, unique=True),
    step=st.integers(1, 100),
)
def test_what_cancels_in_rows_and_in_columns_shows_all_the_same(rows, columns, step):
    data = torch.full((256, ROW), 120, dtype=torch.uint8)
    before = sums(data.view(-1))
    (first, other), (left, right) = rows, columns
    data[first, left] += step
    data[first, right] -= step
    data[other, left] -= step
    data[other, right] += step
    assert (sums(data.view(-1)) != before).any()


def test_sums_are_those_of_the_formula_and_of_each_chunk_alone():
    data = random_bytes(3 * CHUNK)
    data[:CHUNK] = 255
    data[CHUNK : 2 * CHUNK] = 128
    inner, outer = (one.numpy() for one in shadow._weights())
    values = data.numpy().view(np.int8).reshape(3, 256, ROW).astype(np.int64)
    rows = values @ inner.astype(np.int64).T
    assert np.abs(rows).max() < 2**31
    assert (inner % 2 == 1).all()
    assert (inner > 0).all()
    expected = (rows.astype(np.uint64) * outer.astype(np.uint64)).sum(1)
    assert (sums(data).view(np.uint64) == expected).all()
    assert (all_sums(data[:CHUNK], data[CHUNK:]) == sums(data)).all()


def test_more_chunks_than_are_reduced_at_a_time_have_the_sums_that_each_has_alone(monkeypatch):
    data = random_bytes(9 * CHUNK)
    expected = np.concatenate([sums(one) for one in data.split(CHUNK)])
    monkeypatch.setattr(shadow, "_AT_ONCE", 2)
    assert (
        all_sums(data[:CHUNK], data[CHUNK : 6 * CHUNK], data[6 * CHUNK : 8 * CHUNK], data[8 * CHUNK :]) == expected
    ).all()


# ---------------------------------------------------------------------------------------- what is copied


def copied(rig):
    """Both reports of a sleep, and the ranges that it copied, by segment number and chunk."""
    seen, segments = [], rig.pool._core.table.of("weights")
    copies = rig.pool._core.copies
    begin = copies.begin
    copies.begin = lambda run: (seen.append(run), begin(run))[1]
    prepared, _ = sleep(rig.pool)
    del copies.begin
    wake(rig.pool)
    return prepared, [(segments.index(run.segment), run.offset // CHUNK, run.n_bytes // CHUNK) for run in seen]


def test_unchanged_weights_are_not_copied(rig):
    assert copied(rig)[1] == [(0, 0, 3), (1, 0, 1), (2, 0, 1), (3, 0, 1)]
    for _ in range(3):
        prepared, runs = copied(rig)
        assert (prepared.copied_bytes, prepared.skipped_clean_bytes, runs) == (0, 12 * MIB, [])


@pytest.mark.parametrize("place", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 12345, 3 * CHUNK - 1])
def test_one_changed_byte_anywhere_has_its_own_chunk_copied_alone(rig, place):
    copied(rig)
    rig.model.big.view(-1).view(torch.uint8)[place] ^= 1
    before = rig.copies()
    prepared, runs = copied(rig)
    assert runs == [(0, place // CHUNK, 1)]
    assert (prepared.copied_bytes, prepared.skipped_clean_bytes) == (2 * MIB, 10 * MIB)
    assert all_equal(rig.copies(), before)


def test_neighbouring_chunks_are_one_run_and_others_runs_of_their_own(rig):
    copied(rig)
    flat = rig.model.big.view(-1).view(torch.uint8)
    flat[5] ^= 1
    flat[2 * CHUNK] ^= 1
    rig.model.scale[0] += 1
    assert copied(rig)[1] == [(0, 0, 1), (0, 2, 1), (3, 0, 1)]
    flat[5] ^= 1
    flat[CHUNK] ^= 1
    assert copied(rig)[1] == [(0, 0, 2)]


def test_a_change_that_is_taken_back_is_no_change(rig):
    copied(rig)
    rig.model.big[7, 7] += 1
    assert copied(rig)[1] == [(0, 0, 1)]
    rig.model.big[7, 7] -= 1
    old = rig.model.big[7, 7].clone()
    assert copied(rig)[1] == [(0, 0, 1)]
    rig.model.big[7, 7] = 3
    rig.model.big[7, 7] = old
    assert copied(rig)[1] == []


def test_a_level_2_in_between_leaves_copies_that_serve_where_the_same_weights_came_back():
    rig = OwnRig()  # vLLM's segments hold anything between the tensors
    copied(rig)
    sleep(rig.pool, 2)
    wake(rig.pool)
    rig.fill()
    assert copied(rig)[0].copied_bytes == 0
    sleep(rig.pool, 2)
    wake(rig.pool)
    rig.fill()
    rig.model.big.add_(1)
    before = rig.copies()
    assert copied(rig)[0].copied_bytes == 6 * MIB
    assert all_equal(rig.copies(), before)


# --------------------------------------------------------------------------- where nothing can be known


def test_a_platform_that_can_not_look_at_bytes_copies_everything_each_time():
    rig = Rig(machine=RocmMachine())
    for _ in range(2):
        prepared, _ = sleep(rig.pool)
        assert (prepared.copied_bytes, prepared.skipped_clean_bytes) == (12 * MIB, 0)
        wake(rig.pool)


@pytest.mark.parametrize("when", ["always", "from the second sleep", "while it copies", "at the second look"])
def test_sums_that_can_not_be_taken_mean_copying_everything_and_no_error(rig, monkeypatch, when):
    real, calls = torch._int_mm, []
    refuse = {
        "always": lambda _number: True,
        "from the second sleep": lambda number: number > 4,
        "while it copies": lambda number: number <= 4,
        "at the second look": lambda number: number == 5,
    }[when]

    def int_mm(*args, out):
        calls.append(1)
        if refuse(len(calls)):
            msg = "no int8 matrix units"
            raise RuntimeError(msg)
        return real(*args, out=out)

    monkeypatch.setattr(torch, "_int_mm", int_mm)
    found = []
    for turn in range(3):
        rig.model.big[turn, 0] += 1
        before = rig.copies()
        prepared, _ = sleep(rig.pool)
        found.append(prepared.copied_bytes // MIB)
        wake(rig.pool)
        assert all_equal(rig.copies(), before)
    assert found == [12, 12, 2 if when == "at the second look" else 12]
    monkeypatch.setattr(torch, "_int_mm", real)
    for _ in range(2):
        prepared, _ = sleep(rig.pool)
        wake(rig.pool)
    assert prepared.copied_bytes == 0
    assert all_equal(rig.copies(), before)


def test_bytes_that_can_not_be_looked_at_end_no_sleep(rig, monkeypatch):
    sleep(rig.pool)
    wake(rig.pool)

    def refuse(*_):
        msg = "CUDA error: out of memory"
        raise RuntimeError(msg)

    monkeypatch.setattr(rig.pool._core.driver, "bytes_at", refuse)
    prepared, _ = sleep(rig.pool)
    assert prepared.copied_bytes == 12 * MIB


# ------------------------------------------------------------------------------ sleeps that do not end well


def spoil(rig, how):
    """A sleep that ends early."""
    if how == "aborted":
        rig.pool.prepare_sleep(1)
        rig.pool.abort_sleep()
    elif how == "aborted before it copied":
        rig.pool.prepare_sleep(1, late_copy=True)
        rig.pool.abort_sleep()
    elif how == "cancelled":
        asked = iter([False] * 3 + [True] * 9)
        with pytest.raises(TransitionCancelledError):
            rig.pool.prepare_sleep(1, cancelled=lambda: next(asked))
    elif how == "level 2":
        rig.pool.prepare_sleep(2)
        rig.pool.abort_sleep()
    else:
        name, number = how
        rig.cumem.fail(name, number)
        with pytest.raises(DeviceError):
            rig.pool.prepare_sleep(1)


@pytest.mark.parametrize(
    "how",
    [
        "aborted",
        "aborted before it copied",
        "cancelled",
        "level 2",
        ("memcpy", 1),
        ("memcpy", 2),
        ("memcpy", 4),
        ("wait", 1),
    ],
    ids=str,
)
def test_no_sleep_that_ended_early_leaves_a_copy_that_only_seems_clean(rig, how):
    sleep(rig.pool)
    wake(rig.pool)
    first = rig.copies()
    for tensor in rig.tensors():
        tensor.add_(1)
    second = rig.copies()
    spoil(rig, how)
    assert all_equal(rig.copies(), second)
    for contents in (first, second, first, first):
        for tensor, value in zip(rig.tensors(), contents, strict=True):
            tensor.copy_(value)
        sleep(rig.pool)
        wake(rig.pool)
        assert all_equal(rig.copies(), contents)


@pytest.mark.parametrize("how", ["drop_copies", "drop_backup"])
def test_copies_that_were_dropped_are_made_again(rig, how):
    sleep(rig.pool)
    if how == "drop_backup":
        rig.pool.drop_backup()
    wake(rig.pool)
    if how == "drop_copies":
        assert rig.pool.drop_copies() == 12 * MIB
        assert rig.pool.host_backup_bytes() == 0
    rig.fill()
    before = rig.copies()
    prepared, _ = sleep(rig.pool)
    assert prepared.copied_bytes == 12 * MIB
    wake(rig.pool)
    assert all_equal(rig.copies(), before)
