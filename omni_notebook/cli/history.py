"""`omni-notebook history` and `omni-notebook where`: the ledger in a terminal, without an engine and without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from omni_notebook.cli import screen
from omni_notebook.engine import history_export
from omni_notebook.engine.history import facts
from omni_notebook.verbs import history

if TYPE_CHECKING:
    from argparse import Namespace

_NUMBERS = frozenset({"freed", "mapped", "latency"})


def run(args: Namespace) -> int:
    """Show past ACKs; always 0.

    Raises:
        ArgumentError: a file can not be written.
        LedgerError: there is no history to read.
    """
    found = history.read(args, args.stage)
    out = screen.console()
    out.print(Text(found.title, style="bold"), soft_wrap=True)
    if found.newest:
        columns, rows = history_export.table(found.newest)
        table = screen.grid(*columns, right=[column for column in columns if column in _NUMBERS])
        table.columns[0].no_wrap = True
        for row, ack in zip(rows, found.newest, strict=True):
            table.add_row(*map(Text, row), style=None if ack.ok else "red")
        out.print(table)
    for path in history.files(args):
        out.print(Text(f"written: {path}"), soft_wrap=True)
    return 0


def where(args: Namespace) -> int:
    """Show the file; 0 if it can be used or is off, else 1."""
    del args
    found = facts()
    for line in history.where_lines(found):
        screen.console().print(Text(line), soft_wrap=True)
    return 0 if found.trouble is None else 1
