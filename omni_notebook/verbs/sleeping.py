"""`sleep` and `wake`: memory goes, memory comes back, and every rank says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_notebook.errors import ArgumentError, SleepError, WakeError
from omni_notebook.protocol import PauseState, StateEvent
from omni_notebook.verbs import hints
from omni_notebook.verbs.gauges import MemoryGauge
from omni_notebook.verbs.interrupts import InterruptedVerb, interrupts_held
from omni_notebook.verbs.jobs import Work, add_background, begin, written
from omni_notebook.verbs.parsing import TAG, VerbParser, add_mode, add_order, add_stages
from omni_notebook.verbs.registry import verb

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

    from omni_notebook.protocol import Event, OmniACK
    from omni_notebook.verbs.engine_api import Engine
    from omni_notebook.verbs.jobs import Job
    from omni_notebook.verbs.session import Session


@verb
class Sleep:
    """Put stages to sleep: their device memory goes back, every rank answers how much.

    Level 1 keeps a copy on the host and loses nothing; level 2 keeps none and reads the checkpoint again at the wake.
    A stage with requests is refused unless --mode says what to do with them: keep lets the running batch end and holds
    the rest until the wake, wait lets all of them end, abort ends the queued ones and drops the running batch's result.
    Example: acks = %omni sleep 0 1 --level 2
    """

    name = "sleep"
    gives_orders = True
    python = "await engine.sleep([0], level=1)"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Stages, level, mode, discard, and what every order has."""
        add_stages(parser, "put to sleep")
        parser.add_argument(
            "--level", type=int, choices=(1, 2), default=1, help="1 keeps a host copy (default), 2 none"
        )
        add_mode(parser, None, "what to do first with requests that are there: keep, wait or abort (above)")
        parser.add_argument(
            "--discard", action="store_true", help="allow level 2 of weights that nothing can reproduce: they are LOST"
        )
        add_order(parser)
        add_background(parser)

    def run(self, session: Session, args: argparse.Namespace) -> list[OmniACK] | Job[list[OmniACK]]:
        """The ACKs; they are kept before a failure is raised. With --bg a job that comes to them."""
        stages = session.stage_ids(args.stages)

        def order(engine: Engine) -> Coroutine[Any, Any, list[OmniACK]]:
            return engine.sleep(stages, args.level, args.mode, args.timeout, discard=args.discard)

        return _begin(session, order, self.name, stages, args)


@verb
class Wake:
    """Wake stages: memory is mapped, filled and verified again.

    --tags wakes only some memory; --no-reload maps without loading, for weights that you install yourself.
    Stages come before --tags, which takes every word after it.
    Example: %omni wake 0 --tags weights
    """

    name = "wake"
    gives_orders = True
    python = "await engine.wake_up([0])"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Stages, tags, reload, and what every order has."""
        add_stages(parser, "wake")
        parser.add_argument("--tags", nargs="+", metavar=TAG, help="wake only this memory: weights, kv_cache, …")
        parser.add_argument("--no-reload", action="store_true", help="map, but leave a level 2's weights empty")
        add_order(parser)
        add_background(parser)

    def run(self, session: Session, args: argparse.Namespace) -> list[OmniACK] | Job[list[OmniACK]]:
        """The ACKs; they are kept before a failure is raised. With --bg a job that comes to them."""
        stages = session.stage_ids(args.stages)
        _check_tags(args.tags or [])

        def order(engine: Engine) -> Coroutine[Any, Any, list[OmniACK]]:
            return engine.wake_up(stages, args.tags, not args.no_reload, args.timeout)

        return _begin(session, order, self.name, stages, args)


def _check_tags(tags: list[str]) -> None:
    numbers = [tag for tag in tags if tag.isdecimal()]
    if numbers:
        msg = (
            f"omni wake: {numbers[0]!r} is no tag, and --tags takes every word after it: write the stages first, "
            f"%omni wake {' '.join(numbers)} --tags …; nothing was changed"
        )
        raise ArgumentError(msg)


def _begin(
    session: Session,
    make: Callable[[Engine], Coroutine[Any, Any, list[OmniACK]]],
    order: str,
    stages: list[int] | None,
    args: argparse.Namespace,
) -> list[OmniACK] | Job[list[OmniACK]]:
    """In the cell, or behind the notebook."""
    if not args.bg:
        return _carry_out(session, make, order, stages, args.out)
    job = _in_background(session, make, order, stages, written(order, args))
    session.store(args.out, job)
    return job


def _in_background(
    session: Session,
    make: Callable[[Engine], Coroutine[Any, Any, list[OmniACK]]],
    order: str,
    stages: list[int] | None,
    line: str,
) -> Job[list[OmniACK]]:
    """A job whose answers become the session's last ones when they come, good or bad."""
    gauge = MemoryGauge(stages, falling=order == "sleep")
    gauge.engine = engine = session.engine

    def is_sign(event: Event) -> bool:
        if not isinstance(event, StateEvent) or (stages is not None and event.stage_id not in stages):
            return False
        return event.state in hints.MOVING or event.pause_state is PauseState.PAUSING

    with interrupts_held():
        future = begin(engine, make(engine), is_sign)
        future.add_done_callback(lambda ended: _note_answers(session, order, ended))
        return session.jobs.start(Work(line, future, gauge=gauge, dress=lambda acks: session.dressed(acks, order)))


def _note_answers(session: Session, order: str, ended: Future[list[OmniACK]]) -> None:
    """Runs on the engine's thread: keeps and shows nothing but the answers."""
    if ended.cancelled():
        return
    error = ended.exception()
    if error is None:
        session.acks = session.dressed(ended.result(), order)
    elif isinstance(error, SleepError | WakeError):
        session.acks = session.dressed(error.acks, order)


def _carry_out(
    session: Session,
    make: Callable[[Engine], Coroutine[Any, Any, list[OmniACK]]],
    order: str,
    stages: list[int] | None,
    out: str | None,
) -> list[OmniACK]:
    """Wait for the ranks; what they answered is kept also when it is a failure, and nothing when nobody listened."""

    def start(engine: Engine) -> Coroutine[Any, Any, list[OmniACK]]:
        gauge.engine = engine
        return make(engine)

    gauge = MemoryGauge(stages, falling=order == "sleep")
    try:
        acks = session.call(start, order=order, stages=stages, gauge=gauge)
    except (SleepError, WakeError) as error:
        session.keep(error.acks, out, order)
        raise
    except InterruptedVerb as interrupt:
        answers = interrupt.result if isinstance(interrupt.result, list) else []
        session.keep(answers, out, order, interrupted=True)
        raise
    try:
        with interrupts_held():
            return session.keep(acks, out, order)
    except KeyboardInterrupt:
        raise session.too_late(order, stages, acks) from None
