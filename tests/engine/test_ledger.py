"""The ledger alone: what it keeps, where, together with others, and what it does when it can not."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import omni_notebook
from omni_notebook.engine import ledger as module
from omni_notebook.engine import ledger_file
from omni_notebook.engine.ledger import Ledger
from omni_notebook.engine.ledger_file import MIGRATIONS, LedgerFile, ledger_path
from omni_notebook.memory import host
from omni_notebook.protocol import MemoryEvent, MemoryState, OmniACK, PauseState, RequestEvent, RequestState
from tests.engine.engine_helpers import until
from tests.engine.ledger_helpers import ack_event, in_process, ledger, record, rows, state_event
from tests.executors.executor_helpers import fds

if TYPE_CHECKING:
    from collections.abc import Callable

HOSTILE = "<script>alert('x')</script> \udcff \U0001f600"


def ledger_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "omni-ledger"}


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


# ------------------------------------------------------------------------- files that can not be used


def text_file(path: Path) -> str:
    path.write_bytes(b"my notes\n" * 2000)
    return "is not a ledger"


def short_text(path: Path) -> str:
    path.write_bytes(b"x")
    return "is not a ledger"


def anothers(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE acks (mine)")
        connection.commit()
    return "is a database of another program"


def anothers_in_wal_mode(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE migrations (number)")
        connection.commit()
    return "is a database of another program"


def newer(path: Path) -> str:
    record(path, ack_event("newer"))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO migrations VALUES (99, 'from the future', 0)")
        connection.commit()
    return "was written by a newer omni_notebook (its schema is 99, this version knows 2): update the package"


def damaged(path: Path) -> str:
    record(path, ack_event("lost"))
    content = bytearray(path.read_bytes())
    content[100:4096] = b"\xff" * 3996
    path.write_bytes(content)
    return "is damaged"


def halved(path: Path) -> str:
    record(path, *(ack_event(f"{n}") for n in range(50)))
    os.truncate(path, 8192)
    return "is damaged"


def folder(path: Path) -> str:
    path.mkdir()
    return "is a folder"


def pipe(path: Path) -> str:
    os.mkfifo(path)
    return "is no regular file"


SPOILERS = [text_file, short_text, anothers, anothers_in_wal_mode, newer, damaged, halved, folder, pipe]


def content(path: Path) -> bytes | int:
    return path.read_bytes() if path.is_file() else path.stat().st_mode


@pytest.mark.parametrize("spoil", SPOILERS)
def test_what_is_no_usable_ledger_is_left_as_it_is_and_named_in_one_line(
    tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    path = tmp_path / "ledger.db"
    why = spoil(path)
    before = content(path)
    started = time.monotonic()
    (note,) = record(path, ack_event("t"), state_event())
    assert time.monotonic() - started < 1, "nobody waits for what can not be"
    assert why in note
    assert note.startswith(f"no history is kept: {path} ")
    assert "OMNI_NOTEBOOK_LEDGER names another file, or off" in note
    assert "\n" not in note
    assert content(path) == before


@pytest.mark.parametrize("spoil", [text_file, newer, folder])
def test_what_waited_is_written_once_the_file_can_be_used(
    tmp_path: Path, spoil: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    path = tmp_path / "ledger.db"
    spoil(path)

    async def run() -> None:
        async with ledger(path) as one:
            one.take(ack_event("first"))
            await one.written()
            assert one.notes
            path.rename(tmp_path / "elsewhere")
            await until(lambda: not one.notes)
            one.take(ack_event("second"))
            await one.written()
            assert one.notes == ()

    asyncio.run(run())
    assert rows(path) == ["first", "second"]


def test_a_close_tries_once_more(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.mkdir()

    async def run() -> None:
        async with ledger(path) as one:
            one.take(ack_event("kept"))
            await one.written()
            assert one.notes
            path.rmdir()

    asyncio.run(run())
    assert rows(path) == ["kept"]


@pytest.mark.parametrize(
    "place", ["/proc/no-such/ledger.db", "/dev/null/ledger.db", "/tmp/" + "x" * 300 + "/ledger.db"]
)
def test_a_folder_that_can_not_be_made_is_named(place: str) -> None:
    (note,) = record(Path(place), ack_event())
    assert note.startswith(f"no history is kept: {Path(place).parent}")


def test_memory_keeps_the_newest_up_to_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 5)
    path = tmp_path / "ledger.db"
    path.mkdir()

    async def run() -> None:
        async with ledger(path) as one:
            for n in range(12):
                one.take(ack_event(str(n)))
            await one.written()
            assert "the last 5 records wait in memory" in one.notes[0]
            path.rmdir()

    asyncio.run(run())
    assert rows(path) == ["7", "8", "9", "10", "11"]


AS_NOBODY = """
import asyncio, os, platform, sys
import omni_notebook
from tests.engine.ledger_helpers import ack_event, record, rows
from omni_notebook.engine import history, ledger_file
from pathlib import Path
path = Path(sys.argv[1])
omni_notebook.__version__, platform.node()  # nobody may not read the interpreter's own folder
if os.geteuid() == 0:
    os.setgroups([])
    os.setresuid(65534, 65534, 65534)
