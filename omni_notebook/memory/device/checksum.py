"""The checksum of `memory.checksum`, computed by torch where the bytes lie, on a device or the host.

A tensor's value is one pair of sums for each 2 MiB of its bytes. Scratch memory: under 60 MiB.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from omni_notebook.memory.arena import CHUNK
from omni_notebook.memory.checksum import chunk_weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

TensorSums = dict[str, bytes]
"""A name → the little-endian int64 sums (low, high) of each 2 MiB of the tensor's bytes."""

_ROWS = 16
_GATHERED = 8
_BATCH = _ROWS * CHUNK
_PART = 8 * CHUNK
_WORDS = CHUNK // 8
_HIGH_HALF = 0xFFFFFFFF


class Summer:
    """Sums the bytes of tensors of one device: `add` them, then take the `result` of all in one copy.

    Whole chunks are summed where they lie, 16 at a time; tensors' last parts are gathered and summed together, so that
    many small tensors cost few kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._weights = [torch.from_numpy(part.view("int64").copy()).to(device) for part in chunk_weights()]
        self._products = torch.empty((_ROWS, _WORDS), dtype=torch.int64, device=device)
        self._gathered = torch.empty((_GATHERED, CHUNK), dtype=torch.uint8, device=device)
        self._waiting: list[int] = []
        self._order: list[int] = []
        self._lows: list[torch.Tensor] = []
        self._highs: list[torch.Tensor] = []
        self._n_rows = 0

    def add(self, pieces: Iterable[torch.Tensor]) -> list[int]:
        """Sum contiguous bytes (uint8), given in pieces; their rows of the result.

        Every piece but the last has a multiple of 2 MiB.
        """
        first = self._n_rows
        for piece in pieces:
            whole = piece.numel() // CHUNK * CHUNK
            for batch in piece[:whole].split(_BATCH) if whole else ():
                self._sum(_words(batch).view(-1, _WORDS), self._take(batch.numel() // CHUNK))
            if whole < piece.numel():
                self._gather(piece[whole:])
        return list(range(first, self._n_rows))

    def _take(self, count: int) -> list[int]:
        self._n_rows += count
        return list(range(self._n_rows - count, self._n_rows))

    def _gather(self, rest: torch.Tensor) -> None:
        row = self._gathered[len(self._waiting)]
        row[: rest.numel()] = rest
        row[rest.numel() :] = 0
        self._waiting += self._take(1)
        if len(self._waiting) == _GATHERED:
            self._sum_gathered()

    def _sum_gathered(self) -> None:
        if self._waiting:
            self._sum(self._gathered[: len(self._waiting)].view(torch.int64), self._waiting)
            self._waiting = []

    def _sum(self, words: torch.Tensor, rows: list[int]) -> None:
        low, high = self._weights
        products = self._products[: len(rows)]
        self._lows.append(torch.mul(words, low, out=products).sum(1))
        torch.bitwise_right_shift(words, 32, out=products)
        products &= _HIGH_HALF  # torch's shift keeps the sign
        products *= high
        self._highs.append(products.sum(1))
        self._order += rows

    def result(self) -> NDArray[np.int64]:
        """The sums (low, high) of all rows, on the host: shape [rows, 2]."""
        self._sum_gathered()
        table = np.zeros((self._n_rows, 2), np.int64)
        if self._order:
            table[self._order] = torch.stack([torch.cat(self._lows), torch.cat(self._highs)], 1).cpu().numpy()
        return table


def _words(data: torch.Tensor) -> torch.Tensor:
    """Whole words as int64, copied where they are not aligned."""
    aligned = data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0
    return (data if aligned else data.clone()).view(torch.int64)


def pieces(flat: torch.Tensor, layout: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a tensor in order, given the bytes that it spans; only a tensor with gaps is copied, in pieces."""
    n_bytes = layout.numel() * layout.itemsize
    if n_bytes == flat.numel():
        yield flat
        return
    room = flat.numel() // layout.itemsize * layout.itemsize
    items = (flat if flat.storage_offset() % layout.itemsize == 0 else flat.clone())[:room].view(layout.dtype)
    tensor = torch.as_strided(items, layout.shape, layout.stride(), items.storage_offset())
    yield from _whole_chunks(part.contiguous().view(-1).view(torch.uint8) for part in _parts(tensor))


def _parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Parts of at most about 16 MiB, cut along the longest dimension."""
    longest = max(range(tensor.dim()), key=lambda place: tensor.shape[place])
    n_parts = -(-tensor.numel() * tensor.itemsize // _PART)
    parts: Iterable[torch.Tensor] = tensor.split(max(1, tensor.shape[longest] // n_parts), longest)
    return parts


def _whole_chunks(parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same bytes in pieces of whole chunks, but for the last."""
    carried: torch.Tensor | None = None
    for part in parts:
        carried = part if carried is None else torch.cat([carried, part])
        whole = carried.numel() // CHUNK * CHUNK
        if whole:
            yield carried[:whole]
            carried = carried[whole:].clone()
    if carried is not None and carried.numel():
        yield carried


def digest(sums: Mapping[str, bytes]) -> str:
    """Sixteen hex digits over all tensors, by name."""
    hasher = hashlib.blake2b(digest_size=8)
    for name in sorted(sums):
        hasher.update(f"{name}\0{len(sums[name])}\0".encode())
        hasher.update(sums[name])
    return hasher.hexdigest()
