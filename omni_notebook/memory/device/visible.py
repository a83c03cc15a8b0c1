"""Which of the machine's GPUs this process calls `cuda:0`; without torch."""

from __future__ import annotations

import os
from typing import Any


def visible_handle(nvml: Any, name: str) -> Any:
    """NVML's handle of `cuda:1`, which counts only what CUDA_VISIBLE_DEVICES shows.

    Raises:
        ValueError: the variable names no such device.
    """
    index = int(name.partition(":")[2] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    shown = [word.strip() for word in visible.split(",")]
    if index >= len(shown):
        msg = f"{name} is not among CUDA_VISIBLE_DEVICES={visible}"
        raise ValueError(msg)
    word = shown[index]
    return nvml.nvmlDeviceGetHandleByIndex(int(word)) if word.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(word)
