from __future__ import annotations

import pytest
import torch

import demo_judge
from omni_notebook.models.render import describe, render, shape_textures
from omni_notebook.models.scene import (
    PALETTE,
    PLAN_LENGTH,
    PLAN_VOCAB_SIZE,
    SceneObject,
    decode_plan,
    encode_plan,
    format_plan,
    parse_plan,
    random_plans,
)


def test_a_plan_survives_text_and_ids():
    for plan in random_plans(300, seed=5):
        assert parse_plan(format_plan(plan)) == plan
        ids = encode_plan(plan)
        assert len(ids) == PLAN_LENGTH
        assert max(ids) < PLAN_VOCAB_SIZE
        assert decode_plan(ids) == plan


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "an object is 'colour shape row column'"),
        ("red star top", "an object is 'colour shape row column'"),
        ("mauve star top center", "'mauve' is no colour"),
        ("red blob top center", "'blob' is no shape"),
        ("red star up center", "'up' is no row"),
        ("red star top port", "'port' is no column"),
        ("red star top left; blue ring top left", "share a cell"),
        ("; ".join(f"red star {row} left" for row in ("top", "middle", "bottom")) + "; red star top right", "1 to 3"),
    ],
)
def test_what_is_no_plan_is_named(text, says):
    with pytest.raises(ValueError, match=says):
        parse_plan(text)


def test_a_drawn_symbol_has_its_colour_in_its_cell_and_the_rest_is_white():
    image = render(describe([(SceneObject("blue", "square", "top", "right"),)]), shape_textures())[0]
    assert torch.allclose(image[:, 18, 46] * 255, torch.tensor(PALETTE["blue"]).float())
    assert torch.all(image[:, 40:, :] == 1)
    assert torch.all(image[:, :, :24] == 1)


def test_the_same_generator_seed_draws_the_same_picture():
    table, textures = describe(random_plans(8, seed=1)), shape_textures()
    one, two, other = (render(table, textures, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_the_judge_reads_rendered_truth_it_never_saw(judge):
    assert demo_judge.score_on_truth(judge, count=2000) >= 0.995
