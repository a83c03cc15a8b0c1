"""The ledger's file: where it is, whose it is, its schema, and the one way to write it and to read it.

Append-only SQLite in WAL mode: several kernels write it at once, readers block nobody, and what is committed survives a
killed process. On a network's file system a rollback journal takes the log's place. A file that is anything else than a
ledger that this version knows is left as it is.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import stat
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import omni_notebook
from omni_notebook.errors import ArgumentError, LedgerError
from omni_notebook.memory import host
from omni_notebook.paths import expanded
from omni_notebook.protocol import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VARIABLE = "OMNI_NOTEBOOK_LEDGER"
OFF = "off"
APPLICATION_ID = 0x4F4D4E49  # "OMNI", in the file's header
BUSY_S = 0.2
TIDY_ROWS = 500
LARGE_LOG_BYTES = 4 * MIB
"""The write-ahead log goes into the file after so many rows, or where one was left so large; when nobody waits."""

MIGRATIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "sessions, acks, states, audits",
        (
            f"PRAGMA application_id = {APPLICATION_ID}",
            "CREATE TABLE migrations (number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied REAL NOT NULL)",
            """CREATE TABLE sessions (id INTEGER PRIMARY KEY, started REAL NOT NULL, pid INTEGER NOT NULL,
            host TEXT NOT NULL, model TEXT NOT NULL, version TEXT NOT NULL)""",
            """CREATE TABLE acks (id INTEGER PRIMARY KEY, session_id INTEGER NOT NULL REFERENCES sessions (id),
            time REAL NOT NULL, "order" TEXT NOT NULL, task_id TEXT NOT NULL, status TEXT NOT NULL,
            stage_id INTEGER NOT NULL, replica INTEGER NOT NULL, rank INTEGER NOT NULL, freed_bytes INTEGER,
            latency_ms REAL, level INTEGER, weight_version TEXT, error_code TEXT, error_msg TEXT, ack TEXT NOT NULL)""",
            """CREATE TABLE states (id INTEGER PRIMARY KEY, session_id INTEGER NOT NULL REFERENCES sessions (id),
            time REAL NOT NULL, stage_id INTEGER NOT NULL, state TEXT NOT NULL, level INTEGER,
            pause_state TEXT NOT NULL, reason TEXT NOT NULL)""",
            """CREATE TABLE audits (id INTEGER PRIMARY KEY, session_id INTEGER NOT NULL REFERENCES sessions (id),
            time REAL NOT NULL, verdict TEXT NOT NULL, report TEXT NOT NULL)""",
        ),
    ),
    (
        "indexes that hold every column a history is filtered by",
        (
            "CREATE INDEX acks_by_time ON acks (time, status, stage_id, rank, session_id)",
            "CREATE INDEX acks_by_stage ON acks (stage_id, time, status, rank, session_id)",
            "CREATE INDEX acks_by_rank ON acks (rank, time, status, stage_id, session_id)",
            "CREATE INDEX acks_by_session ON acks (session_id, time, status, stage_id, rank)",
            "CREATE INDEX states_by_session ON states (session_id, time)",
        ),
    ),
)
"""Name and statements of each step; a file's schema is the number of those that it has. Only ever add to the end."""

_BESIDE = ("-wal", "-shm", "-journal")
"""How the names of SQLite's other files end."""
_TRANSIENT = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
_WHY = {
    sqlite3.SQLITE_NOTADB: "{path} is not a ledger ({error})",
    sqlite3.SQLITE_CORRUPT: "{path} is damaged ({error})",
    sqlite3.SQLITE_FULL: "there is no room for {path} ({error})",
    sqlite3.SQLITE_READONLY: "{path} can not be written ({error})",
    sqlite3.SQLITE_CANTOPEN: "{path} can not be opened ({error})",
}

_NETWORK_FILESYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "gfs2", "gpfs", "lustre", "nfs", "nfs4"}
    | {"ocfs2", "panfs", "smb3", "wekafs"}
)


class LedgerBusyError(LedgerError):
    """Another process holds the file; trying again helps."""


class Record(NamedTuple):
    """A row to be: its statement and its values, those after the session's id."""

    sql: str
    values: tuple[Any, ...]


