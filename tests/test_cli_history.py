"""`omni-notebook history` and `where` as a person runs them: a process, its exit status and its streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from omni_notebook.cli import parsing
from tests.engine.ledger_helpers import ack_event, record

COMMAND = [sys.executable, "-m", "omni_notebook"]
HOSTILE = "<script>alert('x')</script> [bold]no markup[/bold]"


def run(*words, ledger, **options):
    env = {**os.environ, "OMNI_NOTEBOOK_LEDGER": str(ledger)}
    done = subprocess.run(
        [*COMMAND, *words], env=env, capture_output=True, text=True, check=False, timeout=60, **options
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def filled(tmp_path):
    path = tmp_path / "ledger.db"
    record(path, ack_event("a", 1e9, latency_ms=12.0), ack_event("b", 1e9 + 1, stage_id=1, error_msg=HOSTILE))
    return path


def test_history_shows_a_table(filled):
    done = run("history", ledger=filled)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "2 ACKs"
    for part in ("2001-09-0", "1 · demo", "✓ SUCCESS", "✗ ERROR", "256.0 MiB", "12 ms", "[bold]no markup[/bold]"):
        assert part in done.stdout


def test_history_takes_the_filters_and_writes_files(filled, tmp_path):
    words = (
        "--stage",
        "1",
        "--errors",
        "--since",
        "2001-01-01",
        "--limit",
        "all",
        "--json",
        str(tmp_path / "out.json"),
    )
    done = run("history", *words, ledger=filled)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "1 ACK")
    assert [one["task_id"] for one in json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))] == ["b"]


def test_history_before_the_first_engine(tmp_path):
    done = run("history", ledger=tmp_path / "none.db")
    assert (done.returncode, done.stdout) == (0, f"no history yet: no ACK is in {tmp_path / 'none.db'}\n")


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (("history", "--since", "soon"), 2, "'soon' is no time"),
        (("history", "--stage", "painter"), 2, "'painter' is not a whole number"),
        (("history", "--limit", "0"), 2, "limit=0"),
        (("history", "--csv", "/no/such/folder/x"), 2, "can not be written"),
        (("histroy",), 2, "did you mean 'history'"),
    ],
)
def test_a_mistake_is_one_line(filled, words, status, line):
    done = run(*words, ledger=filled)
    assert (done.returncode, done.stdout) == (status, "")
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_is_no_ledger_is_one_line_of_history_and_the_last_one_of_where(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"my notes\n" * 2000)
    done = run("history", ledger=path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"omni-notebook: {path} is not a ledger (file is not a database)\n"
    done = run("where", ledger=path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1].startswith(f"It can not be used: {path} is not a ledger")


def test_off_is_said(tmp_path):
    done = run("history", ledger="off")
    assert (done.returncode, done.stderr) == (1, "omni-notebook: no history is kept: OMNI_NOTEBOOK_LEDGER is off\n")
    assert run("where", ledger="off").returncode == 0


def test_where_shows_the_file(filled):
    done = run("where", ledger=filled)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == f"ledger  {filled}"
    assert "rows    sessions 1 · ACKs 2 · state changes 0 · audits 0" in done.stdout


def test_neither_command_loads_torch(filled):
    code = (
        "import sys; from omni_notebook import cli; cli.main(['history']); cli.main(['where']); "
        "print('torch' in sys.modules)"
    )
    env = {**os.environ, "OMNI_NOTEBOOK_LEDGER": str(filled)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_help_lists_the_commands():
    assert {"history", "where"} <= set(parsing.COMMANDS)
    done = run("--help", ledger="off")
    for command, about in parsing.COMMANDS.items():
        assert f"  {command:<8}{about}" in done.stdout
