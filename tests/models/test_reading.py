"""Checkpoints read straight into pools: which tensors, every byte, and what happens when it goes wrong."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from omni_notebook.errors import ConfigError
from omni_notebook.memory.base import DeviceError
from omni_notebook.memory.cpu import CpuPool
from omni_notebook.models import loaders
from omni_notebook.models.loaders import INDEX_FILE, SINGLE_FILE, checkpoint_dtype, checkpoint_files, load_into
from omni_notebook.worker.model_runner import torch_dtype
from tests.memory.fake_ranges import OwnMachine

WEIGHTS = {
    "rows": torch.randn(24, 10),
    "columns": torch.randn(6, 16),
    "bias": torch.randn(12),
    "narrow": torch.randn(9, 5).bfloat16(),
    "other_type": torch.randn(7, 3).double(),
    "whole": torch.arange(40).view(5, 8),
    "scalar": torch.tensor(3.5),
    "cube": torch.randn(4, 3, 5),
    "nothing": torch.empty(0, 4),
}


class Module(nn.Module):
    """The named tensors, or parts of them, of zeroes; `checkpoint_slices` says which parts."""

    def __init__(self, slices=None, types=None):
        super().__init__()
        self._slices = slices or {}
        for name, value in WEIGHTS.items():
            part = value[self._slices[name]] if name in self._slices else value
            kind = torch.float32 if name == "other_type" else (types or {}).get(name, value.dtype)
            self.register_buffer(name, torch.zeros(part.shape, dtype=kind))

    def checkpoint_slices(self):
        return self._slices


class HostMachine:
    """A CPU as `OwnMachine` is a GPU."""

    def __init__(self):
        self._pools = []

    def pool(self):
        self._pools.append(CpuPool())
        return self._pools[-1]

    def close(self):
        for pool in self._pools:
            pool.close()


@pytest.fixture
def gpu():
    return OwnMachine()


@pytest.fixture(params=["gpu", "cpu"])
def machine(request):
    if request.param == "gpu":
        yield request.getfixturevalue("gpu")
        return
    machine = HostMachine()
    yield machine
    machine.close()


@pytest.fixture(autouse=True)
def no_thread_goes_on():
    before = threading.enumerate()
    yield
    assert [one for one in threading.enumerate() if one not in before and one.name == "omni-read"] == []


@pytest.fixture
def reader(machine):
    """The reader of a pool, which remembers what it was asked for."""
    reader = machine.pool().reader()
    reader.least_bytes = 0
    read = reader.read
    reader.asked = []

    def remember(pieces, check):
        reader.asked += (pieces := list(pieces))
        read(pieces, check)

    reader.read = remember
    return reader


@pytest.fixture(params=["one file", "shards"])
def folder(request, tmp_path):
    if request.param == "one file":
        save_file(WEIGHTS, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
        return tmp_path
    table = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(WEIGHTS)}
    for file in set(table.values()):
        save_file({name: WEIGHTS[name] for name in table if table[name] == file}, tmp_path / file)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": table}))
    return tmp_path


def adopted(machine, **options):
    module = Module(**options)
    machine.pool().adopt(module)
    return module


def asked_for(reader, module):
    by_address = {tensor.data_ptr(): name for name, tensor in module.state_dict().items() if tensor.numel()}
    return {by_address[piece.address] for piece in reader.asked if piece.n_bytes}


def assert_loaded(module, slices=None):
    for name, tensor in module.state_dict().items():
        value = WEIGHTS[name][(slices or {}).get(name, ...)]
        assert torch.equal(tensor, value.to(tensor.dtype)), name


def test_whole_tensors_of_the_files_types_are_read_and_others_copied(machine, reader, folder):
    module = adopted(machine)
    load_into(module, folder, reader=reader)
    assert_loaded(module)
    assert asked_for(reader, module) == WEIGHTS.keys() - {"other_type", "nothing"}


def test_rows_are_read_and_other_parts_copied(machine, reader, folder):
    slices = {
        "rows": (slice(6, 12),),
        "bias": (slice(3, 12),),
        "columns": (slice(None), slice(4, 8)),
        "whole": (slice(1, 3), slice(None)),
        "cube": (slice(1, 4), slice(0, 3), slice(0, 5)),
        "narrow": (slice(0, 9, 2),),
    }
    module = adopted(machine, slices=slices)
    load_into(module, folder, reader=reader)
    assert_loaded(module, slices)
    assert asked_for(reader, module) == {"rows", "bias", "whole", "cube", "scalar"}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_ranks_rows_are_its_own(machine, reader, folder, rank):
    slices = {"rows": (slice(rank * 8, rank * 8 + 8),), "bias": (slice(rank * 4, rank * 4 + 4),)}
    module = adopted(machine, slices=slices)
    load_into(module, folder, reader=reader)
    assert_loaded(module, slices)


def test_a_tensor_of_another_type_or_order_of_bytes_is_copied(machine, reader, folder):
    module = adopted(machine, types={"rows": torch.bfloat16})
    module.columns = machine.pool().empty((16, 6), torch.float32, "weights", recomputable=False).t()
    load_into(module, folder, reader=reader)
    assert_loaded(module)
    assert {"rows", "columns"}.isdisjoint(asked_for(reader, module))


def test_a_tied_tensor_is_read_under_each_of_its_names(machine, reader, tmp_path):
    module = nn.Module()
    module.one = module.other = nn.Parameter(torch.zeros(4, 3))
    machine.pool().adopt(module)
    value = torch.randn(4, 3)
    save_file({"one": value, "other": value.clone()}, tmp_path / SINGLE_FILE)
    load_into(module, tmp_path, reader=reader)
    assert module.one is module.other
    assert torch.equal(module.one, value)


def test_less_than_is_worth_a_readers_while_is_copied(machine, reader, folder):
    reader.least_bytes = 10_000_000
    module = adopted(machine)
    load_into(module, folder, reader=reader)
    assert_loaded(module)
    assert reader.asked == []


# ------------------------------------------------------------------------------------------ going wrong


def test_whoever_is_asked_between_tensors_ends_the_load(machine, reader, folder):
    module, asked = adopted(machine), []

    def between():
        asked.append(1)
        if len(asked) == 3:
            msg = "cancelled"
            raise KeyError(msg)

    with pytest.raises(KeyError, match="cancelled"):
        load_into(module, folder, between=between, reader=reader)
    load_into(module, folder, between=lambda: None, reader=reader)
    assert_loaded(module)


@pytest.mark.parametrize("when", ["before", "while it is read"])
def test_a_file_that_is_cut_short_is_a_config_error(machine, reader, folder, when):
    module = adopted(machine)
    file = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)

    def cut():
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size - 16)

    read = reader.read

    def cut_and_read(pieces, check):
        cut()
        read(pieces, check)

    if when == "before":
        cut()
    else:
        reader.read = cut_and_read
    with pytest.raises(ConfigError, match="safetensors"):
        load_into(module, folder, reader=reader)
    if when == "before":
        assert not any(tensor.any() for tensor in module.state_dict().values())


@pytest.mark.parametrize("text", [b"", b"\xff" * 8])
@pytest.mark.parametrize("straight", [True, False])
def test_a_file_that_is_written_over_after_the_check_is_a_config_error(
    machine, reader, tmp_path, monkeypatch, text, straight
):
    save_file(WEIGHTS, tmp_path / SINGLE_FILE)
    module, check = adopted(machine), loaders._check_fits

    def check_and_write(*args):
        check(*args)
        (tmp_path / SINGLE_FILE).write_bytes(text)

    monkeypatch.setattr(loaders, "_check_fits", check_and_write)
    with pytest.raises(ConfigError, match=r"cannot be read: .*safetensors ends \d+ bytes before the end of a tensor"):
        load_into(module, tmp_path, reader=reader if straight else None)
    assert not any(tensor.any() for tensor in module.state_dict().values())


def test_a_file_that_is_cut_short_between_two_conversions_is_a_config_error_and_no_signal(machine, tmp_path):
    save_file(WEIGHTS, tmp_path / SINGLE_FILE)
    module = adopted(machine, types=dict.fromkeys(("rows", "columns", "bias", "cube"), torch.bfloat16))
    asked = []

    def between():
        asked.append(1)
        if len(asked) == 2:
            (tmp_path / SINGLE_FILE).write_bytes(b"")

    with pytest.raises(ConfigError, match=r"ends \d+ bytes before the end of a tensor"):
        load_into(module, tmp_path, between=between)


def test_a_checkpoint_that_another_takes_the_name_of_is_read_to_its_end(machine, reader, folder, tmp_path):
    """As a trainer does that writes beside it and renames."""
    module, asked = adopted(machine, types={"rows": torch.bfloat16}), []

    def between():
        if not asked:
            for file in folder.glob("*.safetensors"):
                save_file({"rows": torch.zeros(1)}, tmp_path / "new")
                (tmp_path / "new").replace(file)
        asked.append(1)

    load_into(module, folder, between=between, reader=reader)
    assert_loaded(module)
    with pytest.raises(ConfigError):
        load_into(module, folder, reader=reader)


@pytest.mark.parametrize("name", ["memcpy", "wait", "event"])
@pytest.mark.parametrize("machine", ["gpu"], indirect=True)
def test_a_copy_that_the_driver_refuses_is_its_error_and_the_load_can_be_repeated(machine, reader, folder, name):
    module = adopted(machine)
    machine.fail(name, 1)
    with pytest.raises(DeviceError):
        load_into(module, folder, reader=reader)
    load_into(module, folder, reader=reader)
    assert_loaded(module)


# ------------------------------------------------------------------------------------------------ types


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"a": torch.zeros(10, dtype=torch.bfloat16), "b": torch.zeros(4)}, torch.bfloat16),
        ({"a": torch.zeros(10, dtype=torch.bfloat16), "b": torch.zeros(6)}, torch.float32),
        ({"a": torch.zeros(3, dtype=torch.float16), "b": torch.zeros(1000, dtype=torch.int64)}, torch.float16),
        ({"a": torch.zeros(1000, dtype=torch.uint8)}, torch.float32),
        ({"a": torch.tensor(1.0, dtype=torch.float16)}, torch.float16),
    ],
)
def test_the_type_of_a_checkpoint_is_that_of_most_of_its_bytes(tmp_path, tensors, expected):
    save_file(tensors, tmp_path / SINGLE_FILE)
    assert checkpoint_dtype(checkpoint_files(tmp_path)) == expected
    assert torch_dtype("auto", "cuda:1", lambda: checkpoint_files(tmp_path)) == expected
    assert torch_dtype("auto", "cpu", lambda: checkpoint_files(tmp_path)) == torch.float32
    assert torch_dtype("bfloat16", "cuda:0", lambda: checkpoint_files(tmp_path)) == torch.bfloat16


def test_the_type_of_a_checkpoint_counts_all_its_shards(tmp_path):
    save_file({"a": torch.zeros(5)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(11, dtype=torch.bfloat16)}, tmp_path / "2.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    assert checkpoint_dtype(checkpoint_files(tmp_path)) == torch.bfloat16
