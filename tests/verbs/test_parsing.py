import pytest

from omni_notebook.errors import ArgumentError
from omni_notebook.verbs import registry
from omni_notebook.verbs.parsing import split_line

QUOTES = "\"'"


def read(verb, line, quotes=QUOTES):
    return registry.parser_for(registry.find(verb)).read(split_line(line, quotes))


def refusal(verb, line):
    with pytest.raises(ArgumentError) as caught:
        read(verb, line)
    return str(caught.value)


@pytest.mark.parametrize("line", ["0 1 --level 2", "--level 2 0 1", "0 --level 2 1", "--level=2 0 1"])
def test_stages_and_options_may_stand_in_any_order(line):
    args = read("sleep", line)
    assert (args.stages, args.level) == ([["0"], ["1"]], 2)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "sleep"),
        ("# all of them", "sleep"),
        ("0 1 --level 2   # it's a comment", "sleep 0 1 --level 2"),
        ("0\t#x", "sleep 0"),
        ("'0#1'", "sleep 0#1"),
        ("'a # b'", "sleep a # b"),
    ],
)
def test_a_word_that_starts_with_a_hash_ends_the_line(line, expected):
    assert " ".join(["sleep", *split_line(line)]) == expected


def test_a_prompt_keeps_a_hash_in_quotes_only():
    assert split_line('a cat\'s "house # 3" # drawn small', '"') == ["a", "cat's", "house # 3"]


@pytest.mark.parametrize("text", ["256", "1", "1.5"])
def test_a_small_size_without_a_unit_is_asked_about(text):
    assert f"{text} B? Write {text}MiB" in refusal("start", f"--ballast {text}")


@pytest.mark.parametrize(("text", "n_bytes"), [("0", 0), ("256B", 256), ("1048576", 2**20), ("1MiB", 2**20)])
def test_other_sizes_are_taken_as_they_are(text, n_bytes):
    assert read("start", f"--ballast {text}").ballast_bytes == n_bytes


def test_the_default_level_is_the_one_that_loses_nothing():
    args = read("sleep", "")
    assert (args.level, args.mode, args.discard, args.timeout) == (1, None, False, None)


@pytest.mark.parametrize(
    ("verb", "line", "words"),
    [
        ("sleep", "--level 3", ["--level", "3", "choose from", "1", "2"]),
        ("sleep", ",", ["',' is no stage", "%omni status"]),
        ("sleep", "-1", ["-1"]),
        ("sleep", "--lvl 2", ["unknown option '--lvl'", "did you mean '--level'?"]),
        ("sleep", "--lev 2", ["unknown option '--lev'", "did you mean '--level'?"]),
        ("sleep", "--timeout soon", ["'soon' is not a number of seconds above 0"]),
        ("sleep", "--timeout -3", ["'-3' is not a number"]),
        ("sleep", "--timeout nan", ["'nan' is not a number"]),
        ("sleep", "--out 3x", ["'3x' can not be the name of a variable"]),
        ("sleep", "--mode stop", ["--mode", "'stop'", "abort", "wait", "keep"]),
        ("start", "--ballast much", ["'much' is not a size", "256MiB"]),
        ("start", "demo other", ["unknown argument 'other'"]),
        ("restart", "", ["STAGE"]),
        ("weights", "", ["STAGE", "FOLDER"]),
        ("weights", "1", ["FOLDER"]),
        ("weights", "1 a b", ["unknown argument 'b'"]),
        ("weights", "1 a --ver v2", ["unknown option '--ver'", "did you mean '--version'?"]),
        ("sleep", '"0', ["no closing quotation"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(verb, line, words, capsys):
    message = refusal(verb, line)
    assert "\n" not in message
    assert "nothing was changed" in message
    for word in words:
        assert word in message
    assert capsys.readouterr() == ("", "")


def test_start_passes_on_only_what_was_given():
    assert vars(read("start", "")) == {"model": "demo", "engine": "embedded", "replace": False}
    args = vars(read("start", "--tp 2 --num-replicas 3 --ballast 256MiB --devices cpu cpu --step-execution"))
    assert args == {
        "model": "demo",
        "engine": "embedded",
        "replace": False,
        "tensor_parallel_size": 2,
        "num_replicas": 3,
        "ballast_bytes": 256 * 2**20,
        "devices": ["cpu", "cpu"],
        "step_execution": True,
    }


def test_words_of_a_prompt_keep_their_apostrophes():
    args = read("generate", "it's a \"red  star\" --seed 42 above the cat's house", quotes='"')
    assert " ".join(args.prompt) == "it's a red  star above the cat's house"
    assert args.seed == 42


def test_single_quotes_hold_a_folder_with_a_space_together():
    assert read("start", "--spill-dir '/a b' m").spill_dir == "/a b"


@pytest.mark.parametrize("verb", list(registry.verbs()))
def test_every_option_says_what_it_does(verb):
    found = registry.find(verb)
    assert registry.summary(found).endswith(".")
    for action in registry.parser_for(found).actions():
        assert action.help, action.dest
