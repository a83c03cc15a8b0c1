"""`start`, `stop`, `restart`."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
from typing import TYPE_CHECKING, Any, get_args

from omni_notebook import config, units
from omni_notebook.errors import ArgumentError
from omni_notebook.verbs import engines, hints
from omni_notebook.verbs.gauges import StartGauge, held_bytes
from omni_notebook.verbs.interrupts import InterruptedVerb, interrupts_held
from omni_notebook.verbs.look import NOTHING_RUNS
from omni_notebook.verbs.parsing import STAGE, VerbParser, seconds, size, stages
from omni_notebook.verbs.registry import verb
from omni_notebook.verbs.serving import end_server, server_of
from omni_notebook.verbs.session import CANCEL_GRACE_S, Session
from omni_notebook.verbs.waits import in_thread

if TYPE_CHECKING:
    from concurrent.futures import Future

    from omni_notebook.protocol import EngineStatus
    from omni_notebook.verbs.engine_api import Engine

_UNSET = argparse.SUPPRESS
_RUNTIME_HELP = "what runs the model: vllm takes the AR stages (auto: those that are not ours, where it is installed)"
_ENGINE_ARGS_HELP = """options for vLLM's engine, as JSON: '{"enforce_eager": true}'"""
_STEPS_HELP = "diffusion: schedule single denoise steps; images sharpen while they are drawn; no pause --mode keep"


@verb
class Start:
    """Start an engine and return it.

    MODEL is demo (default), a pipeline file or a model folder; with --engine vllm-omni what that takes. Options reach
    every stage.
    While a stage is awake, the copy that level 1 wakes from is kept ready in --spill-dir: as much disk as weights and
    ballast. A level-2 sleep removes it, a wake writes it again; --backup checkpoint needs none for weights.
    Example: engine = %omni start --ballast 256MiB
    """

    name = "start"
    python = "engine = AsyncOmni('demo')"

    def prepare_parser(self, parser: VerbParser) -> None:
        """The model, and every option of a stage that a notebook sets."""
        parser.add_argument("model", nargs="?", default=config.DEMO, help="demo, a pipeline file or a model folder")
        parser.add_argument("--replace", action="store_true", help="stop the engine that is running first")
        engines.add_engine(parser)
        add_stage_options(parser)

    def run(self, session: Session, args: argparse.Namespace) -> Engine:
        """The new engine, ready."""
        overrides = {
            key: value
            for key, value in vars(args).items()
            if key not in {"model", "engine", "replace", "cell", "words"}
        }
        engines.check(args.engine, args.model, overrides)  # a mistake must not cost the engine that runs
        replaced = make_room(session, self.name, replace=args.replace)
        gauge, future = StartGauge(), None
        try:
            with interrupts_held():
                future = in_thread(
                    lambda: engines.build(args.engine, args.model, overrides, gauge.report), "omni-start"
                )
            session.use(session.frontend.wait(future, gauge, None))
        except KeyboardInterrupt:
            gauge.cancelled = True
            raise InterruptedVerb(_undo(future, replaced=replaced)) from None
        session.tell_notes()
        return session.engine


def make_room(session: Session, verb: str, *, replace: bool) -> bool:
    """Whether an engine was stopped, or a connection closed, for the one that `verb` brings.

    Raises:
        ArgumentError: there is one, and it is not to be replaced; nothing was changed.
    """
    running = session.attached
    if running is None:
        return False
    if not replace:
        raise ArgumentError(_in_the_way(running, verb))
    _shut_down(session, running)
    return True


def _in_the_way(running: Engine, verb: str) -> str:
    if running.url is not None:
        return (
            f"this session is connected to {running.url}; %omni {verb} … --replace disconnects first (the engine there "
            "runs on), %omni stop disconnects; nothing was changed"
        )
    return (
        f"an engine ({running.status().model}) is already running; %omni {verb} … --replace stops it first, "
        "%omni stop stops it; nothing was changed"
    )


def add_stage_options(parser: argparse.ArgumentParser) -> None:
    """The options of a stage that people set; those that were not given are not in the result."""
    _add_memory(parser)
    _add_placement(parser)


def _add_memory(parser: argparse.ArgumentParser) -> None:
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
        help="level 1's copy: spill (default) is our own file, checkpoint takes no disk but trusts the model's file",
    )
    group.add_argument("--spill-dir", default=_UNSET, metavar="DIR", help="where the spill files of level 1 live")
    group.add_argument("--max-loras", type=int, default=_UNSET, metavar="N", help="slots for LoRA adapters a stage")
    group.add_argument(
        "--max-lora-rank", type=int, default=_UNSET, metavar="N", help="largest rank of one; its slot's size"
    )
    group.add_argument(
        "--gpu-memory-utilization", type=float, default=_UNSET, metavar="X", help="share of the device, (0, 1]"
    )
    group.add_argument(
        "--default-timeout", type=seconds, default=_UNSET, metavar="S", help="seconds that an order may take"
    )


