"""An engine's ledger: on disk before the caller sees an order end, and never in an order's way."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.engine.history import Filter, History
from omni_notebook.engine.ledger import WAIT_S
from omni_notebook.engine.ledger_file import LedgerFile
from omni_notebook.errors import ConfigError, SleepError, StageBusyError, WakeError
from tests.engine.engine_helpers import collect, fault, slow, until
from tests.engine.ledger_helpers import in_process, rows
from tests.executors.executor_helpers import fds, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger of the test's own."""
    monkeypatch.setenv("OMNI_NOTEBOOK_LEDGER", str(tmp_path / "ledger.db"))
    return tmp_path / "ledger.db"


@pytest.fixture
def uni(path: Path) -> Iterator[AsyncOmni]:
    """An engine that keeps it."""
    with AsyncOmni("demo", executor="uni") as engine:
        yield engine


def ledger_of(engine: AsyncOmni) -> Path:
    path = engine._core.ledger.path
    assert path is not None
    return path


def states(path: Path, stage_id: int, since: int = 0) -> list[str]:
    return rows(path, f"SELECT state FROM states WHERE stage_id = {stage_id} AND id > {since} ORDER BY id")


def last_state(path: Path) -> int:
    return rows(path, "SELECT max(id) FROM states")[0]


# ------------------------------------------------------------------------- before the caller sees it


def test_every_ack_and_state_change_is_on_disk_when_the_order_returns(engine: AsyncOmni) -> None:
    path = ledger_of(engine)

    async def run() -> None:
        for level in (1, 2):
            before = last_state(path)
            acks = await engine.sleep(level=level)
            kept = rows(path, f"SELECT \"order\", stage_id, freed_bytes FROM acks WHERE task_id = '{acks[0].task_id}'")
            assert kept == [("sleep", ack.stage_id, ack.freed_bytes) for ack in acks]
            assert states(path, 0, before) == states(path, 1, before) == ["FALLING_ASLEEP", "ASLEEP"]
            acks = await engine.wake_up()
            kept = rows(path, f"SELECT \"order\", stage_id FROM acks WHERE task_id = '{acks[0].task_id}'")
            assert kept == [("wake", 0), ("wake", 1)]
            assert states(path, 1, before) == ["FALLING_ASLEEP", "ASLEEP", "WAKING", "AWAKE"]

    asyncio.run(run())


def test_what_ranks_answered_is_on_disk_when_the_order_raises(engine: AsyncOmni) -> None:
    path = ledger_of(engine)

    async def run() -> None:
        with fault(engine, 1, "prepare_sleep", RuntimeError("<b>no</b>")), pytest.raises(SleepError) as caught:
            await engine.sleep()
        task_id = caught.value.acks[0].task_id
        kept = rows(path, f"SELECT stage_id, status, error_msg FROM acks WHERE task_id = '{task_id}'")
        assert kept == [(ack.stage_id, ack.status, ack.error_msg) for ack in caught.value.acks]
        assert [status for _, status, _ in kept] == ["SUCCESS", "ERROR"]
        (failed,) = History(path, Filter(errors=True, limit=1))
        assert "<b>no</b>" in str(failed.error_msg)

    asyncio.run(run())


def test_the_orders_of_a_caller_that_went_away_are_kept_too(engine: AsyncOmni) -> None:
    path = ledger_of(engine)
    before = rows(path, "SELECT count(*) FROM acks")[0]

    async def run() -> None:
        with slow(engine, 0, 0.3, "prepare_sleep"):
            task = asyncio.create_task(engine.sleep([0]))
            await until(lambda: engine.status().stages[0].state == "FALLING_ASLEEP")
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await until(lambda: engine.status().stages[0].state == "AWAKE")
        await until(lambda: rows(path, "SELECT count(*) FROM acks")[0] == before + 1)

    asyncio.run(run())
    assert rows(path, "SELECT error_code FROM acks ORDER BY id DESC LIMIT 1") == ["CANCELLED"]


