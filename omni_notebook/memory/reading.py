"""Pieces of files into memory: what every platform's reader shares, and the reader of host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from omni_notebook.memory import libc
from omni_notebook.memory.lanes import default_lanes, run_lanes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from io import FileIO

_PART = 2 * 1024**2
_ALONE_UNDER = 8 * 1024**2
"""So few bytes are read sooner than a thread starts."""


class FilePiece(NamedTuple):
    """Bytes of an open file, and the address where they go."""

    file: FileIO
    offset: int
    n_bytes: int
    address: int

    def read(self, address: int | None = None) -> None:
        """Read them there, or to another address, in host memory.

        Raises:
            OSError: the file can not be read, or has become shorter.
        """
        address, done = self.address if address is None else address, 0
        while done < self.n_bytes:
            try:
                got = libc.read_at(self.file.fileno(), address + done, self.n_bytes - done, self.offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.file.name) from error
            if not got:
                msg = f"{self.file.name} ends {self.n_bytes - done} bytes before the end of a tensor"
                raise OSError(msg)
            done += got


class FileReader(Protocol):
    """Reads pieces of files into the memory of a platform's pools. One caller at a time.

    Attributes:
        least_bytes: fewer are copied from a tensor on the host as fast.
    """

    least_bytes: int

    def read(self, pieces: Iterable[FilePiece], check: Callable[[], None]) -> None:
        """Read all pieces; `check` is called before each part of one, and may raise, which ends the read.

        Raises:
            OSError: a file could not be read, or ended too early.
        """
        ...


class HostReader:
    """Reads into host memory: one copy, from the page cache to the place."""

    least_bytes = 0

    def read(self, pieces: Iterable[FilePiece], check: Callable[[], None]) -> None:
        """See `FileReader`; `check` is called by the caller's thread only."""
        parts = tuple(cut(pieces, _PART))
        few = sum(part.n_bytes for part in parts) < _ALONE_UNDER

        def stop() -> bool:
            check()
            return False

        run_lanes(parts, FilePiece.read, lanes=1 if few else default_lanes(), stop=stop)


def cut(pieces: Iterable[FilePiece], most: int) -> Iterator[FilePiece]:
    """Parts of at most `most` bytes."""
    for piece in pieces:
        for done in range(0, piece.n_bytes, most):
            n_bytes = min(most, piece.n_bytes - done)
            yield FilePiece(piece.file, piece.offset + done, n_bytes, piece.address + done)
