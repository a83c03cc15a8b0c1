"""The checksum of `memory.checksum`, computed by torch where the bytes lie, on a device or the host.

A tensor's value is one pair of sums for each 2 MiB of its bytes. Scratch memory: under 40 MiB.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from omni_notebook.memory.arena import CHUNK
from omni_notebook.memory.checksum import chunk_weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

TensorSums = dict[str, bytes]
"""A name → the little-endian int64 sums (low, high) of each 2 MiB of the tensor's bytes."""

_BATCH = 8 * CHUNK
_WORDS = CHUNK // 8
_HIGH_HALF = 0xFFFFFFFF


class Summer:
    """Sums tensors of one device; holds the weights there while it lives."""

    def __init__(self, device: torch.device) -> None:
        self._weights = [torch.from_numpy(part.view("int64").copy()).to(device) for part in chunk_weights()]

    def sums(self, pieces: Iterable[torch.Tensor]) -> torch.Tensor:
        """The sums of contiguous bytes (uint8), given in pieces; int64 of shape [n, 2] on their device.

        Every piece but the last has a multiple of 2 MiB.
        """
        parts = [self._rows(batch) for piece in pieces for batch in piece.split(_BATCH)]
        return torch.cat(parts) if parts else self._weights[0].new_zeros((0, 2))

    def _rows(self, data: torch.Tensor) -> torch.Tensor:
        whole = data[: data.numel() // CHUNK * CHUNK]
        rest = data[whole.numel() :]
        rows = [self._sum(_words(whole).view(-1, _WORDS))] if whole.numel() else []
        return torch.cat([*rows, self._sum(_words(rest).view(1, -1))]) if rest.numel() else rows[0]

    def _sum(self, words: torch.Tensor) -> torch.Tensor:
        low, high = (weights[: words.shape[1]] for weights in self._weights)
        lows = (words * low).sum(1)
        shifted = words >> 32
        shifted &= _HIGH_HALF  # torch's shift keeps the sign
        shifted *= high
        return torch.stack([lows, shifted.sum(1)], 1)


def _words(data: torch.Tensor) -> torch.Tensor:
    """Bytes as int64, copied where they are not aligned, with zeroes behind where they are no whole words."""
    if data.numel() % 8 == 0:
        return (data if data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)
    padded = data.new_zeros((data.numel() + 7) // 8 * 8)
    padded[: data.numel()] = data
    return padded.view(torch.int64)


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
    """Parts of at most about one batch, cut along the longest dimension."""
    longest = max(range(tensor.dim()), key=lambda place: tensor.shape[place])
    n_parts = -(-tensor.numel() * tensor.itemsize // _BATCH)
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
