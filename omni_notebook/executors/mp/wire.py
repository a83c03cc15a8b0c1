"""Frames between an engine and a rank's process: msgpack over SOCK_SEQPACKET, big ones in a memfd.

A frame is `body length (8 bytes) | msgpack body | padding | array bytes, each on a 64-byte boundary`. Arrays stand in
the body as an extension (offset, dtype, shape), so that neither side copies them more than once: the sender writes
them into the frame, the receiver views them where they lie. Source: unix(7), memfd_create(2), msgpack's spec.
"""

from __future__ import annotations

import array
import ctypes
import functools
import math
import os
import socket
import struct
import sys
import weakref
from typing import TYPE_CHECKING, Any

import msgspec

from omni_notebook.errors import ArgumentError
from omni_notebook.memory.libc import map_private, unmap

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

INLINE_BYTES = 32 * 1024
"""Frames up to this size travel in the socket itself."""
FRAMES_A_TURN = 64
"""How many frames whoever reads on a loop takes before the loop turns to what else there is."""
_ALIGN = 64
_LENGTH = struct.Struct("<Q")
_ARRAY = 1
_FDS = socket.CMSG_SPACE(struct.calcsize("i")) if hasattr(socket, "CMSG_SPACE") else 0


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGN) * _ALIGN


class _ArrayRef(msgspec.Struct, array_like=True):
    """Where an array lies in its frame; offsets count from the end of the padded body."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class Packet:
    """A frame that is ready to go, to one rank or to many; a memfd is closed when the last user drops the packet."""

    def __init__(self, body: bytes, arrays: Sequence[memoryview]) -> None:
        start = _aligned(_LENGTH.size + len(body))
        self.n_bytes = start + sum(_aligned(len(a)) for a in arrays) if arrays else _LENGTH.size + len(body)
        self.fd: int | None = None
        if self.n_bytes <= INLINE_BYTES:
            self.data = _join(body, arrays)
        else:
            self.data = _LENGTH.pack(self.n_bytes)
            self.fd = os.memfd_create("omni-frame", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.fd).atexit = False
            _fill(self.fd, body, arrays, start)

    def send(self, to: socket.socket) -> None:
        """Send it whole.

        Raises:
            BlockingIOError: a non-blocking socket has no room now.
            OSError: the other end is gone.
        """
        if self.fd is None:
            to.send(self.data)
        else:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.fd]))
            to.sendmsg([self.data], [rights])


def _join(body: bytes, arrays: Sequence[memoryview]) -> bytes:
    parts: list[bytes | memoryview] = [_LENGTH.pack(len(body)), body]
    length = _LENGTH.size + len(body)
    for view in arrays:
        parts += [bytes(_aligned(length) - length), view]
        length = _aligned(length) + len(view)
    if arrays:
        parts.append(bytes(_aligned(length) - length))
    return b"".join(parts)


def _fill(fd: int, body: bytes, arrays: Sequence[memoryview], start: int) -> None:
    _write(fd, memoryview(_LENGTH.pack(len(body)) + body), 0)
    offset = start
    for view in arrays:
        _write(fd, view, offset)
        offset += _aligned(len(view))
    os.ftruncate(fd, max(offset, _LENGTH.size + len(body)))


def _write(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


class _Packer:
    """Encodes one message, its arrays put aside."""

    def __init__(self) -> None:
        self.arrays: list[memoryview] = []
        self._offset = 0

    def hook(self, value: Any) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return value.item()
        if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.kind in "OV":
            msg = f"a {type(value).__module__}.{type(value).__qualname__} can not be sent between processes"
            raise ArgumentError(msg)
        view = memoryview(numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8))
        ref = _ArrayRef(self._offset, value.dtype.str, value.shape)
        self.arrays.append(view)
        self._offset += _aligned(len(view))
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(ref))


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Making one costs more than using it; the types are those of the messages and methods, a few dozen."""
    return msgspec.msgpack.Decoder(kind, ext_hook=functools.partial(_view, memoryview(b"")))


def pack(message: Any) -> Packet:
    """A message as a frame.

    Raises:
        ArgumentError: it holds an object that has no form on the wire (plain types, Structs and numpy arrays have).
    """
    packer = _Packer()
    try:
        body = msgspec.msgpack.encode(message, enc_hook=packer.hook)
    except (TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
        msg = f"not sent between processes: {error}"
        raise ArgumentError(msg) from error
    return Packet(body, packer.arrays)


class Frame:
    """A frame that arrived; arrays decoded from it are views that keep it alive."""

    def __init__(self, data: memoryview) -> None:
        (length,) = _LENGTH.unpack_from(data)
        self.body = data[_LENGTH.size : _LENGTH.size + length]
        self._arrays = data[_aligned(_LENGTH.size + length) :]

    def decode(self, kind: Any, part: msgspec.Raw | None = None) -> Any:
        """The body, or a part of it, as `kind`.

        Raises:
            msgspec.ValidationError: it is something else.
        """
        data = self.body if part is None else part
        if not self._arrays:
            return _decoder(kind).decode(data)
        return msgspec.msgpack.decode(data, type=kind, ext_hook=functools.partial(_view, self._arrays))


def _view(arrays: memoryview, code: int, data: memoryview) -> np.ndarray[Any, Any]:
    """The array that an extension in a frame stands for."""
    import numpy as np  # noqa: PLC0415  (a rank without arrays needs none)

    if code != _ARRAY:
        msg = f"extension {code} is unknown"
        raise msgspec.ValidationError(msg)
    ref = msgspec.msgpack.decode(data, type=_ArrayRef)
    kind, count = np.dtype(ref.dtype), math.prod(ref.shape)
    if count == 0:
        return np.empty(ref.shape, kind)
    return np.frombuffer(arrays, kind, count, ref.offset).reshape(ref.shape)


class Receiver:
    """Reads frames from a socket; one thread at a time."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._buffer = bytearray(INLINE_BYTES)

    def receive(self) -> Frame | None:
        """The next frame, or None at the end of the connection.

        Raises:
            BlockingIOError: a non-blocking socket has none now.
            OSError: EMFILE: a big frame came, and this process may open no more files.
        """
        try:
            count, extra, flags, _ = self._source.recvmsg_into([self._buffer], _FDS, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return None
        if count == 0:
            return None
        if flags & socket.MSG_CTRUNC:
            msg = "a frame in shared memory was lost: too many open files"
            raise OSError(msg)
        for _level, _kind, data in extra:
            (fd,) = array.array("i", data)
            return Frame(_mapped(fd, *_LENGTH.unpack_from(self._buffer)))
        return Frame(memoryview(bytearray(memoryview(self._buffer)[:count])))


def _mapped(fd: int, n_bytes: int) -> memoryview:
    """A writable private view of a memfd; unmapped when nothing uses it any more."""
    try:
        address = map_private(fd, n_bytes)
    finally:
        os.close(fd)
    buffer = (ctypes.c_ubyte * n_bytes).from_address(address)
    weakref.finalize(buffer, unmap, address, n_bytes).atexit = False
    return memoryview(buffer).cast("B")
