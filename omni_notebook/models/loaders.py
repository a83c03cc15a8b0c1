"""Reads model folders: config.json and safetensors files, into memory that exists already."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omni_notebook.errors import ConfigError
from omni_notebook.models.places import Places, sliced_shape, some
from omni_notebook.models.straight import fill
from omni_notebook.models.tensor_file import FLOATS, TensorFile

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from torch import nn

    from omni_notebook.memory.reading import FileReader
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
    return indexed_files(path / index)


def indexed_files(index: Path) -> list[Path]:
    """Return the files that a checkpoint's index names, in order of name; raise ConfigError if one is missing."""
    table = read_object(index).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        msg = f"{index}: weight_map is missing or is no table of file names"
        raise ConfigError(msg)
    names = sorted(set(table.values()))
    for name in names:
        if Path(name).name != name:
            msg = f"{index}: {name!r} lies outside the model folder"
            raise ConfigError(msg)
        if not (index.parent / name).is_file():
            msg = f"{index.parent / name}: no such file, but {index.name} names it"
            raise ConfigError(msg)
    return [index.parent / name for name in names]


def read_metadata(folder: str | Path) -> dict[str, str]:
    """Return the metadata of the folder's first safetensors file."""
    with TensorFile(checkpoint_files(folder)[0]) as file:
        return dict(file.metadata)


@contextmanager
def opened(paths: Iterable[Path]) -> Iterator[list[TensorFile]]:
    """Open safetensors files, for as long as the `with` lasts; raise ConfigError unless all of them are whole."""
    with ExitStack() as stack:
        yield [stack.enter_context(TensorFile(path)) for path in paths]


def checkpoint_dtype(files: Iterable[Path]) -> torch.dtype:
    """Return the type of most of the floating point bytes in a checkpoint's files; float32 where they have none."""
    sizes: Counter[torch.dtype] = Counter()
    for path in files:
        with TensorFile(path) as file:
            for entry in file.table.values():
                if entry.dtype in FLOATS:
                    sizes[FLOATS[entry.dtype]] += entry.n_bytes
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def check_fits(module: nn.Module, folder: str | Path, slices: Slices | None = None) -> None:
    """Raise ConfigError unless the checkpoint has every tensor of the module, in its shape; reads headers alone.

    slices: see `Places`, which says too how a module passes tensors over and holds a part of a model.
    """
    with opened(checkpoint_files(folder)) as files:
        _check_fits(Places(module, slices), folder, files)


def _check_fits(places: Places, folder: str | Path, files: Iterable[TensorFile]) -> None:
    shapes = _shapes(files)
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
    with opened(checkpoint_files(folder)) as files:
        _check_fits(places, folder, files)
        for name, target in places.targets.items():
            if target.is_meta:
                msg = f"{name} has no memory yet; give the module storage before loading into it"
                raise ConfigError(msg)
        fill(files, places.targets, places.parts, reader, between)


def checkpoint_shapes(folder: str | Path, slices: Slices | None = None) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return for each tensor its file and shape (of its slice where one is named), from the headers alone."""
    return shapes_of(checkpoint_files(folder), slices)


def shapes_of(files: Collection[Path], slices: Slices | None = None) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return the same of safetensors files."""
    with opened(files) as whole:
        return _shapes(whole, slices)


def _shapes(files: Iterable[TensorFile], slices: Slices | None = None) -> dict[str, tuple[Path, tuple[int, ...]]]:
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in files:
        for name, entry in file.table.items():
            if name in found:
                msg = f"{file.path}: {name} is also in {found[name][0].name}"
                raise ConfigError(msg)
            part = (slices or {}).get(name)
            found[name] = (file.path, sliced_shape(file.path, name, entry.shape, part))
    return found


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
