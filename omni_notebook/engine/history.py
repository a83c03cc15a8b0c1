"""Past ACKs out of the ledger, newest first: what `omni.history()` and `%omni history` return.

Reads the file without a right to write it, and needs neither an engine nor torch.
"""

from __future__ import annotations

import datetime as dt
import math
import os
import re
import socket
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from omni_notebook.engine import history_export, ledger_file
from omni_notebook.engine.ledger_file import VARIABLE, ledger_path
from omni_notebook.errors import ArgumentError, LedgerError
from omni_notebook.protocol import AckStatus, OmniACK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pandas as pd

LIMIT = 50
"""So many are shown where nobody says how many."""
CLOCK_S = 2.0
"""How far a process's start and the wall clock may lie apart."""
MOST = 2**31
SINCE_FORMS = "30s, 15m, 2h, 3d, 1w, today, a date (2026-11-29) or a time (2026-11-29T14:30)"

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SPAN = re.compile(r"(\d{1,9})([smhdw])")
_COLUMNS = 'a.id, a.session_id, a.time, a."order", s.model, s.host, s.pid, a.ack'
_FROM = "FROM acks a JOIN sessions s ON s.id = a.session_id"


@dataclass(slots=True, kw_only=True)
class PastAck(OmniACK):
    """An ACK as it was answered, and when, to what, and where.

    Attributes:
        id: its place in the ledger, in the order in which ACKs were written.
        session_id: the engine's run, a row of the table `sessions`.
        time_s: seconds since 1970.
        order: "sleep" or "wake".
        model, host, pid: the pipeline, the machine and the process of the engine (`metadata["pid"]` is the rank's).
    """

    id: int
    session_id: int
    time_s: float
    order: str
    model: str
    host: str
    pid: int


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which ACKs; None = any. `since` in seconds since 1970, `limit` None = all, `sessions` only these."""

    stage: int | None = None
    rank: int | None = None
    since: float | None = None
    session: int | None = None
    errors: bool = False
    limit: int | None = None
    sessions: tuple[int, ...] | None = None

    def checked(self) -> Filter:
        """Itself, if every number can be one.

        Raises:
            ArgumentError: names the one that can not.
        """
        for name, least in (("stage", 0), ("rank", 0), ("session", 1), ("limit", 1)):
            value = getattr(self, name)
            wrong = isinstance(value, bool) or not isinstance(value, int)
            if value is not None and (wrong or not least <= value < MOST):
                msg = f"{name}={value!r} is not a whole number from {least} on; nothing was read"
                raise ArgumentError(msg)
        return self

    def where(self, newest_id: int) -> tuple[str, list[float]]:
        """The condition in SQL and its values; rows that came after `newest_id` are left out."""
        given = (("a.stage_id =", self.stage), ("a.rank =", self.rank), ("a.session_id =", self.session))
        tests = [(f"{words} ?", value) for words, value in (*given, ("a.time >=", self.since)) if value is not None]
        tests.append(("a.id <= ?", newest_id))
        plain = [f"a.status = '{AckStatus.ERROR}'"] if self.errors else []
        plain += [] if self.sessions is None else [f"a.session_id IN ({', '.join(map(str, self.sessions))})"]
        return " AND ".join([*(words for words, _ in tests), *plain]), [value for _, value in tests]


class History:
    """Past ACKs, newest first. Iterate it, or take `to_dataframe()`, `to_csv(path)`, `to_json(path)`, `to_html(path)`.

    With `limit=None` it reads from the file as you go, and holds only the newest; the ledger only grows, so that it
    shows the same rows each time.

    Attributes:
        newest: the ACKs themselves, or where `limit` is None the first of them.
        complete: whether `newest` are all that match.
    """

    def __init__(self, path: Path, wanted: Filter) -> None:
        self.path = path
        self.wanted = wanted
        self.newest: list[PastAck] = []
        self.complete = True
        self._newest_id = 0
        if not ledger_file.exists(path):
            return
        with closing(ledger_file.reading(path)) as connection, ledger_file.explained(path):
            if ledger_file.is_empty(connection, path):
                return
            self._newest_id = connection.execute("SELECT max(id) FROM acks").fetchone()[0] or 0
            found = self._select(connection, (wanted.limit or LIMIT) + 1)
            self.newest = [_past(row, path) for row in found]
        if len(self.newest) > (wanted.limit or LIMIT):
            self.newest.pop()
            self.complete = False

    def _select(self, connection: Any, limit: int) -> Any:
        where, values = self.wanted.where(self._newest_id)
        sql = f"SELECT {_COLUMNS} {_FROM} WHERE {where} ORDER BY a.time DESC, a.id DESC LIMIT ?"
        return connection.execute(sql, (*values, limit))

    def __iter__(self) -> Iterator[PastAck]:
        return iter(self.newest) if self.complete or self.wanted.limit is not None else self._from_file()

    def _from_file(self) -> Iterator[PastAck]:
        with closing(ledger_file.reading(self.path)) as connection, ledger_file.explained(self.path):
            for row in self._select(connection, -1):
                yield _past(row, self.path)

    def __len__(self) -> int:
        if self.complete or self.wanted.limit is not None:
            return len(self.newest)
        where, values = self.wanted.where(self._newest_id)
        with closing(ledger_file.reading(self.path)) as connection, ledger_file.explained(self.path):
            return int(connection.execute(f"SELECT count(*) FROM acks a WHERE {where}", values).fetchone()[0])  # noqa: S608

    @property
    def any(self) -> bool:
        """Whether the ledger has any ACK at all."""
        return self._newest_id > 0

    def __repr__(self) -> str:
        """The table in text."""
        return history_export.as_text(self)

    @property
    def place(self) -> str:
        """Where it is kept, for people."""
        return str(self.path)

    @property
    def title(self) -> str:
        """How many, of which there are more."""
        if not self.newest:
            return (
                f"no ACK in {self.place} matches" if self._newest_id else f"no history yet: no ACK is in {self.place}"
            )
        acks = f"{len(self.newest)} ACK{'s' if len(self.newest) > 1 else ''}"
        if self.complete:
            return acks
        if self.wanted.limit is not None:
            return f"the newest {acks}, there are more"
        return f"the newest {acks} are shown, there are more: to_dataframe(), to_csv(path) and --csv FILE take all"

    def to_dataframe(self) -> pd.DataFrame:
        """A row an ACK; `time` in UTC.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        return history_export.as_dataframe(self)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a line an ACK.

        Raises:
            ArgumentError: the file can not be written, or is the ledger.
        """
        history_export.write(self, path, history_export.csv_lines)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON array with the whole of every ACK.

        Raises:
            ArgumentError: the file can not be written, or is the ledger.
        """
        history_export.write(self, path, history_export.json_lines)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page with the table, which needs no other file.

        Raises:
            ArgumentError: the file can not be written, or is the ledger.
        """
        history_export.write(self, path, history_export.html_lines)


def _past(row: tuple[Any, ...], path: Path) -> PastAck:
    *facts, text = row
    try:
        ack = msgspec.json.decode(text, type=OmniACK)
    except msgspec.DecodeError as error:
        msg = f"{path} is damaged (ACK {row[0]}: {error})"
        raise LedgerError(msg) from error
    names = ("id", "session_id", "time_s", "order", "model", "host", "pid")
    answered = {name: getattr(ack, name) for name in OmniACK.__slots__}
    return PastAck(**answered, **dict(zip(names, facts, strict=True)))


def history(
    stage: int | None = None,
    rank: int | None = None,
    since: str | dt.date | dt.timedelta | float | None = None,
    session: int | Literal["this"] | None = None,
    errors: bool = False,
    limit: int | None = None,
) -> History:
    """Past ACKs of all sessions on this machine, newest first.

    Args:
        stage: only this one's; None = all.
        rank: only this one's, in every stage and replica.
        since: "2h", "2026-11-29", a date or datetime, a timedelta before now, or seconds since 1970.
        session: only this run of an engine; "this" = those of this process.
        errors: only ACKs whose status is ERROR.
        limit: at most so many; None = all, of which a table shows the newest `LIMIT`.

    Raises:
        ArgumentError: an argument is wrong.
        LedgerError: no history is kept, or the file can not be read.
    """
    after = None if since is None else moment(since)
    path = _place()
    own, number = (_sessions_of_this_process(path), None) if session == "this" else (None, session)
    wanted = Filter(stage=stage, rank=rank, since=after, session=number, errors=errors, limit=limit, sessions=own)
    return History(path, wanted.checked())


def _sessions_of_this_process(path: Path) -> tuple[int, ...]:
    """The runs of engines that this process began; a number of a process that was used again is not one."""
    if not ledger_file.exists(path):
        return ()
    import psutil  # noqa: PLC0415  (only this needs it)

    facts = os.getpid(), socket.gethostname(), psutil.Process().create_time() - CLOCK_S
    with closing(ledger_file.reading(path)) as connection, ledger_file.explained(path):
        if ledger_file.is_empty(connection, path):
            return ()
        rows = connection.execute("SELECT id FROM sessions WHERE pid = ? AND host = ? AND started >= ?", facts)
        return tuple(number for (number,) in rows)


def _place() -> Path:
    path = ledger_path()
    if path is None:
        msg = f"no history is kept: {VARIABLE} is off"
        raise LedgerError(msg)
    return path


# --------------------------------------------------------------------------------------------- time


def moment(since: str | dt.date | dt.timedelta | float) -> float:
    """Seconds since 1970 of what a person calls a time; a time without a zone is this machine's.

    Raises:
        ArgumentError: it is none.
    """
    try:
        if isinstance(since, dt.datetime):
            return since.timestamp()
        if isinstance(since, dt.date):
            return dt.datetime(since.year, since.month, since.day).astimezone().timestamp()
        if isinstance(since, dt.timedelta):
            return time.time() - since.total_seconds()
        if isinstance(since, str):
            return _moment_in_words(since.strip().lower())
        return _seconds(since)
    except (ValueError, TypeError, OverflowError, OSError):
        msg = f"{since!r} is no time; write {SINCE_FORMS}"
        raise ArgumentError(msg) from None


def _seconds(since: float) -> float:
    value = float(since)
    if isinstance(since, bool) or not math.isfinite(value):
        raise ValueError
    return value


def _moment_in_words(text: str) -> float:
    span = _SPAN.fullmatch(text)
    if span is not None:
        return time.time() - int(span[1]) * _UNIT_S[span[2]]
    if text == "today":
        return dt.datetime.now().astimezone().replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
    return dt.datetime.fromisoformat(text.upper()).timestamp()


# -------------------------------------------------------------------------------------------- facts


class LedgerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What `%omni where` says: the file, its bytes, its schema and rows, and why it can not be used, if so."""

    path: str | None
    size_bytes: int | None = None
    schema: int | None = None
    rows: dict[str, int] = {}
    trouble: str | None = None


def facts() -> LedgerFacts:
    """The ledger as it is now; never raises for what is wrong with the file."""
    path = ledger_path()
    if path is None:
        return LedgerFacts(path=None)
    try:
        if not ledger_file.exists(path):
            return LedgerFacts(path=str(path))
        with ledger_file.explained(path):
            size_bytes = ledger_file.size_of(path)
    except LedgerError as error:
        return LedgerFacts(path=str(path), trouble=str(error))
    try:
        schema, rows = ledger_file.rows_of(path)
    except LedgerError as error:
        return LedgerFacts(path=str(path), size_bytes=size_bytes, trouble=str(error))
    return LedgerFacts(path=str(path), size_bytes=size_bytes, schema=schema, rows=rows)
