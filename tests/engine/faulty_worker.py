"""A worker whose orders can be made to fail or to take longer, by words on the channel that `cancel` uses.

Engines under test have it, in their children or here, so that a fault happens where a real one would: in the rank's
own process and thread. The channel is the one that overtakes orders in progress. It keeps a journal of what a rank did.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from omni_notebook.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTY = "tests.engine.faulty_worker:FaultyWorker"
PREFIX = "test:"
PATIENCE = "OMNI_TEST_COLLECTIVE_S"
"""The environment variable that says how long a forward pass waits for another rank; a test has less time."""
ORDERS = (
    "execute",
    "prepare_sleep",
    "commit_sleep",
    "prepare_wake",
    "commit_wake",
    "abort_sleep",
    "abort_wake",
    "undo",
    "prepare_weights",
    "load_weights",
    "prepare_tensors",
    "load_tensors",
    "finish_tensors",
    "set_weight_version",
    "drop_backup",
    "barrier",
    "prepare_lora",
    "commit_lora",
    "remove_lora",
    "pin_lora",
    "unpin_lora",
)
INSIDE = ("map_restore", "reload")
"""Steps inside a wake: the pool's, and the weights'."""
ON_THREADS = OUTPUT, FETCH = "output", "fetch"
"""Jobs of a rank's other threads: a batch's copy and encoding, one image's conditioning."""
JOURNAL = 10_000
HELD_AT_MOST_S = 60.0
CANCELLED = "cancelled"
"""A journal's word for an order that the rank has heard to be cancelled: its task id."""
TAKEN = "taken"
"""A journal's word for a batch's images: for each whether its conditioning was on the device before the batch began."""


def words(**fault: Any) -> str:
    """What to send: `method` with `error` (a builtin's name) and `args`, or `seconds`, or `signal`, or nothing.

    Nothing makes it well. `place` = (replica, rank) means this rank only. `after` = the step is carried out first.
    `times` = it is well again after so many. `hold` = the step waits until it is told something else, and follows that.
    """
    return PREFIX + json.dumps(fault)


def _parameters(worker: Worker) -> Any:
    runner: Any = worker._runner
    return runner._model.parameters()


def _first(worker: Worker) -> Any:
    return next(p for p in _parameters(worker) if p.ndim == 2)


def addresses(worker: Worker) -> list[int]:
    """Where the parameters lie."""
    return [p.data_ptr() for p in _parameters(worker)]


def segments(worker: Worker) -> list[tuple[str, int, int]]:
    """Where the pool's memory lies: (tag, address, bytes); it stays there for the rank's life."""
    pool: Any = worker._pool
    return [(tag, s.address, s.span_bytes) for tag, book in pool._core.books.items() for s in book.segments]


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


def journal(worker: FaultyWorker) -> list[tuple[float, str, Any]]:
    """What the rank did since it was last asked: (monotonic seconds, "name begins" | "name ends" | `TAKEN`, detail)."""
    entries, worker._journal = list(worker._journal), deque(maxlen=JOURNAL)
    return entries


def fetched(worker: Worker) -> int:
    """How many images' conditioning the rank holds, or is fetching."""
    runner: Any = worker._runner
    return len(runner._conditioner._ahead)


class FaultyWorker(Worker):
    """A real worker; what was ordered through `cancel` happens in front of its methods and its threads' jobs."""

    def __init__(self, spec: Any) -> None:
        self._faults: dict[str, dict[str, Any]] = {}
        self._journal: deque[tuple[float, str, Any]] = deque(maxlen=JOURNAL)
        patience_s = float(os.environ.get(PATIENCE, spec.collective_timeout_s))
        super().__init__(msgspec.structs.replace(spec, collective_timeout_s=patience_s))
        for owner, step in zip((self._pool, self._weights), INSIDE, strict=True):
            setattr(owner, step, self._perhaps(step, getattr(owner, step)))
        self._outputs.put = self._on_thread(OUTPUT, self._outputs.put)  # type: ignore[method-assign]
        conditioner = getattr(self._runner, "_conditioner", None)
        if conditioner is not None:
            conditioner._ahead.fetch = self._on_thread(FETCH, conditioner._ahead.fetch)
            conditioner.batch = self._taking(conditioner, conditioner.batch)

    def _on_thread(self, name: str, submit: Callable[..., None]) -> Callable[..., None]:
        """`submit(key, job)` of a thread, whose jobs may fail or take longer."""
        return lambda key, job: submit(key, self._perhaps(name, job, key))

    def _taking(self, conditioner: Any, batch: Callable[..., Any]) -> Callable[..., Any]:
        def take(images: Any) -> Any:
            there = conditioner._ahead._fetched
            self._note(TAKEN, [i.condition is None and there[i.key].done() for i in images])
            return batch(images)

        return take

    def _note(self, what: str, detail: Any = None) -> None:
        self._journal.append((time.monotonic(), what, detail))

    def cancel(self, task_id: str) -> None:
        if not task_id.startswith(PREFIX):
            super().cancel(task_id)
            self._note(CANCELLED, task_id)
            return
        fault = json.loads(task_id.removeprefix(PREFIX))
        where = self._spec.where
        if fault.get("place") in (None, [where.replica, where.rank]):
            self._faults[fault["method"]] = fault

    journal = journal
    fetched = fetched
    addresses = addresses
    segments = segments
    first_weight = first_weight
    scribble = scribble

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return self._perhaps(name, value) if name in ORDERS else value

    def _fault_of(self, name: str) -> dict[str, Any]:
        end = time.monotonic() + HELD_AT_MOST_S
        while (fault := self._faults.get(name, {})).get("hold") and time.monotonic() < end:
            time.sleep(0.001)
        if "times" in fault:
            fault["times"] -= 1
            if fault["times"] < 0:
                return {}
        return fault

    def _perhaps(self, name: str, step: Callable[..., Any], detail: Any = None) -> Callable[..., Any]:
        def perhaps(*args: Any, **known: Any) -> Any:
            self._note(f"{name} begins", detail)
            try:
                fault = self._fault_of(name)
                if not fault.get("after"):
                    _happen(fault)
                answer = step(*args, **known)
                if fault.get("after"):
                    _happen(fault)
            finally:
                self._note(f"{name} ends", detail)
            return answer

        return perhaps


def _happen(fault: dict[str, Any]) -> None:
    if "error" in fault:
        raise getattr(builtins, fault["error"])(*fault["args"])
    if "signal" in fault:
        os.kill(os.getpid(), fault["signal"])
    time.sleep(fault.get("seconds", 0.0))
