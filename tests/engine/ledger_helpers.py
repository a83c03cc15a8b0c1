"""What ledger tests share: events, rows read by bare sqlite3, and files that are no ledger."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_notebook.engine.ledger import Ledger
from omni_notebook.protocol import AckEvent, MemoryState, PauseState, StateEvent
from tests.notebook.acks import ack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[2]


def ack_event(task_id: str = "t", time_s: float = 1e9, order: str = "sleep", **facts: Any) -> AckEvent:
    """An event with a real ACK."""
    answered = ack(**facts)
    answered.task_id = task_id
    return AckEvent(time_s, order, answered)


def state_event(**facts: Any) -> StateEvent:
    """A state change of stage 0."""
    given = {"time_s": 1e9, "stage_id": 0, "state": MemoryState.AWAKE, "level": None, "pause_state": PauseState.OPEN}
    return StateEvent(**{**given, **facts})


def rows(path: Path, sql: str = "SELECT task_id FROM acks ORDER BY id") -> list[Any]:
    """What a query finds; a single column as plain values."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        found = connection.execute(sql).fetchall()
    return [row[0] if len(row) == 1 else row for row in found]


@asynccontextmanager
async def ledger(path: Path | None, model: str = "demo") -> AsyncIterator[Ledger]:
    """A ledger that writes, and is closed at the end."""
    one = Ledger(path, model)
    one.open()
    try:
        yield one
    finally:
        await one.close()


def record(path: Path, *events: Any, model: str = "demo") -> tuple[str, ...]:
    """Put events on record in a session of their own; the notes at the end."""

    async def run() -> tuple[str, ...]:
        async with ledger(path, model) as one:
            for event in events:
                one.take(event)
            await one.written()
            return one.notes

    return asyncio.run(run())


def in_process(code: str, *words: Any, **options: Any) -> subprocess.Popen[str]:
    """A Python process that knows this repository; what it prints is read as text."""
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def ledger_threads() -> set[threading.Thread]:
    """The threads that write a ledger now."""
    return {thread for thread in threading.enumerate() if thread.name == "omni-ledger"}
