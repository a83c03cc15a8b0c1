"""A ledger together with others: locks, many writers, readers, killed kernels, its end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.engine import ledger as module
from omni_notebook.engine import ledger_file
from omni_notebook.engine.ledger import Ledger
from omni_notebook.engine.ledger_file import LedgerFile
from omni_notebook.memory import host
from tests.engine.engine_helpers import until
from tests.engine.ledger_helpers import ack_event, in_process, ledger, ledger_threads, record, rows
from tests.executors.executor_helpers import fds

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "own" / "ledger.db"


LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.quiet
def test_a_lock_that_another_process_holds_costs_one_bounded_wait_and_no_record(path: Path) -> None:
    async def run() -> None:
        async with ledger(path) as one:
            one.take(ack_event("before"))
            await one.written()
            holder = in_process(LOCK, path, stdin=-1)
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            one.take(ack_event("during"))
            started, beats = time.monotonic(), 0
            waiting = asyncio.create_task(one.written())
            while not waiting.done():
                await asyncio.sleep(0.01)
                beats += 1
            waited = time.monotonic() - started
            assert module.WAIT_S * 0.9 < waited < module.WAIT_S + 1
            assert beats > 30, "the loop goes on"
            assert f"{path} is held by another process (database is locked)" in one.notes[0]
            started = time.monotonic()
            one.take(ack_event("late"))
            await one.written()
            assert time.monotonic() - started < 0.2, "one order waits, not every one"
            holder.communicate(timeout=20)
            await until(lambda: not one.notes)
            await one.written()

    asyncio.run(run())
    assert rows(path) == ["before", "during", "late"]


@pytest.mark.quiet
def test_a_disk_that_does_not_answer_costs_one_bounded_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = LedgerFile.write

    def slow(self: LedgerFile, records: Any) -> None:
        gate.wait(20)
        real(self, records)

    monkeypatch.setattr(LedgerFile, "write", slow)

    async def run() -> None:
        async with ledger(path) as one:
            one.take(ack_event("kept"))
            started = time.monotonic()
            await one.written()
            assert time.monotonic() - started < module.WAIT_S + 0.5
            assert f"{path} did not take a record within 1 s" in one.notes[0]
            gate.set()
            await until(lambda: not one.notes)

    asyncio.run(run())
    assert rows(path) == ["kept"]


WRITER = """
import asyncio, sys
from pathlib import Path
from tests.engine.ledger_helpers import ack_event, ledger

async def run(path, name):
    async with ledger(path, name) as one:
        print("ready", flush=True)
        sys.stdin.readline()
        for n in range(100):
            one.take(ack_event(f"{name}-{n}"))
            await one.written()
        assert one.notes == (), one.notes

asyncio.run(run(Path(sys.argv[1]), sys.argv[2]))
"""


def test_several_processes_write_one_file_at_once_from_its_first_moment(path: Path) -> None:
    writers = [in_process(WRITER, path, f"w{n}", stdin=-1) for n in range(4)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _, err = writer.communicate(timeout=100)
        assert (writer.returncode, err) == (0, "")
    found = rows(path, "SELECT s.model, a.task_id FROM acks a JOIN sessions s ON s.id = a.session_id ORDER BY a.id")
    assert len(found) == 400
    for name in ("w0", "w1", "w2", "w3"):
        assert [task for model, task in found if model == name] == [f"{name}-{n}" for n in range(100)]
    assert rows(path, "SELECT count(*) FROM sessions") == [4]
    assert rows(path, "PRAGMA integrity_check") == ["ok"]


def test_a_reader_that_stays_does_not_hold_a_writer_back(path: Path) -> None:
    record(path, ack_event("before"))
    with closing(ledger_file.reading(path)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM acks").fetchone() == (1,)
        started = time.monotonic()
        assert record(path, *(ack_event(str(n)) for n in range(module.BATCH * 2))) == ()
        assert time.monotonic() - started < 5
        assert reader.execute("SELECT count(*) FROM acks").fetchone() == (1,), "its view stays"
    assert rows(path, "SELECT count(*) FROM acks") == [1 + module.BATCH * 2]


def test_the_log_goes_into_the_file_when_nobody_waits(path: Path) -> None:
    async def run() -> None:
        async with ledger(path) as one:
            for n in range(ledger_file.TIDY_ROWS + 1):
                one.take(ack_event(str(n)))
            await one.written()
            await until(lambda: path.stat().st_size > 100_000)

    asyncio.run(run())


LEAVES_A_LOG = """
import asyncio, os, signal, sys
from pathlib import Path
from omni_notebook.engine import ledger_file
from tests.engine.ledger_helpers import ack_event, ledger
ledger_file.TIDY_ROWS = 10**9

