"""Safetensors files: the table of tensors in their headers, and where the bytes are.

The package that is called so leaves two Python integers behind for each tensor that it reads: a process that reloads
its weights again and again would grow. Source of the format: that package's README.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from omni_notebook.errors import ConfigError
from omni_notebook.memory.libc import MAP_NORESERVE

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path
    from typing import Self

    from torch import Tensor

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""Types that a model computes in, by their names in headers."""
TYPES = FLOATS | {
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MOST_HEADER = 100_000_000
"""Bytes; a longer header is refused, as by the format's own package."""


class Entry(NamedTuple):
    """One tensor; `offset` in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class TensorFile:
    """An open safetensors file: what is read of it is what its table says, also when another takes its name.

    Attributes:
        path, file: its name, and the file.
        table: its tensors by name.
        metadata: the strings that were saved with them.

    Raises:
        ConfigError: it can not be opened, or is not a whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            self.file: FileIO = path.open("rb", buffering=0)
            try:
                self.metadata, self.table = _header(self.file)
            except BaseException:
                self.file.close()
                raise
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            msg = f"{path}: not a whole safetensors file: {error}"
            raise ConfigError(msg) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; tensors of `mapped` stay."""
        self._map = None
        self.file.close()

    def mapped(self, name: str) -> Tensor:
        """A tensor whose memory is the file. Reading it after the file was cut short ends the process by a signal.

        Raises:
            ConfigError: it has a type that torch has not.
            OSError: the file can not be mapped, or has become shorter.
        """
        entry = self.table[name]
        if entry.dtype not in TYPES:
            msg = f"{self.path}: {name} has the type {entry.dtype}, which can not be read; save it as another"
            raise ConfigError(msg)
        kind = TYPES[entry.dtype]
        if not entry.n_bytes:
            return torch.empty(entry.shape, dtype=kind)
        missing = entry.offset + entry.n_bytes - os.fstat(self.file.fileno()).st_size
        if missing > 0:
            msg = f"{self.path} ends {missing} bytes before the end of a tensor"
            raise OSError(msg)
        if self._map is None:
            flags = mmap.MAP_PRIVATE | MAP_NORESERVE  # nothing is written: larger than the host's memory is fine
            self._map = mmap.mmap(self.file.fileno(), 0, flags=flags)
        size = entry.n_bytes // kind.itemsize
        return torch.frombuffer(self._map, dtype=kind, count=size, offset=entry.offset).view(entry.shape)


def _header(file: FileIO) -> tuple[dict[str, str], dict[str, Entry]]:
    """The metadata and the table.

    Raises:
        OSError, ValueError, TypeError, AttributeError: it has none, or the file has not the length that it says.
    """
    end = file.seek(0, 2)
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    if size > min(_MOST_HEADER, end - 8):
        msg = f"its header would have {size} bytes, the file has {end}"
        raise ValueError(msg)
    found = json.loads(_read(file, size))
    metadata = found.pop("__metadata__", None) or {}
    entries = {name: _entry(8 + size, **raw) for name, raw in found.items()}
    at = 8 + size
    for name, entry in sorted(entries.items(), key=_place):
        if entry.offset != at:
            msg = f"{name} begins at byte {entry.offset}, not where the one before it ends"
            raise ValueError(msg)
        at += entry.n_bytes
    if at != end:
        msg = f"its tensors end at byte {at}, the file at {end}"
        raise ValueError(msg)
    return metadata, entries


def _read(file: FileIO, n_bytes: int) -> bytes:
    """A file may give less than was asked for."""
    parts = []
    while n_bytes and (part := file.read(n_bytes)):
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)


def _place(named: tuple[str, Entry]) -> tuple[int, int]:
    return named[1].offset, named[1].n_bytes


def _entry(start: int, *, dtype: str, shape: list[int], data_offsets: list[int]) -> Entry:
    """A table's line, checked against itself. A type that is not known here has what its offsets say."""
    sizes: list[Any] = [*shape, *data_offsets]
    if any(type(size) is not int or size < 0 for size in sizes) or len(data_offsets) != 2:
        msg = f"a tensor of shape {shape} at {data_offsets}"
        raise ValueError(msg)
    first, last = data_offsets
    kind = TYPES.get(dtype)
    if last < first or (kind is not None and math.prod(shape) * kind.itemsize != last - first):
        msg = f"a {dtype} tensor of shape {shape} does not take bytes {first} to {last}"
        raise ValueError(msg)
    return Entry(dtype, tuple(shape), start + first, last - first)
