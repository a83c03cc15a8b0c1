"""What a process does before stages wake in it or beside it: lets go of what nobody uses any more."""

from __future__ import annotations

import ctypes
import gc
import sys
import traceback
from typing import Any

from omni_notebook.memory.device.capturing import CAPTURING
from omni_notebook.verbs.frontend import drop_frames

_LAST = ("last_exc", "last_type", "last_value", "last_traceback")


def drop_last_traceback() -> None:
    """Forget the error that Python keeps for a debugger."""
    for name in _LAST:
        value = getattr(sys, name, None)
        if isinstance(value, BaseException):
            drop_frames(value)
        elif name == "last_traceback":
            traceback.clear_frames(value)
        if value is not None:
            setattr(sys, name, None)


def tidy() -> None:
    """Collect garbage, drop the last traceback, empty torch's cache, and let the C library give back what it kept."""
    drop_last_traceback()
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with CAPTURING:  # a stage in this process may be at it
            torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
