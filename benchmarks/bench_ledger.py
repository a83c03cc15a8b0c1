"""The ledger: a history out of 1 000 000 ACKs against a bare query of the same rows, and what it costs an order."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks import Figure
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.engine.history import Filter, History
from omni_notebook.engine.ledger import Ledger
from omni_notebook.engine.ledger_file import VARIABLE, LedgerFile
from omni_notebook.protocol import MIB, AckEvent, AckMetadata, OmniACK, PhasesMs, ResidualBytes, TagBytes

if TYPE_CHECKING:
    from collections.abc import Callable

ACKS = 1_000_000
SESSIONS = 1000
RANKS = 8
FIRST_S, EVERY_S = 1_700_000_000.0, 10.0
ROUNDS = 15
HISTORY_MS = 100.0
PAIRS = 400
T_95 = 1.966
"""Student's t for 399 degrees of freedom, two-sided 95 %."""

WISHES: dict[str, Filter] = {
    "newest 50": Filter(),
    "--stage 1": Filter(stage=1),
    "--rank 3": Filter(rank=3),
    "--stage 1 --rank 3": Filter(stage=1, rank=3),
    "--since (the last tenth)": Filter(since=FIRST_S + 0.9 * ACKS * EVERY_S),
    "--session 500": Filter(session=SESSIONS // 2),
    "--errors": Filter(errors=True),
    "everything that nothing matches": Filter(stage=77, rank=3, since=FIRST_S, errors=True),
    "--rank 3 --errors --since (the first)": Filter(rank=3, errors=True, since=FIRST_S),
}
_FILL = """WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < ? - 1)
INSERT INTO acks (session_id, time, "order", task_id, status, stage_id, replica, rank, freed_bytes, latency_ms, level,
weight_version, error_code, error_msg, ack)
SELECT 1 + i / (? / ?), ? + i * ?, CASE WHEN i / 16 % 2 THEN 'wake' ELSE 'sleep' END, printf('%012x', i / 16),
CASE WHEN i % 997 = 3 THEN 'ERROR' ELSE 'SUCCESS' END, i / ? % 2, 0, i % ?, 268435456, 12.5, 1, '0123456789', NULL,
NULL, ? FROM n"""


def fill(path: Path, n_acks: int = ACKS) -> None:
    """A ledger of 2 stages × 8 ranks, in `SESSIONS` sessions; the JSON of each ACK is a real one's."""
    file = LedgerFile(path, "demo")
    file.write([])
    file.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        more = [(FIRST_S + n, 1, "host", "demo", "0") for n in range(SESSIONS - 1)]
        connection.executemany("INSERT INTO sessions (started, pid, host, model, version) VALUES (?, ?, ?, ?, ?)", more)
        values = (n_acks, n_acks, SESSIONS, FIRST_S, EVERY_S, RANKS, RANKS, _ack_json())
        connection.execute(_FILL, values)
        connection.execute("COMMIT")


def _ack_json() -> str:
    return msgspec.json.encode(_ack()).decode()


def _ack() -> OmniACK:
    facts = AckMetadata(
        source="Platform_CPU",
        state="COLD",
        level=1,
        tags={"weights": TagBytes(256 * MIB, "spill"), "kv_cache": TagBytes(64 * MIB, None)},
        expected_bytes=256 * MIB,
        observed_bytes=256 * MIB,
        observed_scope="mapping",
        residual=ResidualBytes(context=0, untagged=3 * MIB),
        backup_location="/tmp/omni-spill-0123456789/weights",
        latency_ms=12.5,
        phases_ms=PhasesMs(quiesce=1.0, checksum=2.0, copy=3.0, unmap=4.0),
        weight_version="0123456789",
    )
    answered = {"task_id": "0" * 12, "status": "SUCCESS", "stage_id": 0, "rank": 0, "freed_bytes": 256 * MIB}
    return OmniACK(**answered, metadata=facts.to_dict())  # type: ignore[arg-type]


def _median_ms(act: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        act()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def _bare(path: Path, ids: list[int]) -> list[object]:
    """The same rows by their ids: what SQLite alone takes to open the file and to read them."""
    marks = ", ".join("?" * len(ids))
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        return connection.execute(f"SELECT * FROM acks WHERE id IN ({marks})", ids).fetchall()


def _histories(path: Path) -> list[Figure]:
    figures = []
    for words, wanted in WISHES.items():
        found = History(path, wanted)
        ids = [ack.id for ack in found]
        value = _median_ms(lambda wanted=wanted: repr(History(path, wanted)))  # type: ignore[misc]
        figures.append(
            Figure(
                what=f"history of {ACKS} ACKs, {words}, as text",
                value=value,
                unit="ms",
                floor=_median_ms(lambda ids=ids: _bare(path, ids)),  # type: ignore[misc]
                floor_is="the same rows by id",
                bar=f"≤ {HISTORY_MS:g} ms",
                met=value <= HISTORY_MS,
                note=f"{len(ids)} rows, median of {ROUNDS}, file opened each time",
            )
        )
    return figures


async def _orders_ms(kept: AsyncOmni, off: AsyncOmni) -> tuple[list[float], list[float]]:
    """Milliseconds of no-op sleeps with and without a ledger, in alternating pairs."""
    times: dict[AsyncOmni, list[float]] = {kept: [], off: []}
    for engine in (kept, off):
        await engine.sleep([0])
        for _ in range(20):
            await engine.sleep([0])
    for n in range(PAIRS):
        for engine in (kept, off) if n % 2 else (off, kept):
            started = time.perf_counter()
            await engine.sleep([0])
            times[engine].append((time.perf_counter() - started) * 1e3)
    return times[kept], times[off]


def _cost(folder: Path) -> list[Figure]:
    os.environ[VARIABLE] = "off"
    with AsyncOmni("demo", executor="uni") as off:
        os.environ[VARIABLE] = str(folder / "orders.db")
        with AsyncOmni("demo", executor="uni") as kept:
            with_ms, without_ms = asyncio.run(_orders_ms(kept, off))
            if kept.status().notes:
                raise RuntimeError(kept.status().notes[0])
    more = [a - b for a, b in zip(with_ms, without_ms, strict=True)]
    half = T_95 * statistics.stdev(more) / PAIRS**0.5
    return [
        Figure(
            what="no-op sleep of a stage with a ledger, median",
            value=statistics.median(with_ms),
            unit="ms",
            floor=statistics.median(without_ms),
            floor_is="without",
            note=f"p95 {_p95(with_ms):.2f} ms against {_p95(without_ms):.2f} ms",
        ),
        Figure(
            what="what the ledger adds to an order, mean",
            value=statistics.mean(more),
            unit="ms",
            note=f"{PAIRS} alternating pairs, 95 % interval ± {half:.2f} ms",
        ),
    ]


async def _waits_ms(path: Path) -> list[float]:
    """Milliseconds from an ACK that is told to the same on disk, without an engine."""
    ledger, times = Ledger(path, "demo"), []
    ledger.open()
    event = AckEvent(FIRST_S, "sleep", _ack())
    for _ in range(PAIRS):
        started = time.perf_counter()
        ledger.take(event)
        await ledger.written()
        times.append((time.perf_counter() - started) * 1e3)
        await asyncio.sleep(0)
    await ledger.close()
    return times


def _waits(folder: Path) -> Figure:
    times = asyncio.run(_waits_ms(folder / "waits.db"))
    return Figure(
        what="wait for one ACK to be on disk, on the ledger's thread, median",
        value=statistics.median(times),
        unit="ms",
        floor=_commit_ms(folder),
        floor_is="one row by bare sqlite3",
        note=f"p95 {_p95(times):.2f} ms",
    )


def _p95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


def _commit_ms(folder: Path) -> float:
    """One committed row of the same size, with the same settings, on this thread."""
    with closing(sqlite3.connect(folder / "bare.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("CREATE TABLE acks (id INTEGER PRIMARY KEY, ack TEXT)")
        text = _ack_json()
        started = time.perf_counter()
        for _ in range(PAIRS):
            connection.execute("INSERT INTO acks (ack) VALUES (?)", (text,))
        return (time.perf_counter() - started) * 1e3 / PAIRS


def measure() -> list[Figure]:
    """Histories and orders."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder / "ledger.db")
        return [*_histories(folder / "ledger.db"), _waits(folder), *_cost(folder)]
