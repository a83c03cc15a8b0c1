"""A fast position-weighted checksum of memory, a value a 2 MiB chunk.

For the 64-bit words x of a chunk, with fixed odd random weights w and v, both sums modulo 2^64:

    low = Σ w[i] · x[i]        high = Σ v[i] · (x[i] >> 32)

A change of one word always shows. Changes of several words cancel with a chance of at most about 2^-32: a product
loses the weight's high bits when only the word's high bits change, and `high` sees those 32 places lower. This finds
accidents and writes, not forgeries. Source: multilinear hashing (Carter and Wegman, 1979).
"""

from __future__ import annotations

import functools
import hashlib
import threading
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_notebook.memory.arena import CHUNK
from omni_notebook.memory.lanes import run_lanes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from omni_notebook.memory.arena import Chunk, Segment

Sums: TypeAlias = NDArray[np.uint64]
Words: TypeAlias = NDArray[np.uint64]

_WORDS = CHUNK // 8
_BLOCK = 32768  # words; a block, its weights and its shifted copy stay in the second-level cache
_MASK = 2**64 - 1
_local = threading.local()


@functools.cache
def chunk_weights() -> tuple[Words, Words]:
    """The weights of a chunk's words: of the low sum, of the high sum; do not write to them."""
    stream = hashlib.shake_128(b"omni_notebook chunk checksum").digest(2 * CHUNK)
    both = np.frombuffer(stream, dtype="<u8").astype(np.uint64) | np.uint64(1)
    return both[:_WORDS], both[_WORDS:]


def _scratch() -> Words:
    found: Words | None = getattr(_local, "scratch", None)
    if found is None:
        found = _local.scratch = np.empty(_BLOCK, np.uint64)
    return found


def sum_bytes(data: memoryview) -> tuple[int, int]:
    """The two sums of at most 2 MiB whose length is a multiple of 8."""
    words = np.frombuffer(data, dtype=np.uint64)
    low_weights, high_weights = chunk_weights()
    scratch, low, high = _scratch(), 0, 0
    for start in range(0, len(words), _BLOCK):
        block = words[start : start + _BLOCK]
        shifted = scratch[: len(block)]
        low += int(np.dot(block, low_weights[start : start + len(block)]))
        np.right_shift(block, np.uint64(32), out=shifted)
        high += int(np.dot(shifted, high_weights[start : start + len(block)]))
    return low & _MASK, high & _MASK


def sum_chunks(chunks: Iterable[Chunk], into: dict[Segment, Sums], *, lanes: int) -> None:
    """Fill the chunks' rows of their segments' tables (shape [chunks, 2])."""

    def work(chunk: Chunk) -> None:
        into[chunk.segment][chunk.index] = sum_bytes(chunk.used)

    run_lanes(chunks, work, lanes=lanes)


def sum_segments(segments: Sequence[Segment], *, lanes: int) -> dict[Segment, Sums]:
    """Each segment's table of sums."""
    tables = {segment: empty_sums(segment) for segment in segments}
    sum_chunks((chunk for segment in segments for chunk in segment.chunks()), tables, lanes=lanes)
    return tables


def empty_sums(segment: Segment) -> Sums:
    """A table for a segment's sums, all zero."""
    return np.zeros((segment.span_bytes // CHUNK, 2), np.uint64)


def digest(tables: Iterable[Sums]) -> str:
    """Sixteen hex digits over segments' tables, in order."""
    hasher = hashlib.blake2b(digest_size=8)
    for table in tables:
        hasher.update(table.astype("<u8").tobytes())
    return hasher.hexdigest()
