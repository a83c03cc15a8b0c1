"""Tensors whose bytes in a safetensors file are their bytes in memory: read straight into their places."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import torch

from omni_notebook.errors import ConfigError
from omni_notebook.memory.device.reader import FilePiece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from omni_notebook.memory.device.reader import FileReader
    from omni_notebook.models.places import Slices

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""Types that a model computes in, by their names in safetensors headers."""
_TYPES = FLOATS | {"F64": torch.float64, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "I8": torch.int8}
_LEAST_BYTES = 64 * 1024**2
"""Fewer are copied as fast as a reader's buffers are made."""


def read_straight(
    files: Iterable[Path],
    targets: Mapping[str, Tensor],
    slices: Slices,
    reader: FileReader | None,
    between: Callable[[], None] | None = None,
) -> set[str]:
    """Have `reader` read those tensors whose bytes in the files are the bytes in their targets; return their names.

    Few bytes are left to the caller, as everything is where there is no reader. between: called now and then; may
    raise. Raises ConfigError where a file can not be read to the end.
    """
    pieces = {} if reader is None else _pieces(files, targets, slices)
    if reader is None or sum(piece.n_bytes for piece in pieces.values()) < _LEAST_BYTES:
        return set()
    try:
        reader.read(pieces.values(), between or _nothing)
    except OSError as error:
        msg = f"a checkpoint cannot be read: {error}"
        raise ConfigError(msg) from error
    return set(pieces)


def _nothing() -> None:
    """Nobody asks to stop."""


def _pieces(files: Iterable[Path], targets: Mapping[str, Tensor], slices: Slices) -> dict[str, FilePiece]:
    """The tensors that are one run of bytes in a file, and the same in their targets."""
    found: dict[str, FilePiece] = {}
    for file in files:
        start, table = _header(file)
        for name in table.keys() & targets.keys():
            entry, target = table[name], targets[name]
            if _TYPES.get(entry.dtype) == target.dtype and target.is_contiguous() and target.numel():
                run = _run(entry, slices.get(name))
                if run is not None and run[1] == target.nbytes:
                    found[name] = FilePiece(file, start + run[0], run[1], target.data_ptr())
    return found


def _run(entry: _Entry, part: tuple[slice, ...] | None) -> tuple[int, int] | None:
    """Where a part of a tensor begins in its file's data, and its bytes; None where it is not one run."""
    rows = _rows(entry.shape, part)
    if rows is None:
        return None
    row_bytes = entry.n_bytes // max(entry.shape[0], 1) if entry.shape else entry.n_bytes
    return entry.offset + rows[0] * row_bytes, (rows[1] - rows[0]) * row_bytes


def _rows(shape: Sequence[int], part: tuple[slice, ...] | None) -> tuple[int, int] | None:
    """The rows (first, end) that a part consists of; None where it is not whole rows."""
    if not shape:
        return 0, 1
    pieces = [piece.indices(size) for piece, size in zip(part or (), shape, strict=False)]
    if any(piece != (0, size, 1) for piece, size in zip(pieces[1:], shape[1:], strict=False)):
        return None
    first, end, step = pieces[0] if pieces else (0, shape[0], 1)
    return (first, end) if step == 1 else None


class _Entry(NamedTuple):
    """One tensor of a safetensors header; `offset` in the file's data."""

    dtype: str
    shape: list[int]
    offset: int
    n_bytes: int


def _entry(dtype: str, shape: list[int], data_offsets: tuple[int, int]) -> _Entry:
    first, end = data_offsets
    return _Entry(dtype, shape, first, end - first)


def _header(file: Path) -> tuple[int, dict[str, _Entry]]:
    """Where a safetensors file's data begins, and its table of tensors; the file was opened as one before.

    Raises:
        ConfigError: it is none any more.
    """
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            table = json.loads(stream.read(min(size, file.stat().st_size)))
        return 8 + size, {name: _entry(**raw) for name, raw in table.items() if name != "__metadata__"}
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        msg = f"{file}: not a whole safetensors file: {error}"
        raise ConfigError(msg) from error
