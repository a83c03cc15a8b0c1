import argparse
from types import SimpleNamespace

import pytest

from omni_notebook.errors import ArgumentError, EngineClosedError
from omni_notebook.verbs import registry
from omni_notebook.verbs.session import Session


@pytest.fixture
def session():
    return Session()


def test_the_verbs_of_this_release_are_there():
    names = set(registry.verbs())
    wanted = {"start", "status", "generate", "sleep", "wake", "pause", "resume", "stop", "restart", "abort", "help"}
    assert wanted | {"lora"} <= names


def test_an_empty_line_is_the_status(session, capsys):
    assert registry.execute(session, "  ") is None
    assert "%omni start" in capsys.readouterr().out


def test_an_unknown_verb_is_refused_with_the_nearest(session):
    with pytest.raises(ArgumentError, match=r"unknown verb 'slep' \(did you mean 'sleep'\?\)"):
        registry.execute(session, "slep 0")


@pytest.mark.parametrize(
    "line",
    ["sleep 0", "wake", "pause", "resume", "restart 0", "abort r", "weights 1 x", "generate a star", "lora list"],
)
def test_without_an_engine_a_verb_names_start(session, line):
    with pytest.raises(EngineClosedError, match="no engine is running; %omni start"):
        registry.execute(session, line)


def test_stopping_nothing_is_no_mistake(session, capsys):
    assert registry.execute(session, "stop") is None
    assert "no engine is running" in capsys.readouterr().out


@pytest.mark.parametrize(("line", "cell"), [("generate", "  \n"), ("generate", None), ("generate --seed 3", "\n")])
def test_an_empty_prompt_is_refused(session, line, cell):
    with pytest.raises(ArgumentError, match="the prompt is empty"):
        registry.execute(session, line, cell)


def test_a_prompt_in_line_and_cell_is_refused(session):
    with pytest.raises(ArgumentError, match="give one"):
        registry.execute(session, "generate a star", "a circle")


def test_a_verb_without_a_cell_says_so(session):
    with pytest.raises(ArgumentError, match="sleep takes no cell"):
        registry.execute(session, "sleep 0", "x = 1")


def test_a_cell_without_a_verb_is_refused(session):
    with pytest.raises(ArgumentError, match="needs a verb"):
        registry.execute(session, "", "x = 1")


@pytest.mark.parametrize("line", ["help sleep", "sleep --help", "sleep 0 -h", "sleep -h --nonsense"])
def test_help_shows_the_docstring_and_every_option(session, line, capsys):
    registry.execute(session, line)
    shown = capsys.readouterr()
    assert shown.err == ""
    for word in ("their device memory goes back", "--level", "--mode", "--discard", "--timeout", "--out"):
        assert word in shown.out


def test_help_lists_every_verb(session, capsys):
    registry.execute(session, "help")
    shown = capsys.readouterr().out
    for name, found in registry.verbs().items():
        assert f"%omni {name}" in shown
        assert registry.summary(found) in shown


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("lora add", "lora add needs a folder"),
        ("lora pin", "lora pin needs an adapter's id or name"),
        ("lora list x", "lora list takes no 'x'"),
        ("lora remove x --name y", "lora remove takes no --name, only add does"),
        ("lora lift x", "invalid choice: 'lift'"),
    ],
)
def test_lora_says_what_it_takes(session, line, says):
    with pytest.raises(ArgumentError, match=says) as caught:
        registry.execute(session, line)
    assert "nothing was changed" in str(caught.value)


def test_help_of_an_unknown_verb_is_refused(session):
    with pytest.raises(ArgumentError, match="did you mean 'wake'"):
        registry.execute(session, "help wakee")


def test_traceback_shows_the_last_error_in_full(session, capsys):
    registry.execute(session, "traceback")
    assert "no verb has failed" in capsys.readouterr().out
    with pytest.raises(ArgumentError):
        registry.execute(session, "sleep --level 3")
    registry.execute(session, "traceback")
    shown = capsys.readouterr().out
    assert shown.startswith("from: %omni sleep --level 3\n")
    assert "Traceback (most recent call last)" in shown
    assert "--level" in shown


def test_a_line_that_is_all_comment_is_the_status(session, capsys):
    assert registry.execute(session, "# who is asleep?") is None
    assert "no engine is running" in capsys.readouterr().out


def test_an_interrupt_at_any_place_names_the_state_and_is_what_traceback_shows(session, monkeypatch, capsys):
    def interrupted(*_args):
        raise KeyboardInterrupt

    with pytest.raises(ArgumentError):
        registry.execute(session, "sleep --level 3")
    monkeypatch.setattr(session, "stage_ids", interrupted)
    with pytest.raises(KeyboardInterrupt, match="interrupted; no engine is running; %omni start"):
        registry.execute(session, "sleep 0")
    registry.execute(session, "traceback")
    shown = capsys.readouterr().out
    assert shown.startswith("from: %omni sleep 0\n")
    assert "KeyboardInterrupt" in shown
    assert "--level" not in shown


def test_a_new_verb_is_one_class(session, monkeypatch):
    monkeypatch.setattr(registry, "_VERBS", dict(registry.verbs()))

    @registry.verb
    class Borrow:
        """Run the cell while stages sleep."""

        name = "borrow"
        takes_cell = True

        def prepare_parser(self, parser):
            parser.add_argument("word", help="a word")

        def run(self, session, args: argparse.Namespace):
            return args.word, args.cell

    assert registry.execute(session, "borrow x", "train()") == ("x", "train()")


def test_a_name_that_several_stages_have_is_not_taken_for_one_of_them(session):
    stages = [SimpleNamespace(stage_id=number, name=name) for number, name in enumerate(("twin", "twin", "painter"))]
    session.use(SimpleNamespace(status=lambda: SimpleNamespace(closed=False, stages=stages)))
    assert session.stage_ids([["painter", "0"], ["2"]]) == [0, 2]
    with pytest.raises(ArgumentError, match=r"'twin' names several stages, take the number; stages are: 0 twin, 1 twi"):
        session.stage_ids([["painter", "twin"]])
