from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from omni_notebook.errors import ConfigError
from omni_notebook.models.loaders import (
    INDEX_FILE,
    SINGLE_FILE,
    checkpoint_files,
    load_into,
    read_config,
    read_metadata,
)


@pytest.fixture
def weights():
    return {"weight": torch.randn(4, 6), "bias": torch.randn(4)}


@pytest.fixture
def folder(tmp_path, weights):
    save_file(weights, tmp_path / SINGLE_FILE, metadata={"format": "pt", "seed": "3"})
    return tmp_path


def _shard(folder, weights):
    table = {}
    for number, (name, value) in enumerate(weights.items()):
        table[name] = f"model-{number}.safetensors"
        save_file({name: value}, folder / table[name])
    (folder / SINGLE_FILE).unlink(missing_ok=True)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": table}))


def test_weights_are_copied_in_place_and_converted(folder, weights):
    module = nn.Linear(6, 4).to(torch.bfloat16)
    addresses = [value.data_ptr() for value in module.parameters()]
    load_into(module, folder)
    assert addresses == [value.data_ptr() for value in module.parameters()]
    assert torch.equal(module.weight, weights["weight"].bfloat16())


def test_shards_named_by_an_index_are_read(folder, weights):
    _shard(folder, weights)
    assert [file.name for file in checkpoint_files(folder)] == ["model-0.safetensors", "model-1.safetensors"]
    module = nn.Linear(6, 4)
    load_into(module, folder)
    assert torch.equal(module.weight, weights["weight"])
    assert torch.equal(module.bias, weights["bias"])


def test_slices_select(folder, weights):
    module = nn.Linear(3, 2)
    load_into(module, folder, {"weight": (slice(2, 4), slice(0, 3)), "bias": (slice(2, 4),)})
    assert torch.equal(module.weight, weights["weight"][2:4, 0:3])
    assert torch.equal(module.bias, weights["bias"][2:4])


def test_metadata_is_read(folder):
    assert read_metadata(folder)["seed"] == "3"


def test_a_module_may_pass_over_tensors(folder, weights):
    class Forgiving(nn.Linear):
        def checkpoint_ignores(self, name):
            return name == "extra"

    save_file(weights | {"extra": torch.zeros(1)}, folder / SINGLE_FILE)
    load_into(Forgiving(6, 4), folder)


def _truncate(folder, weights):
    data = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(data[:-10])


def _garble(folder, weights):
    (folder / SINGLE_FILE).write_bytes(b"\xff" * 200)


def _empty(folder, weights):
    (folder / SINGLE_FILE).write_bytes(b"")


def _rename(folder, weights):
    save_file({"weigth": weights["weight"], "bias": weights["bias"]}, folder / SINGLE_FILE)


def _add(folder, weights):
    save_file(weights | {"lora.extra": torch.zeros(2)}, folder / SINGLE_FILE)


def _reshape(folder, weights):
    save_file({"weight": torch.zeros(4, 5), "bias": weights["bias"]}, folder / SINGLE_FILE)


def _remove(folder, weights):
    (folder / SINGLE_FILE).unlink()


def _lose_shard(folder, weights):
    _shard(folder, weights)
    (folder / "model-1.safetensors").unlink()


def _truncate_last_shard(folder, weights):
    _shard(folder, weights)
    (folder / "model-1.safetensors").write_bytes((folder / "model-1.safetensors").read_bytes()[:-3])


def _point_outside(folder, weights):
    _shard(folder, weights)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"weight": "../model.safetensors"}}))


def _bad_index(folder, weights):
    _remove(folder, weights)
    (folder / INDEX_FILE).write_text("{}")


def _twice(folder, weights):
    _shard(folder, weights)
    save_file(weights, folder / "model-1.safetensors")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_truncate, r"model\.safetensors: not a whole safetensors file"),
        (_garble, r"model\.safetensors: not a whole safetensors file"),
        (_empty, r"model\.safetensors: not a whole safetensors file"),
        (_rename, "lacks weight"),
        (_add, r"no place for lora\.extra"),
        (_reshape, r"model\.safetensors: weight has shape \(4, 5\), the model needs \(4, 6\)"),
        (_remove, r"neither model\.safetensors nor"),
        (_lose_shard, r"model-1\.safetensors: no such file"),
        (_truncate_last_shard, r"model-1\.safetensors: not a whole"),
        (_point_outside, "outside the model folder"),
        (_bad_index, "weight_map is missing"),
        (_twice, "is also in"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line_and_touches_nothing(folder, weights, damage, says):
    damage(folder, weights)
    module = nn.Linear(6, 4)
    before = [value.detach().clone() for value in module.parameters()]
    with pytest.raises(ConfigError, match=says) as caught:
        load_into(module, folder)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_a_module_without_memory_is_refused(folder):
    with torch.device("meta"):
        module = nn.Linear(6, 4)
    with pytest.raises(ConfigError, match="no memory yet"):
        load_into(module, folder)


@pytest.mark.parametrize("content", [None, "{", "[1]", "\udcff"])
def test_a_bad_config_file_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    for call in (read_config, checkpoint_files):
        with pytest.raises(ConfigError, match="no such model folder"):
            call(tmp_path / "nowhere")
