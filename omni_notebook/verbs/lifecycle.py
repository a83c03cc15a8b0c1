"""`start`, `stop`, `restart`."""

from __future__ import annotations

import argparse
import concurrent.futures
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, get_args

from omni_notebook import config
from omni_notebook.errors import ArgumentError
from omni_notebook.verbs import hints
from omni_notebook.verbs.gauges import StartGauge
from omni_notebook.verbs.look import NOTHING_RUNS
from omni_notebook.verbs.parsing import STAGE, VerbParser, seconds, size, stage
from omni_notebook.verbs.registry import verb
from omni_notebook.verbs.session import CANCEL_GRACE_S, InterruptedVerb, Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.verbs.engine_api import Engine

_UNSET = argparse.SUPPRESS


@verb
class Start:
    """Start an engine and return it.

    MODEL is demo (default), a pipeline file or a model folder. Options reach every stage.
    Example: engine = %omni start --ballast 256MiB
    """

    name = "start"

    def prepare_parser(self, parser: VerbParser) -> None:
        """The model, and every option of a stage that a notebook sets."""
        parser.add_argument("model", nargs="?", default=config.DEMO, help="demo, a pipeline file or a model folder")
        parser.add_argument("--replace", action="store_true", help="stop the engine that is running first")
        _add_memory(parser)
        _add_placement(parser)

    def run(self, session: Session, args: argparse.Namespace) -> Engine:
        """The new engine, ready."""
        overrides = {key: value for key, value in vars(args).items() if key not in {"model", "replace", "cell"}}
        config.load_pipeline(args.model, overrides=overrides)  # a mistake must not cost the engine that runs
        self._make_room(session, replace=args.replace)
        gauge = StartGauge()
        future = _in_thread(lambda: _build(args.model, overrides, gauge))
        try:
            session.use(session.frontend.wait(future, gauge, None))
        except KeyboardInterrupt:
            gauge.cancelled = True
            future.add_done_callback(_give_back)
            concurrent.futures.wait([future], timeout=CANCEL_GRACE_S)
            msg = f"interrupted: the start {_undone(future)}, no engine is running; %omni start starts again"
            raise InterruptedVerb(msg) from None
        return session.engine

    def _make_room(self, session: Session, *, replace: bool) -> None:
        running = session.running
        if running is None:
            return
        if not replace:
            msg = (
                f"an engine ({running.status().model}) is already running; %omni start … --replace stops it first, "
                "%omni stop stops it; nothing was changed"
            )
            raise ArgumentError(msg)
        running.shutdown()
        session.use(None)


def _add_memory(parser: VerbParser) -> None:
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--ballast",
        "--ballast-bytes",
        dest="ballast_bytes",
        type=size,
        default=_UNSET,
        metavar="SIZE",
        help="a real extra tensor a rank, such as 256MiB, that makes drops visible; costs that much memory",
    )
    group.add_argument(
        "--backup",
        choices=get_args(config.BackupKind),
        default=_UNSET,
        help="level 1's host copy: spill (default) is our own file, checkpoint costs no space but trusts the file",
    )
    group.add_argument("--spill-dir", default=_UNSET, metavar="DIR", help="where spill files live")
    group.add_argument(
        "--gpu-memory-utilization", type=float, default=_UNSET, metavar="X", help="share of the device, (0, 1]"
    )
    group.add_argument(
        "--default-timeout", type=seconds, default=_UNSET, metavar="S", help="seconds that an order may take"
    )


def _add_placement(parser: VerbParser) -> None:
    group = parser.add_argument_group("placement")
    group.add_argument(
        "--tp",
        "--tensor-parallel-size",
        dest="tensor_parallel_size",
        type=int,
        default=_UNSET,
        metavar="N",
        help="ranks a replica",
    )
    group.add_argument(
        "--replicas",
        "--num-replicas",
        dest="num_replicas",
        type=int,
        default=_UNSET,
        metavar="N",
        help="copies a stage",
    )
    group.add_argument("--executor", choices=get_args(config.ExecutorName), default=_UNSET, help="where ranks run")
    group.add_argument("--runtime", choices=config.runtimes(), default=_UNSET, help="what runs the model")
    group.add_argument("--device", default=_UNSET, metavar="DEVICE", help="auto, cpu, cuda:0")
    group.add_argument("--devices", nargs="+", default=_UNSET, metavar="DEVICE", help="one device a rank")
    group.add_argument("--dtype", choices=get_args(config.DType), default=_UNSET, help="of weights and activations")
    group.add_argument("--step-execution", action="store_true", default=_UNSET, help="diffusion: step by step")
    group.add_argument(
        "--trust-remote-code", action="store_true", default=_UNSET, help="run code that comes with a model"
    )


def _build(model: str, overrides: dict[str, Any], gauge: StartGauge) -> Engine:
    from omni_notebook.engine.async_omni import AsyncOmni  # noqa: PLC0415  (torch: loaded when used)

    engine: Engine = AsyncOmni(model, progress=gauge.report, **overrides)
    return engine


def _in_thread(build: Callable[[], Engine]) -> Future[Engine]:
    """Build in a daemon thread, so that the caller can show progress and be interrupted."""
    future: Future[Engine] = Future()

    def target() -> None:
        try:
            future.set_result(build())
        except BaseException as error:  # noqa: BLE001  (handed to whoever waits)
            future.set_exception(error)

    threading.Thread(target=target, name="omni-start", daemon=True).start()
    return future


def _undone(future: Future[Engine]) -> str:
    return "was undone" if future.done() else "is still being undone"


def _give_back(future: Future[Engine]) -> None:
    if future.exception() is None:
        future.result().shutdown()


@verb
class Stop:
    """Stop the engine: workers end, all memory goes back.

    Stopping when nothing runs is no mistake.
    """

    name = "stop"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Nothing to add."""

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Stop, and say so."""
        del args
        running = session.running
        if running is None:
            session.frontend.write(NOTHING_RUNS)
            return
        running.shutdown()
        session.use(None)
        session.frontend.write("the engine was stopped; %omni start starts a new one\n")


@verb
class Restart:
    """Start a stage's workers anew, from the last checkpoint; the way out of FAILED.

    Example: %omni restart 1
    """

    name = "restart"

    def prepare_parser(self, parser: VerbParser) -> None:
        """One stage."""
        parser.add_argument("stage", type=stage, metavar=STAGE, help="id of the stage to restart")

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Restart, and say what state the stage is in."""
        engine = session.engine
        session.call(engine.restart(args.stage), stages=[args.stage])
        session.frontend.write(f"{hints.describe(hints.pick(engine.status(), [args.stage]))}\n")
