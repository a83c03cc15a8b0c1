"""The few calls of the CUDA driver that neither torch nor vLLM's extension offers.

They act in the calling thread's current context. Source: CUDA driver API, virtual memory management.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from omni_notebook.memory.base import DeviceError

GRANULE = 2 * 1024**2
_MAPPED_ATTRIBUTE = 13  # CU_POINTER_ATTRIBUTE_MAPPED
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
_NO_ROOM = 2  # CUDA_ERROR_OUT_OF_MEMORY
_PINNED_MEMORY = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp, 32 bytes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _AccessDescription(ctypes.Structure):
    """CUmemAccessDesc, 12 bytes."""

    _fields_ = (("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int))


@functools.cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    size, pointer = ctypes.c_size_t, ctypes.c_uint64
    library.cuPointerGetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, pointer)
    library.cuMemCreate.argtypes = (ctypes.c_void_p, size, ctypes.c_void_p, ctypes.c_ulonglong)
    library.cuMemMap.argtypes = (pointer, size, size, ctypes.c_ulonglong, ctypes.c_ulonglong)
    library.cuMemUnmap.argtypes = (pointer, size)
    library.cuMemSetAccess.argtypes = (pointer, size, ctypes.c_void_p, size)
    library.cuMemAddressReserve.argtypes = (ctypes.c_void_p, size, size, pointer, ctypes.c_ulonglong)
    library.cuMemAddressFree.argtypes = (pointer, size)
    library.cuMemRelease.argtypes = (ctypes.c_ulonglong,)
    library.cuMemHostRegister_v2.argtypes = (pointer, size, ctypes.c_uint)
    library.cuMemHostUnregister.argtypes = (pointer,)
    library.cuStreamCreate.argtypes = (ctypes.c_void_p, ctypes.c_uint)
    library.cuStreamSynchronize.argtypes = (ctypes.c_void_p,)
    library.cuEventCreate.argtypes = (ctypes.c_void_p, ctypes.c_uint)
    library.cuEventRecord.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.cuEventSynchronize.argtypes = (ctypes.c_void_p,)
    library.cuStreamWaitEvent.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    library.cuEventDestroy_v2.argtypes = (ctypes.c_void_p,)
    library.cuMemcpyAsync.argtypes = (pointer, pointer, size, ctypes.c_void_p)
    library.cuMemsetD8Async.argtypes = (pointer, ctypes.c_ubyte, size, ctypes.c_void_p)
    return library


def is_mapped(address: int) -> bool | None:
    """Whether pages are behind an address; None where the driver does not say."""
    mapped = ctypes.c_int(0)  # the driver writes a C bool or an int; either way its low byte
    try:
        error = _driver().cuPointerGetAttribute(ctypes.byref(mapped), _MAPPED_ATTRIBUTE, address)
    except OSError:
        return None
    if error == _INVALID_VALUE:  # an address that the driver knows no memory for
        return False
    return bool(mapped.value & 0xFF) if error == 0 else None


def map_alias(device: int, address: int, n_bytes: int, cell: int) -> None:
    """Map all of a reserved range onto one granule of device memory and put its handle into the 8-byte `cell`.

    Nothing can read or write it; what it is for is that unmapping the range and releasing the handle then work.

    Raises:
        DeviceError: the driver refused; the range is as before.
    """
    if n_bytes % GRANULE:
        msg = f"a range of {n_bytes} bytes is not whole granules of {GRANULE} bytes"
        raise DeviceError(msg)
    driver = _driver()
    handle = _create(device, GRANULE)
    for start in range(0, n_bytes, GRANULE):
        error = driver.cuMemMap(address + start, GRANULE, 0, handle, 0)
        if error:
            if start:
                driver.cuMemUnmap(address, start)
            driver.cuMemRelease(handle)
            _check("cuMemMap", error)
    ctypes.c_ulonglong.from_address(cell).value = handle


def _create(device: int, n_bytes: int) -> int:
    properties = _AllocationProperties(type=_PINNED_MEMORY, location_type=_ON_DEVICE, location_id=device)
    handle = ctypes.c_ulonglong(0)
    _check("cuMemCreate", _driver().cuMemCreate(ctypes.byref(handle), n_bytes, ctypes.byref(properties), 0))
    return handle.value


def reserve(n_bytes: int) -> int:
    """Addresses for so many bytes (whole granules), with nothing behind them.

    Raises:
        DeviceError: the driver refused.
    """
    address = ctypes.c_uint64(0)
    _check("cuMemAddressReserve", _driver().cuMemAddressReserve(ctypes.byref(address), n_bytes, GRANULE, 0, 0))
    return address.value


def free_addresses(address: int, n_bytes: int) -> None:
    """Give back what `reserve` gave.

    Raises:
        DeviceError: the driver refused: pages are behind them.
    """
    _check("cuMemAddressFree", _driver().cuMemAddressFree(address, n_bytes))


def map_new(device: int, n_bytes: int, address: int) -> int:
    """Put fresh device memory behind reserved addresses; its handle.

    Raises:
        DeviceError: the driver refused; nothing is there then, and nothing is left of it.
    """
    handle = _create(device, n_bytes)
    error = _driver().cuMemMap(address, n_bytes, 0, handle, 0)
    if error:
        _driver().cuMemRelease(handle)
        _check("cuMemMap", error)
    access = _AccessDescription(location_type=_ON_DEVICE, location_id=device, flags=_READ_WRITE)
    error = _driver().cuMemSetAccess(address, n_bytes, ctypes.byref(access), 1)
    if error:
        _driver().cuMemUnmap(address, n_bytes)
        _driver().cuMemRelease(handle)
        _check("cuMemSetAccess", error)
    return handle


def unmap(address: int, n_bytes: int, handle: int) -> None:
    """Take the memory of a `map_new` from its addresses, which stay reserved, and give it back.

    Raises:
        DeviceError: the driver refused, and all is as before; or (`lost`) it kept memory that nothing can reach.
    """
    _check("cuMemUnmap", _driver().cuMemUnmap(address, n_bytes))
    error = _driver().cuMemRelease(handle)
    if error:
        msg = f"cuMemRelease: CUDA driver error {error}"
        raise DeviceError(msg, lost=True)


def new_stream() -> int:
    """A stream that waits for no other, the default stream neither; it lives as long as the context.

    Raises:
        DeviceError: the driver refused.
    """
    stream = ctypes.c_void_p()
    _check("cuStreamCreate", _driver().cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING))
    return stream.value or 0


def copy(to: int, source: int, n_bytes: int, stream: int) -> None:
    """Begin to copy between any two addresses; the driver tells host from device by the address.

    Raises:
        DeviceError: the driver refused.
    """
    _check("cuMemcpyAsync", _driver().cuMemcpyAsync(to, source, n_bytes, stream))


def zero(address: int, n_bytes: int, stream: int) -> None:
    """Begin to fill device memory with zeroes.

    Raises:
        DeviceError: the driver refused.
    """
    _check("cuMemsetD8Async", _driver().cuMemsetD8Async(address, 0, n_bytes, stream))


def wait(stream: int) -> None:
    """Wait until a stream has done all that was begun on it.

    Raises:
        DeviceError: some of it failed.
    """
    _check("cuStreamSynchronize", _driver().cuStreamSynchronize(stream))


class _Bytes:
    """What torch makes a tensor of without a copy. Source: the CUDA array interface, version 3."""

    def __init__(self, address: int, n_bytes: int, holder: object) -> None:
        self.holder = holder
        self.__cuda_array_interface__ = {"shape": (n_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def tensor_at(device: int, address: int, n_bytes: int, holder: object) -> torch.Tensor:
    """Mapped device memory as a uint8 tensor, which keeps `holder` alive."""
    if not n_bytes:
        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}")
    return torch.as_tensor(_Bytes(address, n_bytes, holder), device=f"cuda:{device}")


def pin(address: int, n_bytes: int) -> bool:
    """Page-lock host memory for fast copies; whether that worked."""
    error: int = _driver().cuMemHostRegister_v2(address, n_bytes, 0)
    return error == 0


def unpin(address: int) -> None:
    """Undo `pin`.

    Raises:
        DeviceError: the driver refused; the memory stays locked, and must not be given back.
    """
    _check("cuMemHostUnregister", _driver().cuMemHostUnregister(address))


def record_event(stream: int) -> int:
    """An event behind all that was begun on a stream.

    Raises:
        DeviceError: the driver refused.
    """
    event = ctypes.c_void_p()
    _check("cuEventCreate", _driver().cuEventCreate(ctypes.byref(event), _NO_TIMING))
    error = _driver().cuEventRecord(event, stream)
    if error:
        _driver().cuEventDestroy_v2(event)
        _check("cuEventRecord", error)
    return event.value or 0


def follow_event(stream: int, event: int) -> None:
    """Have what is begun on a stream from now on wait for an event; this thread does not.

    Raises:
        DeviceError: the driver refused.
    """
    _check("cuStreamWaitEvent", _driver().cuStreamWaitEvent(stream, event, 0))


def wait_event(event: int) -> None:
    """Wait for an event, and destroy it.

    Raises:
        DeviceError: what was begun before it failed.
    """
    error = _driver().cuEventSynchronize(event)
    _driver().cuEventDestroy_v2(event)
    _check("cuEventSynchronize", error)


def _check(call: str, error: int) -> None:
    if error:
        msg = f"{call}: CUDA driver error {error}"
        raise DeviceError(msg, no_room=error == _NO_ROOM)
