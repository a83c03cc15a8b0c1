"""Safetensors files as we read them, beside the package that writes them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from omni_notebook.errors import ConfigError
from omni_notebook.models.tensor_file import TYPES, TensorFile

F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def encoded(header, body, pad=0):
    text = (header if isinstance(header, str) else json.dumps(header)).encode(errors="surrogateescape") + b" " * pad
    return len(text).to_bytes(8, "little") + text + body


def table(**changes):
    return {"a": {key: value for key, value in {**F32, **changes}.items() if value is not None}}


@pytest.mark.parametrize("kind", TYPES.values(), ids=TYPES)
def test_a_tensor_of_every_type_is_what_was_saved(tmp_path, kind):
    bits = torch.randint(0, 2, (3, 4, 5), dtype=torch.uint8)
    saved = {"a": bits.to(kind), "none": torch.empty(0, 3, dtype=kind), "one": bits[0, 0, 0].clone().to(kind)}
    save_file(saved, tmp_path / "f", metadata={"by": "us"})
    with TensorFile(tmp_path / "f") as file:
        assert file.metadata == {"by": "us"}
        found = {name: file.mapped(name) for name in file.table}
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert found[name].dtype == kind
        assert found[name].shape == tensor.shape
        assert found[name].tolist() == tensor.tolist()


@pytest.mark.parametrize("pad", range(4))
def test_a_header_of_any_length_is_followed_by_the_bytes(tmp_path, pad):
    data = torch.randn(2, 3)
    (tmp_path / "f").write_bytes(encoded(table(), data.numpy().tobytes(), pad))
    with TensorFile(tmp_path / "f") as file:
        assert torch.equal(file.mapped("a"), data)


def test_writing_to_a_mapped_tensor_does_not_touch_the_file(tmp_path):
    (tmp_path / "f").write_bytes(before := encoded(table(), bytes(24)))
    with TensorFile(tmp_path / "f") as file:
        file.mapped("a").fill_(3)
    assert (tmp_path / "f").read_bytes() == before


DAMAGED = {
    "nothing": b"",
    "half a length": b"\x01\0\0",
    "a length beyond the file": (1000).to_bytes(8, "little") + b"{}",
    "a length beyond all files": b"\xff" * 8 + bytes(100),
    "no JSON": encoded("{", b""),
    "not UTF-8": encoded('{"\udcff": 1}', b""),
    "a list": encoded("[]", b""),
    "a number": encoded("7", b""),
    "deep": encoded("[" * 100_000, b""),
    "a tensor that is null": encoded('{"a": null}', b""),
    "a tensor that is a list": encoded('{"a": []}', b""),
    "no type": encoded(table(dtype=None), bytes(24)),
    "no shape": encoded(table(shape=None), bytes(24)),
    "no place": encoded(table(data_offsets=None), bytes(24)),
    "a shape that is text": encoded(table(shape="ab"), bytes(24)),
    "a negative size": encoded(table(shape=[-2, -3]), bytes(24)),
    "a size that is no number": encoded(table(shape=[2.0, 3]), bytes(24)),
    "one offset": encoded(table(data_offsets=[24]), bytes(24)),
    "three offsets": encoded(table(data_offsets=[0, 24, 24]), bytes(24)),
    "backwards": encoded(table(data_offsets=[24, 0]), bytes(24)),
    "another size than its shape": encoded(table(data_offsets=[0, 20]), bytes(20)),
    "one byte missing": encoded(table(), bytes(23)),
    "one byte too many": encoded(table(), bytes(25)),
    "a gap": encoded(table(data_offsets=[8, 32]), bytes(32)),
    "two in one place": encoded({**table(), "b": F32}, bytes(24)),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_what_the_format_s_own_package_refuses_is_refused(tmp_path, data):
    with pytest.raises(SafetensorError):
        load(data)
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(ConfigError, match=r"/f: not a whole safetensors file: ") as caught:
        TensorFile(tmp_path / "f")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_is_a_folder_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="not a whole safetensors file"):
            TensorFile(path)


def test_a_type_that_torch_has_not_is_named_only_when_it_is_read(tmp_path):
    header = {"a": F32, "b": {"dtype": "F4", "shape": [4], "data_offsets": [24, 26]}}
    (tmp_path / "f").write_bytes(encoded(header, bytes(26)))
    with TensorFile(tmp_path / "f") as file:
        assert not file.mapped("a").any()
        with pytest.raises(ConfigError, match="b has the type F4"):
            file.mapped("b")
