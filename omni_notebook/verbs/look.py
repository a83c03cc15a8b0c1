"""`status`, `help` and `traceback`: they look and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.verbs.parsing import VERB, VerbParser, add_out
from omni_notebook.verbs.registry import find, parser_for, summary, takes_cell, verb, verbs

if TYPE_CHECKING:
    import argparse

    from omni_notebook.protocol import EngineStatus
    from omni_notebook.verbs.session import Session

NOTHING_RUNS = "no engine is running; %omni start starts the demo pipeline, %omni help lists the verbs\n"


@verb
class Status:
    """Show every stage: state, pause, requests, memory. `%omni` alone does the same.

    Never waits for a worker and changes nothing.
    """

    name = "status"
    python = "engine.status()"

    def prepare_parser(self, parser: VerbParser) -> None:
        """A variable for the snapshot."""
        add_out(parser)

    def run(self, session: Session, args: argparse.Namespace) -> EngineStatus | None:
        """The snapshot, or a line when there is no engine."""
        if session.running is None:
            session.frontend.write(NOTHING_RUNS)
            return None
        status = session.engine.status()
        session.store(args.out, status)
        return status


@verb
class Help:
    """List the verbs, or show what one verb takes.

    Example: %omni help sleep
    """

    name = "help"

    def prepare_parser(self, parser: VerbParser) -> None:
        """A verb, or none."""
        parser.add_argument("verb", nargs="?", metavar=VERB, help="the verb to explain")

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Write it."""
        text = overview() if args.verb is None else parser_for(find(args.verb)).format_help()
        session.frontend.write(text)


@verb
class Traceback:
    """Show the full traceback of the last error or interrupt, worker's side included.

    Errors are one line; this is the rest. The first line says which %omni line it belongs to.
    """

    name = "traceback"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Nothing to add."""

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Write it."""
        del args
        session.frontend.write(session.last_traceback or "no verb has failed in this session\n")


def overview() -> str:
    """All verbs with their summaries, one a line."""
    lines = [f"  {_form(name):<18}{summary(found)}" for name, found in verbs().items()]
    return "\n".join(
        ["%omni VERB [arguments]; %omni alone shows the status", *lines, "%omni help VERB explains one", ""]
    )


def _form(name: str) -> str:
    return f"%%omni {name}" if takes_cell(find(name)) else f"%omni {name}"
