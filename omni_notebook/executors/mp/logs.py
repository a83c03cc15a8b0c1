"""What a rank's process writes: a file without a name, of which the last lines can be had at any time.

The file is a memfd that the parent made: it needs no folder, and nothing is left when both are gone.
"""

from __future__ import annotations

import ctypes
import os
import stat

KEPT_LINES = 200
KEPT_BYTES = 1024 * 1024
_TAIL_BYTES = 128 * 1024
_KEEP_SIZE_AND_PUNCH = 0x01 | 0x02


def make_log() -> int:
    """A new log file's descriptor, for the child's stdout and stderr."""
    return os.memfd_create("omni-worker-log", os.MFD_CLOEXEC)


def tail(fd: int, lines: int = KEPT_LINES) -> list[str]:
    """The last lines of a log; reading moves nothing."""
    size = os.fstat(fd).st_size
    start = max(0, size - _TAIL_BYTES)
    text = os.pread(fd, size - start, start).decode("utf-8", errors="replace")
    found = text.lstrip("\0").splitlines()
    return found[-lines:] if lines else []


def trim(fd: int) -> None:
    """Give the memory of all but the last `KEPT_BYTES` of a log back; the file keeps its length and its readers.

    Source: fallocate(2), FALLOC_FL_PUNCH_HOLE.
    """
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_blocks * 512 > 2 * KEPT_BYTES:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
        libc.fallocate(fd, _KEEP_SIZE_AND_PUNCH, 0, status.st_size - KEPT_BYTES)
