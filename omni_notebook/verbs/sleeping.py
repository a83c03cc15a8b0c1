"""`sleep` and `wake`: memory goes, memory comes back, and every rank says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_notebook.errors import SleepError, WakeError
from omni_notebook.verbs.gauges import MemoryGauge
from omni_notebook.verbs.parsing import TAG, VerbParser, add_mode, add_order, add_stages, ids
from omni_notebook.verbs.registry import verb
from omni_notebook.verbs.session import InterruptedVerb

if TYPE_CHECKING:
    import argparse
    from collections.abc import Coroutine

    from omni_notebook.protocol import OmniACK
    from omni_notebook.verbs.session import Session


@verb
class Sleep:
    """Put stages to sleep: their device memory goes back, every rank answers how much.

    Level 1 keeps a copy on the host and loses nothing; level 2 keeps none and reads the checkpoint again at the wake.
    A stage with requests is refused unless --mode says what to do with them.
    Example: acks = %omni sleep 0 1 --level 2
    """

    name = "sleep"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Stages, level, mode, discard, and what every order has."""
        add_stages(parser, "put to sleep")
        parser.add_argument(
            "--level", type=int, choices=(1, 2), default=1, help="1 keeps a host copy (default), 2 none"
        )
        add_mode(parser, None, "quiesce first: abort ends, wait drains, keep holds the requests that are there")
        parser.add_argument(
            "--discard", action="store_true", help="allow level 2 of weights that nothing can reproduce: they are LOST"
        )
        add_order(parser)

    def run(self, session: Session, args: argparse.Namespace) -> list[OmniACK]:
        """The ACKs; they are kept before a failure is raised."""
        engine, stages = session.engine, ids(args.stages)
        order = engine.sleep(stages, args.level, args.mode, args.timeout, discard=args.discard)
        return _carry_out(session, order, args, MemoryGauge(engine, stages, falling=True))


@verb
class Wake:
    """Wake stages: memory is mapped, filled and verified again.

    --tags wakes only some memory; --no-reload maps without loading, for weights that you install yourself.
    Example: %omni wake 0 --tags weights
    """

    name = "wake"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Stages, tags, reload, and what every order has."""
        add_stages(parser, "wake")
        parser.add_argument("--tags", nargs="+", metavar=TAG, help="wake only this memory: weights, kv_cache, …")
        parser.add_argument("--no-reload", action="store_true", help="map, but leave a level 2's weights empty")
        add_order(parser)

    def run(self, session: Session, args: argparse.Namespace) -> list[OmniACK]:
        """The ACKs; they are kept before a failure is raised."""
        engine, stages = session.engine, ids(args.stages)
        order = engine.wake_up(stages, args.tags, not args.no_reload, args.timeout)
        return _carry_out(session, order, args, MemoryGauge(engine, stages, falling=False))


def _carry_out(
    session: Session, order: Coroutine[Any, Any, list[OmniACK]], args: argparse.Namespace, gauge: MemoryGauge
) -> list[OmniACK]:
    """Wait for the ranks; what they answered is kept also when it is a failure, and nothing when nobody listened."""
    try:
        acks = session.call(order, stages=ids(args.stages), gauge=gauge)
    except (SleepError, WakeError) as error:
        session.keep(error.acks, args.out)
        raise
    except InterruptedVerb:
        session.keep([], args.out)
        raise
    return session.keep(acks, args.out)
