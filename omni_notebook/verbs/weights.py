"""`weights`: other weights into a stage, in place."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omni_notebook.errors import ArgumentError, OmniError
from omni_notebook.protocol import PauseState
from omni_notebook.verbs import hints
from omni_notebook.verbs.interrupts import InterruptedVerb
from omni_notebook.verbs.parsing import FOLDER, STAGE, VerbParser, seconds, stages
from omni_notebook.verbs.registry import verb

if TYPE_CHECKING:
    import argparse

    from omni_notebook.protocol import StageStatus
    from omni_notebook.verbs.session import Session


@verb
class Weights:
    """Load a checkpoint folder into a stage that is awake, in place, on every rank.

    A stage with requests is refused unless a pause holds them: %omni pause 1 --mode keep before, %omni resume after;
    what waited then runs on the new weights. Tensors of a model in this notebook go in by the Python call, which takes
    model.state_dict() or an iterator of (name, tensor) in place of the folder.
    Example: %omni weights 1 runs/step-200 --version step-200
    """

    name = "weights"
    gives_orders = True
    python = "await engine.load_weights(1, 'folder', version='v2')"

    def prepare_parser(self, parser: VerbParser) -> None:
        """One stage, a folder, a name, a bound."""
        parser.add_argument("stage", type=stages, metavar=STAGE, help="id or name of the stage")
        parser.add_argument("path", metavar=FOLDER, help="the checkpoint: config.json is not read, *.safetensors are")
        parser.add_argument(
            "--version", metavar="NAME", help="what ACKs, status and outputs call these weights; else their checksum"
        )
        parser.add_argument("--timeout", type=seconds, metavar="S", help="most seconds to wait, lock and quiescing too")

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Load, and say which weights the stage has now, and what still waits."""
        picked = session.stage_ids([args.stage])
        if picked is None or len(picked) != 1:
            msg = "omni weights takes one stage; nothing was changed"
            raise ArgumentError(msg)
        started_s = time.perf_counter()
        try:
            session.call(
                lambda engine: engine.load_weights(picked[0], args.path, args.version, args.timeout), stages=picked
            )
        except InterruptedVerb as interrupt:
            msg = f"{interrupt}; %omni status shows which weights it has"
            raise InterruptedVerb(msg) from None
        except OmniError:
            raise
        except Exception as error:
            [stage] = hints.pick(session.engine.status(), picked)
            msg = f"weights were not loaded: {type(error).__name__}: {error}; {hints.describe([stage])}"
            raise OmniError(msg) from error
        took_ms = (time.perf_counter() - started_s) * 1000
        [stage] = hints.pick(session.engine.status(), picked)
        session.frontend.write(_result(stage, took_ms))


def _result(stage: StageStatus, took_ms: float) -> str:
    """`stage 1 (painter) is AWAKE with weights v2, loaded in 12 ms`, and what a pause still holds."""
    line = f"{hints.named_state(stage)} with weights {stage.weight_version}, loaded in {took_ms:.0f} ms"
    if stage.pause_state is PauseState.OPEN:
        return f"{line}\n"
    held = ", ".join(f"{count} {word}" for count, word in _waiting(stage) if count)
    return f"{line}{'; ' if held else ''}{held}: {hints.call_that_helps(stage)}\n"


def _waiting(stage: StageStatus) -> tuple[tuple[int, str], ...]:
    return (
        (stage.running, "begun"),
        (stage.queued, "queued"),
        (stage.in_transit, "in transit"),
        (stage.waiting_at_gate, "at the gate"),
    )
