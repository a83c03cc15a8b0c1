"""The few calls of the HIP runtime that vLLM's extension does not offer, with the functions of `libcuda`.

Source: HIP runtime API (hip_runtime_api.h, ROCm 6), stream and memory management; clr, hip_vm.cpp. Not run on hardware.
"""

from __future__ import annotations

import ctypes
from typing import Any

from omni_notebook.memory.base import DeviceError

_NO_ROOM = 2  # hipErrorOutOfMemory
_DEFAULT = 4  # hipMemcpyDefault
_NON_BLOCKING = 1  # hipStreamNonBlocking
_DEVICE_MEMORY = 2  # hipMemoryTypeDevice
_ATTRIBUTE_BYTES = 256  # hipPointerAttribute_t has 32 of them; its first field is the memory's type


class HipRuntime:
    """Calls into one loaded HIP runtime: it must be the one that torch uses.

    Args:
        library: that library (`vllm.device_allocator.cumem.libcudart.lib`).
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def is_mapped(self, address: int) -> bool:
        """Whether the runtime knows device memory at an address; it forgets it with `hipMemUnmap`."""
        attributes = (ctypes.c_int * (_ATTRIBUTE_BYTES // 4))()
        error = self._library.hipPointerGetAttributes(ctypes.byref(attributes), ctypes.c_void_p(address))
        if error:
            self._forget_error()
        return error == 0 and attributes[0] == _DEVICE_MEMORY

    def new_stream(self) -> int:
        """A stream that waits for no other; it lives as long as the process.

        Raises:
            DeviceError: the runtime refused.
        """
        stream = ctypes.c_void_p()
        flags = ctypes.c_uint(_NON_BLOCKING)
        self._check("hipStreamCreateWithFlags", self._library.hipStreamCreateWithFlags(ctypes.byref(stream), flags))
        return stream.value or 0

    def copy(self, to: int, source: int, n_bytes: int, stream: int) -> None:
        """Begin to copy between any two addresses; the runtime tells host from device by the address.

        Raises:
            DeviceError: the runtime refused.
        """
        pointers = ctypes.c_void_p(to), ctypes.c_void_p(source)
        size, kind = ctypes.c_size_t(n_bytes), ctypes.c_int(_DEFAULT)
        self._check("hipMemcpyAsync", self._library.hipMemcpyAsync(*pointers, size, kind, ctypes.c_void_p(stream)))

    def zero(self, address: int, n_bytes: int, stream: int) -> None:
        """Begin to fill device memory with zeroes.

        Raises:
            DeviceError: the runtime refused.
        """
        value, size = ctypes.c_ubyte(0), ctypes.c_size_t(n_bytes)
        to, on = ctypes.c_void_p(address), ctypes.c_void_p(stream)
        self._check("hipMemsetD8Async", self._library.hipMemsetD8Async(to, value, size, on))

    def wait(self, stream: int) -> None:
        """Wait until a stream has done all that was begun on it.

        Raises:
            DeviceError: some of it failed.
        """
        self._check("hipStreamSynchronize", self._library.hipStreamSynchronize(ctypes.c_void_p(stream)))

    def pin(self, address: int, n_bytes: int) -> bool:
        """Page-lock host memory; whether that worked."""
        size, flags = ctypes.c_size_t(n_bytes), ctypes.c_uint(0)
        error = self._library.hipHostRegister(ctypes.c_void_p(address), size, flags)
        if error:
            self._forget_error()
        return bool(error == 0)

    def unpin(self, address: int) -> None:
        """Undo `pin`.

        Raises:
            DeviceError: the runtime refused; the memory stays locked, and must not be given back.
        """
        self._check("hipHostUnregister", self._library.hipHostUnregister(ctypes.c_void_p(address)))

    def _check(self, call: str, error: int) -> None:
        if error:
            self._forget_error()
            msg = f"{call}: HIP error {error}"
            raise DeviceError(msg, no_room=error == _NO_ROOM)

    def _forget_error(self) -> None:
        self._library.hipGetLastError()  # or the next kernel's check finds it
