"""The ledger alone: what it keeps, where, and in which schema."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

import omni_notebook
from omni_notebook.engine import ledger_file
from omni_notebook.engine.ledger_file import MIGRATIONS, ledger_path
from omni_notebook.protocol import MemoryEvent, MemoryState, OmniACK, PauseState, RequestEvent, RequestState
from tests.engine.ledger_helpers import ack_event, ledger, ledger_threads, record, rows, state_event

HOSTILE = "<script>alert('x')</script> \udcff \U0001f600"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "own" / "ledger.db"


# --------------------------------------------------------------------------------------- what it keeps


def test_an_ack_is_kept_in_columns_and_whole_as_json(path: Path) -> None:
    event = ack_event(
        "task",
        1234.5,
        stage_id=1,
        rank=3,
        replica=2,
        latency_ms=7.5,
        weight_version="v1",
        error_msg="no",
        error_code="E",
    )
    assert record(path, event) == ()
    ((*facts, text),) = rows(
        path,
        'SELECT session_id, time, "order", task_id, status, stage_id, replica, rank, freed_bytes, latency_ms, level, '
        "weight_version, error_code, error_msg, ack FROM acks",
    )
    assert facts == [1, 1234.5, "sleep", "task", "ERROR", 1, 2, 3, 256 * 2**20, 7.5, 2, "v1", "E", "no"]
    assert msgspec.json.decode(text, type=OmniACK) == event.ack


def test_a_state_change_is_kept(path: Path) -> None:
    record(path, state_event(state=MemoryState.ASLEEP, level=2, pause_state=PauseState.PAUSED, reason="asleep"))
    found = rows(path, "SELECT session_id, time, stage_id, state, level, pause_state, reason FROM states")
    assert found == [(1, 1e9, 0, "ASLEEP", 2, "PAUSED", "asleep")]


@pytest.mark.parametrize("report", ['{"frees": [1, 2]}', {"frees": [1, 2]}])
def test_an_audit_is_kept_as_json(path: Path, report: Any) -> None:
    async def run() -> None:
        async with ledger(path) as one:
            one.record_audit("PASS", report)
            await one.written()

    before = time.time()
    asyncio.run(run())
    ((when, verdict, text),) = rows(path, "SELECT time, verdict, report FROM audits")
    assert before <= when <= time.time()
    assert (verdict, msgspec.json.decode(text)) == ("PASS", {"frees": [1, 2]})


def test_samples_and_requests_are_not_kept(path: Path) -> None:
    record(
        path,
        MemoryEvent(1.0, 0, 0, 0, {}, None, 0),
        RequestEvent(1.0, "r", 0, RequestState.RUNNING),
        state_event(),
    )
    assert ledger_file.rows_of(path) == (2, {"sessions": 1, "acks": 0, "states": 1, "audits": 0})


def test_a_session_says_which_process_of_which_machine_ran_what(path: Path) -> None:
    before = time.time()
    record(path, state_event(), model="a model")
    ((started, *facts),) = rows(path, "SELECT started, pid, host, model, version FROM sessions")
    assert before <= started <= time.time()
    assert facts == [os.getpid(), os.uname().nodename, "a model", omni_notebook.__version__]


def test_values_that_sqlite_and_json_have_no_form_for_do_not_stop_the_ledger(path: Path) -> None:
    event = ack_event("odd", freed_bytes=2**80, error_msg=HOSTILE, note=HOSTILE)
    event.ack.metadata["object"] = Path("/x")
    assert record(path, event, state_event(reason=HOSTILE), ack_event("next"), model=HOSTILE) == ()
    assert rows(path, "SELECT task_id, freed_bytes FROM acks ORDER BY id") == [("odd", None), ("next", 256 * 2**20)]
    (text,) = rows(path, "SELECT ack FROM acks WHERE task_id = 'odd'")
    kept = msgspec.json.decode(text)
    assert (kept["freed_bytes"], kept["metadata"]["object"]) == (2**80, "/x")
    assert kept["error_msg"] == HOSTILE.replace("\udcff", "?")
    assert rows(path, "SELECT model FROM sessions") == [HOSTILE.replace("\udcff", "\\udcff")]


# ------------------------------------------------------------------------------------------- where


def test_the_file_and_the_folder_that_it_makes_are_the_persons_own(path: Path) -> None:
    record(path, state_event())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    record(tmp_path / "ledger.db", state_event())
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("off", None),
        (" OFF ", None),
        ("/a/b.db", "/a/b.db"),
        ("~/b.db", "/home/someone/b.db"),
        ("b.db", "{cwd}/b.db"),
        ("", "/home/someone/data/omni-notebook/ledger.db"),
        (None, "/home/someone/data/omni-notebook/ledger.db"),
    ],
)
def test_a_variable_names_the_file(monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str | None) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_DATA_HOME", "/home/someone/data")
    monkeypatch.delenv("OMNI_NOTEBOOK_LEDGER")
    if given is not None:
        monkeypatch.setenv("OMNI_NOTEBOOK_LEDGER", given)
    found = ledger_path()
    assert (found and str(found)) == (expected and expected.format(cwd=Path.cwd()))


def test_tests_never_write_the_persons_own_ledger() -> None:
    assert "omni-tests-" in str(ledger_path())


def test_odd_characters_in_the_path_are_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "a %41 b?c#d" / "ledger ü\udcff.db"
    record(path, ack_event("here"))
    assert ledger_file.rows_of(path)[1]["acks"] == 1
    assert rows(path) == ["here"]


def test_off_keeps_nothing_and_costs_no_thread() -> None:
    before = ledger_threads()

    async def run() -> None:
        async with ledger(None) as one:
            one.take(ack_event())
            await one.written()
            assert one.notes == ()
            assert ledger_threads() <= before

    asyncio.run(run())


# ------------------------------------------------------------------------------------------ schema


def test_the_file_says_what_it_is_and_numbers_its_migrations(path: Path) -> None:
    record(path, state_event())
    assert rows(path, "SELECT number, name FROM migrations") == [
        (n, name) for n, (name, _) in enumerate(MIGRATIONS, start=1)
    ]
    assert rows(path, "PRAGMA application_id") == [0x4F4D4E49]
    assert rows(path, "PRAGMA user_version") == [0]
    assert rows(path, "PRAGMA journal_mode") == ["wal"]


def test_an_older_file_is_brought_up_to_date_and_keeps_its_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ledger_file, "MIGRATIONS", MIGRATIONS[:1])
        record(path, ack_event("old"))
        assert rows(path, "SELECT count(*) FROM sqlite_master WHERE type = 'index' AND name LIKE 'acks_by_%'") == [0]
    assert ledger_file.rows_of(path) == (1, {"sessions": 1, "acks": 1, "states": 0, "audits": 0})
    record(path, ack_event("new"))
    assert rows(path) == ["old", "new"]
    assert ledger_file.rows_of(path)[0] == len(MIGRATIONS)


def test_a_migration_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(path, ack_event("old"))
    broken = ("broken", ("CREATE TABLE more (x)", "CREATE TABLE more (x)"))
    with monkeypatch.context() as patch:
        patch.setattr(ledger_file, "MIGRATIONS", (*MIGRATIONS, broken))
        (note,) = record(path, ack_event("new"))
    assert "table more already exists" in note
    assert rows(path, "SELECT count(*) FROM sqlite_master WHERE name = 'more'") == [0]
    assert ledger_file.rows_of(path)[0] == len(MIGRATIONS)
