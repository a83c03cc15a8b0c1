"""Which processors are near a device: pages that they touch first lie on its side of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_SYSFS = Path("/sys/bus/pci/devices")


def near_cpus(torch_device: Any, index: int) -> frozenset[int]:
    """The processors near a device that this process may use; empty where torch or the kernel does not say.

    Args:
        torch_device: `torch.cuda`, or what has its `get_device_properties`.
        index: torch's number of the device.
    """
    try:
        properties = torch_device.get_device_properties(index)
        name = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        text = (_SYSFS / name / "local_cpulist").read_text(encoding="ascii")
        return frozenset(_cpus(text)) & os.sched_getaffinity(0)
    except (AttributeError, OSError, ValueError):
        return frozenset()


def _cpus(text: str) -> list[int]:
    """The numbers of a list such as `0-3,8`."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return [number for first, *last in ranges for number in range(int(first), int((last or [first])[0]) + 1)]


def stay_near(cpus: frozenset[int]) -> None:
    """Keep the calling thread on these processors; nothing where there are none, or the kernel does not let it."""
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError:
            return
