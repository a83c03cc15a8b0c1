"""New weights into a stage, and a stage made anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.errors import DeadlineError, NeedsWeightsError, WorkerDiedError
from omni_notebook.protocol import MemoryState, PauseMode
from omni_notebook.stages.lora_orders import bring_back
from omni_notebook.stages.quiesce import quiesce
from omni_notebook.stages.stage import first_error, raise_first
from omni_notebook.stages.transitions import SLEEP, Context
from omni_notebook.stages.waiting import Deadline, OrderCancelled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.executors.base import RankAnswer
    from omni_notebook.stages.stage import Stage

WEIGHTS_REASON = "weights"
FAILED_PATIENCE_S = 2.0
"""What a FAILED stage has on its device is given this long to end."""


async def load_weights(stage: Stage, source: str, version: str | None, context: Context) -> None:
    """Load a checkpoint folder into every rank; the caller has checked state and requests.

    Raises:
        ConfigError: the checkpoint does not fit; the old weights are untouched.
        NeedsWeightsError: a rank failed half way, or another has loaded; a wake reloads the weights from before.
        Exception: what the first rank that failed raised.
    """
    stage.close(WEIGHTS_REASON)
    try:
        raise_first(await quiesce(stage, PauseMode.KEEP, WEIGHTS_REASON, context.deadline, context.token))
        raise_first(await stage.call_all("prepare_weights", source, timeout_s=context.deadline.left_s()))
        answers = await stage.call_all("load_weights", source, version, timeout_s=context.finish_s)
        error = first_error(answers)
        if error is not None:
            await _after_failed_load(stage, answers, error, context)
            if stage.state != MemoryState.NEEDS_WEIGHTS:
                raise error
            raise NeedsWeightsError(_half_loaded(stage, source, answers)) from error
        stage.requeue()
        stage.source, stage.source_version, stage.recoverable = source, version, True
        stage.weight_version = await stage.name_weights([answer.value for answer in answers])
        stage.set_state(MemoryState.AWAKE, None, awake_tags=tuple(stage.tags), reason=f"weights {stage.weight_version}")
        stage.reopen(SLEEP)
    finally:
        stage.reopen(WEIGHTS_REASON)


async def _after_failed_load(
    stage: Stage, answers: Sequence[RankAnswer], error: BaseException, context: Context
) -> None:
    """Nothing changed if no rank has new or broken weights; else no rank keeps its own: never a mix of two."""
    if isinstance(error, DeadlineError | WorkerDiedError):
        stage.fail(error)
        return
    valid = await stage.call_all("weights_valid", timeout_s=context.finish_s)
    loaded = any(answer.error is None for answer in answers)
    if first_error(valid) is None and not loaded and all(answer.value for answer in valid):
        return
    revoked = await stage.call_all("revoke_weights", timeout_s=context.finish_s)
    if first_error((*valid, *revoked)) is not None:
        stage.fail(error)
        return
    stage.close(SLEEP)
    stage.set_state(MemoryState.NEEDS_WEIGHTS, None, reason=f"load_weights failed: {error}")


def _half_loaded(stage: Stage, source: str, answers: Sequence[RankAnswer]) -> str:
    where, error = next((a.where, a.error) for a in answers if a.error is not None)
    return (
        f"{where.title} of stage {stage.stage_id} could not load {source}: {type(error).__name__}: {error}; the stage "
        f"is NEEDS_WEIGHTS. Call load_weights({stage.stage_id}, path), or wake_up([{stage.stage_id}]) to reload the "
        "weights from before"
    )


async def restart(stage: Stage, context: Context) -> None:
    """End a stage's ranks and start new ones from the last checkpoint, with its adapters; its requests run again.

    Ranks in processes of their own are ended at the deadline, whatever they do; a FAILED stage's are soon.

    Raises:
        DeadlineError: the running batch did not end in time, and it runs in this process; nothing changed.
        Exception: what the first rank that did not load raised; the stage is FAILED.
    """
    failed = stage.state == MemoryState.FAILED
    stage.close("restart")
    patience = Deadline(min(FAILED_PATIENCE_S, context.deadline.left_s())) if failed else context.deadline
    try:
        at_rest = await stage.changed.until(lambda: stage.at_rest, patience, context.token)
    except OrderCancelled:
        stage.reopen("restart")
        raise
    if not at_rest and not failed and stage.config.executor_name == "uni":
        stage.reopen("restart")
        msg = f"stage {stage.stage_id} was not restarted: its running batch had not ended; abort it or wait longer"
        raise DeadlineError(msg)
    await stage.restart()
    await bring_back(stage)
