"""Texts of an autoregressive stage while they grow: what a reader was told stays as it is."""

from __future__ import annotations

import itertools

import pytest
from tokenizers import Tokenizer, decoders, models

from omni_notebook.config import DEMO_FOLDER
from omni_notebook.models.tokenizer import TextTokenizer
from omni_notebook.protocol import OmniSamplingParams
from omni_notebook.stages.ar_scheduler import ArPrompt, ArScheduler
from omni_notebook.stages.requests import StageOutput, StageRequest
from omni_notebook.worker.batches import SequenceAnswer

HALF = "\ufffd"
EOS = 256


def byte_fallback() -> TextTokenizer:
    """A token a sign of ASCII or a byte; like Llama 2's, its decoder reads a run of bytes as a whole or not at all."""
    vocab = {chr(byte) if byte < 128 else f"<0x{byte:02X}>": byte for byte in range(256)} | {"</s>": EOS}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="</s>"))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return TextTokenizer(made, (EOS,))


def texts_of(tokenizer: TextTokenizer, ids: list[int], *, stops: bool = True) -> list[StageOutput]:
    """What a stage delivers whose model says these tokens, and then the end token or no more."""
    outputs: list[StageOutput] = []
    scheduler = ArScheduler(slots=1, max_len=1000, tokenizer=tokenizer)
    params = OmniSamplingParams(max_tokens=1000 if stops else len(ids))
    scheduler.add(StageRequest(request_id="r", seed=0, params=params, payload=ArPrompt((1,)), deliver=outputs.append))
    for token in [*ids, tokenizer.eos_token_id] if stops else ids:
        batch = scheduler.schedule()
        scheduler.finish(batch, [SequenceAnswer(token_id=token, hidden=None)], "v")
    assert [output.final for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs


@pytest.mark.parametrize("text", ["café 😀 ok", "😀é中", "all plain", "a é", f"is {HALF} a sign"])
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_text_that_grows_never_shows_half_a_character_nor_takes_one_back(kind: str, text: str) -> None:
    if kind == "byte-level":
        tokenizer = TextTokenizer.load(DEMO_FOLDER / "thinker")
        ids = tokenizer.encode(text)[1:-1]  # without the template's
    else:
        tokenizer, ids = byte_fallback(), list(text.encode())
    told = [output.text for output in texts_of(tokenizer, ids)]
    assert told[-1] == text
    assert all(later.startswith(sooner) for sooner, later in itertools.pairwise(told))
    assert len(set(told)) > 1


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_text_that_ends_within_a_character_is_told_whole_at_its_end(kind: str) -> None:
    if kind == "byte-level":
        tokenizer = TextTokenizer.load(DEMO_FOLDER / "thinker")
        ids = tokenizer.encode("ok 😀")[1:-2]
    else:
        tokenizer, ids = byte_fallback(), list("ok 😀".encode())[:-1]
    told = [output.text for output in texts_of(tokenizer, ids, stops=False)]
    assert told[-1] == tokenizer.decode(ids) == "ok " + told[-1].count(HALF) * HALF
    assert told[-2] == "ok"
    assert HALF in told[-1]


def test_bytes_that_are_no_text_do_not_hold_back_what_follows() -> None:
    tokenizer = byte_fallback()
    told = [output.text for output in texts_of(tokenizer, [*b"a\x80\x80b", *b"c"])]
    assert told == ["a", "a", "a", f"a{HALF}{HALF}b", f"a{HALF}{HALF}bc", f"a{HALF}{HALF}bc"]


def test_a_space_of_several_bytes_at_the_end_is_left_out_of_what_grows_as_it_is_at_the_end() -> None:
    tokenizer = byte_fallback()
    told = [output.text for output in texts_of(tokenizer, [*b"ok ", *"\u3000".encode()])]
    assert told == ["o", *["ok"] * 6]