def test_a_refused_order_leaves_nothing_on_record(engine: AsyncOmni) -> None:
    path = ledger_of(engine)

    async def run() -> None:
        with slow(engine, 1, 0.3):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            before = rows(path, "SELECT count(*) FROM acks"), last_state(path)
            with pytest.raises(StageBusyError):
                await engine.sleep([1])
            assert (rows(path, "SELECT count(*) FROM acks"), last_state(path)) == before
            await request

    asyncio.run(run())


def test_pauses_new_weights_and_restarts_are_on_disk_when_they_return(engine: AsyncOmni) -> None:
    path = ledger_of(engine)

    async def run() -> None:
        before = last_state(path)
        await engine.pause_generation("keep", [1])
        found = rows(path, f"SELECT pause_state, reason FROM states WHERE stage_id = 1 AND id > {before} ORDER BY id")
        assert found == [("PAUSING", "pause keep"), ("PAUSED", "paused (keep)")]
        await engine.resume_generation()
        before = last_state(path)
        await engine.restart(1)
        assert states(path, 1, before)[-2:] == ["WAKING", "AWAKE"]

    asyncio.run(run())


def test_an_audit_is_on_disk_when_the_call_returns(engine: AsyncOmni) -> None:
    asyncio.run(engine.record_audit("FAIL", {"residual": [1, 2]}))
    assert rows(ledger_of(engine), "SELECT verdict, report FROM audits")[-1] == ("FAIL", '{"residual":[1,2]}')


def test_a_ready_engine_has_its_session_and_states_on_disk(uni: AsyncOmni, path: Path) -> None:
    assert rows(path, "SELECT id, model FROM sessions") == [(1, "demo")]
    assert states(path, 0) == states(path, 1) == ["AWAKE"]


