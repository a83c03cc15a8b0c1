import os

import pytest

from omni_notebook.verbs.completion import candidates
from omni_notebook.verbs.registry import verbs
from omni_notebook.verbs.session import Session


def words(text):
    return candidates(Session(), text).words


def test_an_empty_line_offers_every_verb():
    assert words("") == list(verbs())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sl", ["sleep"]),
        ("sleep --le", ["--level"]),
        ("sleep --level ", ["1", "2"]),
        ("sleep 0 --mode ", ["abort", "wait", "keep"]),
        ("sleep --mode k", ["keep"]),
        ("start --executor ", ["auto", "uni", "mp", "ray"]),
        ("help wa", ["wake"]),
        ("nonsense --", []),
        ("lora r", ["remove"]),
        ("lora add runs/style --n", ["--name"]),
        ("generate --lo", ["--lora"]),
    ],
)
def test_what_can_stand_at_the_cursor(text, expected):
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("weights 1 ", ["runs/", "walks/", "--version", "--timeout"]),
        ("weights 1 r", ["runs/"]),
        ("weights --version v2 1 r", ["runs/"]),
        ("weights 1 --timeout 3 runs/", ["runs/step-1/", "runs/step-2/"]),
        ("weights 1 runs/step-1/ ", ["--version", "--timeout"]),
        ("weights 1 no/such/", []),
        ("weights 1 --version ", []),
    ],
)
def test_a_folder_is_completed_where_one_stands(tmp_path, monkeypatch, text, expected):
    for name in ("runs/step-2", "runs/step-1", "walks", "with space"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "readme").write_text("no folder")
    monkeypatch.chdir(tmp_path)
    assert words(text) == expected
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert words("weights 1 ~/wal") == ["~/walks/"]
    assert words(f"weights 1 {tmp_path}{os.sep}ru") == [f"{tmp_path}/runs/"]


def test_a_choice_that_was_made_is_not_offered_again():
    assert words("lora ")[:4] == ["add", "remove", "list", "pin"]
    assert not {"add", "remove", "list", "pin"} & set(words("lora pin "))


def test_an_option_is_offered_once():
    assert "--level" not in words("sleep --level 2 --")
    assert "--timeout" in words("sleep --level 2 --")


def test_the_fragment_is_what_stands_before_the_cursor():
    assert candidates(Session(), "sleep --le").fragment == "--le"
    assert candidates(Session(), "sleep ").fragment == ""
