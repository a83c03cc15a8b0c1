"""`%omni lora` and `%omni generate --lora` on the real engine, in a real shell of this process."""

import shutil

import pytest

from omni_notebook.config import DEMO_FOLDER
from omni_notebook.errors import ArgumentError, AsleepError, ConfigError
from omni_notebook.models.decoder import Decoder, DecoderConfig
from omni_notebook.models.loaders import read_config
from omni_notebook.models.lora import shapes
from omni_notebook.verbs.completion import candidates
from omni_notebook.verbs.session import session
from tests import adapters

PROMPT = "generate a red star above a blue circle --seed 42 --steps 3"


@pytest.fixture
def engine(cell):
    result, shown = cell("%omni start --max-loras 2")
    assert result.success, shown
    return session().engine


@pytest.fixture
def folder(tmp_path):
    config = DecoderConfig.from_hf(read_config(DEMO_FOLDER / "thinker"))
    return adapters.write(tmp_path / "styles" / "bold", adapters.matrices(shapes(lambda: Decoder(config)), size=2.0))


def ok(cell, code):
    result, shown = cell(code)
    assert result.success, shown
    return result.result, shown


def test_an_adapter_is_added_used_pinned_and_removed_by_name(shell, cell, engine, folder):
    base, _ = ok(cell, f"%omni {PROMPT}")
    assert "there is no adapter; %omni lora add PATH" in ok(cell, "%omni lora list")[1]
    _, shown = ok(cell, f"%omni lora add {folder}")
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0] == ["id", "name", "stages", "rank", "pinned", "folder"]
    assert lines[1:] == [["1", "bold", "0", "thinker", "4", "no", str(folder)]]
    made, shown = ok(cell, f"%omni {PROMPT} --lora bold")
    assert made.text != base.text
    assert made.lora == "bold"
    assert "lora bold · " in shown
    assert ok(cell, f"%omni {PROMPT}")[0].text == base.text
    assert base.lora is None
    assert ok(cell, f"%omni {PROMPT} --lora 1")[0].text == made.text
    assert "yes" in ok(cell, "%omni lora pin bold")[1]
    assert "lora: bold" in shell.display_formatter.format(engine)[0]["text/plain"]
    said = ok(cell, "%omni lora remove bold")[1]
    assert "adapter 'bold' (id 1) was removed" in said
    assert "there is no adapter" in said
    assert session().engine.status().stages[0].loras == ()


def test_names_and_numbers_can_be_chosen_and_the_same_folder_again_is_the_same_adapter(cell, engine, folder):
    ok(cell, f"%omni lora add {folder} --name loud --id 7 --stages thinker")
    _, shown = ok(cell, f"%omni lora add {folder} --name loud")
    assert "adapter 'loud' (id 7) was there already" in shown
    assert [(one.lora_int_id, one.lora_name) for one in engine.status().stages[0].loras] == [(7, "loud")]
    words = candidates(session(), "lora pin ").words
    assert words[0] == "loud"
    assert candidates(session(), "generate a star --lora l").words == ["loud"]


def test_mistakes_are_one_red_line_that_names_verbs(cell, engine, folder):
    for code, kind, says in (
        (f"%omni lora add {folder}/none", ConfigError, "no such adapter folder"),
        (f"%omni lora add {folder} --stages painter", ConfigError, "stage 1 (painter): the model has no layer"),
        ("%omni lora remove loud", ArgumentError, "there is no adapter 'loud'; adapters are: none"),
        (f"%omni {PROMPT} --lora loud", ArgumentError, "there is no adapter 'loud'; adapters are: none"),
    ):
        result, shown = cell(code)
        assert isinstance(result.error_in_exec, kind)
        assert len(shown.splitlines()) == 1
        assert says in shown
    ok(cell, "%omni sleep 0")
    result, shown = cell(f"%omni lora add {folder}")
    assert isinstance(result.error_in_exec, AsleepError)
    assert "%omni wake 0" in shown


def test_a_restart_that_loses_an_adapter_says_so(cell, engine, folder):
    ok(cell, f"%omni lora add {folder}")
    _, shown = ok(cell, "%omni restart thinker")
    assert shown == "stage 0 (thinker) is AWAKE\n"
    shutil.rmtree(folder)
    _, shown = ok(cell, "%omni restart thinker")
    assert shown.splitlines()[0] == "stage 0 (thinker) is AWAKE"
    assert "restarted, but adapter 'bold' (id 1) is not on stage 0 any more" in shown.splitlines()[1]
    assert "%omni lora add PATH" in shown
