"""How many bytes of a range of this process's addresses are physically there: measured, never from books.

`PAGEMAP_SCAN` (Linux 6.7) is exact and takes microseconds; `/proc/self/smaps` says the same in milliseconds. Reading
an untouched page maps the kernel's shared zero page, which is nobody's memory: neither counts it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from omni_notebook.memory import libc

if TYPE_CHECKING:
    from collections.abc import Iterator

# linux/fs.h
PAGEMAP_SCAN = 0xC0606610
SCAN_CHECK_WP_ASYNC = 2
PAGE_IS_WRITTEN = 1 << 1
PAGE_IS_PRESENT = 1 << 3
PAGE_IS_ZERO = 1 << 5

_REGIONS = 512
_ARG_BYTES = 96


def scan(
    address: int, n_bytes: int, *, mask: int, inverted: int = 0, flags: int = 0, fd: int | None = None
) -> Iterator[tuple[int, int]]:
    """Ranges (start, end) of pages whose categories match `mask` (those in `inverted` must be absent).

    Raises:
        OSError: ENOTTY or EINVAL where the kernel has no PAGEMAP_SCAN. Source: admin-guide/mm/pagemap.rst.
    """
    opened = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC) if fd is None else fd
    try:
        regions = (ctypes.c_uint64 * (3 * _REGIONS))()
        start, end = address, address + n_bytes
        while start < end:
            argument = (ctypes.c_uint64 * 12)(
                _ARG_BYTES, flags, start, end, 0, ctypes.addressof(regions), _REGIONS, 0, inverted, mask, 0, mask
            )
            found = libc.ioctl(opened, PAGEMAP_SCAN, argument)
            for index in range(found):
                yield regions[3 * index], regions[3 * index + 1]
            start = argument[4]
    finally:
        if fd is None:
            os.close(opened)


def resident_by_pagemap(address: int, n_bytes: int) -> int:
    """Resident bytes of a page-aligned range, by PAGEMAP_SCAN."""
    mask = PAGE_IS_PRESENT
    found = scan(address, n_bytes, mask=mask | PAGE_IS_ZERO, inverted=PAGE_IS_ZERO)
    return sum(end - start for start, end in found)


def resident_by_smaps(address: int, n_bytes: int) -> int:
    """Resident bytes of the mappings that lie wholly inside a range (proc_pid_smaps(5))."""
    total, inside = 0, False
    with Path("/proc/self/smaps").open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            first = line.split(None, 1)[0]
            if not first.endswith(":"):
                low, high = (int(part, 16) for part in first.split("-"))
                inside = address <= low and high <= address + n_bytes
            elif inside and first == "Rss:":
                total += int(line.split()[1]) * 1024
    return total


@functools.cache
def has_pagemap_scan() -> bool:
    """Whether this kernel answers PAGEMAP_SCAN; found out by asking it about one page."""
    probe = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        probe[0] = 1
        view = ctypes.c_char.from_buffer(probe)
        try:
            return resident_by_pagemap(ctypes.addressof(view), mmap.PAGESIZE) == mmap.PAGESIZE
        finally:
            del view
    except OSError as error:
        if error.errno in {errno.ENOTTY, errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENOENT, errno.ENOSYS}:
            return False
        raise
    finally:
        probe.close()


def resident_bytes(address: int, n_bytes: int) -> int:
    """Resident bytes of a range that is exactly one or more mappings with nothing else of the process beside them."""
    if has_pagemap_scan():
        return resident_by_pagemap(address, n_bytes)
    return resident_by_smaps(address, n_bytes)
