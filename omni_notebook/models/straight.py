"""Tensors of safetensors files into their places: where the bytes are the same, straight; the others over a mapping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from omni_notebook.errors import ConfigError
from omni_notebook.memory.reading import FilePiece
from omni_notebook.models.places import sliced_shape
from omni_notebook.models.tensor_file import TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from torch import Tensor

    from omni_notebook.memory.reading import FileReader
    from omni_notebook.models.places import Slices
    from omni_notebook.models.tensor_file import Entry, TensorFile


@torch.no_grad()
def fill(
    files: Collection[TensorFile],
    targets: Mapping[str, Tensor],
    slices: Slices,
    reader: FileReader | None = None,
    between: Callable[[], None] | None = None,
) -> None:
    """Read the files' tensors, or the parts that `slices` names, into their targets, converting types.

    Shapes were checked. reader: of the pool that has the targets. between: called now and then; may raise.

    Raises:
        ConfigError: a file can not be read to the end, or holds a type that torch has not.
    """
    between = between or _nothing
    try:
        done = set() if reader is None else _read_straight(files, targets, slices, reader, between)
        for file in files:
            for name in file.table.keys() & targets.keys() - done:
                between()
                targets[name].copy_(file.mapped(name)[slices.get(name, ())])
    except OSError as error:
        msg = f"a checkpoint cannot be read: {error}"
        raise ConfigError(msg) from error


def _nothing() -> None:
    """Nobody asks to stop."""


def _read_straight(
    files: Iterable[TensorFile],
    targets: Mapping[str, Tensor],
    slices: Slices,
    reader: FileReader,
    between: Callable[[], None],
) -> set[str]:
    """Have `reader` read those tensors whose bytes in the files are those in their targets; their names.

    Less than is worth a reader's while is left to the caller.
    """
    pieces = {name: piece for file in files for name, piece in _pieces(file, targets, slices)}
    if sum(piece.n_bytes for piece in pieces.values()) < reader.least_bytes:
        return set()
    reader.read(pieces.values(), between)
    return set(pieces)


def _pieces(file: TensorFile, targets: Mapping[str, Tensor], slices: Slices) -> Iterator[tuple[str, FilePiece]]:
    """A file's tensors that are one run of bytes in it, and the same in their targets."""
    for name in file.table.keys() & targets.keys():
        entry, target, part = file.table[name], targets[name], slices.get(name)
        if TYPES.get(entry.dtype) == target.dtype and target.is_contiguous():
            run = _run(entry, part)
            if run is not None and sliced_shape(file.path, name, entry.shape, part) == tuple(target.shape):
                yield name, FilePiece(file.file, *run, target.data_ptr())


def _run(entry: Entry, part: tuple[slice, ...] | None) -> tuple[int, int] | None:
    """Where a part of a tensor begins in its file, and its bytes; None where it is not whole rows."""
    if not entry.n_bytes or not entry.shape:
        return entry.offset, entry.n_bytes
    pieces = [piece.indices(size) for piece, size in zip(part or (), entry.shape, strict=False)]
    if any(piece != (0, size, 1) for piece, size in zip(pieces[1:], entry.shape[1:], strict=False)):
        return None
    first, end, step = pieces[0] if pieces else (0, entry.shape[0], 1)
    row_bytes = entry.n_bytes // entry.shape[0]
    return (entry.offset + first * row_bytes, max(0, end - first) * row_bytes) if step == 1 else None
