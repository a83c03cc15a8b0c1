import pickle

import pytest
from IPython.core.completer import provisionalcompleter

from omni_notebook.errors import ArgumentError
from omni_notebook.notebook.magics import shortened
from omni_notebook.verbs.session import session


def completed(shell, line):
    with provisionalcompleter():
        return {one.text for one in shell.Completer.completions(line, len(line))}


def test_a_mistake_is_one_red_line_and_fails_the_cell(cell):
    result, shown = cell("%omni slep 0")
    assert shown.splitlines() == [
        "\x1b[31mArgumentError: unknown verb 'slep' (did you mean 'sleep'?); verbs are: "
        + shown.split("verbs are: ")[1].rstrip("\n")
    ]
    assert isinstance(result.error_in_exec, ArgumentError)


@pytest.mark.parametrize(
    "code",
    [
        "%omni sleep --level 3",
        "%omni sleep 0",
        "%omni start --ballast much",
        "%omni start no/such/folder.yaml",
        "%omni start ByteDance-Seed/BAGEL-7B-MoT",
        "%omni start --executor ray",
        "%%omni generate --seed 1\n   \n",
        "%%omni sleep\nx",
        "%omni generate",
        "%omni help wakeup",
        "%omni weights 1",
        "%omni weights 1 no/such/folder",
    ],
)
def test_every_mistake_is_one_red_line(cell, code):
    result, shown = cell(code)
    assert not result.success
    assert len(shown.splitlines()) == 1
    assert shown.startswith("\x1b[31m")
    assert "Traceback" not in shown


def test_the_whole_story_is_there_on_demand(cell):
    cell("%omni sleep --level 3")
    _, shown = cell("%omni traceback")
    assert "Traceback (most recent call last)" in shown


def test_a_script_can_catch_the_error(cell):
    _, shown = cell("try:\n    %omni sleep 0\nexcept Exception as error:\n    print(type(error).__name__)")
    assert shown == "EngineClosedError\n"


def test_a_shown_error_can_be_pickled_and_holds_no_frames():
    error = shortened(ArgumentError("no"))
    assert error.__traceback__ is None
    assert str(pickle.loads(pickle.dumps(error))) == "no"


def test_the_bare_magic_says_how_to_start(cell):
    result, shown = cell("%omni")
    assert result.success
    assert "%omni start" in shown


def test_names_of_the_package_speak_to_the_same_session(cell):
    _, shown = cell("import omni_notebook as omni\nprint(omni.last_acks())\nomni.current()")
    assert shown.startswith("[]\n")
    assert "no engine is running" in shown


def test_loading_twice_and_reloading_keep_one_magic_and_one_matcher(shell, cell):
    for code in ("%load_ext omni_notebook", "%reload_ext omni_notebook", "%reload_ext omni_notebook"):
        assert cell(code)[0].success
    ours = [one for one in shell.Completer.custom_matchers if one.matcher_identifier == "omni_notebook.matcher"]
    assert len(ours) == 1
    assert cell("%omni help")[0].success


def test_unloading_takes_everything_away(shell, cell):
    cell("%unload_ext omni_notebook")
    assert "omni" not in shell.magics_manager.magics["line"]
    assert "omni" not in shell.magics_manager.magics["cell"]
    assert shell.Completer.custom_matchers == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%omni sl", {"sleep"}),
        ("acks = %omni sleep --le", {"--level"}),
        ("  %omni wake --no", {"--no-reload"}),
        ("%%omni generate --see", {"--seed"}),
        ("%omni sleep --mode ", {"abort", "wait", "keep"}),
        ("%omni weights 1 x --ver", {"--version"}),
    ],
)
def test_the_completer_knows_verbs_options_and_values(shell, line, expected):
    assert completed(shell, line) == expected


def test_other_lines_complete_as_before(shell):
    shell.user_ns["omnibus"] = 1
    assert completed(shell, "omnib") == {"omnibus"}


def test_variables_in_a_line_are_expanded(shell, cell):
    shell.user_ns["which"] = "slepp"
    _, shown = cell("%omni {which}")
    assert "'slepp'" in shown


def test_no_error_leaves_the_old_traceback_of_another_session(cell):
    assert session().last_traceback is None
