"""What a client sends for a prompt: what some stage of some engine takes; whether this one does, its server says."""

from __future__ import annotations

from typing import Any

import pytest

from omni_notebook.engine.remote.client import _prompt
from omni_notebook.errors import ArgumentError


@pytest.mark.parametrize(
    "prompt",
    [
        "a red star",
        "",
        {"prompt_token_ids": [1, 2]},
        {"prompt_token_ids": (1, 2)},
        {"prompt": "a red star"},
        {"prompt": "a red star", "negative_prompt": "blue"},
        {"prompt": "a red star", "negative_prompt": None},
    ],
)
def test_every_form_of_a_prompt_is_sent_as_it_is(prompt: Any) -> None:
    assert _prompt(prompt) is prompt


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        7,
        b"a red star",
        ["a red star"],
        {},
        {"prompt": 7},
        {"prompt": "a red star", "negative_prompt": 7},
        {"prompt": "a red star", "seed": 7},
        {"negative_prompt": "blue"},
        {"prompt_token_ids": "12"},
        {"prompt_token_ids": ["1"]},
        {"prompt_token_ids": [1], "prompt": "a red star"},
    ],
)
def test_what_no_stage_takes_is_refused_before_anything_is_sent(prompt: Any) -> None:
    with pytest.raises(ArgumentError, match=r"a prompt is a string, .*nothing was started"):
        _prompt(prompt)
