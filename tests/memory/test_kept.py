"""Tags that are kept from end to end, tensors that are kept later than others, and tags that are given up for good."""

from __future__ import annotations

import pytest
import torch

from omni_notebook.errors import ArgumentError
from omni_notebook.memory.base import TransitionOrderError
from omni_notebook.memory.residency import resident_bytes
from tests.memory.pools import MIB, filled, sleep, wake


def kept(pool, n_bytes, seed):
    """A tensor of the tag `lora`, all of it kept."""
    tensor = filled(pool, n_bytes, tag="lora", seed=seed)
    pool.keep("lora", [tensor])
    return tensor


@pytest.mark.parametrize("level", [1, 2])
def test_a_tag_that_is_kept_whole_is_backed_up_at_every_level_and_needs_no_reload(pool, level):
    weights, first = filled(pool, 4 * MIB), kept(pool, 3 * MIB + 5, seed=2)
    sleep(pool, level)
    wake(pool)
    second = kept(pool, MIB, seed=3)  # made and kept after a sleep
    before = first.clone(), second.clone()
    planned = pool.plan(level, ["lora"])

    prepared, unmapped = sleep(pool, level)

    assert prepared.backup == {"weights": "spill" if level == 1 else None, "lora": "spill"}
    assert (planned.backup_bytes, planned.kept_bytes) == (3 * MIB + 64 + MIB, 0)
    assert unmapped.freed["lora"] == 6 * MIB
    assert pool.host_backup_bytes() >= planned.backup_bytes  # in a file: none of it is this process's memory
    _, restored = wake(pool)
    assert restored.needs_reload == (() if level == 1 else ("weights",))
    assert torch.equal(first, before[0])
    assert torch.equal(second, before[1])
    assert bool(weights.any()) == (level == 1)


def test_what_was_written_since_the_last_backup_is_there_after_level_2(pool):
    tensor = kept(pool, 5 * MIB, seed=2)
    pool.write_ahead()
    assert pool.wait_write_ahead(10)
    tensor[3 * MIB : 3 * MIB + 9] = 7
    before = tensor.clone()
    prepared, _ = sleep(pool, 2)
    assert prepared.copied_bytes == 2 * MIB
    wake(pool)
    assert torch.equal(tensor, before)


def test_level_1_to_2_leaves_the_backup_of_a_tag_that_is_kept_whole(pool):
    weights, tensor = filled(pool, 4 * MIB), kept(pool, 2 * MIB, seed=2)
    before = tensor.clone()
    sleep(pool, 1)
    held = pool.host_backup_bytes()
    freed = pool.drop_backup()
    assert freed == pytest.approx(4 * MIB, abs=MIB)
    assert pool.host_backup_bytes() == held - freed
    _, restored = wake(pool)
    assert restored.needs_reload == ("weights",)
    assert torch.equal(tensor, before)
    assert not weights.any()


def test_a_tag_with_a_part_that_is_not_kept_keeps_the_rest_in_host_memory(pool):
    tensor = kept(pool, 2 * MIB, seed=2)
    other = filled(pool, MIB, tag="lora", seed=3)
    before = tensor.clone()
    prepared, _ = sleep(pool, 2)
    assert prepared.backup == {"lora": "host"}
    _, restored = wake(pool)
    assert restored.needs_reload == ("lora",)
    assert torch.equal(tensor, before)
    assert not other.any()


def test_a_wake_that_was_called_off_can_be_made_again(pool):
    tensor = kept(pool, 2 * MIB, seed=2)
    before = tensor.clone()
    sleep(pool, 2)
    pool.map_restore()
    pool.abort_wake()
    wake(pool)
    assert torch.equal(tensor, before)


def test_a_discarded_tag_gives_its_pages_and_its_backup_back_and_can_be_made_anew(pool):
    weights, tensor = filled(pool, 4 * MIB), kept(pool, 2 * MIB, seed=2)
    pool.write_ahead()
    assert pool.wait_write_ahead(10)
    address, held, before = tensor.data_ptr(), pool.host_backup_bytes(), weights.clone()
    pool.discard("lora")
    assert resident_bytes(address, 2 * MIB) == 0
    assert not tensor.any()
    assert pool.host_backup_bytes() == pytest.approx(held - 2 * MIB, abs=MIB)
    assert set(pool.tags()) == set(pool.memory()) == {"weights"}
    for level in (1, 2):
        assert sleep(pool, level)[1].freed == {"weights": 4 * MIB}
        wake(pool)
        assert torch.equal(weights, before) == (level == 1)
    again = kept(pool, MIB, seed=4)
    wanted = again.clone()
    sleep(pool, 2)
    wake(pool)
    assert torch.equal(again, wanted)


def test_only_an_awake_tag_that_is_there_can_be_discarded(pool):
    with pytest.raises(ArgumentError, match="unknown tag 'lora'"):
        pool.discard("lora")
    tensor = kept(pool, MIB, seed=2)
    before = tensor.clone()
    sleep(pool, 2)
    with pytest.raises(TransitionOrderError, match="it must be awake"):
        pool.discard("lora")
    wake(pool)
    assert torch.equal(tensor, before)
