"""The notebook of the dashboard: as it is committed, and as a real kernel runs it."""

from __future__ import annotations

import base64
import re

import nbformat
import pytest

import run_notebooks
from tests.executed_notebooks import NOTEBOOKS, cells, data, execute_copy, picture, read, text

COMMITTED = NOTEBOOKS / "05_dashboard.ipynb"
BOARD, ILLEGAL = "board = %omni dashboard", "%omni sleep 1 --level 1"
SLEEPS = {1: "acks = %omni sleep 1 --level 1", 2: "acks = %omni sleep 0 1 --level 2"}
FIRST_LINES = [
    "%load_ext omni_notebook",
    "engine = %omni start --ballast 96MiB",
    BOARD,
    "%%omni generate --seed 42 --out before",
    SLEEPS[1],
    "import asyncio",
    "%omni wake 1",
    "await asyncio.sleep(2)",
    SLEEPS[2],
    ILLEGAL,
    "await asyncio.sleep(1)",
    "%omni wake",
    "%omni pause 1 --mode keep",
    "stage = engine.status().stages[1]",
    "%omni resume",
    "%%omni generate --seed 42 --out after",
    "assert before.images[0].tobytes() == after.images[0].tobytes()",
    "%omni history",
    "%matplotlib inline",
    "omni.plot_reclaimed(acks)",
    "board.close()",
]
SVG = re.compile(r'<img alt="[^"]+" src="data:image/svg\+xml;base64,([^"]+)"')
BALLAST_MIB = 96

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    return execute_copy(COMMITTED, tmp_path_factory.mktemp("notebook"))


@pytest.fixture(scope="module", params=["committed", "executed"])
def notebook(request):
    return read(COMMITTED) if request.param == "committed" else request.getfixturevalue("executed")


@pytest.fixture(scope="module")
def found(notebook):
    return cells(notebook)


def test_the_cells_are_those_that_a_newcomer_is_promised(notebook):
    assert list(cells(notebook)) == FIRST_LINES


def test_every_cell_ran_in_order_and_only_the_illegal_order_failed(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = [
        (output.output_type, output.get("name", "stdout"), cell.source) for cell in code for output in cell.outputs
    ]
    assert [source for kind, _, source in kinds if kind == "error"] == [ILLEGAL]
    assert {name for _, name, _ in kinds} == {"stdout"}


def test_it_holds_no_widget_and_no_path_of_a_machine(notebook):
    raw = nbformat.writes(notebook)
    assert "widgets" not in notebook.metadata
    assert run_notebooks.WIDGET not in raw
    assert run_notebooks.machine_paths(notebook) == []
    assert re.findall(r"/(?:home|root|Users|work|tmp)/\S+", raw) == []


# ---------------------------------------------------------------------------------------- the dashboard


def test_without_a_kernel_the_dashboard_is_one_output_with_text_a_page_and_a_picture(found):
    (output,) = found[BOARD].outputs
    assert set(output.data) == {"text/plain", "text/html", "image/png"}
    shown = picture(found[BOARD])
    assert shown.width > 500
    assert len(shown.getcolors(shown.width * shown.height)) > 50


def test_the_still_dashboard_shows_the_last_state_and_what_was_ordered(found):
    (page,), (words,) = data(found[BOARD], "text/html"), data(found[BOARD], "text/plain")
    drawn = base64.b64decode(SVG.search(page)[1]).decode()
    assert "demo: 0 thinker AWAKE · 1 painter AWAKE" in drawn
    assert "0 thinker · rank 0" in drawn
    assert "1 painter · rank 0" in drawn
    assert re.search(r"sleep L2 −1\d\d\.\d MiB", drawn)
    for shown in (page, words):
        assert shown.count("SUCCESS") == 2  # each rank's last answer: the wake
        assert "ballast (filler, no model) 96.0 MiB / 96.0 MiB" in shown


# ------------------------------------------------------------------------------------- what was ordered


@pytest.mark.parametrize(("level", "ranks"), [(1, 1), (2, 2)])
def test_each_rank_that_sleeps_gave_back_its_ballast_and_more(found, level, ranks):
    (table,) = data(found[SLEEPS[level]], "text/plain")
    freed = [float(mib) for mib in re.findall(rf"✓ SUCCESS +ASLEEP \(level {level}\) +([\d.]+) MiB", table)]
    assert len(freed) == ranks
    assert min(freed) > BALLAST_MIB


@pytest.mark.parametrize(("line", "ranks"), [("%omni wake 1", 1), ("%omni wake", 2)])
def test_each_rank_that_wakes_got_its_memory_again(found, line, ranks):
    (table,) = data(found[line], "text/plain")
    mapped = [float(mib) for mib in re.findall(r"✓ SUCCESS +AWAKE +([\d.]+) MiB", table)]
    assert len(mapped) == ranks
    assert min(mapped) > BALLAST_MIB


def test_the_illegal_order_is_one_line_that_names_the_call_that_helps(found):
    (output,) = found[ILLEGAL].outputs
    assert output.ename == "AsleepError"
    (line,) = output.traceback
    assert "\n" not in line
    assert "level 1 has nothing to back up; call %omni wake 1 first. Nothing changed" in line


def test_the_painter_is_paused_and_admission_opens_again(found):
    assert text(found["%omni pause 1 --mode keep"]).startswith("admission is closed: stage 1 (painter)")
    assert text(found["stage = engine.status().stages[1]"]) == "painter AWAKE PAUSED keep\n"
    assert text(found["%omni resume"]) == "admission is open\n"


def test_the_same_picture_before_and_after(found):
    before, after = (picture(found[f"%%omni generate --seed 42 --out {name}"]) for name in ("before", "after"))
    assert before.tobytes() == after.tobytes()


# ----------------------------------------------------------------------------------------- what stays


def test_the_history_lists_every_answer_newest_first_and_only_of_this_kernel(found):
    (table,) = data(found["%omni history"], "text/plain")
    title, _columns, *rows, foot = table.splitlines()
    assert title == "6 ACKs"
    answers = [re.search(r" (wake|sleep) +(\d) +0 +✓ SUCCESS ", row).groups() for row in rows]
    assert answers[-2:] == [("wake", "1"), ("sleep", "1")]
    assert sorted(answers[:2]) == [("wake", "0"), ("wake", "1")]
    assert sorted(answers[2:4]) == [("sleep", "0"), ("sleep", "1")]
    assert foot == "ledger: ~/.local/share/omni-notebook/ledger.db"
    assert len(data(found["%omni history"], "text/html")) == 1


@pytest.mark.parametrize("line", ["%matplotlib inline", "omni.plot_reclaimed(acks)"])
def test_the_figures_are_pictures_that_are_not_blank(found, line):
    figure = picture(found[line])
    assert figure.width > 500
    assert len(figure.getcolors(figure.width * figure.height)) > 50


def test_everything_is_given_back(found):
    given = re.match(r"the engine was stopped: ([\d.]+) MiB of stage memory given back", text(found["board.close()"]))
    assert float(given[1]) > 2 * BALLAST_MIB
