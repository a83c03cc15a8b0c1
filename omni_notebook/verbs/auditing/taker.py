"""A process that takes memory as a trainer would: run as a file, it needs nothing but Python.

Each line on stdin is a number of bytes to take and touch; the answer is `ok`, or what the system said. All of it goes
back when stdin ends. Where memory runs short, the kernel is asked to end this process before any other.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from pathlib import Path

FIRST_TO_GO = "1000"
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


def take(n_bytes: int) -> mmap.mmap:
    """Fresh private memory with every page there.

    Raises:
        OSError: the system has none.
    """
    taken = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        taken.madvise(_POPULATE_WRITE)
    except OSError as error:
        if error.errno != 22:  # EINVAL: an older kernel; touch each page instead
            taken.close()
            raise
        for place in range(0, n_bytes, mmap.PAGESIZE):
            taken[place] = 1
    return taken


def main() -> None:
    """Take what is asked for until nobody asks any more."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO, encoding="ascii")
    held = []
    for line in sys.stdin:
        try:
            held.append(take(int(line)))
            answer = "ok"
        except OSError as error:
            answer = str(error.strerror)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