def ledger_path() -> Path | None:
    """The file that `OMNI_NOTEBOOK_LEDGER` names, else the person's own; None = no history is kept ("off")."""
    given = os.environ.get(VARIABLE, "").strip()
    if given.lower() == OFF:
        return None
    if given:
        return expanded(given).absolute()
    import platformdirs  # noqa: PLC0415  (loaded when used)

    return platformdirs.user_data_path("omni-notebook") / "ledger.db"


# ------------------------------------------------------------------------------------------ opening


def reading(path: Path) -> sqlite3.Connection:
    """A connection that can only read; the file is a ledger that this version knows.

    Raises:
        LedgerError: it is not, or can not be read.
    """
    try:
        return _known(path)
    except (sqlite3.Error, OSError) as error:
        raise reason(path, error) from error


def _known(path: Path) -> sqlite3.Connection:
    _check_kind(path)
    try:
        connection = _connect(path, "mode=ro")
        _check_ours(connection, path)
    except sqlite3.OperationalError as error:
        if _code(error) not in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN} or _log(path).exists():
            raise
        connection = _connect(path, "mode=ro&immutable=1")  # a folder that is not ours to write, and nobody who writes
        _check_ours(connection, path)
    return connection


def _writing(path: Path) -> sqlite3.Connection:
    _make(path)
    _known(path).close()  # looked at without a right to write: a file of another program stays as it is to the byte
    connection = _connect(path, "mode=rw")
    try:
        connection.execute(f"PRAGMA journal_mode = {_journal(path)}")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        _migrate(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _journal(path: Path) -> str:
    """WAL shares memory between processes, which several hosts of one network file system do not have (sqlite.org)."""
    return "DELETE" if host.filesystem_of(str(path.parent)) in _NETWORK_FILESYSTEMS else "WAL"


def _connect(path: Path, how: str) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?{how}", uri=True, timeout=BUSY_S, isolation_level=None)


def _make(path: Path) -> None:
    """A new empty file that its owner alone reads; one that exists is not opened: closing it ends SQLite's locks."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))


def _check_kind(path: Path) -> None:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        msg = f"{path} is {'a folder' if stat.S_ISDIR(found.st_mode) else 'no regular file'}"
        raise LedgerError(msg)
    if found.st_size == 1:  # SQLite takes it for an empty database
        msg = f"{path} is not a ledger (it is one byte long)"
        raise LedgerError(msg)


def _check_ours(connection: sqlite3.Connection, path: Path) -> None:
    try:
        _check_schema(_schema(connection, path), path)
    except BaseException:
        connection.close()
        raise


def is_empty(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file has no tables yet."""
    return _schema(connection, path) == 0


def _check_schema(number: int, path: Path) -> None:
    if number > len(MIGRATIONS):
        msg = (
            f"{path} was written by a newer omni_notebook (its schema is {number}, this version knows "
            f"{len(MIGRATIONS)}): update the package"
        )
        raise LedgerError(msg)


def _schema(connection: sqlite3.Connection, path: Path) -> int:
    """How many migrations the file has; 0 = it is empty."""
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    owner = connection.execute("PRAGMA application_id").fetchone()[0]
    if owner != APPLICATION_ID and (tables or owner):
        msg = f"{path} is a database of another program"
        raise LedgerError(msg)
    return int(connection.execute("SELECT max(number) FROM migrations").fetchone()[0]) if tables else 0


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    while _schema(connection, path) < len(MIGRATIONS):
        with _transaction(connection):
            done = _schema(connection, path)  # under the lock: another kernel may have been faster
            if done >= len(MIGRATIONS):
                return
            name, statements = MIGRATIONS[done]
            for statement in statements:
                connection.execute(statement)
            connection.execute("INSERT INTO migrations VALUES (?, ?, ?)", (done + 1, name, time.time()))


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        with suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")


# ------------------------------------------------------------------------------------------ writing


class LedgerFile:
    """The writing side, for one thread and one engine's session."""

    def __init__(self, path: Path, model: str) -> None:
        self.path = path
        self._model = model
        self._started_s = time.time()
        self._connection: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None
        self._log_inode: tuple[int, int] | None = None
        self._session_id: int | None = None
        self._untidy = 0

    def write(self, records: Sequence[Record]) -> None:
        """Commit all of them, or none.

        Raises:
            LedgerBusyError: another process held the file for `BUSY_S`.
            LedgerError: it can not be used.
        """
        try:
            connection = self._open()
            with _transaction(connection):
                session_id = self._session_id or self._session(connection)
                for record in records:
                    connection.execute(record.sql, (session_id, *record.values))
        except (sqlite3.Error, OSError, LedgerError) as error:
            why = reason(self.path, error)
            if not isinstance(why, LedgerBusyError):
                self.close()
            raise why from error
        self._session_id = session_id
        self._log_inode = _inode(_log(self.path))
        self._untidy += len(records)

    def _open(self) -> sqlite3.Connection:
        """The connection; a new one where the file or its log was moved or removed.

        Closing the old one takes what was in a removed log into the file.
        """
        found = _inode(self.path), _inode(_log(self.path))
        if self._connection is not None and (self._inode, self._log_inode or found[1]) != found:
            self.close()
        if self._connection is None:
            self._connection = _writing(self.path)
            self._inode = _inode(self.path)
            self._untidy = TIDY_ROWS if _log_bytes(self.path) > LARGE_LOG_BYTES else 0
        return self._connection

    def _session(self, connection: sqlite3.Connection) -> int:
        """The id of this engine's session in the file, which may have been opened before or be a new one."""
        facts = (self._started_s, os.getpid(), socket.gethostname(), self._model)
        sql = "SELECT id FROM sessions WHERE (started, pid, host, model) = (?, ?, ?, ?)"
        known = connection.execute(sql, facts).fetchone()
        if known is not None:
            return int(known[0])
        sql = "INSERT INTO sessions (started, pid, host, model, version) VALUES (?, ?, ?, ?, ?)"
        return int(connection.execute(sql, (*facts, omni_notebook.__version__)).lastrowid or 0)

    def tidy(self) -> None:
        """Move the write-ahead log into the file if it has grown; never waits for readers."""
        if self._connection is not None and self._untidy >= TIDY_ROWS:
            self._untidy = 0
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        """Let go of the file; the next `write` opens it again."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
        self._connection = self._inode = self._log_inode = self._session_id = None


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


# ------------------------------------------------------------------------------------------- words


def reason(path: Path, error: Exception) -> LedgerError:
    """An error of SQLite or of the system as one line that names the file."""
    if isinstance(error, LedgerError):
        return error
    if isinstance(error, OSError):
        return LedgerError(f"{error.filename or path} can not be used ({error.strerror})")
    code = _code(error)
    if code in _TRANSIENT:
        return LedgerBusyError(f"{path} is held by another process ({error})")
    return LedgerError(_WHY.get(code, "{path} can not be used ({error})").format(path=path, error=error))


def _code(error: Exception) -> int:
    """SQLite's primary error code; 0 where the error has none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Errors of SQLite come out as LedgerError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise reason(path, error) from error


# -------------------------------------------------------------------------------------------- facts


def _log(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def refuse_ledger(place: Path, ledger: Path | None) -> None:
    """Refuse to write over the ledger or over the files that SQLite keeps beside it, under whatever name.

    Raises:
        ArgumentError: `place` is one of them; nothing was written.
    """
    if ledger is None:
        return
    real = Path(os.path.realpath(ledger))  # SQLite follows links too
    for part in (real, *(real.with_name(real.name + end) for end in _BESIDE)):
        if os.path.realpath(place) == str(part) or _inode(place) == _inode(part) is not None:
            msg = f"{place} is the ledger itself, or a part of it; name another file, nothing was written"
            raise ArgumentError(msg)


def exists(path: Path) -> bool:
    """Whether there is a file.

    Raises:
        LedgerError: nobody may look.
    """
    with explained(path):
        return path.exists()


def _log_bytes(path: Path) -> int:
    try:
        return _log(path).stat().st_size
    except FileNotFoundError:
        return 0


def size_of(path: Path) -> int:
    """Bytes of the file and of its write-ahead log."""
    return path.stat().st_size + _log_bytes(path)


def rows_of(path: Path) -> tuple[int, dict[str, int]]:
    """The schema, and the rows of each table.

    Raises:
        LedgerError: the file can not be read.
    """
    with closing(reading(path)) as connection, explained(path):
        number = _schema(connection, path)
        tables = ("sessions", "acks", "states", "audits") if number else ()
        return number, {t: connection.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in tables}  # noqa: S608
