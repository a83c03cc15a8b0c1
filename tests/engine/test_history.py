"""Reading the ledger: filters, times, what an export holds, what is escaped, and how fast it is."""

from __future__ import annotations

import asyncio
import csv
import datetime as dt
import json
import sqlite3
import sys
import time
from contextlib import closing
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

import omni_notebook as omni
from benchmarks import bench_ledger
from omni_notebook.engine import history_export, ledger_file
from omni_notebook.engine.history import Filter, History, facts, history, moment
from omni_notebook.errors import ArgumentError, LedgerError, UnsupportedError
from omni_notebook.protocol import MIB, OmniACK
from tests.engine.ledger_helpers import ack_event, ledger, record, rows

if TYPE_CHECKING:
    from pathlib import Path

TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "table", "thead", "tr", "th", "tbody", "td"}
HOSTILE = "<script>alert('x')</script> & \"q\""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `history()` reads."""
    monkeypatch.setenv("OMNI_NOTEBOOK_LEDGER", str(tmp_path / "ledger.db"))
    return tmp_path / "ledger.db"


@pytest.fixture
def filled(path: Path) -> Path:
    """Two sessions: 4 ACKs of 2 stages and 2 ranks at 1000 s … 1003 s, then 2 of stage 1 at 2000 s, one an ERROR."""
    ranks = [(0, 0), (0, 1), (1, 0), (1, 1)]
    record(path, *(ack_event(f"a{n}", 1000.0 + n, stage_id=s, rank=r) for n, (s, r) in enumerate(ranks)), model="first")
    late = [
        ack_event("b0", 2000.0, "wake", stage_id=1, freed_bytes=0, state="WARM", level=None, mapped_bytes=3 * MIB),
        ack_event("b1", 2000.5, "wake", stage_id=1, rank=1, error_msg="out of paint", error_code="OUT_OF_MEMORY"),
    ]
    record(path, *late, model="second")
    return path


def tasks(found: History) -> list[str]:
    return [ack.task_id for ack in found]


# -------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, "b1 b0 a3 a2 a1 a0"),
        ({"stage": 0}, "a1 a0"),
        ({"rank": 1}, "b1 a3 a1"),
        ({"stage": 1, "rank": 1}, "b1 a3"),
        ({"session": 1}, "a3 a2 a1 a0"),
        ({"session": 2, "rank": 0}, "b0"),
        ({"errors": True}, "b1"),
        ({"errors": True, "stage": 0}, ""),
        ({"since": 1002.0}, "b1 b0 a3 a2"),
        ({"since": 1002.0, "stage": 1, "rank": 0, "session": 1}, "a2"),
        ({"since": dt.datetime.fromtimestamp(2000, dt.UTC)}, "b1 b0"),
        ({"limit": 2}, "b1 b0"),
        ({"limit": 6}, "b1 b0 a3 a2 a1 a0"),
        ({"limit": None}, "b1 b0 a3 a2 a1 a0"),
        ({"stage": 9}, ""),
    ],
)
def test_filters_pick_and_the_newest_come_first(filled: Path, wanted: dict[str, Any], expected: str) -> None:
    found = omni.history(**wanted)
    assert tasks(found) == expected.split()
    assert len(found) == len(expected.split())


def test_a_row_is_an_ack_that_knows_when_and_where(filled: Path) -> None:
    (ack,) = history(errors=True)
    assert isinstance(ack, OmniACK)
    assert (ack.order, ack.session_id, ack.time_s, ack.model, ack.id) == ("wake", 2, 2000.5, "second", 6)
    assert (ack.ok, ack.error_msg, ack.metadata["error_code"]) == (False, "out of paint", "OUT_OF_MEMORY")
    assert omni.plot_reclaimed(list(history())).axes


@pytest.mark.parametrize(
    "wrong",
    [
        {"stage": -1},
        {"stage": "x"},
        {"rank": 2**63},
        {"session": 0},
        {"limit": 0},
        {"limit": -5},
        {"since": "yesterweek"},
        {"since": "99999999999w"},
        {"since": "0001-01-01"},
        {"since": []},
    ],
)
def test_a_wrong_wish_is_refused_in_one_line(filled: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        history(**wrong)
    assert repr(next(iter(wrong.values()))) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("15m", 900), ("2h", 7200), ("3D", 259200), (" 1w ", 604800)]
)
def test_a_span_is_counted_from_now(text: str, seconds: float) -> None:
    assert abs(time.time() - seconds - moment(text)) < 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-29", dt.datetime(2026, 11, 29)),  # noqa: DTZ001  (this machine's zone)
        ("2026-11-29 14:30", dt.datetime(2026, 11, 29, 14, 30)),  # noqa: DTZ001
        ("2026-11-29t14:30:05+02:00", dt.datetime(2026, 11, 29, 12, 30, 5, tzinfo=dt.UTC)),
        ("2026-11-29T14:30z", dt.datetime(2026, 11, 29, 14, 30, tzinfo=dt.UTC)),
    ],
)
def test_a_date_or_a_time_is_this_machines_unless_it_names_a_zone(text: str, expected: dt.datetime) -> None:
    assert moment(text) == expected.timestamp()


def test_today_is_the_last_midnight() -> None:
    midnight = dt.datetime.fromtimestamp(moment("today"))  # noqa: DTZ006  (this machine's zone)
    assert (midnight.hour, midnight.minute, midnight.second) == (0, 0, 0)
    assert 0 <= time.time() - moment("today") < 25 * 3600


def test_all_of_them_are_read_as_one_goes_and_stay_the_same_while_others_write(path: Path) -> None:
    record(path, *(ack_event(str(n), float(n)) for n in range(120)))
    found = history(limit=None)
    assert len(found.newest) == 50
    reading = iter(found)
    first = next(reading)
    record(path, ack_event("later", 500.0), ack_event("later too", -1.0))
    assert [first.task_id, *(ack.task_id for ack in reading)] == [str(n) for n in reversed(range(120))]
    assert len(found) == 120
    assert found.title.startswith(
        "the newest 50 ACKs are shown, there are more: to_dataframe(), to_csv(path) and --csv"
    )
    assert len(history(limit=None)) == 122


def test_a_title_says_whether_there_are_more(filled: Path) -> None:
    assert history().title == "6 ACKs"
    assert history(limit=1).title == "the newest 1 ACK, there are more"
    assert history(stage=9).title == f"no ACK in {filled} matches"


# ------------------------------------------------------------------------------- nothing to read


def test_before_the_first_engine_there_is_an_empty_history(path: Path) -> None:
    found = history()
    assert (list(found), len(found)) == ([], 0)
    assert repr(found) == f"no history yet: no ACK is in {path}"
    assert not path.exists()


def test_a_file_that_is_still_empty_is_an_empty_history(path: Path) -> None:
    path.touch()
    assert repr(history()) == f"no history yet: no ACK is in {path}"
    assert (facts().schema, facts().trouble) == (0, None)


def test_off_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_NOTEBOOK_LEDGER", "off")
    with pytest.raises(LedgerError, match="no history is kept: OMNI_NOTEBOOK_LEDGER is off"):
        history()


@pytest.mark.parametrize("content", [b"my notes\n" * 2000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_ledger_is_refused_in_one_line_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(LedgerError) as caught:
        history()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


def test_a_row_that_is_no_ack_is_named(path: Path) -> None:
    record(path, ack_event())
    with ledger_file._connect(path, "mode=rw") as connection:
        connection.execute("UPDATE acks SET ack = '[]'")
    connection.close()
    with pytest.raises(LedgerError, match=r"is damaged \(ACK 1"):
        history()


def test_reading_leaves_the_ledger_as_it_is(filled: Path) -> None:
    before = filled.read_bytes()
    list(history(limit=None))
    facts()
    assert filled.read_bytes() == before


# --------------------------------------------------------------------------------------------- forms


def test_the_text_is_a_table_without_columns_that_say_nothing(filled: Path) -> None:
    lines = repr(history(stage=0)).splitlines()
    assert lines[0] == "2 ACKs"
    assert lines[1].split() == ["when", "session", "order", "stage", "rank", "answer", "level", "freed"]
    when = dt.datetime.fromtimestamp(1001.0).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    assert lines[2].split("  ")[0] == when
    assert [word for word in lines[2].split() if word in {"sleep", "SUCCESS", "256.0", "MiB", "2"}]
    assert "OUT_OF_MEMORY; out of paint" in repr(history(errors=True))
    assert "3.0 MiB" in repr(history(session=2))


def test_a_time_that_no_calendar_has_is_a_dash() -> None:
    assert history_export.when(1e20) == "–"
    assert history_export.when(float("nan")) == "–"


def test_csv_has_a_line_an_ack_and_reads_back(path: Path, tmp_path: Path) -> None:
    record(path, ack_event("x", 1000.25, error_msg='a "quoted", \n line', stage_id=1), model=HOSTILE)
    history().to_csv(tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert tuple(row) == history_export.FIELDS
    assert row["time"] == "1970-01-01T00:16:40.250000+00:00"
    assert (row["task_id"], row["stage_id"], row["freed_bytes"], row["level"]) == ("x", "1", str(256 * MIB), "2")
    assert (row["model"], row["error_msg"]) == (HOSTILE, 'a "quoted", \n line')


@pytest.mark.parametrize("wanted", [{}, {"errors": True}, {"stage": 9}])
def test_json_holds_the_whole_of_every_ack(filled: Path, tmp_path: Path, wanted: dict[str, Any]) -> None:
    found = history(**wanted)
    found.to_json(tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [one["task_id"] for one in read] == tasks(found)
    assert [one["metadata"] for one in read] == [ack.metadata for ack in found]
    assert [one["order"] for one in read] == [ack.order for ack in found]


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_html_escapes_every_text_and_needs_no_other_file(path: Path, tmp_path: Path) -> None:
    record(path, ack_event(error_msg=HOSTILE, error_code=HOSTILE, note=HOSTILE, weight_version=HOSTILE), model=HOSTILE)
    history().to_html(tmp_path / "out.html")
    markup = (tmp_path / "out.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(markup)
    assert set(page.tags) == TAGS
    assert page.tags.count("tr") == 2
    assert sum(text.count(HOSTILE) for text in page.text) == 5
    assert "http" not in markup
    assert "<tr class=error>" in markup


def test_all_that_match_are_exported_without_a_limit(path: Path, tmp_path: Path) -> None:
    record(path, *(ack_event(str(n), float(n)) for n in range(120)))
    for wanted, expected in (({"limit": 60}, 60), ({}, 120)):
        history(**wanted).to_csv(tmp_path / "out.csv")
        assert len((tmp_path / "out.csv").read_text(encoding="utf-8").splitlines()) == expected + 1
    history().to_html(tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "<h1>History of sleeps and wakes: 120 ACKs</h1>" in page
    assert page.count("<tr>") == 1 + 120


def test_this_is_what_the_engines_of_this_process_were_answered(path: Path) -> None:
    assert list(history(session="this")) == []
    for task_id in ("mine", "of another process", "of another machine", "of one that had its number before"):
        record(path, ack_event(task_id, time.time()))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE sessions SET pid = pid + 1 WHERE id = 2")
        connection.execute("UPDATE sessions SET host = 'elsewhere' WHERE id = 3")
        connection.execute("UPDATE sessions SET started = 1000 WHERE id = 4")
    assert len(history()) == 4
    assert [ack.task_id for ack in history(session="this")] == ["mine"]


def test_an_export_never_overwrites_the_ledger(filled: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(filled)
    before = filled.read_bytes()
    for target in (filled, tmp_path / "link"):
        with pytest.raises(ArgumentError, match="is the ledger itself"):
            history().to_csv(target)
    assert filled.read_bytes() == before
    assert len(rows(filled)) == 6


@pytest.mark.parametrize("end", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("named", ["itself", "by a link", "through a linked folder"])
def test_an_export_never_overwrites_a_file_that_sqlite_keeps_beside_the_ledger(
    path: Path, tmp_path: Path, end: str, named: str
) -> None:
    (tmp_path / "folder").symlink_to(tmp_path, target_is_directory=True)
    part = path.with_name(path.name + end)
    (tmp_path / "link").symlink_to(part)
    target = {"itself": part, "by a link": tmp_path / "link"}.get(named, tmp_path / "folder" / part.name)

    async def order_and_export() -> None:
        async with ledger(path) as one:
            one.take(ack_event("first"))
            await one.written()
            with pytest.raises(ArgumentError, match="is the ledger itself, or a part of it"):
                history().to_csv(target)
            one.take(ack_event("second"))
            await one.written()
            assert one.notes == ()
            assert tasks(history()) == ["second", "first"]

    asyncio.run(order_and_export())


def test_a_ledgers_place_is_kept_free_before_there_is_one(path: Path) -> None:
    with pytest.raises(ArgumentError, match="is the ledger itself"):
        history().to_csv(path)
    assert not path.exists()


@pytest.mark.parametrize("formula", ["=HYPERLINK(A1)", "+1", "-1+cmd|' /C calc'!A0", "@SUM(1)", "\t=1", "\r=1"])
def test_no_text_of_a_csv_cell_is_a_formula_for_a_spreadsheet(path: Path, tmp_path: Path, formula: str) -> None:
    record(path, ack_event(formula, error_msg=formula, error_code=formula, freed_bytes=-5), model=formula)
    history().to_csv(tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert [row[name] for name in ("model", "task_id", "error_msg", "error_code")] == [f"'{formula}"] * 4
    assert row["freed_bytes"] == "-5", "a number stays one"


def test_an_export_that_can_not_be_written_says_why(filled: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"no/such/file.csv can not be written \(No such file or directory\)"):
        history().to_csv(tmp_path / "no" / "such" / "file.csv")


def test_a_dataframe_has_a_row_an_ack_and_times_with_a_zone(filled: Path) -> None:
    pytest.importorskip("pandas")
    frame = history().to_dataframe()
    assert list(frame.columns) == list(history_export.FIELDS)
    assert list(frame["task_id"]) == ["b1", "b0", "a3", "a2", "a1", "a0"]
    assert str(frame["time"].dt.tz) == "UTC"
    assert frame["time"].iloc[0].timestamp() == 2000.5
    assert frame["freed_bytes"].sum() == 5 * 256 * MIB
    assert str(frame["mapped_bytes"].dtype) == str(frame["level"].dtype) == "Int64", "bytes are whole, also beside none"
    assert frame["mapped_bytes"].sum() == 3 * MIB
    assert list(history(stage=9).to_dataframe().columns) == list(history_export.FIELDS)


def test_without_pandas_a_dataframe_is_refused_in_one_line(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UnsupportedError, match="to_dataframe needs pandas, which is not installed"):
        history().to_dataframe()


# --------------------------------------------------------------------------------------------- facts


def test_facts_name_the_file_its_size_its_rows_and_its_schema(filled: Path) -> None:
    found = facts()
    assert found.path == str(filled)
    assert found.size_bytes == filled.stat().st_size
    assert (found.schema, found.trouble) == (len(ledger_file.MIGRATIONS), None)
    assert found.rows == {"sessions": 2, "acks": 6, "states": 0, "audits": 0}


def test_facts_of_what_is_not_there_or_can_not_be_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts().size_bytes is None
    path.write_bytes(b"my notes\n" * 2000)
    found = facts()
    assert (found.size_bytes, found.rows) == (18000, {})
    assert str(found.trouble).startswith(f"{path} is not a ledger")
    monkeypatch.setenv("OMNI_NOTEBOOK_LEDGER", "/dev/null/ledger.db")
    assert facts().size_bytes is None
    monkeypatch.setenv("OMNI_NOTEBOOK_LEDGER", "off")
    assert facts().path is None


@pytest.mark.parametrize("since", [float("nan"), float("inf"), float("-inf"), True, b"2h", []])
def test_what_is_no_time_is_refused_and_never_matches_nothing_in_silence(filled: Path, since: Any) -> None:
    with pytest.raises(ArgumentError, match="is no time; write "):
        history(since=since)


@pytest.mark.parametrize("name", ["stage", "rank", "session", "limit"])
def test_a_truth_value_is_no_number(filled: Path, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}=True is not a whole number"):
        history(**{name: True})


def test_a_date_object_is_its_midnight_here(filled: Path) -> None:
    assert moment(dt.date(2026, 11, 29)) == moment("2026-11-29")


def test_a_home_of_nobody_is_one_clear_line(filled: Path) -> None:
    with pytest.raises(ArgumentError, match=r"~no-such-user/x.csv can not be written"):
        history().to_csv("~no-such-user/x.csv")


# --------------------------------------------------------------------------------------------- speed

MANY = 100_000
BAR_S = 0.1


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "ledger.db"
    bench_ledger.fill(path, MANY)
    return path


@pytest.mark.parametrize("words", bench_ledger.WISHES)
def test_a_history_of_many_acks_is_answered_in_100_ms(large: Path, words: str) -> None:
    wanted, times = bench_ledger.WISHES[words], []
    for _ in range(5):
        started = time.perf_counter()
        repr(History(large, wanted))
        times.append(time.perf_counter() - started)
    assert min(times) < BAR_S


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (Filter(), "acks_by_time"),
        (Filter(since=5.0), "acks_by_time"),
        (Filter(errors=True), "acks_by_time"),
        (Filter(stage=1), "acks_by_stage"),
        (Filter(rank=1, errors=True), "acks_by_rank"),
        (Filter(session=1, since=5.0), "acks_by_session"),
    ],
)
def test_every_filter_walks_an_index_that_holds_all_that_it_asks(large: Path, wanted: Filter, index: str) -> None:
    where, values = wanted.where(MANY)
    sql = f"EXPLAIN QUERY PLAN SELECT a.id FROM acks a WHERE {where} ORDER BY a.time DESC, a.id DESC LIMIT 50"
    connection = ledger_file.reading(large)
    plan = " ".join(row[3] for row in connection.execute(sql, values))
    connection.close()
    assert f"USING COVERING INDEX {index}" in plan
