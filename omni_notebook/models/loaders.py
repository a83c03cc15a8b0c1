"""Reads model folders: config.json and safetensors files, lazily, into memory that exists already."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from omni_notebook.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch import Tensor, nn

    Slices = Mapping[str, tuple[slice, ...]]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return a model folder's config.json; raise ConfigError when folder or file is missing or is no JSON object."""
    path = Path(folder)
    if not path.is_dir():
        msg = f"{path}: no such model folder"
        raise ConfigError(msg)
    return _read_object(path / "config.json")


def checkpoint_files(folder: str | Path) -> list[Path]:
    """Return a model folder's safetensors files, shards in order of name; raise ConfigError if one is missing."""
    path = Path(folder)
    if not path.is_dir():
        msg = f"{path}: no such model folder"
        raise ConfigError(msg)
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    if not (path / INDEX_FILE).is_file():
        msg = f"{path}: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
        raise ConfigError(msg)
    table = _read_object(path / INDEX_FILE).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        msg = f"{path / INDEX_FILE}: weight_map is missing or is no table of file names"
        raise ConfigError(msg)
    names = sorted(set(table.values()))
    for name in names:
        if Path(name).name != name:
            msg = f"{path / INDEX_FILE}: {name!r} lies outside the model folder"
            raise ConfigError(msg)
        if not (path / name).is_file():
            msg = f"{path / name}: no such file, but {INDEX_FILE} names it"
            raise ConfigError(msg)
    return [path / name for name in names]


def read_metadata(folder: str | Path) -> dict[str, str]:
    """Return the metadata of the folder's first safetensors file."""
    with ExitStack() as stack:
        return dict(_open(stack, checkpoint_files(folder)[0]).metadata() or {})


def iter_tensors(
    folder: str | Path,
    names: Collection[str] | None = None,
    slices: Slices | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint's tensors one by one, mapped from the file, on the CPU.

    names: only these (a missing one raises ConfigError when the files are through). slices: for some names the part to
    read, one slice a dimension, so that a tensor-parallel rank reads its own share only.
    """
    wanted = None if names is None else set(names)
    for file in checkpoint_files(folder):
        with ExitStack() as stack:
            handle = _open(stack, file)
            for name in handle.keys():  # noqa: SIM118
                if wanted is None or name in wanted:
                    yield name, _read(handle, file, name, (slices or {}).get(name))
                    if wanted is not None:
                        wanted.discard(name)
    if wanted:
        msg = f"{folder}: the checkpoint lacks {_some(wanted)}"
        raise ConfigError(msg)


def check_fits(module: nn.Module, folder: str | Path, slices: Slices | None = None) -> None:
    """Raise ConfigError unless the checkpoint has every tensor of the module, in its shape; reads headers alone.

    A module may name tensors to pass over by a method `checkpoint_ignores(name) -> bool`, and, where it is one
    rank's part of a model, the slices that it holds by `checkpoint_slices()` (the default of `slices`) and the shapes
    of the whole tensors by `checkpoint_wholes()`.
    """
    targets = module.state_dict(keep_vars=True)
    parts = _parts(module) if slices is None else slices
    wholes: Mapping[str, tuple[int, ...]] = getattr(module, "checkpoint_wholes", dict)()
    shapes = checkpoint_shapes(folder)
    ignores = getattr(module, "checkpoint_ignores", lambda _name: False)
    if missing := targets.keys() - shapes.keys():
        msg = f"{folder}: the checkpoint lacks {_some(missing)}"
        raise ConfigError(msg)
    if extra := {name for name in shapes.keys() - targets.keys() if not ignores(name)}:
        msg = f"{folder}: the model has no place for {_some(extra)}"
        raise ConfigError(msg)
    for name, target in targets.items():
        file, shape = shapes[name]
        _check_shape(file, name, shape, wholes.get(name, shape))
        _check_shape(file, name, _sliced_shape(file, name, shape, parts.get(name)), tuple(target.shape))


def load_into(
    module: nn.Module, folder: str | Path, slices: Slices | None = None, *, between: Callable[[], None] | None = None
) -> None:
    """Copy a checkpoint into the module's existing parameters and buffers, converting types; addresses stay.

    Names, shapes and file sizes are checked before anything is written: ConfigError then means an untouched module.
    slices: see `check_fits`; only these parts of the file are read. between: called before each tensor; may raise.
    """
    check_fits(module, folder, slices)
    parts = _parts(module) if slices is None else slices
    targets = module.state_dict(keep_vars=True)
    for name, target in targets.items():
        if target.is_meta:
            msg = f"{name} has no memory yet; give the module storage before loading into it"
            raise ConfigError(msg)
    with torch.no_grad():
        for name, tensor in iter_tensors(folder, targets.keys(), parts):
            if between is not None:
                between()
            targets[name].copy_(tensor)


def checkpoint_shapes(folder: str | Path, slices: Slices | None = None) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return for each tensor its file and shape (of its slice where one is named), from the headers alone."""
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in checkpoint_files(folder):
        with ExitStack() as stack:
            handle = _open(stack, file)
            for name in handle.keys():  # noqa: SIM118
                if name in found:
                    msg = f"{file}: {name} is also in {found[name][0].name}"
                    raise ConfigError(msg)
                whole = tuple(handle.get_slice(name).get_shape())
                found[name] = (file, _sliced_shape(file, name, whole, (slices or {}).get(name)))
    return found


def _parts(module: nn.Module) -> Slices:
    parts: Slices = getattr(module, "checkpoint_slices", dict)()
    return parts


def _check_shape(file: Path, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        msg = f"{file}: {name} has shape {shape}, the model needs {wanted}"
        raise ConfigError(msg)


def _sliced_shape(file: Path, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None) -> tuple[int, ...]:
    if part is None:
        return shape
    if len(part) > len(shape):
        msg = f"{file}: {name} has {len(shape)} dimensions, a slice of {len(part)} was asked for"
        raise ConfigError(msg)
    cut = [len(range(*piece.indices(size))) for piece, size in zip(part, shape, strict=False)]
    return (*cut, *shape[len(cut) :])


def _open(stack: ExitStack, file: Path) -> Any:
    """Open a safetensors file; its own checks find a truncated body or a bad header."""
    try:
        return stack.enter_context(safe_open(str(file), framework="pt", device="cpu"))
    except (SafetensorError, OSError, ValueError) as error:
        msg = f"{file}: not a whole safetensors file: {error}"
        raise ConfigError(msg) from error


def _read(handle: Any, file: Path, name: str, part: tuple[slice, ...] | None) -> Tensor:
    try:
        tensor: Tensor = handle.get_tensor(name) if part is None else handle.get_slice(name)[part]
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        msg = f"{file}: {name} cannot be read: {error}"
        raise ConfigError(msg) from error
    return tensor


def _read_object(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        msg = f"{file}: no such file"
        raise ConfigError(msg) from None
    except (OSError, ValueError) as error:
        msg = f"{file}: cannot be read as JSON: {error}"
        raise ConfigError(msg) from error
    if not isinstance(data, dict):
        msg = f"{file}: holds no JSON object"
        raise ConfigError(msg)
    return data


def _some(names: Collection[str]) -> str:
    """Name up to three tensors, and how many more."""
    listed = sorted(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more
