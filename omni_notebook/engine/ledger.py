"""The ledger: every ACK, state change and audit on disk before the caller sees the order end.

A thread of its own writes, so that the engine's loop never waits for a disk or for another kernel. What can not be
written waits in memory, the ledger says why in one line, and orders go on.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from omni_notebook.engine.ledger_file import VARIABLE, LedgerBusyError, LedgerFile, Record
from omni_notebook.protocol import AckEvent, OmniACK, StateEvent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from omni_notebook.protocol import Event

WAIT_S = 1.0
"""An order waits at most so long for its records; one that ends while the ledger is behind does not wait."""
RETRY_S = 5.0
KEPT = 10_000
"""Records that wait in memory while the file can not be written."""
BATCH = 1000
END = float("inf")
"""As many records as there will ever be: the writer's thread has ended."""
AGAIN_S = 0.02

_BEFORE_INT, _AFTER_INT = -(2**63) - 1, 2**63
_ACK = """INSERT INTO acks (session_id, time, "order", task_id, status, stage_id, replica, rank, freed_bytes,
latency_ms, level, weight_version, error_code, error_msg, ack) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_STATE = """INSERT INTO states (session_id, time, stage_id, state, level, pause_state, reason)
VALUES (?, ?, ?, ?, ?, ?, ?)"""
_AUDIT = "INSERT INTO audits (session_id, time, verdict, report) VALUES (?, ?, ?, ?)"


class Ledger:
    """One engine's part of the ledger; everything here may be called from any thread.

    Args:
        path: the file; None keeps no history.
        model: the pipeline's name, for the session's row.
    """

    def __init__(self, path: Path | None, model: str) -> None:
        self.path = path
        self._model = _clean(model)
        self._changed = threading.Condition()
        self._records: deque[tuple[int, Record]] = deque(maxlen=KEPT)
        self._waiters: list[tuple[float, asyncio.Future[None]]] = []
        self._taken = 0
        self._written: float = 0
        self._trouble: str | None = None
        self._busy: LedgerBusyError | None = None
        self._retry_s = 0.0
        self._end_s = END
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------ taking

    def take(self, event: Event) -> None:
        """Put an ACK or a state change on record; other events are not kept. Never waits."""
        if isinstance(event, AckEvent):
            self._add(_ack_record(event))
        elif isinstance(event, StateEvent):
            self._add(_state_record(event))

    def record_audit(self, verdict: str, report: Any) -> None:
        """Put an audit on record: its verdict and its report, as JSON text or as what JSON can hold. Never waits."""
        text = report if isinstance(report, str) else _as_json(report)
        self._add(Record(_AUDIT, _fitting(time.time(), verdict, text)))

    def _add(self, record: Record) -> None:
        if self.path is None:
            return
        with self._changed:
            self._taken += 1
            self._records.append((self._taken, record))
            self._changed.notify()

    # ----------------------------------------------------------------------------------- waiting

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person must know: nothing, or the line that says why no history is kept."""
        why = self._trouble
        if why is None:
            return ()
        line = (
            f"no history is kept: {why}. Orders go on, the last {KEPT} records wait in memory until the file can be "
            f"written; {VARIABLE} names another file, or off"
        )
        return (line,)

    async def written(self) -> None:
        """Return once all that was taken is committed, at the latest after `WAIT_S`; at once while that fails."""
        count = self._taken
        await self._until(count, WAIT_S)
        with self._changed:
            if self._thread is not None and self._written < count and self._trouble is None:
                self._trouble = str(self._busy or f"{self.path} did not take a record within {WAIT_S:g} s")

    async def _until(self, count: float, seconds: float) -> None:
        """Return once the writer has come as far as `count` or fails, at the latest after `seconds`."""
        with self._changed:
            if self._thread is None or self._need_not_wait(count):
                return
            future = asyncio.get_running_loop().create_future()
            self._waiters.append((count, future))
        await asyncio.wait({future}, timeout=seconds)

    def _need_not_wait(self, count: float) -> bool:
        return self._written >= count or (self._trouble is not None and count < END)

    def open(self) -> None:
        """Begin to write; what was taken before is written too."""
        if self.path is not None and self._thread is None:
            file = LedgerFile(self.path, self._model)
            self._thread = threading.Thread(target=self._run, args=(file,), name="omni-ledger", daemon=True)
            self._thread.start()

    async def close(self) -> None:
        """Write what is left, at the latest by `WAIT_S` from now, and let go of the file; idempotent."""
        with self._changed:
            self._end_s = time.monotonic() + WAIT_S
            self._retry_s = 0.0
            self._changed.notify()
        await self._until(END, 2 * WAIT_S)

    # --------------------------------------------------------------------------- the writer's thread

    def _run(self, file: LedgerFile) -> None:
        try:
            while batch := self._next():
                self._attempt(file, batch)
        finally:
            file.close()
            with self._changed:
                self._written = END
            self._release()

    def _next(self) -> list[tuple[int, Record]]:
        """The records to write now, when there are some; none at the end."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._records and self._retry_s <= now <= self._end_s:
                    return list(islice(self._records, BATCH))
                if self._end_s < END and (not self._records or now > self._end_s):
                    return []
                self._changed.wait(max(self._retry_s - now, 0.0) if self._records else None)

    def _attempt(self, file: LedgerFile, batch: Sequence[tuple[int, Record]]) -> None:
        try:
            file.write([record for _, record in batch])
        except LedgerBusyError as error:
            self._busy = error  # SQLite has waited, and a waiter says when that is too long
            self._retry_s = time.monotonic() + AGAIN_S
        except Exception as error:  # noqa: BLE001  (whatever it is, orders go on)
            self._failed(str(error) or type(error).__name__)
        else:
            self._succeeded(batch[-1][0])
            file.tidy()

    def _failed(self, why: str) -> None:
        with self._changed:
            self._trouble = why
            self._retry_s = time.monotonic() + RETRY_S
            if self._end_s < END:
                self._end_s = 0.0  # there is no later
        self._release()

    def _succeeded(self, last: int) -> None:
        with self._changed:
            self._written = last
            self._trouble = self._busy = None
            while self._records and self._records[0][0] <= last:
                self._records.popleft()
        self._release()

    def _release(self) -> None:
        """Wake those whose records are written, or all if that fails."""
        with self._changed:
            free = [waiter for waiter in self._waiters if self._need_not_wait(waiter[0])]
            self._waiters = [waiter for waiter in self._waiters if waiter not in free]
        for _, future in free:
            try:
                future.get_loop().call_soon_threadsafe(_resolve, future)
            except RuntimeError:  # its loop has ended
                continue


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# ------------------------------------------------------------------------------------------ records


def _ack_record(event: AckEvent) -> Record:
    ack, facts = event.ack, event.ack.metadata
    known = (facts.get(key) for key in ("latency_ms", "level", "weight_version", "error_code"))
    where = (ack.stage_id, facts.get("replica") or 0, ack.rank, ack.freed_bytes)
    values = (event.time_s, event.order, ack.task_id, ack.status, *where, *known, ack.error_msg, _as_json(ack))
    return Record(_ACK, _fitting(*values))


def _state_record(event: StateEvent) -> Record:
    values = (event.time_s, event.stage_id, event.state, event.level, event.pause_state, event.reason)
    return Record(_STATE, _fitting(*values))


def _as_json(value: Any) -> str:
    """JSON text of anything; what JSON has no form for as its `str`, what is no character as a question mark."""
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except (UnicodeEncodeError, TypeError, ValueError, OverflowError, RecursionError):
        plain = asdict(value) if isinstance(value, OmniACK) else value
        return json.dumps(plain, default=str, skipkeys=True, ensure_ascii=False).encode("utf-8", "replace").decode()


def _fitting(*values: Any) -> tuple[Any, ...]:
    return tuple(map(_fit, values))


def _fit(value: Any) -> Any:
    """A value as SQLite takes it; a number that is too large for it only stands in the JSON."""
    if value is None or isinstance(value, float):
        return value
    if isinstance(value, int):
        return int(value) if _BEFORE_INT < value < _AFTER_INT else None
    return _clean(str(value))


def _clean(text: str) -> str:
    """Text that can be written as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