async def run(path):
    async with ledger(path) as one:
        for n in range(1000):
            one.take(ack_event(str(n), note="x" * 8000))
            await one.written()
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(run(Path(sys.argv[1])))
"""


def test_a_file_on_a_network_takes_no_shared_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "filesystem_of", lambda _folder: "nfs4")
    assert record(path, ack_event("first"), model="one") == ()

    async def run() -> None:
        async with ledger(path) as one, ledger(path) as two:
            for n in range(20):
                one.take(ack_event(f"a{n}"))
                two.take(ack_event(f"b{n}"))
                await asyncio.gather(one.written(), two.written())
            assert one.notes == two.notes == ()

    asyncio.run(run())
    assert rows(path, "PRAGMA journal_mode") == ["delete"]
    assert sorted(rows(path)) == sorted(["first", *(f"{name}{n}" for name in "ab" for n in range(20))])
    assert [one.name for one in path.parent.iterdir()] == ["ledger.db"]


def test_a_large_log_that_a_killed_kernel_left_goes_into_the_file(path: Path) -> None:
    in_process(LEAVES_A_LOG, path).communicate(timeout=60)
    assert path.stat().st_size < 100_000
    assert ledger_file._log_bytes(path) > ledger_file.LARGE_LOG_BYTES

    async def run() -> None:
        async with ledger(path) as one, ledger(path, "another that stays"):
            one.take(ack_event("next"))
            await one.written()
            await until(lambda: path.stat().st_size > ledger_file.LARGE_LOG_BYTES)

    asyncio.run(run())
    assert len(rows(path)) == 1001


def test_a_file_that_is_taken_away_while_in_use_is_made_anew(path: Path) -> None:
    async def run() -> None:
        async with ledger(path) as one:
            one.take(ack_event("before"))
            await one.written()
            path.unlink()  # noqa: ASYNC240  (nothing else is on this loop)
            one.take(ack_event("after"))
            await one.written()
            assert one.notes == ()

    asyncio.run(run())
    assert rows(path) == ["after"]
    assert rows(path, "SELECT id, pid FROM sessions") == [(1, os.getpid())]


def test_a_closed_ledger_holds_no_file_and_no_thread(path: Path) -> None:
    before, threads = fds(), ledger_threads()

    async def run() -> None:
        async with ledger(path) as one:
            one.take(ack_event("x"))
            await one.written()
            assert len(ledger_threads() - threads) == 1
        await one.close()
        await until(lambda: ledger_threads() <= threads)

    asyncio.run(run())
    assert not {name for name in fds() - before if "ledger" in name}
    assert sorted(p.name for p in path.parent.iterdir()) == ["ledger.db"]


def test_what_was_taken_before_it_opened_and_at_its_end_is_written(path: Path) -> None:
    async def run() -> None:
        one = Ledger(path, "demo")
        one.take(ack_event("first"))
        one.open()
        for n in range(3000):
            one.take(ack_event(str(n)))
        await one.close()

    asyncio.run(run())
    assert rows(path) == ["first", *map(str, range(3000))]
