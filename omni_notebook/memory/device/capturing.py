"""CUDA graphs are captured by one thread of a process while no other waits for the device or empties torch's cache.

Both break a capture, and the capture them. Source: CUDA C++ programming guide, "Prohibited and unhandled operations" of
stream capture; CUDA graphs in torch (one capture at a time in a process).
"""

from __future__ import annotations

import threading

CAPTURING = threading.RLock()
"""Held while a graph is captured, and by whoever would break that; no other lock is taken within it."""


def synchronize(device: str) -> None:
    """Wait until a device has done all that was started; nothing runs behind our back on a CPU."""
    if device == "cpu":
        return
    import torch  # noqa: PLC0415  (whoever has a device has loaded it)

    with CAPTURING:
        torch.accelerator.synchronize(device)
