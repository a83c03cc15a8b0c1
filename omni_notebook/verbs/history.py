"""`history` and `where`: what ranks answered before, and where that is kept. Both need no engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from omni_notebook import units
from omni_notebook.engine.history import LIMIT, SINCE_FORMS, facts, history, moment
from omni_notebook.engine.ledger_file import OFF, VARIABLE
from omni_notebook.errors import ArgumentError, ServerLostError, UnsupportedError
from omni_notebook.verbs import hints
from omni_notebook.verbs.parsing import STAGE, VerbParser, add_out, stages
from omni_notebook.verbs.registry import verb

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.engine.history import History as Found
    from omni_notebook.engine.history import LedgerFacts
    from omni_notebook.verbs.engine_api import ServedEngine
    from omni_notebook.verbs.session import Session

_TABLES = {"sessions": "sessions", "acks": "ACKs", "states": "state changes", "audits": "audits"}


@verb
class History:
    """Show sleeps and wakes as the ranks answered them, newest first: this engine's ACKs and those of all before it.

    The table shows the newest 50; the result's to_dataframe(), to_csv(path), to_json(path) and to_html(path), and the
    files of --csv, --json and --html have all that match, unless --limit says how many. State changes and audits are in
    the same file (%omni where), not in this table. Connected to a server it is the server's history.
    Example: past = %omni history --stage 0 --since 2h --session this
    """

    name = "history"
    python = "omni.history(stage=0)"

    def prepare_parser(self, parser: VerbParser) -> None:
        """What to show, and files to write."""
        parser.add_argument("--stage", type=stages, metavar=STAGE, help="only this stage's, id or name")
        here = "connected to a server: this machine's history, not the server's"
        parser.add_argument("--here", action="store_true", help=here)
        add_wishes(parser)
        add_out(parser)

    def run(self, session: Session, args: argparse.Namespace) -> Found:
        """The ACKs; files are written before they are shown."""
        stage = None if args.stage is None else _one_stage(session, args.stage)
        engine = session.attached
        if args.here or engine is None or engine.url is None:
            found = read(args, stage)
        else:
            found = _there(session, cast("ServedEngine", engine), args, stage)
        session.store(args.out, found)
        session.frontend.write("".join(f"written: {path}\n" for path in files(args)))
        return found


def _there(session: Session, engine: ServedEngine, args: argparse.Namespace, stage: int | None) -> Found:
    """The server's own; where it tells none, this machine's, and why."""
    try:
        found = read(args, stage, engine.history)
    except (UnsupportedError, ServerLostError) as error:
        session.frontend.write(
            f"this machine's history, not that of the engine at {engine.url}: {hints.in_verbs(str(error))}\n"
        )
        return read(args, stage)
    session.frontend.write(f"the history of the server at {engine.url}; %omni history --here shows this machine's\n")
    return found


def _one_stage(session: Session, words: list[str]) -> int:
    picked = session.stage_ids([words])
    if picked is None or len(picked) != 1:
        msg = "omni history takes one stage, or none for all; nothing was read"
        raise ArgumentError(msg)
    return picked[0]


def add_wishes(parser: argparse.ArgumentParser) -> None:
    """What to show beside the stage, and files to write; the command line has the same."""
    add = parser.add_argument
    add("--rank", type=number, metavar="R", help="only this rank's")
    add("--since", type=since, metavar="TIME", help=f"only what came after: {SINCE_FORMS}")
    add("--session", type=run_of, metavar="N", help="only this session's, as the table numbers them; this = own")
    add("--errors", action="store_true", help="only answers whose status is ERROR")
    add("--limit", type=limit, metavar="N", help=f"at most so many, shown and written; else {LIMIT} shown, all written")
    for kind in ("csv", "json", "html"):
        add(f"--{kind}", type=Path, metavar="FILE", help=f"also write them to this {kind.upper()} file")


def read(args: argparse.Namespace, stage: int | None, look: Callable[..., Found] = history) -> Found:
    """The ACKs that a parsed line asks for, after the files that it asks for are written; `look` finds them.

    Raises:
        ArgumentError: a file can not be written.
        LedgerError: there is no history to read.
    """
    found = look(stage, args.rank, args.since, args.session, args.errors, args.limit)
    for path, write in ((args.csv, found.to_csv), (args.json, found.to_json), (args.html, found.to_html)):
        if path is not None:
            write(path)
    return found


def files(args: argparse.Namespace) -> list[Path]:
    """Where the files that a parsed line asks for lie."""
    return [path.expanduser().absolute() for path in (args.csv, args.json, args.html) if path is not None]


def number(text: str) -> int:
    """An argument type: a whole number from 0 on."""
    if not text.isascii() or not text.isdecimal():
        msg = f"{text!r} is not a whole number from 0 on"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def run_of(text: str) -> int | Literal["this"]:
    """An argument type: the number of a session, or `this` for those of this process."""
    return "this" if text == "this" else number(text)


def limit(text: str) -> int | None:
    """An argument type: a number, or None for `all`."""
    return None if text == "all" else number(text)


def since(text: str) -> float:
    """An argument type: seconds since 1970."""
    try:
        return moment(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@verb
class Where:
    """Show where the history is kept: the file, its size and its rows.

    OMNI_NOTEBOOK_LEDGER names another file, or off.
    """

    name = "where"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Nothing to add."""

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Write it, and what hinders the engine that runs."""
        del args
        engine = session.attached
        notes = engine.status().notes if engine is not None and engine.url is None else ()
        session.frontend.write("\n".join([*where_lines(facts()), *notes, ""]))


def where_lines(found: LedgerFacts) -> list[str]:
    """The facts as lines for a person."""
    if found.path is None:
        return [f"ledger  {OFF} ({VARIABLE}): no history is kept"]
    lines = [f"ledger  {found.path}"]
    if found.size_bytes is not None:
        lines.append(f"size    {units.size(found.size_bytes)}")
    elif found.trouble is None:
        lines.append("size    not there yet; the first engine makes it")
    if found.rows:
        lines.append(f"rows    {' · '.join(f'{words} {found.rows[name]}' for name, words in _TABLES.items())}")
    if found.schema is not None:
        lines.append(f"schema  {found.schema}")
    if found.trouble is not None:
        lines.append(f"It can not be used: {found.trouble}; it was left as it is. {VARIABLE} names another file")
    return lines
