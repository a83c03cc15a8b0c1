"""A worker whose orders can be made to fail or to take longer, by words on the channel that `cancel` uses.

An engine on `executor="mp"` has it in its children under test, so that a fault happens where a real one would: in the
rank's own process. The channel is the one that overtakes orders in progress.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import time
from typing import Any

from omni_notebook.worker.worker import Worker

FAULTY = "tests.engine.faulty_worker:FaultyWorker"
PREFIX = "test:"
ORDERS = (
    "execute",
    "prepare_sleep",
    "commit_sleep",
    "prepare_wake",
    "commit_wake",
    "abort_sleep",
    "abort_wake",
    "undo",
)


def words(**fault: Any) -> str:
    """What to send: `method` with `error` (a builtin's name) and `args`, or `seconds`, or neither to make it well."""
    return PREFIX + json.dumps(fault)


def _first(worker: Worker) -> Any:
    return next(p for p in worker._runner._model.parameters() if p.ndim == 2)


def addresses(worker: Worker) -> list[int]:
    """Where the parameters lie."""
    return [p.data_ptr() for p in worker._runner._model.parameters()]


def first_weight(worker: Worker) -> Any:
    """The contents of one parameter."""
    return _first(worker).detach().numpy().copy()


def scribble(worker: Worker, how: str) -> None:
    """Write to that parameter, past every counter."""
    weight = _first(worker)
    if how == "data":
        weight.data[0, 0] = 0.25
    elif how == "numpy":
        weight.detach().numpy()[0, 0] = 0.25
    else:
        ctypes.memset(weight.data_ptr(), 0x3E, 4)


class FaultyWorker(Worker):
    """A real worker; what was ordered through `cancel` happens in front of its methods."""

    def __init__(self, spec: Any) -> None:
        self._faults: dict[str, dict[str, Any]] = {}
        super().__init__(spec)

    def cancel(self, task_id: str) -> None:
        if not task_id.startswith(PREFIX):
            super().cancel(task_id)
            return
        fault = json.loads(task_id.removeprefix(PREFIX))
        self._faults[fault["method"]] = fault

    addresses = addresses
    first_weight = first_weight
    scribble = scribble

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name not in ORDERS:
            return value
        faults = self._faults

        def perhaps(*args: Any) -> Any:
            fault = faults.get(name, {})
            if "error" in fault:
                if fault["after"]:
                    value(*args)
                raise getattr(builtins, fault["error"])(*fault["args"])
            time.sleep(fault.get("seconds", 0.0))
            return value(*args)

        return perhaps
