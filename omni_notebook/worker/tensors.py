"""Tensors on their way to the ranks; plain types that may cross a process border, no torch."""

from __future__ import annotations

import math
from typing import Any

import msgspec

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""The types that may be sent, by torch's names, and the bytes of one element."""


class TensorHeader(msgspec.Struct, frozen=True):
    """A whole, unsharded tensor as a checkpoint names it; `dtype` is one of `ITEM_BYTES`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape, where a number counts as one row."""
        return self.shape or (1,)


class TensorPart(msgspec.Struct, frozen=True, kw_only=True):
    """The rows `start` … `stop` of `tensor[place]`, `place` being indices of its first dimensions, mostly none.

    `data`: their bytes in C order, a uint8 array of one dimension.
    """

    header: TensorHeader
    place: tuple[int, ...]
    start: int
    stop: int
    data: Any

    @property
    def row_items(self) -> int:
        """Elements of one row."""
        return math.prod(self.header.sizes[len(self.place) + 1 :])

    @property
    def first_item(self) -> int:
        """How many elements of the tensor, in C order, come before this part."""
        sizes, index = self.header.sizes, 0
        for size, at in zip(sizes, (*self.place, self.start), strict=False):
            index = index * size + at
        return index * self.row_items


class TensorChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Parts that travel together; a tensor's follow one another in C order. `last`: no other chunk comes."""

    parts: tuple[TensorPart, ...]
    last: bool
