"""The checksum of tensors on a device or the host: for each 2 MiB of a tensor's bytes the eight sums of `shadow`.

Scratch memory: under 30 MiB.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from omni_notebook.memory.arena import CHUNK
from omni_notebook.memory.device.shadow import N_SUMS, ChunkSums

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

TensorSums = dict[str, bytes]
"""A name → the little-endian int64 sums of each 2 MiB of the tensor's bytes."""

_GATHERED = 8
_BATCH = 64 * CHUNK
_PART = 8 * CHUNK
_ALIGN = 16


class Summer:
    """Sums the bytes of tensors of one device: `add` them, then take the `result` of all in one copy.

    Whole chunks are summed where they lie; tensors' last parts are gathered and summed together, so that many small
    tensors cost few kernels. A device without int8 products has its bytes summed by the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._gathered = torch.empty((_GATHERED, CHUNK), dtype=torch.uint8, device=device)
        self._rests: list[torch.Tensor] = []
        self._waiting: list[int] = []
        self._n_rows = 0
        self._tables: dict[torch.device, tuple[ChunkSums, list[int]]] = {}

    def add(self, pieces: Iterable[torch.Tensor]) -> list[int]:
        """Sum contiguous bytes (uint8), given in pieces; their rows of the result.

        Every piece but the last has a multiple of 2 MiB.
        """
        first = self._n_rows
        for piece in pieces:
            whole = piece.numel() // CHUNK * CHUNK
            for batch in piece[:whole].split(_BATCH) if whole else ():
                self._sum(_aligned(batch), self._take(batch.numel() // CHUNK))
            if whole < piece.numel():
                self._gather(piece[whole:])
        return list(range(first, self._n_rows))

    def _take(self, count: int) -> list[int]:
        self._n_rows += count
        return list(range(self._n_rows - count, self._n_rows))

    def _gather(self, rest: torch.Tensor) -> None:
        self._rests.append(rest)
        self._waiting += self._take(1)
        if len(self._waiting) == _GATHERED:
            self._sum_gathered()

    def _sum_gathered(self) -> None:
        """Sum what waits: zeros around them and all of them side by side, in as few kernels as it goes."""
        if self._waiting:
            gathered = self._gathered[: len(self._waiting)].zero_()
            rows = [row[: rest.numel()] for row, rest in zip(gathered, self._rests, strict=True)]
            torch._foreach_copy_(rows, self._rests)
            self._sum(gathered.view(-1), self._waiting)
            self._rests, self._waiting = [], []

    def _sum(self, data: torch.Tensor, rows: list[int]) -> None:
        try:
            self._sum_at(data, rows)
        except (RuntimeError, NotImplementedError):
            self._sum_at(data.cpu(), rows)

    def _sum_at(self, data: torch.Tensor, rows: list[int]) -> None:
        if data.device not in self._tables:
            self._tables[data.device] = ChunkSums(data.device), []
        sums, order = self._tables[data.device]
        sums.add(data)
        order += rows

    def result(self) -> NDArray[np.int64]:
        """The sums of all rows, on the host: shape [rows, 8]."""
        self._sum_gathered()
        table = np.zeros((self._n_rows, N_SUMS), np.int64)
        for sums, order in self._tables.values():
            if order:
                table[order] = sums.result().cpu().numpy()
        return table


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """Bytes as matrix units take them, copied where they are not aligned."""
    return data if data.data_ptr() % _ALIGN == 0 else data.clone()


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
