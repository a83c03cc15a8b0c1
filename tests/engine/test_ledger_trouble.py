"""A ledger that can not be used: nothing is overwritten, nothing is lost from memory, nobody waits."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from omni_notebook.engine import ledger as module
from omni_notebook.engine import ledger_file
from tests.engine.engine_helpers import until
from tests.engine.ledger_helpers import ack_event, in_process, ledger, record, rows, state_event

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "own" / "ledger.db"


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


@pytest.mark.quiet
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
    for parent in takewhile(lambda one: not one.stat().st_mode & 0o001, where.parents):  # pytest's own
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


@pytest.mark.parametrize("ends", [["-wal"], ["-shm"], ["-wal", "-shm"]])
def test_a_log_that_was_removed_loses_nothing_that_was_acknowledged(path: Path, ends: list[str]) -> None:
    async def orders() -> list[str]:
        async with ledger(path) as one:
            one.take(ack_event("before"))
            await one.written()
            for end in ends:
                path.with_name(path.name + end).unlink()
            one.take(ack_event("after"))
            await one.written()
            assert one.notes == ()
            return rows(path)

    assert asyncio.run(orders()) == ["before", "after"]
    assert rows(path) == ["before", "after"]
