"""A segment's backup in files without a name: nobody else can open them and a killed process leaves none.

The bytes are the page cache's (and the disk's), not this process's. One file a copy lane: the kernel lets one writer at
a time into a file. All room is taken when the spill is made, so that a full disk shows before anything is given up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from omni_notebook.errors import OutOfMemoryError
from omni_notebook.memory.arena import CHUNK
from omni_notebook.memory.base import BackupError
from omni_notebook.memory.host import disk_free_bytes
from omni_notebook.protocol import gib

if TYPE_CHECKING:
    from omni_notebook.memory.arena import Chunk, Segment

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def _unnamed_file(folder: str) -> int:
    with contextlib.suppress(OSError, AttributeError):  # not every file system knows O_TMPFILE
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fd, path = tempfile.mkstemp(dir=folder)
    Path(path).unlink()
    return fd


def _close_all(fds: list[int], owner_pid: int) -> None:
    """Close the files; emptied first, so that a forked child that still has them open keeps no room taken."""
    while fds:
        fd = fds.pop()
        if os.getpid() == owner_pid:
            os.ftruncate(fd, 0)
        os.close(fd)


class Spill:
    """Room for a segment's used bytes in `folder`.

    Raises:
        OutOfMemoryError: the disk, a quota or a file size limit has no room; nothing is left behind.
        OSError: the folder can not be written.
    """

    def __init__(self, folder: str, segment: Segment, lanes: int) -> None:
        self.folder = folder
        self._fds: list[int] = []
        self._finalizer = weakref.finalize(self, _close_all, self._fds, os.getpid())
        self._finalizer.atexit = False
        self._lock = threading.Lock()
        try:
            for lane in range(lanes):
                self._fds.append(_unnamed_file(folder))
                sizes = (len(chunk.used) for chunk in segment.chunks() if chunk.index % lanes == lane)
                if n_bytes := sum(sizes):
                    os.posix_fallocate(self._fds[-1], 0, n_bytes)
        except OSError as error:
            self.close()
            if error.errno in _NO_ROOM:
                raise no_room(folder, segment.used_bytes, error) from error
            raise

    def close(self) -> None:
        """Give the room back; idempotent."""
        with self._lock:
            self._finalizer()

    def _place(self, chunk: Chunk) -> tuple[int, int]:
        lanes = len(self._fds)
        return self._fds[chunk.index % lanes], chunk.index // lanes * CHUNK

    def write(self, chunk: Chunk, data: memoryview) -> None:
        """Write a chunk's bytes.

        Raises:
            OSError: the disk failed.
        """
        fd, offset = self._place(chunk)
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)

    def read(self, chunk: Chunk, into: memoryview) -> None:
        """Read a chunk's bytes.

        Raises:
            BackupError: the file is shorter than what was written.
            OSError: the disk failed.
        """
        fd, offset = self._place(chunk)
        done = 0
        while done < len(into):
            count = os.preadv(fd, [into[done:]], offset + done)
            if count == 0:
                msg = f"the spill file in {self.folder} ended early; the backup is lost, load the weights again"
                raise BackupError(msg)
            done += count

    def occupied_bytes(self) -> int:
        """What the files take of the file system now; any thread may ask."""
        with self._lock:
            return sum(os.fstat(fd).st_blocks * 512 for fd in self._fds)


def no_room(folder: str, needed_bytes: int, cause: OSError | None = None) -> OutOfMemoryError:
    """The error for a backup that does not fit into `folder`."""
    free = disk_free_bytes(folder)
    reason = f" ({cause.strerror})" if cause is not None else ""
    message = (
        f"a backup of {gib(needed_bytes)} GiB does not fit into {folder}: {gib(free)} GiB are free{reason}; nothing "
        "changed. Free room there, start with another spill_dir, or sleep with level 2, which needs no backup."
    )
    return OutOfMemoryError(message, needed_bytes=needed_bytes, free_bytes=free)


def check_room(folder: str, needed_bytes: int) -> None:
    """Refuse a backup that `folder` has no room for.

    Raises:
        OutOfMemoryError: too little room, on disk or, where files there are memory, in RAM.
    """
    if needed_bytes and needed_bytes > disk_free_bytes(folder):
        raise no_room(folder, needed_bytes)
