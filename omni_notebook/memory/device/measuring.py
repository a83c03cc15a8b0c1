"""Measurements of a whole device, and the lock around them: what another stage does meanwhile would spoil them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_notebook.memory.base import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK_WAIT_S = 2.0
MOVING = threading.RLock()
"""Held by the pool that measures what it gives up, or that takes memory: drivers tell what a process holds in all."""


def used_bytes(torch_device: Any, index: int) -> int:
    """What all processes hold on a device, as its runtime tells torch.

    Raises:
        DeviceError: it does not tell.
    """
    try:
        free, total = torch_device.mem_get_info(index)
    except RuntimeError as error:
        raise not_measured(error, source="mem_get_info") from error
    return int(total - free)


def not_measured(error: object, *, source: str) -> DeviceError:
    """The error of a probe that could not ask."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return DeviceError(f"the device's memory could not be measured by {source}: {text}")


@contextlib.contextmanager
def device_lock(name: str) -> Iterator[bool]:
    """Hold a device's file lock, for at most two seconds of waiting; False: it was not to be had."""
    path = Path(tempfile.gettempdir()) / f"omni_notebook-{name}.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError:
        yield False
        return
    try:
        yield _locked(fd)
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        else:
            return True
