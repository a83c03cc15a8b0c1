import asyncio

import pytest

from omni_notebook.engine.history import History, history
from omni_notebook.notebook import results
from omni_notebook.notebook.history import history_bundle
from omni_notebook.verbs.session import session
from tests.engine.ledger_helpers import ack_event, record, rows
from tests.notebook.acks import stage, status

HOSTILE = "<script>alert('x')</script> & \"quoted\""


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("OMNI_NOTEBOOK_LEDGER", str(tmp_path / "ledger.db"))
    return tmp_path / "ledger.db"


def test_a_history_shows_as_text_and_html(path):
    record(path, ack_event("t", stage_id=1, replica=2, latency_ms=1234.0))
    bundle = history_bundle(history())
    assert set(bundle) == {"text/plain", "text/html"}
    assert bundle["text/plain"].splitlines()[0] == "1 ACK"
    for part in ("1 · demo", "sleep", "✓ SUCCESS", "256.0 MiB", "1.23 s", "replica", f"ledger: {path}"):
        assert part in bundle["text/plain"]
        assert part in bundle["text/html"]


def test_every_text_of_a_history_is_escaped(path):
    facts = {"note": HOSTILE, "weight_version": HOSTILE, "error_code": HOSTILE}
    record(path, ack_event(error_msg=HOSTILE, **facts), model=HOSTILE)
    markup = history_bundle(history())["text/html"]
    assert "<script" not in markup
    assert markup.count("&lt;script&gt;") == 5


def test_a_status_shows_what_a_person_must_know_escaped():
    bundle = results.status_bundle(status(stage(), notes=(f"no history is kept: {HOSTILE}",)))
    assert bundle["text/plain"].splitlines()[-1] == f"no history is kept: {HOSTILE}"
    assert "<script" not in bundle["text/html"]


def test_the_magic_returns_a_history_that_the_cell_shows(shell, cell, path):
    record(path, ack_event("old", 1000.0), model=HOSTILE)
    result, shown = cell("past = %omni history --stage 0\npast")
    assert result.success, shown
    assert isinstance(result.result, History)
    data, _ = shell.display_formatter.format(result.result)
    assert "<table" in data["text/html"]
    assert "<script" not in data["text/html"]
    assert HOSTILE in data["text/plain"]


def test_orders_of_the_magic_are_in_its_history(shell, cell, path):
    result, shown = cell("engine = %omni start --executor uni\nslept = %omni sleep 0\nwoken = %omni wake 0")
    assert result.success, shown
    result, _ = cell("%omni history")
    (woken, slept) = result.result
    assert (slept.order, woken.order, slept.model) == ("sleep", "wake", "demo")
    assert slept.freed_bytes == shell.user_ns["slept"][0].freed_bytes > 0
    _, shown = cell("%omni where")
    assert "rows    sessions 1 · ACKs 2 · state changes 6 · audits 0" in shown
    assert rows(path, "SELECT count(*) FROM acks") == [2]


def test_a_ledger_that_can_not_be_used_is_said_once_and_orders_go_on(cell, path):
    path.write_bytes(b"my notes\n" * 2000)
    line = f"no history is kept: {path} is not a ledger (file is not a database). Orders go on"
    result, shown = cell("engine = %omni start --executor uni")
    assert result.success
    assert shown.count(line) == 1
    result, shown = cell("%omni sleep 0")
    assert [ack.ok for ack in result.result] == [True]
    assert line not in shown.replace(repr(result.result), "")
    _, shown = cell("%omni")
    assert line in shown
    _, shown = cell("%omni where")
    assert shown.count(line) == 1
    result, shown = cell("%omni history")
    assert not result.success
    assert shown == f"\x1b[31mLedgerError: {path} is not a ledger (file is not a database)\x1b[0m\n"
    assert path.read_bytes() == b"my notes\n" * 2000


def test_an_audit_is_counted(cell, path):
    result, shown = cell("engine = %omni start --executor uni")
    assert result.success, shown
    asyncio.run(session().engine.record_audit("PASS", {"freed": 1}))
    _, shown = cell("%omni where")
    assert "audits 1" in shown
