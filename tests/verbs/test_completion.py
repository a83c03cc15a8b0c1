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


def test_a_choice_that_was_made_is_not_offered_again():
    assert words("lora ")[:4] == ["add", "remove", "list", "pin"]
    assert not {"add", "remove", "list", "pin"} & set(words("lora pin "))


def test_an_option_is_offered_once():
    assert "--level" not in words("sleep --level 2 --")
    assert "--timeout" in words("sleep --level 2 --")


def test_the_fragment_is_what_stands_before_the_cursor():
    assert candidates(Session(), "sleep --le").fragment == "--le"
    assert candidates(Session(), "sleep ").fragment == ""
