"""The verbs by name. Adding one is one class with `@verb`; magic, completion, help and README come from here."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from omni_notebook.errors import ArgumentError
from omni_notebook.verbs import hints
from omni_notebook.verbs.frontend import CellError
from omni_notebook.verbs.interrupts import InterruptedVerb, interrupts_held
from omni_notebook.verbs.parsing import VerbParser, did_you_mean, split_line

if TYPE_CHECKING:
    import argparse

    from omni_notebook.verbs.session import Session

_MODULES = (
    "look",
    "lifecycle",
    "connecting",
    "generating",
    "sleeping",
    "pausing",
    "weights",
    "lora",
    "auditing.verb",
    "borrowing.verb",
    "jobs",
    "history",
    "serving",
)
DEFAULT = "status"


class Verb(Protocol):
    """One verb: its class docstring is its help, the first line the summary."""

    name: ClassVar[str]

    def prepare_parser(self, parser: VerbParser) -> None:
        """Add the verb's arguments."""

    def run(self, session: Session, args: argparse.Namespace) -> object:
        """Carry it out; `args.cell` is the cell's text, None in the line form, `args.words` the line's words.

        The result is what a magic returns.
        """


_V = TypeVar("_V", bound=type[Any])
_VERBS: dict[str, Verb] = {}


def verb(cls: _V) -> _V:
    """Register a verb class.

    A verb that takes a cell says so with `takes_cell = True`; one whose words are prose and not Python names the
    quotes that hold words together with `quotes = '"'`. `python` is the call that does the same in Python. One with
    `gives_orders = True` is not carried out at an engine that nobody was told of.
    """
    _VERBS[cls.name] = cls()
    return cls


def verbs() -> dict[str, Verb]:
    """All verbs, in the order in which help lists them: by module as above, then as they stand in it."""
    modules = [importlib.import_module(f"omni_notebook.verbs.{name}").__name__ for name in _MODULES]

    def place(item: tuple[str, Verb]) -> int:
        home = type(item[1]).__module__
        return modules.index(home) if home in modules else len(modules)

    return dict(sorted(_VERBS.items(), key=place))


def find(name: str) -> Verb:
    """The verb with this name.

    Raises:
        ArgumentError: there is none; names the nearest.
    """
    known = verbs()
    if name not in known:
        msg = f"unknown verb {name!r}{did_you_mean(name, known)}; verbs are: {', '.join(known)} (%omni help)"
        raise ArgumentError(msg)
    return known[name]


def parser_for(found: Verb) -> VerbParser:
    """A fresh parser with the verb's arguments."""
    parser = VerbParser(found.name, documentation(found))
    found.prepare_parser(parser)
    return parser


def documentation(found: Verb) -> str:
    """The verb's whole help text."""
    return inspect.getdoc(type(found)) or ""


def summary(found: Verb) -> str:
    """The first line of the verb's help text."""
    return documentation(found).partition("\n")[0]


def python_name(found: Verb) -> str:
    """The call that does the same in Python, or an empty text."""
    return str(getattr(found, "python", ""))


def takes_cell(found: Verb) -> bool:
    """Whether `%%omni VERB` with a cell makes sense."""
    return bool(getattr(found, "takes_cell", False))


def execute(session: Session, line: str, cell: str | None = None) -> object:
    """Carry out one line, `VERB [arguments]`; an empty line is `status`.

    Raises:
        ArgumentError: the line can not be read.
        OmniError: what the verb raises, in the words of verbs. `session.last_traceback` has the details.
        InterruptedVerb: Ctrl-C.
        CellError: the user's own code in the cell raised.
    """
    try:
        return _carry_out(session, line, cell)
    except CellError:
        raise
    except KeyboardInterrupt as error:
        session.note_error(error, line)
        if isinstance(error, InterruptedVerb):
            raise
        msg = f"interrupted; {session.state_now()}"
        raise InterruptedVerb(msg) from None
    except Exception as error:
        session.note_error(error, line)
        hints.reword(error)
        raise
    finally:
        session.tell_news()


def _carry_out(session: Session, line: str, cell: str | None) -> object:
    name, rest = _first_word(line)
    found = find(_default_verb(name, cell))
    tokens = split_line(rest, getattr(found, "quotes", "\"'"))
    if any(token in {"-h", "--help"} for token in tokens):
        session.frontend.write(parser_for(found).format_help())
        return None
    with interrupts_held():  # argparse cleans up with fields that an interrupt leaves unset
        args = parser_for(found).read(tokens)
    args.cell, args.words = _checked_cell(found, cell), tokens
    if getattr(found, "gives_orders", False):
        session.check_told(name or DEFAULT)
    return found.run(session, args)


def _first_word(line: str) -> tuple[str, str]:
    """The verb and what follows it; a line that is all comment has neither."""
    words = [] if line.lstrip().startswith("#") else line.split(None, 1)
    return (words[0] if words else ""), (words[1] if len(words) > 1 else "")


def _default_verb(name: str, cell: str | None) -> str:
    if not name and cell is not None:
        msg = "%%omni needs a verb before the cell's text, for example %%omni generate; nothing was changed"
        raise ArgumentError(msg)
    return name or DEFAULT


def _checked_cell(found: Verb, cell: str | None) -> str | None:
    if cell is not None and not takes_cell(found):
        takers = ", ".join(name for name, other in verbs().items() if takes_cell(other))
        msg = (
            f"omni {found.name} takes no cell: write %omni {found.name} with one % (a cell goes to: {takers}); "
            "nothing was changed"
        )
        raise ArgumentError(msg)
    return cell
