"""Audits, borrowed memory and jobs as a real shell shows them."""

import re

import pytest

from omni_notebook.notebook.audits import plot_audit
from omni_notebook.verbs.auditing.result import AuditResult
from omni_notebook.verbs.jobs import Job, JobList
from omni_notebook.verbs.session import session


@pytest.fixture
def engine(cell):
    result, shown = cell("engine = %omni start --ballast 16MiB")
    assert result.success, shown
    return session().engine


def ok(cell, code):
    result, shown = cell(code)
    assert result.success, shown
    return result.result


def states(engine):
    return [str(stage.state) for stage in engine.status().stages]


# ------------------------------------------------------------------------------------------- audit


def test_an_audit_shows_as_text_report_and_still_picture(shell, cell, engine):
    made = ok(cell, '%omni audit 0 1 --level 2 --prompt "a red star" --steps 3 --seed 7 --out kept')
    assert isinstance(made, AuditResult)
    assert shell.user_ns["kept"] is made
    assert (made.verdict, made.record.prompt, made.record.seed) == ("PASS", "a red star", 7)
    data, _ = shell.display_formatter.format(made)
    assert data["text/plain"].startswith("audit PASS · level 2")
    assert "✓ PASS" in data["text/html"]
    assert "<script" not in data["text/html"]
    assert data["image/png"][:4] == b"\x89PNG"


def test_an_audit_shows_a_hostile_prompt_as_text(shell, cell, engine):
    made = ok(cell, '%omni audit 0 --level 1 --steps 2 --prompt "<img src=x onerror=alert(1)> red star"')
    html = shell.display_formatter.format(made)[0]["text/html"]
    assert "<img src=x" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;" in html


def test_an_audit_writes_its_files(cell, engine, tmp_path):
    files = {kind: tmp_path / f"audit.{kind}" for kind in ("html", "json", "csv")}
    options = " ".join(f"--{kind} {path}" for kind, path in files.items())
    _, shown = cell(f"kept = %omni audit 1 --level 1 --steps 2 {options}")
    assert shown.startswith("audit PASS · level 1 · 1 of 1 cycle · stage 1 (painter)")
    assert shown.splitlines()[1:] == [f"written: {path}" for path in files.values()]
    assert files["html"].read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert '"verdict": "PASS"' in files["json"].read_text(encoding="utf-8")
    assert files["csv"].read_text(encoding="utf-8").startswith("cycle,stage_id,")


@pytest.mark.parametrize(
    "options",
    ["--html no/such/folder/a.html", "--json /", "--cycles 0", "--level 3", "--probe much", "--prompt ' '", "9"],
)
def test_a_wrong_audit_is_one_line_and_nothing_moves(cell, engine, options):
    result, shown = cell(f"%omni audit {options}")
    assert not result.success
    assert len(shown.splitlines()) == 1
    assert states(engine) == ["AWAKE", "AWAKE"]


def test_a_file_that_can_not_be_written_does_not_cost_the_result(shell, cell, engine):
    result, shown = cell("%omni audit 0 --level 1 --steps 2 --json /dev/full --out kept")
    assert not result.success
    assert "the audit ended with PASS, but /dev/full could not be written" in shown
    assert shell.user_ns["kept"].verdict == "PASS"


def test_the_still_picture_has_a_row_a_process_and_the_images(cell, engine):
    made = ok(cell, "%omni audit --level 1 --steps 2 --cycles 2")
    figure = plot_audit(made)
    titles = [axes.get_title(loc="left") or axes.get_title() for axes in figure.axes]
    assert titles[1:] == ["before the sleep", "after the wake"]
    assert titles[0].startswith("process ")
    assert figure.get_suptitle().startswith("audit PASS"), repr(made)


# ------------------------------------------------------------------------------------------ borrow


def test_a_borrowed_cell_runs_in_the_users_namespace_while_stages_sleep(shell, cell, engine):
    _, shown = cell(
        "%%omni borrow 0 1 --out lease\nx = 1\ninside = [str(s.state) for s in engine.status().stages]\nx + 1"
    )
    assert shell.user_ns["inside"] == ["ASLEEP", "ASLEEP"]
    assert shown.splitlines()[0].endswith("2")
    assert re.search(r"borrowed [\d.]+ MiB of stage 0, 1 · asleep in .* own peak .* awake again in", shown)
    assert shell.user_ns["lease"].freed_bytes > 32 * 2**20
    assert states(engine) == ["AWAKE", "AWAKE"]


def test_a_borrowed_cell_may_use_verbs(cell, engine):
    ok(cell, "%%omni borrow 1\nmade = %omni generate a red star --text-only\n")
    assert states(engine) == ["AWAKE", "AWAKE"]


