"""A history as text, CSV, JSON, a page and a DataFrame: every text escaped where the form needs it."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
from html import escape
from itertools import compress
from typing import TYPE_CHECKING, Any

import msgspec

from omni_notebook import units
from omni_notebook.engine import ledger_file
from omni_notebook.errors import ArgumentError, UnsupportedError
from omni_notebook.paths import expanded

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pandas as pd

    from omni_notebook.engine.history import History, PastAck

FIELDS = (
    "id",
    "time",
    "session_id",
    "model",
    "host",
    "pid",
    "order",
    "task_id",
    "status",
    "stage_id",
    "replica",
    "rank",
    "freed_bytes",
    "mapped_bytes",
    "latency_ms",
    "level",
    "noop",
    "weight_version",
    "error_code",
    "error_msg",
)
"""The columns of a DataFrame and of a CSV file."""
_OF_METADATA = frozenset({"replica", "mapped_bytes", "latency_ms", "level", "noop", "weight_version", "error_code"})
COLUMNS = (
    "when",
    "session",
    "order",
    "stage",
    "rank",
    "replica",
    "answer",
    "level",
    "freed",
    "mapped",
    "latency",
    "weights id",
    "note",
)
"""The columns of a table for people; one in which no row says anything is left out."""
_SILENT = frozenset({"", units.NONE})
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>omni_notebook history</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2em }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: 3px 8px; text-align: left; vertical-align: top; border-bottom: 1px solid rgba(128,128,128,.45) }}
td:not(:last-child), th {{ white-space: nowrap }}
h1 {{ font-size: 1.2em }}
tr.error td:first-child {{ border-left: 4px solid #d55e00 }}
</style></head><body><h1>History of sleeps and wakes: {title}</h1><table><thead><tr>{head}</tr></thead><tbody>
"""


# ------------------------------------------------------------------------------------------- tables


def table(acks: Sequence[PastAck]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The columns that say something, and a row an ACK."""
    rows = [cells(ack) for ack in acks]
    said = [bool({row[place] for row in rows} - _silent(name)) for place, name in enumerate(COLUMNS)]
    return tuple(compress(COLUMNS, said)), [tuple(compress(row, said)) for row in rows]


def _silent(column: str) -> frozenset[str]:
    return _SILENT | {"0"} if column == "replica" else _SILENT


def cells(ack: PastAck) -> tuple[str, ...]:
    """One ACK in words, a text for each of `COLUMNS`."""
    facts = ack.metadata
    slept = ack.order == "sleep"
    level, mapped = facts.get("level"), facts.get("mapped_bytes")
    return (
        when(ack.time_s),
        f"{ack.session_id} · {ack.model}",
        ack.order,
        str(ack.stage_id),
        str(ack.rank),
        str(facts.get("replica") or 0),
        ("✓ " if ack.ok else "✗ ") + ack.status,
        units.NONE if level is None else str(level),
        units.size(ack.freed_bytes if slept else None),
        units.NONE if slept else units.size(mapped),
        units.milliseconds(facts.get("latency_ms")),
        facts.get("weight_version") or units.NONE,
        "; ".join(
            str(part) for part in (facts.get("error_code"), ack.error_msg, _noop(facts), facts.get("note")) if part
        ),
    )


def _noop(facts: dict[str, Any]) -> str | None:
    return "no-op: it was so already" if facts.get("noop") else None


def when(time_s: float) -> str:
    """`2026-11-29 23:53:52 CET`, of this machine's time zone; a dash where no calendar has it."""
    try:
        return dt.datetime.fromtimestamp(time_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except (ValueError, OverflowError, OSError):
        return units.NONE


def as_text(history: History) -> str:
    """A title and the table in fixed-width text."""
    if not history.newest:
        return history.title
    columns, rows = table(history.newest)
    grid = [columns, *(tuple(" ".join(cell.split()) for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in grid]
    return "\n".join([history.title, *lines])


# -------------------------------------------------------------------------------------------- files


def write(history: History, path: str | os.PathLike[str], lines: Callable[[History], Iterable[str]]) -> None:
    """Write text, piece by piece, over what is at `path`.

    Raises:
        ArgumentError: it can not be written, or is the ledger.
    """
    place = expanded(path)
    ledger_file.refuse_ledger(place, history.path)
    try:
        with place.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.writelines(lines(history))
    except OSError as error:
        msg = f"{place} can not be written ({error.strerror})"
        raise ArgumentError(msg) from None


def flat(ack: PastAck) -> dict[str, Any]:
    """One ACK as a value for each of `FIELDS`; `time` is in seconds since 1970."""
    facts = ack.metadata
    found = {name: facts.get(name) if name in _OF_METADATA else getattr(ack, name, None) for name in FIELDS}
    return {**found, "time": ack.time_s}


def csv_lines(history: History) -> Iterator[str]:
    """A head and a line an ACK; times are ISO 8601 in UTC."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, FIELDS)
    writer.writeheader()
    for ack in history:
        row = {**flat(ack), "time": _iso(ack.time_s)}
        writer.writerow({name: units.spreadsheet_cell(value) for name, value in row.items()})
        yield _taken(buffer)
    yield _taken(buffer)


def _taken(buffer: io.StringIO) -> str:
    text = buffer.getvalue()
    buffer.seek(0)
    buffer.truncate()
    return text


def _iso(time_s: float) -> str:
    try:
        return dt.datetime.fromtimestamp(time_s, dt.UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return ""


def json_lines(history: History) -> Iterator[str]:
    """An array with an object an ACK: its fields, its metadata, and `time` in ISO 8601, UTC."""
    before = "[\n"
    for ack in history:
        yield before + json.dumps({"time": _iso(ack.time_s), **msgspec.to_builtins(ack)})
        before = ",\n"
    yield "[]\n" if before == "[\n" else "\n]\n"


def html_lines(history: History) -> Iterator[str]:
    """A page with the table of all ACKs, every column."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in COLUMNS)
    title = history.title if history.wanted.limit or not history.newest else units.count(len(history), "ACK")
    yield _PAGE.format(title=escape(title), head=head)
    for ack in history:
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells(ack))
        yield f"<tr{'' if ack.ok else ' class=error'}>{row}</tr>\n"
    yield "</tbody></table></body></html>\n"


def as_dataframe(history: History) -> pd.DataFrame:
    """See `History.to_dataframe`."""
    try:
        import pandas as pd  # noqa: PLC0415  (not a dependency: only this needs it)
    except ImportError:
        msg = "to_dataframe needs pandas, which is not installed: pip install pandas; to_csv and to_json need nothing"
        raise UnsupportedError(msg) from None
    rows = [flat(ack) for ack in history]
    frame = pd.DataFrame(rows, columns=list(FIELDS))
    frame["time"] = pd.to_datetime(frame["time"], unit="s", utc=True)
    return frame.astype({"mapped_bytes": "Int64", "level": "Int64"})
