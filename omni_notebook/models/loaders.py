"""Reads model folders: config.json and safetensors files, lazily, into memory that exists already."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from omni_notebook.errors import ConfigError
from omni_notebook.models.places import Places, sliced_shape, some
from omni_notebook.models.straight import FLOATS, read_straight

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from torch import Tensor, nn

    from omni_notebook.memory.device.reader import FileReader
    from omni_notebook.models.places import Slices

STEM = "model"
SINGLE_FILE = f"{STEM}.safetensors"
INDEX_FILE = f"{SINGLE_FILE}.index.json"


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return a model folder's config.json; raise ConfigError when folder or file is missing or is no JSON object."""
    path = Path(folder)
    if not path.is_dir():
        msg = f"{path}: no such model folder"
        raise ConfigError(msg)
    return read_object(path / "config.json")


def checkpoint_files(folder: str | Path, stem: str = STEM) -> list[Path]:
    """Return a model folder's safetensors files, shards in order of name; raise ConfigError if one is missing."""
    path = Path(folder)
    single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    if not path.is_dir():
        msg = f"{path}: no such model folder"
        raise ConfigError(msg)
    if (path / single).is_file():
        return [path / single]
    if not (path / index).is_file():
        msg = f"{path}: neither {single} nor {index} is there"
        raise ConfigError(msg)
    table = read_object(path / index).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        msg = f"{path / index}: weight_map is missing or is no table of file names"
        raise ConfigError(msg)
    names = sorted(set(table.values()))
    for name in names:
        if Path(name).name != name:
            msg = f"{path / index}: {name!r} lies outside the model folder"
            raise ConfigError(msg)
        if not (path / name).is_file():
            msg = f"{path / name}: no such file, but {index} names it"
            raise ConfigError(msg)
    return [path / name for name in names]


def read_metadata(folder: str | Path) -> dict[str, str]:
    """Return the metadata of the folder's first safetensors file."""
    with ExitStack() as stack:
        return dict(_open(stack, checkpoint_files(folder)[0]).metadata() or {})


def checkpoint_dtype(files: Iterable[Path]) -> torch.dtype:
    """Return the type of most of the floating point bytes in a checkpoint's files; float32 where they have none."""
    sizes: Counter[torch.dtype] = Counter()
    for file in files:
        with ExitStack() as stack:
            handle = _open(stack, file)
            for name in handle.keys():  # noqa: SIM118
                piece = handle.get_slice(name)
                kind = FLOATS.get(piece.get_dtype())
                if kind is not None:
                    sizes[kind] += math.prod(piece.get_shape()) * kind.itemsize
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def iter_tensors(
    folder: str | Path,
    names: Collection[str] | None = None,
    slices: Slices | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint's tensors one by one, mapped from the file, on the CPU.

    names: only these (a missing one raises ConfigError when the files are through). slices: for some names the part to
    read, one slice a dimension, so that a tensor-parallel rank reads its own share only.
    """
    return tensors_of(checkpoint_files(folder), folder, names, slices)


def tensors_of(
    files: Collection[Path], source: object, names: Collection[str] | None = None, slices: Slices | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of safetensors files one by one; see `iter_tensors`. source: what an error names."""
    wanted = None if names is None else set(names)
    for file in files:
        with ExitStack() as stack:
            handle = _open(stack, file)
            for name in handle.keys():  # noqa: SIM118
                if wanted is None or name in wanted:
                    yield name, _read(handle, file, name, (slices or {}).get(name))
                    if wanted is not None:
                        wanted.discard(name)
    if wanted:
        msg = f"{source}: the checkpoint lacks {some(wanted)}"
        raise ConfigError(msg)


def check_fits(module: nn.Module, folder: str | Path, slices: Slices | None = None) -> None:
    """Raise ConfigError unless the checkpoint has every tensor of the module, in its shape; reads headers alone.

    slices: see `Places`, which says too how a module passes tensors over and holds a part of a model.
    """
    _check_fits(Places(module, slices), folder)


def _check_fits(places: Places, folder: str | Path) -> None:
    shapes = checkpoint_shapes(folder)
    if missing := places.missing(shapes):
        msg = f"{folder}: the checkpoint lacks {some(missing)}"
        raise ConfigError(msg)
    if unplaced := places.unplaced(shapes):
        msg = f"{folder}: the model has no place for {some(unplaced)}"
        raise ConfigError(msg)
    for name in places.targets:
        file, shape = shapes[name]
        places.check_shape(file, name, shape)


def load_into(
    module: nn.Module,
    folder: str | Path,
    slices: Slices | None = None,
    *,
    between: Callable[[], None] | None = None,
    reader: FileReader | None = None,
) -> None:
    """Copy a checkpoint into the module's existing parameters and buffers, converting types; addresses stay.

    Names, shapes and file sizes are checked before anything is written: ConfigError then means an untouched module.
    slices: see `Places`; only these parts of the file are read. between: called before each tensor; may raise. reader:
    reads those that lie in the files as they lie in the module.
    """
    places = Places(module, slices)
    _check_fits(places, folder)
    for name, target in places.targets.items():
        if target.is_meta:
            msg = f"{name} has no memory yet; give the module storage before loading into it"
            raise ConfigError(msg)
    done = read_straight(checkpoint_files(folder), places.targets, places.parts, reader, between)
    with torch.no_grad():
        for name, tensor in iter_tensors(folder, places.targets.keys() - done, places.parts):
            if between is not None:
                between()
            places.targets[name].copy_(tensor)


def checkpoint_shapes(folder: str | Path, slices: Slices | None = None) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return for each tensor its file and shape (of its slice where one is named), from the headers alone."""
    return shapes_of(checkpoint_files(folder), slices)


def shapes_of(files: Collection[Path], slices: Slices | None = None) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return the same of safetensors files."""
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in files:
        with ExitStack() as stack:
            handle = _open(stack, file)
            for name in handle.keys():  # noqa: SIM118
                if name in found:
                    msg = f"{file}: {name} is also in {found[name][0].name}"
                    raise ConfigError(msg)
                whole = tuple(handle.get_slice(name).get_shape())
                found[name] = (file, sliced_shape(file, name, whole, (slices or {}).get(name)))
    return found


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


def read_object(file: Path) -> dict[str, Any]:
    """Return a JSON file's object; raise ConfigError where the file is missing or holds something else."""
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
