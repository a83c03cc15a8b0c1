"""Text to token ids and back, and the finite grammar that keeps a demo plan valid whatever the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tokenizers import Tokenizer

from omni_notebook.config import GRAMMAR_FILE
from omni_notebook.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

LONG_CHARS = 10_000
"""A text of more takes milliseconds to encode."""


class TextTokenizer:
    """The tokenizer of a Hugging Face model folder.

    A folder may set `max_prompt_tokens` in its tokenizer_config.json (the demo: 240): longer prompts lose their end,
    never the special tokens that the folder's template puts around them.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], max_prompt_tokens: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_prompt_tokens = max_prompt_tokens
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if max_prompt_tokens is not None:
            tokenizer.enable_truncation(max_prompt_tokens)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read `tokenizer.json` and what names the end token; raise ConfigError, naming the file, when one is bad."""
        path = Path(folder)
        file = path / "tokenizer.json"
        if not file.is_file():
            msg = f"{file}: no such file; a model folder needs its tokenizer.json"
            raise ConfigError(msg)
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises the bare class
            msg = f"{file}: not a tokenizer file: {error}"
            raise ConfigError(msg) from error
        limit = _read_json(path / "tokenizer_config.json").get("max_prompt_tokens")
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            msg = f"{path / 'tokenizer_config.json'}: max_prompt_tokens must be a positive int, not {limit!r}"
            raise ConfigError(msg)
        return cls(tokenizer, _eos_token_ids(path), limit)

    @property
    def eos_token_id(self) -> int:
        """The first of the ids that end a text."""
        return self.eos_token_ids[0]

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens among them."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text with the folder's special tokens around it, cut to `max_prompt_tokens`."""
        known = printable(text)
        if len(known) > LONG_CHARS:  # a batch of one lets other threads run meanwhile, a single text does not
            return list(self._tokenizer.encode_batch([known])[0].ids)
        return list(self._tokenizer.encode(known).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out, without outer spaces."""
        return str(self._tokenizer.decode(list(ids))).strip()

    def token_id(self, token: str) -> int | None:
        """Return the id of one vocabulary entry, or None."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found


class PlanGrammar:
    """A finite-state machine over token ids: what may follow, so that what comes out is always a valid plan."""

    def __init__(self, start: int, states: Sequence[dict[int, int]]) -> None:
        self.start = start
        self._states = tuple(states)
        self._allowed = tuple(sorted(state) for state in states)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read `plan_grammar.json`; raise ConfigError when it is missing or not a machine."""
        file = Path(folder) / GRAMMAR_FILE
        if not file.is_file():
            msg = f"{file}: no such file"
            raise ConfigError(msg)
        data = _read_json(file)
        try:
            states = [{int(token): int(target) for token, target in state.items()} for state in data["states"]]
            start = int(data["start"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            msg = f"{file}: not a plan grammar: {error!r}"
            raise ConfigError(msg) from error
        targets = {start, *(target for state in states for target in state.values())}
        if not all(states) or not targets <= set(range(len(states))):
            msg = f"{file}: a state is empty or leads to no state"
            raise ConfigError(msg)
        return cls(start, states)

    @classmethod
    def find(cls, folder: str | Path) -> Self | None:
        """Return the folder's grammar, or None when it ships none."""
        return cls.load(folder) if (Path(folder) / GRAMMAR_FILE).exists() else None

    def allowed(self, state: int) -> list[int]:
        """Return the token ids that may come next, in order; the end state allows the end token only."""
        return self._allowed[state]

    def advance(self, state: int, token: int) -> int:
        """Return the state after a token; raise ValueError when the grammar forbids it there."""
        try:
            return self._states[state][token]
        except KeyError:
            msg = f"token {token} is not allowed in state {state}; allowed: {self._allowed[state]}"
            raise ValueError(msg) from None


def printable(text: str) -> str:
    """Replace lone surrogates, which no UTF-8 can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        msg = f"{file}: cannot be read as JSON: {error}"
        raise ConfigError(msg) from error
    if not isinstance(data, dict):
        msg = f"{file}: holds no JSON object"
        raise ConfigError(msg)
    return data


def _eos_token_ids(folder: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
        if ids:
            return ids
    msg = f"{folder}: neither generation_config.json nor config.json names an eos_token_id"
    raise ConfigError(msg)
