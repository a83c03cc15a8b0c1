"""The notebooks on audits and on borrowed memory: as they are committed, and as a real kernel runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import run_notebooks
from tests.test_quickstart import data, picture, read, text

ROOT = Path(__file__).parents[1]
AUDIT, BORROW = "03_memory_audit.ipynb", "04_borrow_for_training.ipynb"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Copies of the committed notebooks without outputs, run by the tool that wrote the committed ones."""
    folder = tmp_path_factory.mktemp("notebooks")
    for name in (AUDIT, BORROW):
        notebook = read(ROOT / "notebooks" / name)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, folder / name)
    command = [sys.executable, str(ROOT / "tools" / "run_notebooks.py"), *(str(folder / n) for n in (AUDIT, BORROW))]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module", params=["committed", "executed"])
def folder(request):
    return ROOT / "notebooks" if request.param == "committed" else request.getfixturevalue("executed")


def code_cells(folder, name):
    return [cell for cell in read(folder / name).cells if cell.cell_type == "code"]


def by_start(cells, start):
    return next(cell for cell in cells if cell.source.startswith(start))


@pytest.mark.parametrize("name", [AUDIT, BORROW])
def test_every_cell_ran_in_order_without_an_error_widget_or_path(folder, name):
    cells = code_cells(folder, name)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert kinds <= {"execute_result", "display_data", "stream"}
    assert {o.name for cell in cells for o in cell.outputs if o.output_type == "stream"} == {"stdout"}
    notebook = read(folder / name)
    raw = nbformat.writes(notebook)
    assert run_notebooks.WIDGET not in raw
    assert run_notebooks.machine_paths(notebook) == []
    assert re.findall(r"/(?:home|root|Users|work|tmp)/\S+", raw) == []


def test_the_audit_passes_and_shows_its_report_and_a_picture(folder):
    cell = by_start(code_cells(folder, AUDIT), "result = %omni audit")
    (shown,) = data(cell, "text/plain")
    answer, verdict = shown.splitlines()[:2]
    assert answer.startswith("A trainer may take 256.0 MiB while these stages sleep (280.0 MiB from the sleep). ")
    assert answer.endswith("The stages are AWAKE again: sleep them first.")
    assert verdict.startswith("audit PASS · level 2 · 5 of 5 cycles")
    assert "1 image the same in 5 of 5 [output]" in shown
    (html,) = data(cell, "text/html")
    assert html.count('<svg role="img"') == 2
    assert picture(cell).width > 500


def test_what_could_not_be_compared_warns(folder):
    shown = text(by_start(code_cells(folder, AUDIT), "partly = "))
    assert shown.startswith("audit WARN · level 1 · 1 of 1 cycle · stage 1 (painter)")
    assert "stage 1's output was not compared" in shown


def test_the_rows_say_what_the_ranks_and_what_others_saw(folder):
    rows = [line.split() for line in text(by_start(code_cells(folder, AUDIT), "result.to_html")).splitlines()]
    assert [(row[0], row[1], row[4]) for row in rows] == [(str(n), s, "smaps") for n in range(1, 6) for s in "01"]
    assert all(abs(int(row[2]) - int(row[3])) < 3 * 2**20 < int(row[2]) for row in rows)


def test_the_job_ends_behind_the_notebook(folder):
    assert text(by_start(code_cells(folder, AUDIT), "audited = await job")) == "audit PASS · level 1 · 4 of 4 cycles\n"


def test_the_network_learns_in_memory_that_the_stages_gave_back(folder):
    cells = code_cells(folder, BORROW)
    awake = int(re.search(r"holds (\d+) MiB", text(by_start(cells, "print(held())")))[1])
    said = text(by_start(cells, "%%omni borrow"))
    asleep, trained = (
        int(re.search(rf"{word}: the kernel holds (\d+) MiB", said)[1]) for word in ("asleep", "trained")
    )
    assert awake - asleep > 500
    assert asleep + 60 < trained < awake
    before, after = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", said).groups())
    assert after < 0.5 * before
    freed, peak = re.search(r"borrowed ([\d.]+) MiB of stage 0, 1 .* own peak ([\d.]+) MiB", said).groups()
    assert float(freed) > 512
    assert float(peak) > 60


def test_the_same_picture_after_the_lease_and_the_curve_is_drawn(folder):
    cells = code_cells(folder, BORROW)
    before, after = (
        picture(by_start(cells, f"%%omni generate --seed 42 --out {name}")) for name in ("before", "after")
    )
    assert before.tobytes() == after.tobytes()
    assert text(by_start(cells, "import hashlib")).startswith("identical: ")
    curve = picture(by_start(cells, "%matplotlib inline"))
    assert len(curve.getcolors(curve.width * curve.height)) > 50


def test_an_error_comes_through_and_the_stages_are_awake(folder):
    lines = text(by_start(code_cells(folder, BORROW), "def too_much")).splitlines()
    assert lines[0] == "raised: the loss is not a number"
    assert "own peak 128" in lines[1]
    assert lines[2] == "['AWAKE', 'AWAKE']"
