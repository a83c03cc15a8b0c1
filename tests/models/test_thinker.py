from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors import safe_open

import demo_thinker
from demo_prompts import is_held_out, make_examples
from omni_notebook.errors import ConfigError
from omni_notebook.models.scene import PLAN_LENGTH, PLAN_WORDS, format_plan, parse_plan
from omni_notebook.models.tokenizer import PlanGrammar, TextTokenizer


@pytest.fixture(scope="session")
def tokenizer(thinker_folder):
    return TextTokenizer.load(thinker_folder)


@pytest.fixture(scope="session")
def grammar(thinker_folder):
    return PlanGrammar.load(thinker_folder)


def test_held_out_prompts_become_exact_plans_with_and_without_the_grammar(thinker, thinker_folder):
    examples = make_examples(150, seed=20_001, held_out=True)
    assert all(is_held_out(text) for text, _ in examples)
    wanted = [format_plan(plan) for _, plan in examples]
    for constrained in (True, False):
        texts = [text for text, _ in examples]
        written, _ = demo_thinker.write_plans(thinker, thinker_folder, texts, constrained=constrained)
        assert sum(a == b for a, b in zip(written, wanted, strict=True)) >= 0.97 * len(wanted)


@pytest.mark.parametrize(
    ("prompt", "plan"),
    [
        ("a red star above a blue circle, please", "red star top center; blue circle bottom center"),
        ("A RED STAR", "red star middle center"),
        ("a pink heart with a red star to its left", "pink heart middle right; red star middle left"),
        ("under a yellow star there is a purple ring", "yellow star top center; purple ring bottom center"),
        ("a golden disc in the top right corner", "yellow circle top right"),
        ("two blue squares", "blue square middle left; blue square middle right"),
    ],
)
def test_prompts_of_the_tutorial(thinker, thinker_folder, prompt, plan):
    assert demo_thinker.write_plans(thinker, thinker_folder, [prompt])[0] == [plan]


def test_any_text_gives_a_valid_plan(thinker, thinker_folder):
    rng = random.Random(7)
    anything = ["", " ", "\n\t", "\x00", "\ud800", "🙂" * 50, "日本語のテキスト", "<eos>", "<plan><plan>", "red " * 400]
    anything += ["".join(chr(rng.randrange(1, 0x11000)) for _ in range(rng.randrange(1, 80))) for _ in range(40)]
    written, _ = demo_thinker.write_plans(thinker, thinker_folder, anything)
    for text in written:
        parse_plan(text)


def test_a_walk_through_the_grammar_always_ends_in_a_valid_plan(tokenizer, grammar):
    rng = random.Random(3)
    for _ in range(500):
        state, ids = grammar.start, []
        while not ids or ids[-1] != tokenizer.eos_token_id:
            ids.append(rng.choice(grammar.allowed(state)))
            state = grammar.advance(state, ids[-1])
        assert len(ids) <= PLAN_LENGTH + 1
        parse_plan(tokenizer.decode(ids))
        assert grammar.allowed(state) == [tokenizer.eos_token_id]


def test_the_grammar_refuses_what_it_forbids(tokenizer, grammar):
    with pytest.raises(ValueError, match="not allowed in state"):
        grammar.advance(grammar.start, tokenizer.eos_token_id)


def test_every_plan_word_is_one_token_of_the_text(tokenizer):
    assert all(tokenizer.token_id(word if word == ";" else f"Ġ{word}") is not None for word in PLAN_WORDS)


def test_a_long_prompt_is_cut_to_the_stated_limit_and_keeps_its_frame(tokenizer):
    ids = tokenizer.encode("a red star and " * 700)
    assert len(ids) == tokenizer.max_prompt_tokens == 240
    assert ids[0] == tokenizer.token_id("<bos>")
    assert ids[-1] == tokenizer.token_id("<plan>")
    assert ids[:40] == tokenizer.encode("a red star and " * 20)[:40]


def test_folder_and_weights_say_what_they_are(thinker_folder, dit_folder):
    config = json.loads((thinker_folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert config["num_attention_heads"] % 2 == config["num_key_value_heads"] % 2 == 0
    for folder in (thinker_folder, dit_folder):
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert {"seed", "steps", "data_hash"} <= file.metadata().keys()
            assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118
    shipped = [path for folder in (thinker_folder, dit_folder) for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in shipped) <= 8_000_000


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", None, "no such file"),
        ("tokenizer.json", "{", "not a tokenizer file"),
        ("tokenizer_config.json", "[]", "holds no JSON object"),
        ("tokenizer_config.json", '{"max_prompt_tokens": 0}', "max_prompt_tokens must be"),
        ("generation_config.json", "{}", "names an eos_token_id"),
    ],
)
def test_a_bad_tokenizer_folder_is_refused_in_one_line(thinker_folder, tmp_path, name, content, says):
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / file).write_bytes((thinker_folder / file).read_bytes())
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        TextTokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "x",
        "{}",
        '{"start": 0, "states": [{}]}',
        '{"start": 0, "states": [{"5": 9}]}',
        '{"start": 0, "states": [3]}',
    ],
)
def test_a_bad_grammar_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "plan_grammar.json").write_text(content)
    with pytest.raises(ConfigError, match=r"plan_grammar\.json"):
        PlanGrammar.load(tmp_path)
    assert (PlanGrammar.find(tmp_path) is None) if content is None else True