def _json_object(text: str) -> dict[str, Any]:
    """The mapping that a JSON text is.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        msg = f"{text!r} is not JSON: {error}"
        raise argparse.ArgumentTypeError(msg) from None
    if not isinstance(value, dict):
        msg = f'{text!r} is not a JSON mapping such as {{"enforce_eager": true}}'
        raise argparse.ArgumentTypeError(msg)
    return value


def _add_placement(parser: argparse.ArgumentParser) -> None:
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
    group.add_argument(
        "--executor",
        choices=get_args(config.ExecutorName),
        default=_UNSET,
        help="where ranks run (ray: not in this release)",
    )
    group.add_argument("--runtime", choices=config.runtimes(), default=_UNSET, help=_RUNTIME_HELP)
    group.add_argument("--engine-args", type=_json_object, default=_UNSET, metavar="JSON", help=_ENGINE_ARGS_HELP)
    group.add_argument("--device", default=_UNSET, metavar="DEVICE", help="auto, cpu, cuda")
    group.add_argument("--devices", nargs="+", default=_UNSET, metavar="DEVICE", help="one device a rank")
    group.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        default=_UNSET,
        help="on a GPU: replay captured passes of our own models (the default)",
    )
    group.add_argument("--dtype", choices=get_args(config.DType), default=_UNSET, help="of weights and activations")
    group.add_argument("--step-execution", action="store_true", default=_UNSET, help=_STEPS_HELP)
    group.add_argument(
        "--trust-remote-code", action="store_true", default=_UNSET, help="run code that comes with a model"
    )


def _undo(future: Future[Any] | None, *, replaced: bool) -> str:
    """Give back what a start made or will have made; what to tell whoever interrupted it."""
    if future is not None:
        future.add_done_callback(_give_back)
        concurrent.futures.wait([future], timeout=CANCEL_GRACE_S)
    undone = "was undone" if future is None or future.done() else "is still being undone"
    before = ", the engine before it is stopped" if replaced else ""
    return f"interrupted: the start {undone}{before}, no engine is running; %omni start starts again"


def _give_back(future: Future[Any]) -> None:
    if future.exception() is None:
        future.result().shutdown()


@verb
class Stop:
    """Stop the engine: workers end, all memory goes back.

    Requests that are there are aborted. From a server (%omni connect) it disconnects: the engine there runs on.
    Stopping when nothing runs is no mistake. Python keeps torch's libraries until the kernel ends.
    """

    name = "stop"
    python = "engine.shutdown()"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Nothing to add."""

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Stop, and say so."""
        del args
        running = session.attached
        if running is None:
            session.frontend.write(NOTHING_RUNS)
            return
        if running.url is not None:
            _shut_down(session, running)
            session.frontend.write(f"disconnected: {_left(running)}; %omni start starts one here\n")
            return
        before = running.status()
        _shut_down(session, running)
        session.frontend.write(f"the engine was stopped: {_given_back(before)}; %omni start starts a new one\n")


def _shut_down(session: Session, engine: Engine) -> None:
    """Stop an engine; an interrupt does not stop the stopping.

    Raises:
        InterruptedVerb: Ctrl-C.
    """
    future, server = None, server_of(engine)
    try:
        with interrupts_held():
            future = in_thread(lambda: _end(engine), "omni-stop")
        session.frontend.wait(future, None, None)
        if server is not None:
            session.frontend.write(f"nothing listens on {server.url} any more\n")
    except KeyboardInterrupt:
        with contextlib.suppress(TimeoutError):
            (future or in_thread(lambda: _end(engine), "omni-stop")).result(CANCEL_GRACE_S)
        if engine.url is not None:
            msg = f"interrupted too late: disconnected; {_left(engine)}"
            raise InterruptedVerb(msg) from None
        ended = "is stopped" if engine.status().closed else "is still being stopped"
        msg = f"interrupted too late: the engine {ended}; no engine is running; %omni start starts one"
        raise InterruptedVerb(msg) from None
    finally:
        session.use(None)


def _left(engine: Engine) -> str:
    """What becomes of an engine on a server when this session leaves it."""
    where = f" ({engine.host})" if engine.host is not None and engine.host != engine.url else ""
    return f"the engine at {engine.url}{where} was left as it is, %omni connect {engine.url} connects again"


def _end(engine: Engine) -> None:
    """The engine first: its end is that of every request, so that its server has none to wait for."""
    engine.shutdown()
    end_server(engine)


def _given_back(before: EngineStatus) -> str:
    """What the stages had when they were stopped."""
    held = units.size(held_bytes(before.stages))
    waiting = max((stage.waiting_at_gate for stage in before.stages), default=0)
    requests = waiting + sum(stage.running + stage.queued for stage in before.stages)
    aborted = f"{requests} request{'s were' if requests > 1 else ' was'} aborted, " if requests else ""
    return f"{aborted}{held} of stage memory given back"


@verb
class Restart:
    """Start a stage's workers anew, from the last checkpoint; the way out of FAILED.

    Example: %omni restart 1
    """

    name = "restart"
    gives_orders = True
    python = "await engine.restart(1)"

    def prepare_parser(self, parser: VerbParser) -> None:
        """One stage."""
        parser.add_argument("stage", type=stages, metavar=STAGE, help="id or name of the stage to restart")

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Restart, and say what state the stage is in."""
        picked = session.stage_ids([args.stage])
        if picked is None or len(picked) != 1:
            msg = "omni restart takes one stage; nothing was changed"
            raise ArgumentError(msg)
        session.call(lambda engine: engine.restart(picked[0]), stages=picked)
        now = hints.pick(session.engine.status(), picked)
        lines = [hints.describe(now), *(hints.in_verbs(stage.last_error) for stage in now if stage.last_error)]
        session.frontend.write("\n".join(lines) + "\n")
