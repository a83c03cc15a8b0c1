"""Write tracking: which 2 MiB chunks were written since they were armed, whoever wrote and however.

Version counters miss writes through `.data`, numpy and raw pointers. The kernel misses none: an asynchronously
write-protected page (userfaultfd, `UFFD_FEATURE_WP_ASYNC`, Linux 6.7) counts as written once anything, the kernel
included, writes to it. Memory that a device writes by itself (long-term pinned pages) is not seen. Where the kernel
does not allow it, `Untracked` says that everything may have been written, and callers compare checksums.

No write is lost between looking and arming: only chunks that were told as written are armed again, and what their
reader does with them (copy, checksum) comes after. Arming is by `UFFDIO_WRITEPROTECT`: `PAGEMAP_SCAN` could do it in
the same call, but flushes the TLB once for each 2 MiB, which takes 50 times longer on huge pages.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_notebook.memory import libc
from omni_notebook.memory.arena import CHUNK, Segment
from omni_notebook.memory.lanes import run_lanes
from omni_notebook.memory.residency import PAGE_IS_WRITTEN, SCAN_CHECK_WP_ASYNC, scan

Flags: TypeAlias = NDArray[np.bool_]
Tracking = Literal["auto", "userfaultfd", "checksum"]

# linux/userfaultfd.h
_UFFD_API = 0xAA
_UFFDIO_API = 0xC018AA3F
_UFFDIO_REGISTER = 0xC020AA00
_UFFDIO_WRITEPROTECT = 0xC018AA06
_MODE_WP = 2
_PROTECT = 1
_USER_MODE_ONLY = 1
_WP_UNPOPULATED = 1 << 13
_WP_ASYNC = 1 << 15


def no_flags(segment: Segment) -> Flags:
    """A flag a chunk, all False."""
    return np.zeros(segment.span_bytes // CHUNK, np.bool_)


class Tracker(Protocol):
    """Tells which chunks were written."""

    exact: bool

    def register(self, segment: Segment) -> None:
        """Watch a segment; all of it counts as written until it is armed."""
        ...

    def written(self, segment: Segment) -> Flags:
        """Chunks that were written since they were armed."""
        ...

    def arm(self, segment: Segment, flags: Flags) -> None:
        """These chunks count as not written from now on."""
        ...

    def close(self) -> None:
        """Stop watching."""
        ...


class Untracked:
    """No tracking: everything may have been written."""

    exact = False

    def register(self, segment: Segment) -> None:
        """Nothing to do."""

    def written(self, segment: Segment) -> Flags:
        """All chunks."""
        return ~no_flags(segment)

    def arm(self, segment: Segment, flags: Flags) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class WriteProtect:
    """Tracking by the kernel; see the module's text.

    Raises:
        OSError: the kernel or a sandbox does not allow it.
    """

    exact = True

    def __init__(self) -> None:
        flags = os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY
        self._fd = libc.userfaultfd(flags)
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        libc.ioctl(self._fd, _UFFDIO_API, (ctypes.c_uint64 * 3)(_UFFD_API, _WP_ASYNC | _WP_UNPOPULATED, 0))

    def register(self, segment: Segment) -> None:
        """Watch a segment. Source: ioctl_userfaultfd(2), UFFDIO_REGISTER."""
        libc.ioctl(self._fd, _UFFDIO_REGISTER, (ctypes.c_uint64 * 4)(segment.address, segment.span_bytes, _MODE_WP, 0))

    def written(self, segment: Segment) -> Flags:
        """Chunks that were written since they were armed. Source: admin-guide/mm/pagemap.rst."""
        flags = no_flags(segment)

        def look(part: tuple[int, int]) -> None:
            for start, end in scan(*part, mask=PAGE_IS_WRITTEN, flags=SCAN_CHECK_WP_ASYNC):
                flags[(start - segment.address) // CHUNK : -(-(end - segment.address) // CHUNK)] = True

        parts = segment.parts()
        run_lanes(parts, look, lanes=len(parts), alone_under=2)
        return flags

    def arm(self, segment: Segment, flags: Flags) -> None:
        """These chunks count as not written from now on. Source: ioctl_userfaultfd(2), UFFDIO_WRITEPROTECT."""
        edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).tolist()
        for first, end in zip(edges[::2], edges[1::2], strict=True):
            start, n_bytes = segment.address + first * CHUNK, (end - first) * CHUNK
            libc.ioctl(self._fd, _UFFDIO_WRITEPROTECT, (ctypes.c_uint64 * 3)(start, n_bytes, _PROTECT))

    def close(self) -> None:
        """Stop watching; idempotent."""
        self._finalizer()


def _try_write_protect() -> None:
    """Watch two chunks, write to one from user code and to the other from the kernel.

    Raises:
        OSError: a call failed, or a write was not seen.
    """
    tracker, segment = WriteProtect(), Segment(3 * CHUNK)
    tracker.register(segment)
    tracker.arm(segment, tracker.written(segment))
    quiet = tracker.written(segment)
    segment.view[5] = 1
    with Path("/dev/zero").open("rb", buffering=0) as zeros:
        zeros.readinto(segment.view[CHUNK : CHUNK + 8])
    seen = tracker.written(segment)
    tracker.close()
    if quiet.any() or seen.tolist() != [True, True, False]:
        msg = f"the kernel's write tracking misses writes ({quiet.tolist()}, {seen.tolist()})"
        raise OSError(38, msg)


@functools.cache
def why_not_tracked() -> str | None:
    """Why writes can not be tracked here, found out by really trying; None if they can."""
    try:
        _try_write_protect()
    except OSError as error:
        return str(error)
    return None


def make_tracker(tracking: Tracking) -> Tracker:
    """A tracker: "userfaultfd" must work, "checksum" does without, "auto" takes what works.

    Raises:
        OSError: "userfaultfd" was asked for and is not possible here.
    """
    if tracking == "checksum" or (tracking == "auto" and why_not_tracked() is not None):
        return Untracked()
    return WriteProtect()