def test_an_order_that_ends_well_or_badly_waits_for_a_slow_disk(
    uni: AsyncOmni, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LedgerFile.write

    def slower(self: LedgerFile, records: Any) -> None:
        time.sleep(0.15)
        real(self, records)

    monkeypatch.setattr(LedgerFile, "write", slower)

    async def run() -> None:
        acks = await uni.sleep([0])
        assert rows(path) == [acks[0].task_id]
        assert states(path, 0)[-1] == "ASLEEP"
        with fault(uni, 0, "prepare_wake", RuntimeError("no")), pytest.raises(WakeError) as caught:
            await uni.wake_up([0])
        assert rows(path) == [acks[0].task_id, caught.value.acks[0].task_id]
        assert states(path, 0)[-2:] == ["WAKING", "ASLEEP"]
        await uni.pause_generation("keep", [1])
        assert rows(path, "SELECT pause_state FROM states ORDER BY id DESC LIMIT 1") == ["PAUSED"]
        await uni.record_audit("PASS", "{}")
        assert rows(path, "SELECT count(*) FROM audits") == [1]
        task = asyncio.create_task(uni.sleep([1]))
        await until(lambda: uni.status().stages[1].state == "ASLEEP")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await until(lambda: len(rows(path)) == 3)

    asyncio.run(run())
    assert uni.status().notes == ()


KILLED = """
import asyncio
from omni_notebook import AsyncOmni

async def run(engine):
    while True:
        for order in (engine.sleep, engine.wake_up):
            acks = await order([0])
            print(acks[0].task_id, flush=True)

asyncio.run(run(AsyncOmni("demo", executor="EXECUTOR")))
"""


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_a_killed_kernel_loses_nothing_that_was_acknowledged(path: Path, executor: str) -> None:
    process = in_process(KILLED.replace("EXECUTOR", executor))
    assert process.stdout is not None
    printed = [process.stdout.readline().strip() for _ in range(25)]
    process.kill()
    rest, _ = process.communicate(timeout=30)
    printed += rest.split("\n")[:-1]
    assert len(set(printed)) == len(printed) >= 25
    kept = rows(path)
    assert set(printed) <= set(kept)
    assert [ack.task_id for ack in History(path, Filter(limit=None))] == kept[::-1]
    with AsyncOmni("demo", executor="uni"):
        pass
    assert rows(path, "SELECT count(*) FROM sessions") == [2]
    assert rows(path) == kept


# ------------------------------------------------------------------------------ never in an order's way


def test_an_engine_whose_ledger_can_not_be_used_works_and_says_so(path: Path) -> None:
    path.write_bytes(b"my notes\n" * 2000)
    with AsyncOmni("demo", executor="uni") as engine:
        (note,) = engine.status().notes
        assert note.startswith(f"no history is kept: {path} is not a ledger")

        async def run() -> None:
            for _ in range(3):
                assert all(ack.ok for ack in await engine.sleep())
                assert all(ack.ok for ack in await engine.wake_up())
            await engine.record_audit("PASS", "{}")

        started = time.monotonic()
        asyncio.run(run())
        assert time.monotonic() - started < 6 * WAIT_S, "no order waits"
        assert engine.status().notes == (note,)
    assert path.read_bytes() == b"my notes\n" * 2000


LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.quiet
def test_another_kernels_lock_holds_no_loop_and_no_order_back_for_long(uni: AsyncOmni, path: Path) -> None:
    holder = in_process(LOCK, path, stdin=-1)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"

    async def run() -> list[str]:
        started = time.monotonic()
        task = asyncio.create_task(uni.sleep([0]))
        slowest = 0.0
        while not task.done():
            asked = time.monotonic()
            await uni.is_paused()  # answered on the engine's loop
            slowest = max(slowest, time.monotonic() - asked)
            await asyncio.sleep(0.02)
        assert time.monotonic() - started < WAIT_S + 1
        assert slowest < 0.5
        acks = await task
        assert "is held by another process" in uni.status().notes[0]
        started = time.monotonic()
        acks += await uni.wake_up([0])
        assert time.monotonic() - started < WAIT_S, "the next one does not wait"
        await asyncio.to_thread(holder.communicate, timeout=20)
        await until(lambda: not uni.status().notes)
        return [ack.task_id for ack in acks]

    done = asyncio.run(run())
    assert rows(path) == done


def test_a_lock_that_outlives_the_engine_does_not_hold_its_end_up(path: Path) -> None:
    engine = AsyncOmni("demo", executor="uni")
    holder = in_process(LOCK, path, stdin=-1)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    asyncio.run(engine.sleep([0]))
    started = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - started < 2 * WAIT_S + 1
    assert "is held by another process" in engine.status().notes[0]
    holder.communicate(timeout=20)


def test_off_keeps_no_history_and_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_NOTEBOOK_LEDGER", "off")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with AsyncOmni("demo", executor="uni") as engine:
        asyncio.run(engine.sleep([0]))
        assert engine.status().notes == ()
    assert list(tmp_path.iterdir()) == []


def test_a_closed_engine_holds_no_file_and_no_thread_and_leaves_one_file(path: Path) -> None:
    before, threads = fds(), set(threading.enumerate())
    with AsyncOmni("demo", executor="uni") as engine:
        asyncio.run(engine.sleep([0]))
        assert [name for name in fds() - before if "ledger.db" in name]
    assert not [name for name in fds() - before if "ledger.db" in name]
    wait_until(lambda: not [t for t in set(threading.enumerate()) - threads if t.name == "omni-ledger"])
    assert [one.name for one in path.parent.iterdir()] == ["ledger.db"]


def test_a_start_that_fails_lets_go_of_the_file(path: Path, tmp_path: Path) -> None:
    before = fds()
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ConfigError):
        AsyncOmni(str(broken), executor="uni")
    assert not [name for name in fds() - before if "ledger.db" in name]


def test_two_engines_of_one_process_are_two_sessions(uni: AsyncOmni, path: Path) -> None:
    with AsyncOmni("demo", executor="uni") as other:

        async def run() -> list[Any]:
            answers = await asyncio.gather(uni.sleep([0]), other.sleep([0]), uni.sleep([1]), other.sleep([1]))
            return [acks[0].task_id for acks in answers]

        ids = asyncio.run(run())
    assert sorted(rows(path)) == sorted(ids)
    kept = dict(rows(path, "SELECT task_id, session_id FROM acks"))
    assert [kept[task_id] for task_id in ids] == [1, 2, 1, 2]
    asyncio.run(uni.wake_up())
    assert rows(path, "SELECT count(*) FROM acks WHERE session_id = 1") == [4]