@pytest.mark.filterwarnings("ignore:To exit")
@pytest.mark.parametrize(
    ("code", "kind", "lines"),
    [
        ("def f():\n    big = [1] * 10\n    raise ValueError('mine')\nf()", "ValueError", ("line 3", "f()")),
        ("%omni sleep 9", "ArgumentError", ()),
        ("undefined_name", "NameError", ()),
        ("import sys\nsys.exit('bye')", "SystemExit", ("bye",)),
    ],
)
def test_an_error_of_a_borrowed_cell_shows_once_after_the_wake(cell, engine, code, kind, lines):
    result, shown = cell(f"%%omni borrow 0\n{code}")
    assert type(result.error_in_exec).__name__ == kind
    assert states(engine) == ["AWAKE", "AWAKE"]
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert plain.index("awake again in") < plain.index(f"{kind}: ")
    assert plain.count(f"{kind}: ") == 1
    assert all(part in plain for part in lines)
    assert "omni_notebook/notebook" not in plain, "no frame of ours between the person and the error"


def test_an_error_that_can_not_say_what_it_is_is_still_the_users_own(cell, engine):
    code = "class Mute(Exception):\n    def __str__(self):\n        raise RuntimeError('no words')\nraise Mute"
    result, shown = cell(f"%%omni borrow 0\n{code}")
    assert type(result.error_in_exec).__name__ == "Mute"
    assert "omni_notebook/" not in re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert states(engine) == ["AWAKE", "AWAKE"]


@pytest.mark.filterwarnings("ignore:To exit")
def test_after_a_borrowed_cell_errors_of_other_cells_show_as_ever(cell, engine):
    cell("%%omni borrow 0\n1 / 0")
    _, shown = cell("1 / 0")
    assert "ZeroDivisionError" in shown
    assert "Traceback" in re.sub(r"\x1b\[[\d;]*m", "", shown)
    cell("%%omni borrow 0\nraise SystemExit")
    assert "SystemExit: 3" in re.sub(r"\x1b\[[\d;]*m", "", cell("raise SystemExit(3)")[1])


@pytest.mark.parametrize("code", ["if x =", "def f(:\n    pass", "'open"])
def test_a_cell_that_is_no_python_is_one_line_and_nothing_sleeps(cell, engine, code):
    result, shown = cell(f"%%omni borrow 0\n{code}")
    assert not result.success
    assert len(shown.splitlines()) == 1
    assert "the cell is no Python" in shown
    assert states(engine) == ["AWAKE", "AWAKE"]


def test_a_wake_without_room_names_the_users_variables_and_shows_both_errors(cell, engine, monkeypatch):
    core = engine._core.stages[1].replicas[0].executor._worker._pool._core
    true_room = core.room
    monkeypatch.setattr(core, "room", lambda: type(true_room())(limit_bytes=2**40, available_bytes=2**20))
    _, shown = cell("%%omni borrow\nimport torch\nactivations = torch.ones(4 * 2**20)\n1 / 0")
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert plain.index("ZeroDivisionError: division by zero") < plain.index("WakeError: ")
    last = plain.splitlines()[-1]
    assert "activations (Tensor) 16.0 MiB" in last
    assert last.endswith("stage 1 (painter) is ASLEEP (level 1): %omni wake 1 wakes it")
    monkeypatch.undo()
    ok(cell, "%omni wake 1")


# -------------------------------------------------------------------------------------------- jobs


def test_a_job_shows_its_state_and_its_result(shell, cell, engine):
    job = ok(cell, "job = %omni generate a red star --seed 1 --steps 3 --bg\njob")
    assert isinstance(job, Job)
    made = ok(cell, "job.result()")
    assert len(made.images) == 1
    data, _ = shell.display_formatter.format(job)
    assert re.search(r"<Job \d+: %omni generate --seed 1 --steps 3 a red star · done · ", data["text/plain"])
    assert "✓ done" in data["text/html"]


def test_the_list_of_jobs_is_a_table_with_errors_escaped(shell, cell, engine):
    before = len(session().jobs.list())
    ok(cell, "job = %omni generate <b>red</b> star --bg --steps 2\n_ = job.result()")
    cell("bad = %omni generate <i>red</i> and nothing else --max-tokens 1 --bg\nbad.result()")
    jobs = ok(cell, "jobs = %omni jobs\njobs")
    assert isinstance(jobs, JobList)
    shown = cell("jobs[999]")[1]
    assert "ArgumentError: there is no job 999; jobs are: " in shown
    assert len(shown.splitlines()) == 1
    assert [str(job.state) for job in jobs[before:]] == ["done", "failed"]
    html = shell.display_formatter.format(jobs)[0]["text/html"]
    assert "<b>red" not in html
    assert "&lt;b&gt;red" in html
    assert "✗ failed" in html
    assert "--max-tokens 1 may have cut the plan" in html


def test_an_error_of_a_job_is_one_red_line(cell, engine):
    cell("%omni sleep 0")
    _, shown = cell("job = %omni generate a red star --bg\njob.result()")
    assert len(shown.splitlines()) == 1
    assert shown.startswith("\x1b[31mAsleepError: stage 0 (thinker) is ASLEEP")
    _, whole = cell("%omni traceback")
    assert "from: %omni generate a red star" in whole
