"""A module moves into the pool: values, ties, buffers and addresses."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from torch import nn

from omni_notebook.errors import ArgumentError
from tests.memory.pools import MIB, sleep, wake


class Tied(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.embedding = nn.Embedding(50, 16, device=device)
        self.head = nn.Linear(16, 50, bias=False, device=device)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(7.0, device=device), persistent=False)
        self.register_buffer("scale", torch.tensor(0.5, device=device))
        self.norm = nn.BatchNorm1d(16, device=device)


def in_pool(pool, tensor):
    return pool._allocation._find(tensor) is not None


def test_everything_moves_in_with_its_values(make_pool):
    pool, module = make_pool(), Tied()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    weight = module.embedding.weight

    pool.adopt(module)

    tensors = [*module.parameters(), *module.buffers()]
    assert all(in_pool(pool, tensor) for tensor in tensors)
    assert all(tensor.data_ptr() % 64 == 0 and tensor.is_contiguous() for tensor in tensors)
    assert not any(tensor.requires_grad for tensor in tensors)
    assert {name: torch.equal(value, before[name]) for name, value in module.state_dict().items()} == dict.fromkeys(
        before, True
    )
    assert module.table.tolist() == list(range(7))
    assert module.embedding.weight is weight is module.head.weight
    assert type(weight) is nn.Parameter


def test_it_comes_back_from_level_1_with_the_same_addresses(pool):
    module = Tied()
    pool.adopt(module)
    before = [(tensor.data_ptr(), tensor.clone()) for tensor in (*module.parameters(), *module.buffers())]
    sleep(pool)
    wake(pool)
    after = [*module.parameters(), *module.buffers()]
    assert [tensor.data_ptr() for tensor in after] == [address for address, _ in before]
    assert all(torch.equal(new, old) for new, (_, old) in zip(after, before, strict=True))


def test_a_meta_module_becomes_real_memory_with_its_ties(make_pool):
    pool, module = make_pool(), Tied("meta")
    pool.adopt(module)
    assert {t.device.type for t in (*module.parameters(), *module.buffers())} == {"cpu"}
    assert module.embedding.weight is module.head.weight
    assert isinstance(module.head.weight, nn.Parameter)
    module.load_state_dict(Tied().state_dict())
    assert in_pool(pool, module.head.weight)
    assert pool.tags()["weights"].used_bytes == 50 * 16 * 4 + 9 * 64 - 64 * 2


def test_views_of_one_storage_stay_views_of_one_storage(make_pool):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            base = torch.arange(100, dtype=torch.float32)
            self.whole = nn.Parameter(base)
            self.part = nn.Parameter(base[10:30].view(4, 5).t())
            self.register_buffer("bits", base[20:40].view(torch.bfloat16))

    pool, module = make_pool(), Shared()
    bits = module.bits.clone()
    pool.adopt(module)
    module.whole[12] = -1
    assert module.part[2, 0] == -1
    assert module.part.shape == (5, 4)
    assert torch.equal(module.bits, bits)
    assert module.bits.data_ptr() == module.whole.data_ptr() + 80


def test_slices_of_a_file_are_adopted_without_the_file(make_pool):
    base = torch.zeros(4 * MIB, dtype=torch.uint8)
    module = nn.Module()
    module.first, module.second = (nn.Buffer(base[start : start + 100]) for start in (0, 3 * MIB))
    pool = make_pool()
    pool.adopt(module)
    assert pool.tags()["weights"].used_bytes == 256


def test_strides_become_contiguous(make_pool):
    module = nn.Module()
    module.weight = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    module.spread = nn.Buffer(torch.ones(1).expand(5))
    make_pool().adopt(module)
    assert module.weight.is_contiguous()
    assert module.weight[1].tolist() == [1, 5, 9]
    assert module.spread.tolist() == [1] * 5


def test_a_second_module_that_shares_a_tensor_keeps_the_tie(make_pool):
    pool, first = make_pool(), Tied()
    pool.adopt(first)
    second = nn.Linear(16, 50, bias=True)
    second.weight = first.head.weight
    address = first.head.weight.data_ptr()
    pool.adopt(second)
    assert second.weight.data_ptr() == address
    assert in_pool(pool, second.bias)
    assert pool.tags()["weights"].used_bytes == 50 * 16 * 4 + 7 * 64 + 256


def test_an_empty_module_makes_no_tag(make_pool):
    pool = make_pool()
    pool.adopt(nn.ReLU())
    assert pool.tags() == {}


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.zeros(3, 3).to_sparse(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "quant"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_can_not_be_adopted_are_named_and_nothing_moves(make_pool, make, word):
    pool, module = make_pool(), nn.Linear(2, 2)
    address = module.weight.data_ptr()
    module.register_buffer("odd", make())
    with pytest.raises(ArgumentError, match=f"odd.*{word}"):
        pool.adopt(module)
    assert module.weight.data_ptr() == address
    assert pool.tags() == {}


def test_pickling_a_tensor_writes_that_tensor_only(make_pool):
    pool, module = make_pool(), nn.Linear(64, 64)
    pool.adopt(module)
    buffer = io.BytesIO()
    torch.save(module.bias, buffer)
    assert buffer.tell() < 5000
    assert len(pickle.dumps(module.bias)) < 5000


@pytest.mark.parametrize("bad", ["foreign", "strided", "other tag"])
def test_keep_takes_only_contiguous_tensors_of_its_tag(make_pool, bad):
    pool = make_pool()
    weights = pool.empty((8, 8), torch.float32, "weights", recomputable=False)
    other = pool.empty((8,), torch.float32)
    tensor = {"foreign": torch.zeros(4), "strided": weights[:, 2], "other tag": other}[bad]
    with pytest.raises(ArgumentError, match="contiguous in the pool"):
        pool.keep("weights", [tensor])


def test_inference_tensors_are_adopted(make_pool):
    with torch.inference_mode():
        module = nn.Linear(3, 3)
    before = module.weight.clone()
    make_pool().adopt(module)
    assert torch.equal(module.weight, before)
    module.weight.data.fill_(2)