(note,) = record(path, ack_event("refused"))
print(note)
print(len(history.History(path, history.Filter())))
"""


@pytest.mark.parametrize(("file_mode", "folder_mode"), [(0o444, 0o777), (0o644, 0o555)])
def test_a_file_that_is_anothers_is_not_written_but_read(file_mode: int, folder_mode: int, tmp_path: Path) -> None:
    where = tmp_path / "own"
    where.mkdir()
    path = where / "ledger.db"
    record(path, ack_event("there"))
    path.chmod(file_mode)
    where.chmod(folder_mode)
    for parent in list(where.parents)[:3]:
        parent.chmod(0o755)
    before = path.read_bytes()
    process = in_process(AS_NOBODY, path)
    out, err = process.communicate(timeout=60)
    where.chmod(0o755)
    assert (process.returncode, err) == (0, "")
    note, count = out.splitlines()
    assert note.startswith(f"no history is kept: {path} can not be ")
    assert count == "1"
    assert path.read_bytes() == before


NO_ROOM = """
import asyncio, resource, sys
from pathlib import Path
from tests.engine.ledger_helpers import ack_event, ledger
from tests.engine.engine_helpers import until
from omni_notebook.engine import ledger as module
module.RETRY_S = 0.05

async def run(path):
    async with ledger(path) as one:
        one.take(ack_event("before"))
        await one.written()
        assert one.notes == ()
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        for n in range(200):
            one.take(ack_event(str(n), note="x" * 1000))
        await one.written()
        print(*one.notes)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        await until(lambda: not one.notes)
        await one.written()

asyncio.run(run(Path(sys.argv[1])))
"""


def test_a_file_that_may_not_grow_costs_nothing_once_it_may(path: Path) -> None:
    process = in_process(NO_ROOM, path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.startswith(f"no history is kept: {path} can not be used (disk I/O error)")
    assert rows(path) == ["before", *map(str, range(200))]
    assert rows(path, "SELECT count(*) FROM sessions") == [1]


def test_a_full_disk_is_said_and_costs_nothing_once_there_is_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    pages, connect = 30, ledger_file._connect

    def limited(where: Path, how: str) -> sqlite3.Connection:
        connection = connect(where, how)
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    monkeypatch.setattr(ledger_file, "_connect", limited)

    async def run() -> None:
        nonlocal pages
        async with ledger(path) as one:
            for n in range(200):
                one.take(ack_event(str(n)))
            await one.written()
            assert f"there is no room for {path} (database or disk is full)" in one.notes[0]
            pages = 100_000
            await until(lambda: not one.notes)
            await one.written()

    asyncio.run(run())
    assert rows(path) == [*map(str, range(200))]


# ------------------------------------------------------------------------------- together with others

LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


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
