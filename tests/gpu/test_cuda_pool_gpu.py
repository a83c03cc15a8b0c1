"""The pool of our own segments on a real device: what the fakes of `tests/memory/fake_ranges.py` stand for."""

from __future__ import annotations

import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from omni_notebook.memory.base import HostMemory
from omni_notebook.models.loaders import load_into
from tests.memory.pools import saved

MIB = 1024**2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def pool():
    from omni_notebook.memory.cuda import cuda_pool

    pool = cuda_pool(0)
    yield pool
    pool.close()


@pytest.fixture
def model(pool):
    """300 MiB in three segments, from the host and from the device, with a tie; a cache of 256 MiB beside it."""
    module = nn.Module()
    for number in range(4):
        device = "cuda:0" if number % 2 else "cpu"
        value = torch.empty(75 * MIB // 2, dtype=torch.bfloat16, device=device).normal_()
        module.register_parameter(f"part{number}", nn.Parameter(value, requires_grad=False))
    module.tied = module.part0
    pool.adopt(module)
    module.kv = pool.empty((256 * MIB,), torch.uint8)
    return module


def contents(module):
    return [parameter.detach().cpu() for parameter in module.parameters()]


def assert_same(module, before):
    assert all(
        torch.equal(parameter.cpu(), value) for parameter, value in zip(module.parameters(), before, strict=True)
    )


def assert_left(unmapped):
    assert abs(sum(unmapped.freed.values()) - unmapped.expected_bytes) <= 16 * MIB
    assert abs(unmapped.observed_bytes - unmapped.expected_bytes) <= 16 * MIB


def cycle(pool, level, *, late):
    prepared = pool.prepare_sleep(level, late_copy=late)
    unmapped = pool.commit_sleep()
    _, restored = pool.map_restore()
    pool.commit_wake()
    return prepared, unmapped, restored


@pytest.mark.parametrize("late", [False, True])
def test_cycles_keep_contents_and_addresses_and_copy_what_changed_alone(pool, model, late):
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    assert model.tied is model.part0
    span = pool.tags()["weights"].span_bytes
    before = contents(model)
    prepared, unmapped, _ = cycle(pool, 1, late=late)
    assert saved(prepared, unmapped) == (span, 0)
    assert unmapped.expected_bytes == span + 256 * MIB
    assert_left(unmapped)
    assert_same(model, before)
    prepared, unmapped, _ = cycle(pool, 1, late=late)
    assert saved(prepared, unmapped) == (0, span)
    assert_left(unmapped)
    assert_same(model, before)
    model.part3[12_345] += 1
    before = contents(model)
    prepared, unmapped, _ = cycle(pool, 1, late=late)
    assert saved(prepared, unmapped) == (2 * MIB, span - 2 * MIB)
    assert_left(unmapped)
    assert_same(model, before)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert not model.kv.any()


@pytest.mark.parametrize("late", [False, True])
def test_level_2_is_read_back_from_files_and_is_as_recorded(pool, model, late, tmp_path):
    names = dict(model.state_dict())
    names["tied"] = names["tied"].clone()
    save_file({name: value.cpu() for name, value in names.items()}, tmp_path / "model.safetensors")
    before = contents(model)
    pool.record_checksum()
    _, _, restored = cycle(pool, 2, late=late)
    assert restored.needs_reload == ("weights",)
    assert not pool.verify_checksum()
    load_into(model, tmp_path, reader=pool.reader())
    assert_same(model, before)
    assert pool.verify_checksum()


def test_locked_memory_that_waits_goes_back_where_the_host_runs_short_and_comes_again(pool, model):
    span, plenty = pool.tags()["weights"].span_bytes, [1 << 40]
    pool._core.room = lambda: HostMemory(limit_bytes=1 << 40, available_bytes=plenty[0])
    before = contents(model)
    pool.write_ahead()
    assert pool.wait_write_ahead(60)
    assert pool.host_backup_bytes() == span
    deadline = time.monotonic() + 20
    for free, held in ((0, 0), (1 << 40, span)):
        plenty[0] = free
        while pool.host_backup_bytes() != held and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pool.host_backup_bytes() == held
    prepared, unmapped, _ = cycle(pool, 1, late=True)
    assert saved(prepared, unmapped) == (span, 0)
    assert_left(unmapped)
    assert_same(model, before)


def test_discarded_memory_goes_back_at_once_and_its_addresses_with_the_last_tensor(pool):
    def used():
        free, total = torch.cuda.mem_get_info(0)
        return total - free

    before = used()
    tensor = pool.empty((256 * MIB,), torch.uint8)
    address = tensor.data_ptr()
    assert used() >= before + 256 * MIB
    pool.discard("kv_cache")
    assert used() < before + 64 * MIB
    assert pool.empty((256 * MIB,), torch.uint8).data_ptr() != address
    empty = pool.empty((0, 3), torch.bfloat16)
    assert (tuple(empty.shape), empty.device.type, empty.dtype) == ((0, 3), "cuda", torch.bfloat16)
