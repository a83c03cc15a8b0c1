"""Words that can stand at the cursor: verbs, options, their values, stage ids."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_notebook.errors import ServerLostError
from omni_notebook.paths import expanded
from omni_notebook.verbs.parsing import FOLDER, LORA, STAGE, TAG, VERB
from omni_notebook.verbs.registry import parser_for, verbs

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from omni_notebook.protocol import EngineStatus
    from omni_notebook.verbs.parsing import VerbParser
    from omni_notebook.verbs.session import Session


@dataclass(frozen=True, slots=True)
class Candidates:
    """`words` that may replace `fragment`, the part of a word in front of the cursor."""

    fragment: str
    words: list[str]


def candidates(session: Session, text: str) -> Candidates:
    """What can follow; `text` is the line after `%omni ` up to the cursor."""
    *before, fragment = text.split(" ")
    before = [word for word in before if word]
    words = _words(session, before, fragment)
    return Candidates(fragment, [word for word in words if word.startswith(fragment)])


def _words(session: Session, before: list[str], fragment: str) -> list[str]:
    if not before:
        return list(verbs())
    found = verbs().get(before[0])
    if found is None:
        return []
    parser = parser_for(found)
    options = [option for option in parser.options() if option.startswith("--") and option not in before]
    if fragment.startswith("-"):
        return options
    open_option = _open_option(parser, before[1:])
    if open_option is not None:
        return _values(session, open_option)
    open_place = _open_place(parser, before[1:])
    if open_place is None:
        return options
    positional = _folders(fragment) if open_place.metavar == FOLDER else _values(session, open_place)
    return [word for word in positional if word not in before[1:]] + options


def _open_place(parser: VerbParser, before: list[str]) -> argparse.Action | None:
    """The argument without a name that the next word would be."""
    places = [action for action in parser.actions() if not action.option_strings]
    given = sum(_is_plain(parser, before, at) for at in range(len(before)))
    return next((place for at, place in enumerate(places) if at >= given or place.nargs in {"*", "+"}), None)


def _is_plain(parser: VerbParser, before: list[str], at: int) -> bool:
    """Whether a word is neither an option nor the value of one."""
    return not before[at].startswith("-") and _open_option(parser, before[:at]) is None


def _folders(fragment: str) -> list[str]:
    """Folders that begin like this, for names without spaces."""
    parent, slash, _ = fragment.rpartition("/")
    with contextlib.suppress(OSError):
        found = [path.name for path in expanded(parent + slash or ".").iterdir() if path.is_dir()]
        return [f"{parent}{slash}{name}/" for name in sorted(found) if " " not in name]
    return []


def _open_option(parser: VerbParser, before: list[str]) -> argparse.Action | None:
    """The option that still takes a value at the cursor."""
    takers = {option: action for action in parser.actions() for option in action.option_strings}
    for distance, word in enumerate(reversed(before)):
        action = takers.get(word)
        if action is None:
            continue
        takes_one_more = action.nargs == "+" or (action.nargs is None and distance == 0)
        return action if takes_one_more else None
    return None


def _values(session: Session, action: argparse.Action) -> list[str]:
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.metavar == VERB:
        return list(verbs())
    found = _OF_THE_ENGINE.get(str(action.metavar))
    with contextlib.suppress(ServerLostError):  # no words, then
        engine = None if found is None else session.running
        return [] if engine is None or found is None else found(engine.status())
    return []


_OF_THE_ENGINE: dict[str, Callable[[EngineStatus], list[str]]] = {
    STAGE: lambda status: [str(stage.stage_id) for stage in status.stages],
    LORA: lambda status: sorted({lora.lora_name for stage in status.stages for lora in stage.loras}),
    TAG: lambda status: sorted({tag for stage in status.stages for rank in stage.ranks for tag in rank.tags}),
}
"""What a word of this kind can be while an engine runs."""
