"""The README's cells in a real kernel, and its Python example as a script: as a newcomer copies them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from omni_notebook.models import scene

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The README's cells with their outputs; an error in one of them is an output too."""
    sources = [source.rstrip("\n") for source in blocks("ipython")]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    folder = tmp_path_factory.mktemp("readme")
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": folder}}
    ).execute()
    return notebook.cells


def data(cell, kind):
    return [output.data[kind] for output in cell.outputs if kind in output.get("data", {})]


def text(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def by_line(cells, start):
    found = [cell for cell in cells if any(line.startswith(start) for line in cell.source.splitlines())]
    assert found, start
    return found


def test_every_cell_runs_as_it_stands(cells):
    errors = {c.source: o.traceback for c in cells for o in c.outputs if o.output_type == "error"}
    assert errors == {}
    assert all("#" in cell.source for cell in by_line(cells, "%omni"))


def test_the_sleep_shows_its_table(cells):
    (slept,) = by_line(cells, "acks = %omni sleep")
    (table,) = data(slept, "text/plain")
    assert table.count("✓ SUCCESS") == table.count("ASLEEP (level 2)") == 2
    assert len(data(slept, "text/html")) == 1


def test_both_prompts_draw_the_same_picture(cells):
    before, after = by_line(cells, "%%omni generate")
    assert data(before, "image/png") == data(after, "image/png") != []
    assert text(before).startswith("plan: red star top")


def test_stop_says_what_came_back(cells):
    (stopped,) = by_line(cells, "%omni stop")
    assert re.search(r"stopped: \d+\.\d MiB of stage memory given back", text(stopped))


@pytest.mark.parametrize(
    ("source", "said", "left"),
    list(zip(blocks("python"), (r"Freed 0\.01 GiB on Stage 0\n", ""), ([], ["star.png"]), strict=True)),
)
def test_every_python_example_runs_as_a_script(tmp_path, source, said, left):
    script = tmp_path / "example.py"
    script.write_text(source, encoding="utf-8")
    command = [sys.executable, script.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(said, done.stdout)
    assert sorted(path.name for path in tmp_path.iterdir() if path != script) == left


def test_it_names_every_word_of_the_scene_language():
    section = README.partition("A prompt names")[2].partition("\n\n")[0]
    words = set(re.findall(r"\w+", section))
    assert {*scene.COLOURS, *scene.SHAPES, *scene.ROWS, *scene.COLUMNS} <= words
