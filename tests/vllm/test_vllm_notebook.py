"""The notebook of vLLM: as it is committed, and as a real kernel runs it."""

from __future__ import annotations

import pytest

from tests.executed_notebooks import NOTEBOOKS, cells, data, execute_copy, read, text

COMMITTED = NOTEBOOKS / "06_vllm.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    return execute_copy(COMMITTED, tmp_path_factory.mktemp("notebook"), seconds=200)


@pytest.fixture(scope="module", params=["committed", "executed"])
def found(request):
    notebook = read(COMMITTED) if request.param == "committed" else request.getfixturevalue("executed")
    return cells(notebook)


def shown(cell):
    """All that a cell shows as text."""
    errors = [output.evalue for output in cell.outputs if output.output_type == "error"]
    return "".join([text(cell), *data(cell, "text/plain"), *errors])


def test_the_thinker_sleeps_on_vllm_and_paints_the_same_picture_after(found):
    slept = shown(found["%omni sleep 0 --level 2"])
    assert "1 rank answered" in slept
    assert "✓ SUCCESS" in slept
    assert "ASLEEP" in slept
    assert "audit PASS" in shown(found["%omni audit 0 --level 2 --seed 42 --steps 8"])
    pictures = [data(found[f"%%omni generate --seed 42 --out {name}"], "image/png") for name in ("before", "after")]
    assert len(pictures[0]) == 1
    assert pictures[0] == pictures[1]


def test_a_prompt_for_the_sleeping_thinker_names_the_wake(found):
    assert "%omni wake 0" in shown(found["%omni generate a red star"])
