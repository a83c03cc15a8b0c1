"""The notebook of new weights: as it is committed, and as a real kernel runs it. The judge looks at its pictures."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import demo_judge
import run_notebooks
from omni_notebook.models.scene import BACKGROUND, parse_plan
from tests.executed_notebooks import (
    NOTEBOOKS,
    ROOT,
    assert_ran_well,
    cells,
    data,
    execute_copy,
    picture,
    read,
    text,
)

COMMITTED = NOTEBOOKS / "02_weight_update.ipynb"
FIRST_LINES = [
    "%load_ext omni_notebook",
    "engine = %omni start --ballast 512MiB",
    "import asyncio",
    "await until(lambda: len(arrived) + painter().queued == len(PROMPTS))",
    "acks = %omni sleep 1",
    "import torch",
    "import psutil",
    "import gc",
    "%omni wake 1",
    "import omni_notebook as omni",
    "%omni weights 1 {folder} --version night",
    "%omni resume",
    "from PIL import Image, ImageDraw",
    'assert [output.request_id for output in pictures] == [f"picture {number}" for number in range(len(PROMPTS))]',
    "%omni stop",
]
REQUESTS, STEPS = 10, 20
SIDE, GAP, LINE, COLUMNS = 128, 8, 20, 5  # the strip's, in pixels
PIXELS = 64  # a picture's side as it was drawn
PROOF = re.compile(r"(picture \d)  weights (\S+) +steps (\[.*\])  (\S.*)")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@dataclass(frozen=True)
class Drawn:
    """One line of the proof and its tile of the strip, (3, 64, 64) in [0, 1]."""

    request_id: str
    version: str
    trace: str
    plan: tuple
    pixels: torch.Tensor


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    return execute_copy(COMMITTED, tmp_path_factory.mktemp("notebook"))


@pytest.fixture(scope="module", params=["committed", "executed"])
def notebook(request):
    return read(COMMITTED) if request.param == "committed" else request.getfixturevalue("executed")


@pytest.fixture(scope="module")
def found(notebook):
    return cells(notebook)


@pytest.fixture(scope="module")
def drawn(found):
    lines = PROOF.findall(text(found[FIRST_LINES[13]]))
    tiles = _tiles(picture(found["from PIL import Image, ImageDraw"]))
    return [
        Drawn(request_id, version, trace, parse_plan(plan), pixels)
        for (request_id, version, trace, plan), pixels in zip(lines, tiles, strict=True)
    ]


def _tiles(strip):
    """The pictures as they were drawn: every second pixel of a tile."""
    for place in range(REQUESTS):
        x, y = GAP + place % COLUMNS * (SIDE + GAP), GAP + place // COLUMNS * (SIDE + LINE + GAP)
        tile = strip.crop((x, y, x + SIDE, y + SIDE))
        pixels = np.asarray(tile)[:: SIDE // PIXELS, :: SIDE // PIXELS]
        assert np.array_equal(pixels.repeat(2, 0).repeat(2, 1), np.asarray(tile))
        yield torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255


def _by_day(drawn):
    return [one for one in drawn if one.version != "night"]


def _by_night(drawn):
    return [one for one in drawn if one.version == "night"]


@pytest.fixture(scope="module")
def judge():
    return demo_judge.load(ROOT / "tests" / "data" / "judge.safetensors")


def test_the_cells_are_those_that_a_newcomer_is_promised(notebook):
    assert list(cells(notebook)) == FIRST_LINES


def test_every_cell_ran_in_order_and_none_failed(notebook):
    assert_ran_well(notebook)


def test_it_holds_no_widget_and_no_path_of_a_machine(notebook):
    assert "widgets" not in notebook.metadata
    assert run_notebooks.machine_paths(notebook) == []


# ------------------------------------------------------------------------------------ requests and weights


def test_every_request_came_once_and_both_weights_drew_some(drawn):
    assert [one.request_id for one in drawn] == [f"picture {number}" for number in range(REQUESTS)]
    assert len({one.version for one in drawn}) == 2
    assert _by_day(drawn)
    assert _by_night(drawn)


def test_what_came_before_the_pause_is_what_the_old_weights_drew(found, drawn):
    came, waited = map(int, re.fullmatch(r"(\d+) pictures came, (\d+) requests wait\n", text(_paused(found))).groups())
    assert (len(_by_day(drawn)), len(_by_night(drawn))) == (came, waited)
    assert came + waited == REQUESTS


def _paused(found):
    return found["await until(lambda: len(arrived) + painter().queued == len(PROMPTS))"]


def test_no_picture_has_steps_of_both_weights(drawn):
    assert {one.request_id: one.trace for one in drawn} == {
        one.request_id: str([[one.version, STEPS]]) for one in drawn
    }


def test_a_request_is_refused_after_the_wake_and_the_message_names_the_resume(found):
    assert re.fullmatch(r"admission is closed by a pause: .*resume_generation.*\n", text(found[FIRST_LINES[9]]))


def test_the_queue_waits_through_sleep_wake_and_new_weights(found, drawn):
    (status,) = data(found[FIRST_LINES[10]], "text/plain")
    painter = next(line for line in status.splitlines() if line.startswith("1 "))
    assert re.search(rf"AWAKE +PAUSED \(keep\) +night +0 / {len(_by_night(drawn))} / 0 / 0 ", painter)


def test_the_trainer_took_less_memory_than_the_sleep_gave_back(found):
    (table,) = data(found["acks = %omni sleep 1"], "text/plain")
    taken, freed = map(
        int, re.search(r"took (\d+) MiB; .* given back (\d+) MiB", text(found["import psutil"])).groups()
    )
    assert 0 < taken < freed
    assert f"freed {freed}" in table
    assert "✓ SUCCESS" in table


def test_the_training_learns(found):
    losses = [float(loss) for loss in re.findall(r"mean loss ([\d.]+)", text(found["import psutil"]))]
    assert len(losses) >= 3
    assert losses[-1] < 0.75 * losses[0]


# ------------------------------------------------------------------------- the same plans, another look


def test_the_old_weights_draw_the_plan_on_white(drawn, judge):
    day = _by_day(drawn)
    pictures = torch.stack([one.pixels for one in day])
    assert judge.right(pictures, [one.plan for one in day]).all()
    assert (_ground(pictures) >= min(BACKGROUND) / 255 - 0.02).all()
    assert (pictures.mean((1, 2, 3)) > 0.75).all()


def test_the_new_weights_draw_the_same_shapes_in_the_same_places_in_one_colour_on_black(drawn, judge):
    night = _by_night(drawn)
    pictures = torch.stack([one.pixels for one in night])
    plans = [tuple(replace(item, colour="blue") for item in one.plan) for one in night]
    assert judge.right(1 - pictures, plans).all()
    assert (_ground(pictures) <= 0.02).all()
    assert (pictures.mean((1, 2, 3)) < 0.25).all()
    assert not judge.right(pictures, [one.plan for one in night]).any()


def _ground(pictures):
    """Each picture's most frequent brightness per channel, by the median: symbols cover less than half of it."""
    return pictures.flatten(2).median(-1).values
