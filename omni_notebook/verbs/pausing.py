"""`pause` and `resume`: the gate in front of `generate`, and the schedulers behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.protocol import PauseState
from omni_notebook.verbs import hints
from omni_notebook.verbs.parsing import VerbParser, add_mode, add_stages, ids, seconds
from omni_notebook.verbs.registry import verb

if TYPE_CHECKING:
    import argparse

    from omni_notebook.verbs.session import Session


@verb
class Pause:
    """Close admission; with --mode keep the running batch ends and the schedulers stop.

    keep (default) holds requests that have not started, wait drains them, abort ends them.
    Example: %omni pause 1 --mode keep
    """

    name = "pause"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Stages, mode, bound, cache."""
        add_stages(parser, "pause")
        add_mode(parser, "keep", "keep holds (default), wait drains, abort ends the requests that are there")
        parser.add_argument("--keep-cache", action="store_true", help="keep the prefix cache; stale after new weights")
        parser.add_argument("--timeout", type=seconds, metavar="S", help="most seconds to wait for the running batch")

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Pause, and say what is closed now."""
        stages = ids(args.stages)
        order = session.engine.pause_generation(
            args.mode, stages, clear_cache=not args.keep_cache, timeout=args.timeout
        )
        session.call(order, stages=stages)
        session.frontend.write(_gate_line(session))


@verb
class Resume:
    """Open again what a pause closed; a stage that sleeps opens after its wake.

    Example: %omni resume
    """

    name = "resume"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Stages."""
        add_stages(parser, "resume")

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Resume, and say what is still closed."""
        stages = ids(args.stages)
        session.call(session.engine.resume_generation(stages), stages=stages)
        session.frontend.write(_gate_line(session))


def _gate_line(session: Session) -> str:
    closed = [stage for stage in session.engine.status().stages if stage.pause_state is not PauseState.OPEN]
    if not closed:
        return "admission is open\n"
    return f"admission is closed: {hints.describe(closed)}\n"
