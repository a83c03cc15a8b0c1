"""Long texts are read as short ones are, and hold no other thread up."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from omni_notebook.config import DEMO_FOLDER
from omni_notebook.models.tokenizer import LONG_CHARS, TextTokenizer
from omni_notebook.protocol import is_unicode


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.load(DEMO_FOLDER / "thinker")


@pytest.mark.parametrize("text", ["a red star ", "ﬁÉ中 ", "x"])
def test_a_long_text_has_the_ids_that_its_tokenizer_gives_one_text(tokenizer: TextTokenizer, text: str) -> None:
    long = text * LONG_CHARS
    assert len(long) > LONG_CHARS - 1
    assert tokenizer.encode(long) == tokenizer._tokenizer.encode(long).ids


def test_other_threads_run_while_a_long_text_is_read(tokenizer: TextTokenizer) -> None:
    turns, done = [], threading.Event()

    def turn() -> None:
        while not done.wait(0.001):
            turns.append(time.perf_counter())

    other = threading.Thread(target=turn)
    other.start()
    began_s = time.perf_counter()
    tokenizer.encode("a red star " * 100_000)
    ended_s = time.perf_counter()
    done.set()
    other.join()
    seen = [began_s, *(one for one in turns if began_s < one < ended_s), ended_s]
    longest_s = max(later - sooner for sooner, later in itertools.pairwise(seen))
    assert longest_s < (ended_s - began_s) / 2


@pytest.mark.parametrize(("text", "known"), [("", True), ("é中😀", True), ("a\ud800", False), ("\udfff", False)])
def test_halves_of_surrogate_pairs_are_no_text(text: str, known: bool) -> None:
    assert is_unicode(text) is known
