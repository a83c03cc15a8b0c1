"""`status`, `dashboard`, `logs`, `help` and `traceback`: they look and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.errors import ArgumentError
from omni_notebook.verbs.parsing import STAGE, VERB, VerbParser, add_out, stages
from omni_notebook.verbs.registry import find, parser_for, summary, takes_cell, verb, verbs

if TYPE_CHECKING:
    import argparse

    from omni_notebook.protocol import EngineStatus
    from omni_notebook.verbs.session import Session

LOG_LINES = 50
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
        session.shown(status.notes)  # under the table
        session.store(args.out, status)
        return status


@verb
class Dashboard:
    """Show the engine live: a card a stage with buttons, memory over time, every rank's answers.

    It stays live when the cell has ended; its buttons work while other cells run, where the kernel allows it. A saved
    notebook shows its last state as a picture. `d = %omni dashboard` keeps it: `d` shows it, `d.close()` frees it.
    """

    name = "dashboard"
    python = "engine.dashboard()"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Nothing to add."""

    def run(self, session: Session, args: argparse.Namespace) -> object:
        """What the front end shows it with."""
        del args
        return session.frontend.dashboard(session.engine)


@verb
class Logs:
    """Show the last lines that a rank's process wrote.

    Ranks in this process (executor uni) write where the notebook's own output goes and have none here.

    Example: %omni logs 1 --rank 0
    """

    name = "logs"
    python = "engine.logs(1, rank=0)"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Whose lines, and how many."""
        parser.add_argument("stage", type=stages, metavar=STAGE, help="id or name of the stage")
        parser.add_argument("--rank", type=int, default=0, help="rank within its replica (default 0)")
        parser.add_argument("--replica", type=int, default=0, help="replica of the stage (default 0)")
        parser.add_argument("--lines", type=int, default=LOG_LINES, help=f"at most so many (default {LOG_LINES})")

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Write them."""
        picked = session.stage_ids([args.stage])
        if picked is None or len(picked) != 1:
            msg = "omni logs takes one stage; nothing was changed"
            raise ArgumentError(msg)
        lines = session.engine.logs(picked[0], args.rank, args.replica)[-max(args.lines, 1) :]
        where = f"stage {picked[0]} · rank {args.rank} · replica {args.replica}"
        session.frontend.write("\n".join(lines or [f"{where} has written nothing"]) + "\n")


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
