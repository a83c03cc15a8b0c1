"""What the pool over vLLM's CUDA allocator keeps beside the contract of all platforms, against the same fakes.

They behave as vLLM 0.24's extension and NVML were recorded to.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import nn

from omni_notebook.errors import ArgumentError, UnsupportedError
from omni_notebook.memory.base import DeviceError, TransitionOrderError
from omni_notebook.memory.device import shadow
from omni_notebook.memory.device.checksum import Summer, pieces
from tests.memory.fake_cuda import MIB, NewData, OldData, Rig
from tests.memory.machines import all_equal
from tests.memory.pools import sleep, wake


@pytest.fixture(params=[OldData, NewData], ids=["vllm-0.24", "vllm-later"])
def rig(request):
    return Rig(request.param)


# ----------------------------------------------------------------------------- copies on the host


def test_locked_host_memory_outlives_a_level_2_sleep_and_serves_the_next_level_1(rig):
    before = rig.copies()
    sleep(rig.pool)
    wake(rig.pool)
    pinned, kept = dict(rig.machine.libcuda.pinned), 64 * 4 + 3 * 4
    prepared, _ = sleep(rig.pool, 2)
    assert prepared.backup["weights"] == "host"
    assert prepared.host_backup_bytes == rig.pool.host_backup_bytes() == 12 * MIB + kept
    _, restored = wake(rig.pool)
    assert (restored.needs_reload, restored.copied_bytes) == (("weights",), kept)
    assert not rig.model.big.any()
    rig.fill()
    sleep(rig.pool)
    wake(rig.pool)
    assert rig.machine.libcuda.pinned == pinned
    assert all_equal(rig.copies(), before)


def test_locked_host_memory_goes_with_a_level_2_sleep_where_the_host_has_little_to_spare(rig):
    sleep(rig.pool)
    wake(rig.pool)
    rig.machine.host_bytes = 4 * 12 * MIB - 1
    prepared, _ = sleep(rig.pool, 2)
    assert prepared.host_backup_bytes == rig.pool.host_backup_bytes() == 64 * 4 + 3 * 4
    assert rig.machine.libcuda.pinned == {}


def test_memory_that_can_not_be_pinned_is_copied_all_the_same_and_called_pageable(rig):
    rig.machine.libcuda.pin_fails = True
    before = rig.copies()
    prepared, _ = sleep(rig.pool)
    assert prepared.backup["weights"] == "pageable"
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


# ----------------------------------------------------------------------------- one step at a time


def test_copies_that_fail_after_they_were_begun_end_a_sleep_and_a_wake_that_change_nothing(rig):
    before = rig.copies()
    rig.cumem.fail("wait", 1)
    with pytest.raises(DeviceError, match="cuStreamSynchronize"):
        rig.pool.prepare_sleep(1)
    assert (rig.pool.host_backup_bytes(), rig.machine.libcuda.pinned) == (0, {})
    sleep(rig.pool)
    for step in (rig.pool.map_restore, rig.pool.map):
        rig.cumem.fail("wait", 1)
        with pytest.raises(DeviceError, match="cuStreamSynchronize"):
            step()
        assert rig.gpu.mappings == {}
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


def test_a_wake_in_one_pass_fills_while_it_maps_and_zeroes_only_what_has_no_copy(rig):
    before = rig.copies()
    sleep(rig.pool)
    zeroed = rig.cumem.calls["memset"]
    mapped, restored = rig.pool.map_restore()
    assert (mapped.mapped_bytes, restored.copied_bytes, restored.needs_reload) == (16 * MIB, 12 * MIB, ())
    assert rig.cumem.calls["memset"] == zeroed + 1
    rig.pool.commit_wake()
    assert all_equal(rig.copies(), before)
    assert not rig.cache.kv.any()


# ------------------------------------------------------------------------------- level 1 to level 2


def test_a_copy_that_differs_from_the_weights_as_loaded_is_found_before_it_is_dropped(rig):
    sleep(rig.pool)
    assert rig.pool.modified_in_backup()  # no record: nobody knows
    wake(rig.pool)
    rig.pool.record_checksum()
    sleep(rig.pool)
    assert not rig.pool.modified_in_backup()
    wake(rig.pool)
    rig.model.turned[3, 3] += 1
    sleep(rig.pool)
    assert rig.pool.modified_in_backup()


# ---------------------------------------------------------------------------------------- checksums


def test_the_checksum_sees_every_write_and_is_the_same_for_the_same_contents(rig):
    first = rig.pool.record_checksum()
    assert len(first) == 16
    assert rig.pool.verify_checksum()
    assert rig.pool.prepare_sleep(2).modified is False
    rig.pool.abort_sleep()
    for tensor in (rig.model.big, rig.model.turned, rig.model.table):
        old = tensor.view(-1)[0].clone() if tensor.is_contiguous() else tensor[0, 0].clone()
        place = (0,) * tensor.dim()
        tensor[place] += 1
        assert not rig.pool.verify_checksum()
        assert rig.pool.prepare_sleep(2).modified is True
        rig.pool.abort_sleep()
        tensor[place] = old
    assert rig.pool.verify_checksum()
    assert rig.pool.record_checksum() == first


def test_two_swapped_values_change_the_checksum(rig):
    rig.pool.record_checksum()
    rig.model.big[[0, 1]] = rig.model.big[[1, 0]].clone()
    assert not rig.pool.verify_checksum()


def test_gaps_between_tensors_do_not_count(rig):
    rig.pool.record_checksum()
    sleep(rig.pool, 2)
    wake(rig.pool)
    rig.fill()  # what is between the tensors is zero now, and was not
    assert rig.pool.verify_checksum()


def test_without_a_record_nothing_is_called_modified(rig):
    with pytest.raises(TransitionOrderError, match="record_checksum"):
        rig.pool.verify_checksum()
    assert rig.pool.prepare_sleep(2).modified is None


def sums_of(data):
    summer = Summer(torch.device("cpu"))
    rows = summer.add([data])
    return summer.result().view(np.uint64)[rows]


@pytest.mark.parametrize("n_bytes", [8, 24, 2 * MIB, 2 * MIB + 8, 37 * MIB + 16])
def test_the_sums_are_those_of_the_formula(n_bytes):
    data = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n_bytes))
    sums = sums_of(data)
    inner, outer = (one.numpy().astype(np.int64) for one in shadow._weights())
    padded = torch.cat([data, torch.zeros(-n_bytes % (2 * MIB), dtype=torch.uint8)])
    rows = padded.numpy().view(np.int8).reshape(-1, 256, 8192).astype(np.int64) @ inner.T
    assert (sums == (rows.view(np.uint64) * outer.view(np.uint64)).sum(1)).all()


def test_a_device_without_int8_products_has_its_bytes_summed_by_the_host(monkeypatch):
    data = torch.randint(0, 256, (3 * MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    expected, product, refused = sums_of(data), torch._int_mm, []

    def refuse_once(left, right, out):
        if len(refused) % 2 == 0:
            refused.append("no")
            msg = "not implemented for this device"
            raise NotImplementedError(msg)
        refused.append("yes")
        return product(left, right, out=out)

    monkeypatch.setattr(torch, "_int_mm", refuse_once)
    assert (sums_of(data) == expected).all()
    assert refused == ["no", "yes"] * 2


@pytest.mark.parametrize(("offset", "n_bytes"), [(1, 100), (2, 4 * MIB), (4, 4 * MIB + 3), (0, 5)])
def test_bytes_that_are_not_aligned_or_no_whole_words_are_summed_as_if_they_were(offset, n_bytes):
    data = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n_bytes))
    moved = torch.zeros(offset + n_bytes, dtype=torch.uint8)
    moved[offset:] = data
    padded = torch.cat([data, torch.zeros(-n_bytes % 8, dtype=torch.uint8)])
    assert (sums_of(moved[offset:]) == sums_of(padded)).all()


def test_many_tensors_in_one_go_have_the_sums_that_each_has_alone():
    generator = torch.Generator().manual_seed(1)
    sizes = [5, 2 * MIB, 16, 2 * MIB + 9, *range(1, 20), 33 * MIB + 1]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    summer = Summer(torch.device("cpu"))
    rows = [summer.add([tensor]) for tensor in tensors]
    table = summer.result().view(np.uint64)
    for tensor, several in zip(tensors, rows, strict=True):
        assert (table[several] == sums_of(tensor)).all()


def test_a_tensor_with_gaps_is_summed_without_them_in_pieces_of_whole_chunks():
    base = torch.arange(6000 * 1048, dtype=torch.int32).view(6000, 1048)[:, :1000]
    flat = torch.empty(0, dtype=torch.uint8).set_(base.untyped_storage(), 0, (base.stride(0) * 5999 * 4 + 4000,), (1,))
    parts = list(pieces(flat, base))
    assert torch.equal(torch.cat(parts).view(torch.int32), base.reshape(-1))
    assert len(parts) > 1
    assert all(part.numel() % (2 * MIB) == 0 for part in parts[:-1])


# ----------------------------------------------------------------------------- what belongs to whom


def test_tensors_outside_vllms_segments_are_named_with_their_bytes_and_left_alone():
    rig = Rig()
    rig.model.register_buffer("elsewhere", torch.full((10,), 2.0))
    assert rig.pool.untagged() == {"0.elsewhere": 40}
    rig.pool.keep("weights", [rig.model.elsewhere])
    sleep(rig.pool, 2)
    assert (rig.model.elsewhere == 2).all()
    wake(rig.pool)


@pytest.mark.parametrize("n_bytes", [4, 4000])
def test_many_small_buffers_are_kept_each_in_its_place_and_come_in_few_copies(rig, monkeypatch, n_bytes):
    block = rig.machine.tensor("weights", (30 * 8192,), torch.uint8).fill_(99)
    buffers = [block[8192 * number :][:n_bytes].fill_(number) for number in range(30)]
    rig.pool.keep("weights", buffers)
    driver, copied = rig.pool._core.driver, []
    copy = driver.copy
    monkeypatch.setattr(driver, "copy", lambda *args: (copied.append(args), copy(*args)))
    sleep(rig.pool, 2)
    segments = {kept.segment for kept in rig.pool._core.books["weights"].kept}
    assert len(copied) <= len(segments)
    copied.clear()
    wake(rig.pool)
    assert len(copied) <= len(segments)
    assert all((buffer == number).all() for number, buffer in enumerate(buffers))
    assert (block == 99).sum() == 0


@pytest.mark.whole_heap
@pytest.mark.parametrize("frozen", [False, True])
def test_living_tensors_that_no_module_has_are_found_in_a_frozen_heap_too(rig, frozen):
    scratch = rig.machine.tensor("kv_cache", (7,)).fill_(1)
    gc.unfreeze()  # what the run has frozen
    if frozen:
        gc.freeze()
    try:
        (found,) = rig.pool.loose_tensors("kv_cache")
        assert (gc.get_freeze_count() > 0) is frozen
    finally:
        gc.unfreeze()
    assert (found.data_ptr(), found.numel()) == (scratch.data_ptr(), 28)
    (scale,) = rig.pool.loose_tensors("weights")
    assert scale.data_ptr() == rig.model.scale.data_ptr()
    rig.pool.keep("kv_cache", [found])
    sleep(rig.pool, 2)
    wake(rig.pool)
    assert (scratch == 1).all()


def test_parameters_that_a_loader_replaced_are_the_ones_that_count(rig):
    rig.pool.record_checksum()
    rig.model.big = nn.Parameter(rig.machine.tensor("weights", (1024, 1536)).fill_(1), requires_grad=False)
    assert not rig.pool.verify_checksum()
    rig.pool.record_checksum()
    assert rig.pool.verify_checksum()
    assert rig.pool.tags()["weights"].span_bytes == 18 * MIB


def test_used_bytes_count_bytes_that_have_several_names_once():
    rig = Rig()
    rig.model.tied = rig.model.big
    rig.model.register_buffer("part", rig.model.big[:3])
    rig.pool.adopt(rig.cache, "kv_cache")
    rig.pool.record_checksum()
    assert rig.pool.tags()["weights"].used_bytes == 6 * MIB + 256 * 100 * 4 + 64 * 4


def test_what_is_vllms_to_make_and_to_free_is_refused(rig):
    with pytest.raises(UnsupportedError, match="ballast_bytes"):
        rig.pool.empty((4,), torch.uint8)
    with pytest.raises(UnsupportedError, match="alone can free it"):
        rig.pool.discard("weights")
    with pytest.raises(ArgumentError, match="unknown tag"):
        rig.pool.adopt(nn.Linear(1, 1), "lora")


# --------------------------------------------------------------------- segments that come and go


# ---------------------------------------------------------------------------------------- measuring


def test_without_nvml_the_device_is_measured(rig):
    def unknown(_uuid):
        raise rig.machine.nvml.NVMLError

    rig.machine.nvml.nvmlDeviceGetHandleByUUID = unknown
    pool = rig.machine.pool()
    pool.prepare_sleep(2)
    assert pool.commit_sleep().scope == "device"


# ---------------------------------------------------------------------------------- start and end
