"""What a process holds on an Intel GPU, as Level Zero's system management tells it (Sysman).

Source: Level Zero specification 1.14, zes_api.h and ze_api.h. Not run on hardware.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING, Any

from omni_notebook.memory.device.measuring import device_lock, not_measured, used_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

LIBRARY = "libze_loader.so.1"
_CORE_PROPERTIES = 0x3  # ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES
_DEVICE_PROPERTIES = 0x1  # ZES_STRUCTURE_TYPE_DEVICE_PROPERTIES
_PROCESS_STATE = 0x16  # ZES_STRUCTURE_TYPE_PROCESS_STATE
_SPARE = 8
"""Room for processes that come between counting and asking."""

_U32, _U64, _POINTER = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p


class _CoreProperties(ctypes.Structure):
    """ze_device_properties_t."""

    _fields_ = (
        *(("stype", _U32), ("pNext", _POINTER), ("type", _U32), ("vendorId", _U32), ("deviceId", _U32)),
        *(("flags", _U32), ("subdeviceId", _U32), ("coreClockRate", _U32), ("maxMemAllocSize", _U64)),
        *(("maxHardwareContexts", _U32), ("maxCommandQueuePriority", _U32), ("numThreadsPerEU", _U32)),
        *(("physicalEUSimdWidth", _U32), ("numEUsPerSubslice", _U32), ("numSubslicesPerSlice", _U32)),
        *(("numSlices", _U32), ("timerResolution", _U64), ("timestampValidBits", _U32)),
        *(("kernelTimestampValidBits", _U32), ("uuid", ctypes.c_ubyte * 16), ("name", ctypes.c_char * 256)),
    )


class DeviceProperties(ctypes.Structure):
    """zes_device_properties_t."""

    _fields_ = (
        *(("stype", _U32), ("pNext", _POINTER), ("core", _CoreProperties), ("numSubdevices", _U32)),
        ("strings", (ctypes.c_char * 64) * 6),
    )


class ProcessState(ctypes.Structure):
    """zes_process_state_t."""

    _fields_ = (
        *(("stype", _U32), ("pNext", _POINTER), ("processId", _U32)),
        *(("memSize", _U64), ("sharedSize", _U64), ("engines", _U32)),
    )


class SysmanProbe:
    """Measures one Intel GPU for this process.

    Args:
        index: torch's number of the device.
        library: Level Zero's loader, or None where it is not installed.
        xpu: `torch.xpu`.
    """

    device_source = "torch.xpu.mem_get_info"

    def __init__(self, index: int, library: Any, *, xpu: Any) -> None:
        self._index = index
        self._xpu = xpu
        self._pid = os.getpid()
        self._library = library
        self._uuid = _uuid(xpu.get_device_properties(index))
        self._handle = None if library is None or self._uuid is None else _handle(library, self._uuid)

    def process_bytes(self) -> int | None:
        """See `Probe.process_bytes`; None also where Sysman is not there."""
        if self._handle is None:
            return None
        count = _U32(0)
        self._ask(count, None)
        states = (ProcessState * (count.value + _SPARE))()
        for state in states:
            state.stype = _PROCESS_STATE
        count.value = len(states)
        self._ask(count, states)
        ours = [int(state.memSize) for state in states[: count.value] if state.processId == self._pid]
        return sum(ours) if ours else None

    def _ask(self, count: Any, states: Any) -> None:
        error = self._library.zesDeviceProcessesGetState(self._handle, ctypes.byref(count), states)
        if error:
            text = f"zesDeviceProcessesGetState: {error & 0xFFFFFFFF:#x}"
            raise not_measured(text, source="Sysman")

    def device_bytes(self) -> int:
        """See `Probe.device_bytes`; some drivers count no memory there that is mapped by hand."""
        return used_bytes(self._xpu, self._index)

    def exclusive(self) -> AbstractContextManager[bool]:
        """See `device_lock`."""
        return device_lock(f"xpu-{self._index}" if self._uuid is None else self._uuid.hex())


def _uuid(properties: Any) -> bytes | None:
    try:
        return bytes(properties.uuid.bytes)
    except (AttributeError, TypeError):
        return None


def _handle(library: Any, uuid: bytes) -> Any:
    """Sysman's handle of the device with torch's `uuid`, or None: its order is not torch's."""
    if library.zesInit(_U32(0)):
        return None
    for driver in _handles(library.zesDriverGet):
        for device in _handles(functools.partial(library.zesDeviceGet, driver)):
            properties = DeviceProperties(stype=_DEVICE_PROPERTIES)
            properties.core.stype = _CORE_PROPERTIES
            error = library.zesDeviceGetProperties(device, ctypes.byref(properties))
            if not error and bytes(properties.core.uuid) == uuid:
                return device
    return None


def _handles(get: Callable[[Any, Any], int]) -> list[ctypes.c_void_p]:
    """What a function lists that is first asked how many there are; nothing where it refuses."""
    count = _U32(0)
    if get(ctypes.byref(count), None) or not count.value:
        return []
    found = (_POINTER * count.value)()
    return [] if get(ctypes.byref(count), found) else [_POINTER(one) for one in found[: count.value]]


def loader() -> Any:
    """Level Zero's loader, or None where it is not installed or has no Sysman."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    needed = ("zesInit", "zesDriverGet", "zesDeviceGet", "zesDeviceGetProperties", "zesDeviceProcessesGetState")
    return library if all(hasattr(library, name) for name in needed) else None
