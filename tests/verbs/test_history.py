import pytest

from omni_notebook.engine.history import History
from omni_notebook.errors import ArgumentError, LedgerError
from omni_notebook.verbs import registry
from omni_notebook.verbs.completion import candidates
from omni_notebook.verbs.session import Session
from tests.engine.ledger_helpers import ack_event, record, rows, state_event
from tests.notebook.acks import status


class Engine:
    """What verbs see of an engine whose ledger has something to say."""

    url = host = None

    def __init__(self, *notes):
        self.notes = notes

    def status(self):
        return status(notes=self.notes)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("OMNI_NOTEBOOK_LEDGER", str(tmp_path / "ledger.db"))
    return tmp_path / "ledger.db"


@pytest.fixture
def filled(path):
    events = [ack_event(f"t{n}", 1000.0 + n, stage_id=n % 2, rank=n // 2) for n in range(4)]
    record(path, *events, ack_event("bad", 2000.0, error_msg="no"), state_event())
    return path


@pytest.fixture
def session():
    return Session()


def run(session, line):
    return registry.execute(session, line)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("history", ["bad", "t3", "t2", "t1", "t0"]),
        ("history --stage 1", ["t3", "t1"]),
        ("history --rank 1 --stage 0", ["t2"]),
        ("history --errors", ["bad"]),
        ("history --since 1970-01-01T00:16:42Z", ["bad", "t3", "t2"]),
        ("history --session 1 --limit 2", ["bad", "t3"]),
        ("history --session this", ["bad", "t3", "t2", "t1", "t0"]),
        ("history --limit all", ["bad", "t3", "t2", "t1", "t0"]),
        ("history --since 2h", []),
    ],
)
def test_history_needs_no_engine_and_shows_what_a_line_asks_for(session, filled, line, expected):
    found = run(session, line)
    assert isinstance(found, History)
    assert [ack.task_id for ack in found] == expected


def test_out_keeps_the_history(session, filled):
    found = run(session, "history --out past")
    assert session.frontend.variables["past"] is found


def test_a_stage_may_be_named_where_an_engine_knows_it(session, filled):
    session.use(Engine())
    with pytest.raises(ArgumentError, match="'painter' is no stage"):
        run(session, "history --stage painter")


@pytest.mark.parametrize("kind", ["csv", "json", "html"])
def test_files_are_written_beside_what_is_shown(session, filled, tmp_path, kind, capsys):
    found = run(session, f"history --errors --{kind} {tmp_path}/out")
    assert capsys.readouterr().out == f"written: {tmp_path}/out\n"
    assert len(found) == 1
    text = (tmp_path / "out").read_text(encoding="utf-8")
    assert "no" in text
    assert ("t0" in text) is False


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("history --stage 0,1", "takes one stage"),
        ("history --stage all", "takes one stage"),
        ("history --rank x", "'x' is not a whole number"),
        ("history --rank -1", "--rank"),
        ("history --since soon", "'soon' is no time; write 30s, 15m, 2h"),
        ("history --limit 0", "limit=0 is not a whole number from 1 on"),
        ("history --limit many", "'many' is not a whole number"),
        ("history --rank 99999999999999999999", "rank=99999999999999999999"),
        ("history --csv /no/such/folder/x", "/no/such/folder/x can not be written"),
        ("history --stgae 1", r"did you mean '--stage'"),
        ("history 1", "unknown argument '1'"),
    ],
)
def test_a_mistake_is_one_line(session, filled, line, words):
    with pytest.raises(ArgumentError) as caught:
        run(session, line)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_export_onto_the_ledger_is_refused(session, filled):
    with pytest.raises(ArgumentError, match="is the ledger itself"):
        run(session, f"history --csv {filled}")
    assert len(rows(filled)) == 5


def test_a_ledger_that_can_not_be_read_is_one_line(session, path):
    path.write_bytes(b"my notes\n" * 2000)
    with pytest.raises(LedgerError) as caught:
        run(session, "history")
    assert str(caught.value) == f"{path} is not a ledger (file is not a database)"


def test_options_are_completed():
    words = candidates(Session(), "history --s").words
    assert words == ["--stage", "--since", "--session"]


# ----------------------------------------------------------------------------------------------- where


def test_where_names_the_file_its_size_its_rows_and_its_schema(session, filled, capsys):
    run(session, "where")
    size = f"{filled.stat().st_size / 1024:.1f} KiB"
    assert capsys.readouterr().out.splitlines() == [
        f"ledger  {filled}",
        f"size    {size}",
        "rows    sessions 1 · ACKs 5 · state changes 1 · audits 0",
        "schema  2",
    ]


def test_where_before_the_first_engine(session, path, capsys):
    run(session, "where")
    assert capsys.readouterr().out.splitlines() == [
        f"ledger  {path}",
        "size    not there yet; the first engine makes it",
    ]
    assert not path.exists()


def test_where_when_it_is_off(session, monkeypatch, capsys):
    monkeypatch.setenv("OMNI_NOTEBOOK_LEDGER", "off")
    run(session, "where")
    assert capsys.readouterr().out == "ledger  off (OMNI_NOTEBOOK_LEDGER): no history is kept\n"


def test_where_says_why_a_file_can_not_be_used(session, path, capsys):
    path.write_bytes(b"my notes\n" * 2000)
    run(session, "where")
    why = f"It can not be used: {path} is not a ledger (file is not a database); it was left as it is. "
    lines = [f"ledger  {path}", "size    17.6 KiB", why + "OMNI_NOTEBOOK_LEDGER names another file"]
    assert capsys.readouterr().out.splitlines() == lines


def test_where_says_what_hinders_the_engine_that_runs(session, filled, capsys):
    session.use(Engine("no history is kept: because"))
    run(session, "where")
    assert capsys.readouterr().out.splitlines()[-1] == "no history is kept: because"


# ------------------------------------------------------------------------------------- what is told once


def test_what_an_engine_must_tell_is_told_once(session, capsys):
    session.use(Engine("no history is kept: because"))
    session.tell_notes()
    session.keep([], None, "sleep")
    assert capsys.readouterr().out == "no history is kept: because\n"
    session.use(Engine("no history is kept: for another reason"))
    session.keep([], None, "sleep")
    assert capsys.readouterr().out == "no history is kept: for another reason\n"
