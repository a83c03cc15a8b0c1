"""The quickstart notebook: as it is committed, and as a real kernel runs it."""

from __future__ import annotations

import re

import nbformat
import pytest

import run_notebooks
from omni_notebook.models.scene import BACKGROUND, PALETTE
from tests.executed_notebooks import (
    NOTEBOOKS,
    assert_ran_well,
    cells,
    data,
    execute_copy,
    picture,
    read,
    run_tool,
    text,
)

COMMITTED = NOTEBOOKS / "01_quickstart.ipynb"
VERBS = [
    "%load_ext omni_notebook",
    "%omni start --ballast 256MiB",
    "%%omni generate --seed 42 --out before",
    "acks = %omni sleep 0 1 --level 2",
    "%omni status",
    "%omni wake",
    "%%omni generate --seed 42 --out after",
    "import hashlib",
    "%matplotlib inline",
    "%omni stop",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    return execute_copy(COMMITTED, tmp_path_factory.mktemp("notebook"))


@pytest.fixture(scope="module", params=["committed", "executed"])
def notebook(request):
    return read(COMMITTED) if request.param == "committed" else request.getfixturevalue("executed")


def test_the_cells_are_those_that_a_newcomer_is_promised(notebook):
    assert list(cells(notebook)) == VERBS


def test_every_cell_ran_in_order_and_none_failed(notebook):
    assert_ran_well(notebook)


def test_the_pictures_are_the_same_before_the_sleep_and_after_the_wake(notebook):
    found = cells(notebook)
    before, after = (picture(found[f"%%omni generate --seed 42 --out {name}"]) for name in ("before", "after"))
    assert before.tobytes() == after.tobytes()
    assert re.fullmatch(r"identical: [0-9a-f]{64}\n", text(found["import hashlib"]))


def test_the_picture_shows_a_red_star_above_a_blue_circle(notebook):
    shown = picture(cells(notebook)["%%omni generate --seed 42 --out before"])
    middle = shown.height // 2
    above, below = shown.crop((0, 0, shown.width, middle)), shown.crop((0, middle, shown.width, shown.height))
    assert _nearest_ink(above) == "red"
    assert _nearest_ink(below) == "blue"


def _nearest_ink(image):
    """The colour of the palette that most pixels are nearest to, background aside."""
    inks = {**PALETTE, "background": BACKGROUND}
    votes = dict.fromkeys(inks, 0)
    for count, pixel in image.getcolors(image.width * image.height):
        name = min(inks, key=lambda ink: sum((a - b) ** 2 for a, b in zip(pixel, inks[ink], strict=True)))
        votes[name] += count
    del votes["background"]
    return max(votes, key=votes.get)


def test_the_acks_are_a_table_of_two_ranks_that_freed_the_ballast_and_more(notebook):
    cell = cells(notebook)["acks = %omni sleep 0 1 --level 2"]
    (table,) = data(cell, "text/plain")
    assert table.count("✓ SUCCESS") == 2
    freed = [float(value) for value in re.findall(r"level 2\) +([\d.]+) MiB", table)]
    assert len(freed) == 2
    assert min(freed) > 256
    assert len(data(cell, "text/html")) == len(data(cell, "image/png")) == 1


def test_the_status_shows_both_stages_asleep(notebook):
    (table,) = data(cells(notebook)["%omni status"], "text/plain")
    assert table.count("ASLEEP (level 2)") == 2


def test_the_figure_is_a_picture_that_is_not_blank(notebook):
    figure = picture(cells(notebook)["%matplotlib inline"])
    assert figure.width > 500
    assert len(figure.getcolors(figure.width * figure.height)) > 50


def test_it_holds_no_widget_and_no_path_of_a_machine(notebook):
    assert "widgets" not in notebook.metadata
    assert notebook.metadata.kernelspec.name == "python3"
    raw = nbformat.writes(notebook)
    assert run_notebooks.WIDGET not in raw
    assert run_notebooks.machine_paths(notebook) == []
    assert re.findall(r"/(?:home|root|Users|work|tmp)/\S+", raw) == []


# ----------------------------------------------------------------------------------- the tool that writes it


def write_notebook(path, *sources):
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbformat.write(made, path)
    return path.read_bytes()


def test_the_tool_leaves_a_notebook_with_an_error_as_it_was(tmp_path):
    path = tmp_path / "broken.ipynb"
    before = write_notebook(path, "1 / 0")
    done = run_tool(path)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stdout
    assert path.read_bytes() == before


def test_the_tool_refuses_to_write_a_path_of_this_machine(tmp_path):
    path = tmp_path / "telling.ipynb"
    before = write_notebook(path, "import sys; print(sys.prefix)")
    done = run_tool(path)
    assert done.returncode == 1
    assert "an output names" in done.stdout
    assert path.read_bytes() == before


def test_the_tool_keeps_the_text_of_a_widget_and_not_the_widget(tmp_path):
    path = tmp_path / "widget.ipynb"
    write_notebook(path, "import ipywidgets\nipywidgets.IntSlider(3)", "2")
    assert run_tool(path).returncode == 0
    (slider,) = read(path).cells[0].outputs
    assert list(slider.data) == ["text/plain"]
    assert "IntSlider(value=3)" in slider.data["text/plain"]
    assert "widgets" not in read(path).metadata


def test_the_tool_drops_the_words_of_a_widget_that_has_a_still_picture_below(tmp_path):
    path = tmp_path / "still.ipynb"
    imports = "from IPython.display import HTML, display\nfrom ipywidgets import IntSlider\n"
    write_notebook(path, imports + "display(IntSlider(3), HTML('a <b>3</b>'))", "display(HTML('above'), IntSlider(3))")
    assert run_tool(path).returncode == 0
    (still,), (above, slider) = (cell.outputs for cell in read(path).cells)
    assert (still.data["text/html"], above.data["text/html"]) == ("a <b>3</b>", "above")
    assert list(slider.data) == ["text/plain"]


def test_the_tool_gives_the_kernel_a_ledger_of_its_own_and_writes_its_home_as_a_tilde(tmp_path):
    path = tmp_path / "ledger.ipynb"
    write_notebook(path, "%load_ext omni_notebook\n%omni history")
    assert run_tool(path).returncode == 0
    (shown,) = data(read(path).cells[0], "text/plain")
    assert shown == "no history yet: no ACK is in ~/.local/share/omni-notebook/ledger.db"


def test_the_tool_writes_an_error_that_the_notebook_is_meant_to_show(tmp_path):
    path = tmp_path / "meant.ipynb"
    write_notebook(path, "1 / 0")
    notebook = read(path)
    notebook.cells[0].metadata["tags"] = ["raises-exception"]
    nbformat.write(notebook, path)
    assert run_tool(path).returncode == 0
    assert [output.ename for output in read(path).cells[0].outputs] == ["ZeroDivisionError"]
