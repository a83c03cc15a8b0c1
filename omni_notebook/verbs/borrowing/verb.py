"""`borrow`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.errors import ArgumentError, OmniError
from omni_notebook.verbs import hints
from omni_notebook.verbs.borrowing.lease import Borrowed
from omni_notebook.verbs.frontend import CellError
from omni_notebook.verbs.interrupts import InterruptedVerb
from omni_notebook.verbs.parsing import VerbParser, add_mode, add_order, add_stages
from omni_notebook.verbs.registry import verb

if TYPE_CHECKING:
    import argparse

    from omni_notebook.verbs.session import Session


@verb
class Borrow:
    """Run the cell while stages sleep: their memory is yours; they wake after it, whatever it raised.

    Requests that are there are held until the wake (--mode wait or abort: as in sleep). A stage that was asleep stays
    so, one that was paused stays paused. Says what was freed, the cell's own peak (and what of it was more than was
    borrowed), and the latency both ways; an error of the cell shows after the wake, its local variables are let go
    before it. Names that the cell assigns stay, and what they hold with them: del what you do not keep. Where the wake
    lacks room it says who holds the memory, and the stages stay asleep. A cell that awaits is refused: async with
    omni.borrowed([0]): in a plain cell takes it. In Python: import omni_notebook as omni, with omni.borrowed([0]):.
    Example: %%omni borrow 0 1 --level 1
    """

    name = "borrow"
    gives_orders = True
    takes_cell = True
    python = "with omni.borrowed([0], level=1):"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Stages, level, mode, bound, and a variable for the lease."""
        add_stages(parser, "borrow from")
        parser.add_argument(
            "--level", type=int, choices=(1, 2), default=1, help="1 keeps a host copy (default), 2 none"
        )
        add_mode(parser, "keep", "what to do first with requests that are there: keep (default), wait or abort")
        add_order(parser)

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Borrow, run, give back; then the cell's own error, if it raised one.

        Raises:
            CellError: the cell raised; carries its error.
        """
        if not (args.cell or "").strip():
            msg = "omni borrow runs a cell: write %%omni borrow, and your code below it; nothing was changed"
            raise ArgumentError(msg)
        session.frontend.check_cell(args.cell)
        borrowed = Borrowed(session.stage_ids(args.stages), args.level, args.mode, timeout=args.timeout, of=session)
        error = None
        session.store(args.out, borrowed.lease)
        try:
            with borrowed:
                error = session.frontend.run_cell(args.cell)
        except (OmniError, InterruptedVerb):
            if error is not None:
                session.frontend.show_error(error)
            raise
        session.frontend.write(f"{borrowed.lease!r}\n")
        if isinstance(error, KeyboardInterrupt):
            now = hints.describe(hints.pick(session.engine.status(), borrowed.lease.stage_ids))
            msg = f"interrupted: the cell ended, what it had borrowed was given back; now {now}"
            raise InterruptedVerb(msg)
        if error is not None:
            raise CellError(error)
