"""Argument parsing that answers a mistake with an `ArgumentError` of one line: no exit, nothing on stderr."""

from __future__ import annotations

import argparse
import difflib
import shlex
from typing import TYPE_CHECKING, NoReturn

from omni_notebook.config import parse_size
from omni_notebook.errors import ArgumentError, ConfigError
from omni_notebook.protocol import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PROG = "omni-notebook"
STAGE = "STAGE"
TAG = "TAG"
VERB = "VERB"
REQUEST = "REQUEST"
FOLDER = "FOLDER"
LORA = "LORA"


class CommandParser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and leave."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """All of `args`; a word that is left over is a mistake, with the nearest option where there is one."""
        read, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            self.error(f"unknown argument {unknown[0]!r}{did_you_mean(unknown[0], known)}")
        return read

    def error(self, message: str) -> NoReturn:
        """Raise instead.

        Raises:
            ArgumentError: always.
        """
        words = self.prog.removeprefix(PROG).strip()
        msg = f"{words + ': ' if words else ''}{message} ({self.prog} --help)"
        raise ArgumentError(msg)


class VerbParser(argparse.ArgumentParser):
    """The parser of one verb; `verb` is its name."""

    def __init__(self, verb: str, description: str = "") -> None:
        super().__init__(
            prog=f"%omni {verb}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )
        self.verb = verb

    def read(self, tokens: list[str]) -> argparse.Namespace:
        """The arguments in `tokens`, options and positionals in any order.

        Raises:
            ArgumentError: a mistake, with the nearest known option where there is one.
        """
        args, unknown = self.parse_known_intermixed_args(tokens)
        if unknown:
            self.error(f"unknown {_word_for(unknown[0])} {unknown[0]!r}{did_you_mean(unknown[0], self.options())}")
        return args

    def options(self) -> list[str]:
        """All option strings, in the order in which they were added."""
        return [option for action in self.actions() for option in action.option_strings]

    def actions(self) -> list[argparse.Action]:
        """All arguments, in the order in which they were added."""
        return list(self._actions)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and leaving the process."""
        msg = f"omni {self.verb}: {message}; nothing was changed (%omni help {self.verb})"
        raise ArgumentError(msg)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Raise: a parser in a kernel never ends the process."""
        self.error(message or f"the parser wanted to leave with status {status}")


def _word_for(token: str) -> str:
    return "option" if token.startswith("-") else "argument"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" (did you mean 'sleep'?)"`, or nothing when no known word is near."""
    near = difflib.get_close_matches(word.partition("=")[0].lower(), list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def without_comment(line: str, quotes: str = "\"'") -> str:
    """The line up to a word that starts with `#` outside of quotes, as in a shell."""
    quote = None
    for place, character in enumerate(line):
        if quote is not None:
            quote = None if character == quote else quote
        elif character in quotes:
            quote = character
        elif character == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place]
    return line


def split_line(line: str, quotes: str = "\"'") -> list[str]:
    """Words of a magic's line up to a `#` comment; `quotes` are the characters that hold words together.

    Raises:
        ArgumentError: a quote that is not closed.
    """
    lexer = shlex.shlex(without_comment(line, quotes), posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    lexer.escape = ""
    lexer.quotes = quotes
    try:
        return list(lexer)
    except ValueError as error:
        msg = f"{line.strip()!r} can not be read: {str(error).lower()}; nothing was changed"
        raise ArgumentError(msg) from None


def size(text: str) -> int:
    """An argument type: bytes from `256MiB`; a small number without a unit is most likely a forgotten one."""
    try:
        n_bytes = parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if 0 < n_bytes < MIB and not text.strip()[-1].isalpha():
        msg = f"{text} B? Write {text}MiB, or {text}B if you mean bytes"
        raise argparse.ArgumentTypeError(msg)
    return n_bytes


def seconds(text: str) -> float:
    """An argument type: a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        msg = f"{text!r} is not a number of seconds above 0"
        raise argparse.ArgumentTypeError(msg)
    return value


def variable(text: str) -> str:
    """An argument type: a name that a Python variable can have."""
    if not text.isidentifier():
        msg = f"{text!r} can not be the name of a variable"
        raise argparse.ArgumentTypeError(msg)
    return text


def stages(text: str) -> list[str]:
    """An argument type: ids or names of stages, `0`, `0,1`, `thinker`, `all`; what they mean the session knows."""
    words = [word for word in text.split(",") if word]
    if not words or any(word.startswith("-") for word in words):
        msg = f"{text!r} is no stage (%omni status lists them)"
        raise argparse.ArgumentTypeError(msg)
    return words


def add_stages(parser: VerbParser, what: str) -> None:
    """The group of verbs that concern some stages: ids, none of them means all."""
    parser.add_argument(
        "stages", nargs="*", type=stages, metavar=STAGE, help=f"ids or names of the stages to {what}; none = all"
    )


def add_order(parser: VerbParser) -> None:
    """The group of verbs that wait for ranks: a bound, and a variable for the answer."""
    parser.add_argument(
        "--timeout", type=seconds, metavar="S", help="most seconds to wait, lock and quiescing included"
    )
    add_out(parser)


def add_out(parser: VerbParser) -> None:
    """A variable that takes the result, also when the verb then raises."""
    parser.add_argument("--out", "-o", type=variable, metavar="NAME", help="also keep the result in this variable")


def add_mode(parser: VerbParser, default: str | None, text: str) -> None:
    """What happens to requests that are there."""
    parser.add_argument("--mode", choices=("abort", "wait", "keep"), default=default, help=text)
