"""`pause` and `resume`: the gate in front of `generate`, and the schedulers behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.protocol import MemoryState, PauseState
from omni_notebook.verbs import hints
from omni_notebook.verbs.parsing import VerbParser, add_mode, add_stages, seconds
from omni_notebook.verbs.registry import verb

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from omni_notebook.protocol import StageStatus
    from omni_notebook.verbs.session import Session


@verb
class Pause:
    """Close admission; with --mode keep the running batch ends and the schedulers stop.

    On a text stage keep (the default) freezes the requests that are there, wait lets them end, abort ends them.
    On a diffusion stage keep lets the running batch end and holds the queue until the resume; wait and abort only close
    admission there, its requests run on.
    While a stage is paused a new request is held out: %omni generate refuses at once; engine.generate() waits up to
    60 s (admission_timeout) and raises PausedError then. %omni resume opens every stage.
    Example: %omni pause 1 --mode keep
    """

    name = "pause"
    gives_orders = True
    python = "await engine.pause_generation('keep', [0])"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Stages, mode, bound, cache."""
        add_stages(parser, "pause")
        add_mode(parser, "keep", "what happens to requests that are there: keep (default), wait or abort (above)")
        parser.add_argument("--keep-cache", action="store_true", help="frozen sequences keep their keys and values")
        parser.add_argument("--timeout", type=seconds, metavar="S", help="most seconds to wait for the running batch")

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Pause, and say what is closed now."""
        stages = session.stage_ids(args.stages)
        session.call(
            lambda engine: engine.pause_generation(
                args.mode, stages, clear_cache=not args.keep_cache, timeout=args.timeout
            ),
            order=self.name,
            stages=stages,
        )
        session.frontend.write(_gate_line(session))
        if args.mode != "keep":
            session.frontend.write(_still_at_work(hints.pick(session.engine.status(), stages)))


def _still_at_work(stages: Sequence[StageStatus]) -> str:
    """A line for each diffusion stage whose requests this pause did not stop."""
    return "".join(
        f"stage {stage.stage_id} still has {_load(stage)}: on a diffusion stage this mode only closes admission; use "
        f"--mode keep, or %omni sleep {stage.stage_id} --mode wait\n"
        for stage in stages
        if stage.kind == "diffusion" and (stage.running or stage.queued)
    )


def _load(stage: StageStatus) -> str:
    parts = ((stage.running, "running"), (stage.queued, "queued"))
    return ", ".join(f"{count} {word}" for count, word in parts if count)


@verb
class Resume:
    """Open again what a pause closed; a stage that sleeps opens after its wake.

    Example: %omni resume
    """

    name = "resume"
    gives_orders = True
    python = "await engine.resume_generation()"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Stages."""
        add_stages(parser, "resume")

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Resume, and say what is still closed."""
        stages = session.stage_ids(args.stages)
        session.call(lambda engine: engine.resume_generation(stages), order=self.name, stages=stages)
        session.frontend.write(_gate_line(session))


def _gate_line(session: Session) -> str:
    stages = session.engine.status().stages
    closed = [stage for stage in stages if stage.pause_state is not PauseState.OPEN]
    if closed:
        return f"admission is closed: {hints.describe(closed)}\n"
    absent = [stage for stage in stages if stage.state is not MemoryState.AWAKE]
    return f"admission is open{'; ' if absent else ''}{hints.describe(absent)}\n"
