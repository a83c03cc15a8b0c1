"""Segments: page ranges with a fixed address whose physical pages come and go.

A segment is one private anonymous mapping, aligned to 2 MiB, with inaccessible guard pages on both sides, so that its
residency can be measured exactly and an overrun dies at once. A forked child does not get it (`MADV_DONTFORK`).

A tensor of a segment must never point at unmapped addresses: reading there would end the user's process. So closing a
segment only gives its pages up (reads see zeros, a stray write takes a small page); the address space itself is
returned when the last view is gone.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from omni_notebook.errors import ArgumentError, OutOfMemoryError
from omni_notebook.memory import libc
from omni_notebook.memory.host import host_memory
from omni_notebook.memory.lanes import default_lanes
from omni_notebook.memory.residency import resident_bytes
from omni_notebook.protocol import gib

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHUNK = 2 * 1024**2
ALIGN = 64
_LARGE = 128 * 1024**2


def round_up(n_bytes: int, unit: int) -> int:
    """The least multiple of `unit` that is not under `n_bytes`."""
    return -(-n_bytes // unit) * unit


def tensor_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """What a contiguous tensor takes.

    Raises:
        ArgumentError: a size is negative.
    """
    if any(size < 0 for size in shape):
        msg = f"shape={tuple(shape)}: sizes must not be negative"
        raise ArgumentError(msg)
    return math.prod(shape) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """Up to 2 MiB of a segment: the unit of copying and of write tracking."""

    segment: Segment
    index: int

    @property
    def offset(self) -> int:
        """Where it starts in its segment, bytes."""
        return self.index * CHUNK

    @property
    def used(self) -> memoryview:
        """Its bytes that tensors use (may be empty in the last chunk)."""
        return self.segment.view[self.offset : min(self.offset + CHUNK, self.segment.used_bytes)]

    def populate(self) -> None:
        """Make its pages physically there. Source: madvise(2), MADV_POPULATE_WRITE."""
        libc.advise(self.segment.address + self.offset, CHUNK, libc.MADV_POPULATE_WRITE)


def _unmap(base: int, n_bytes: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child has not got the mapping, and may have others there
        libc.unmap(base, n_bytes)


class Segment:
    """`used_bytes` of tensors in whole 2 MiB chunks (`span_bytes`), zeroed and physically there.

    With `populate=False` pages come with the first touch, or when someone populates them.

    Raises:
        OutOfMemoryError: no address space or no memory; nothing is left behind.
    """

    def __init__(self, used_bytes: int, *, populate: bool = True) -> None:
        self.used_bytes = round_up(used_bytes, ALIGN)
        self.span_bytes = round_up(max(self.used_bytes, 1), CHUNK)
        reserved = self.span_bytes + 3 * CHUNK
        try:
            base = libc.reserve(reserved)
        except OSError as error:
            raise no_memory(self.span_bytes, error) from error
        self.address = round_up(base + 1, CHUNK)
        self._array = (ctypes.c_char * self.span_bytes).from_address(self.address)
        weakref.finalize(self._array, _unmap, base, reserved, os.getpid()).atexit = False
        self.view = memoryview(self._array).cast("B")
        try:
            libc.protect(self.address, self.span_bytes, libc.PROT_READ | libc.PROT_WRITE)
            libc.advise(self.address, self.span_bytes, libc.MADV_DONTFORK)
            self._advise_huge(libc.MADV_HUGEPAGE)
            if populate:
                for chunk in self.chunks():
                    chunk.populate()
        except OSError as error:
            raise no_memory(self.span_bytes, error) from error

    def _advise_huge(self, advice: int) -> None:
        try:
            libc.advise(self.address, self.span_bytes, advice)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel without huge pages
                raise

    def chunks(self) -> Iterator[Chunk]:
        """All its chunks, in order."""
        return (Chunk(self, index) for index in range(self.span_bytes // CHUNK))

    def parts(self) -> list[tuple[int, int]]:
        """Ranges (address, bytes) to work on at the same time; a small segment is one."""
        lanes = default_lanes() if self.span_bytes >= _LARGE else 1
        size = round_up(-(-self.span_bytes // lanes), CHUNK)
        starts = range(0, self.span_bytes, size)
        return [(self.address + start, min(size, self.span_bytes - start)) for start in starts]

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor at `offset`; its storage is exactly its own bytes, so pickling it writes no neighbour."""
        flat = torch.frombuffer(self._array, dtype=torch.uint8, count=tensor_bytes(shape, dtype), offset=offset)
        return flat.view(dtype).view(tuple(shape))

    def holds(self, address: int, n_bytes: int) -> bool:
        """Whether the range lies in this segment."""
        return self.address <= address and address + n_bytes <= self.address + self.span_bytes

    def resident_bytes(self) -> int:
        """Its bytes that are physically there, measured."""
        return resident_bytes(self.address, self.span_bytes)

    def release(self) -> None:
        """Give its pages up; it reads as zeros from now on."""
        release_range(self.address, self.span_bytes)

    def close(self) -> None:
        """Give its pages up for good; a stray write through a view that still lives takes 4 KiB, not 2 MiB."""
        self.release()
        self._advise_huge(libc.MADV_NOHUGEPAGE)


def release_range(address: int, n_bytes: int) -> None:
    """Give a range's pages up. Source: madvise(2), MADV_DONTNEED.

    Raises:
        OSError: the kernel keeps them.
    """
    try:
        libc.advise(address, n_bytes, libc.MADV_DONTNEED)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        libc.advise(address, n_bytes, libc.MADV_DONTNEED_LOCKED)  # mlock(2) or mlockall(2) holds them


def no_memory(needed_bytes: int, cause: OSError | None = None, *, free_bytes: int | None = None) -> OutOfMemoryError:
    """The error for pages that can not be had; measures what is free unless told."""
    free = host_memory().available_bytes if free_bytes is None else free_bytes
    reason = f" ({cause.strerror})" if cause is not None else ""
    message = (
        f"{gib(needed_bytes)} GiB of host memory are needed and {gib(free)} GiB are free{reason}; nothing changed. "
        "Free memory (other stages, variables of this session, other processes) and try again."
    )
    return OutOfMemoryError(message, needed_bytes=needed_bytes, free_bytes=free)
