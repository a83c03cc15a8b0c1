"""One stage's sleep and wake: two steps over all ranks, all or nothing.

Each function runs under the stage's order lock. Whatever happens it leaves a named state, and every rank an ACK.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from omni_notebook.errors import DeadlineError, OmniError, WorkerDiedError
from omni_notebook.memory.base import TransitionCancelledError
from omni_notebook.protocol import ROLLED_BACK, MemoryState, OmniACK, PauseMode, SleepTask, WakeTask
from omni_notebook.stages.arriving import commit_beside, may_begin_early
from omni_notebook.stages.quiesce import quiesce
from omni_notebook.stages.stage import first_error
from omni_notebook.stages.state_table import Action, Order, decide
from omni_notebook.stages.waiting import OrderCancelled, acquire
from omni_notebook.worker.ack import error_ack, source_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from omni_notebook.executors.base import RankAnswer
    from omni_notebook.stages.stage import Stage
    from omni_notebook.stages.waiting import CancelToken, Deadline
    from omni_notebook.worker.reports import WakeOutlook

SLEEP = "sleep"
GRACE_S = 5.0
"""A step that must not be left half done may outlast the order's deadline by this much."""
ABORT_S = 5.0
"""A rank that does not answer an abort within this is given up: the stage has FAILED."""


class RolledBackError(OmniError):
    """A rank may not stay where it is, because another one failed."""

    error_code = ROLLED_BACK


@dataclass(slots=True, frozen=True)
class Context:
    """What bounds an order."""

    deadline: Deadline
    token: CancelToken

    @property
    def finish_s(self) -> float:
        """Seconds for a step that has to end."""
        return self.deadline.left_s() + GRACE_S


@dataclass(slots=True, frozen=True)
class _Before:
    state: MemoryState
    level: int | None
    awake_tags: tuple[str, ...]

    def back(self, stage: Stage, reason: str) -> None:
        stage.set_state(self.state, self.level, awake_tags=self.awake_tags, reason=reason)
        if self.state == MemoryState.AWAKE:
            stage.reopen(SLEEP)


def _before(stage: Stage) -> _Before:
    return _Before(stage.state, stage.level, stage.awake_tags)


async def whole(stage: Stage, task_id: str, running: Awaitable[list[OmniACK]]) -> list[OmniACK]:
    """A transition's ACKs; a bug in it fails the stage instead of leaving it in between."""
    try:
        return await running
    except Exception as error:  # noqa: BLE001  (whatever it is, the stage gets a named state)
        stage.fail(error)
        return _all_errors(stage, task_id, error)


# -------------------------------------------------------------------------------------------- sleep


async def sleep_stage(stage: Stage, task: SleepTask, mode: PauseMode | None, context: Context) -> list[OmniACK]:
    """Put one stage to sleep; the caller has checked that the state table and the requests allow it."""
    order = Order.SLEEP_1 if task.level == 1 else Order.SLEEP_2
    action = decide(order, stage.state, stage.level)
    if action == Action.NOOP:
        return _acks(stage, task.task_id, await stage.call_all("noop", task.task_id, timeout_s=context.finish_s))
    if action == Action.DROP_BACKUP:
        return await _drop_backup(stage, task, context)
    return await _fall_asleep(stage, task, mode, context)


async def _drop_backup(stage: Stage, task: SleepTask, context: Context) -> list[OmniACK]:
    answers = await stage.call_all("drop_backup", task, timeout_s=context.finish_s)
    acks = _acks(stage, task.task_id, answers)
    if first_error(answers) is None:
        stage.recoverable = all(ack.metadata["recoverable"] for ack in acks)
        stage.set_state(MemoryState.ASLEEP, 2, awake_tags=(), reason="backup dropped")
    return acks


async def _fall_asleep(stage: Stage, task: SleepTask, mode: PauseMode | None, context: Context) -> list[OmniACK]:
    before = _before(stage)
    stage.set_state(MemoryState.FALLING_ASLEEP, task.level, reason=f"sleep level {task.level}")
    context.token.on_cancel(lambda: stage.cancel_order(task.task_id))
    started_s = time.perf_counter()
    try:
        answers = await _come_to_rest(stage, mode or PauseMode.KEEP, context)
    except (OmniError, OrderCancelled) as error:
        before.back(stage, f"sleep did not begin: {error}")
        return _all_errors(stage, task.task_id, _plain(error, "sleep"))
    if first_error(answers) is not None:
        before.back(stage, f"sleep did not begin: {first_error(answers)}")
        return _rolled_back(stage, task.task_id, answers)
    task = msgspec.structs.replace(task, quiesce_ms=(time.perf_counter() - started_s) * 1000)
    answers = await stage.call_all("prepare_sleep", task, timeout_s=context.deadline.left_s())
    culprit = _why_not(answers, context, "sleep")
    if culprit is not None:
        return await _roll_back(stage, task.task_id, "abort_sleep", before, answers, context)
    return await _commit_sleep(stage, task, before, context)


async def _come_to_rest(stage: Stage, mode: PauseMode, context: Context) -> list[RankAnswer]:
    if not await acquire(stage.pause_lock, context.deadline, context.token):
        msg = f"stage {stage.stage_id}: a pause was in progress for {context.deadline.seconds:g} s"
        raise DeadlineError(msg)
    try:
        return await quiesce(stage, mode, SLEEP, context.deadline, context.token)
    finally:
        stage.pause_lock.release()


async def _commit_sleep(stage: Stage, task: SleepTask, before: _Before, context: Context) -> list[OmniACK]:
    answers = await stage.call_all("commit_sleep", task.task_id, timeout_s=context.finish_s)
    if first_error(answers) is not None:
        return await _undo(stage, task.task_id, before, answers, context)
    acks = _acks(stage, task.task_id, answers)
    stage.requeue()
    stage.recoverable = all(ack.metadata["recoverable"] for ack in acks)
    level = max(ack.metadata["level"] or task.level for ack in acks)
    stage.set_state(MemoryState.ASLEEP, level, awake_tags=(), reason=f"asleep at level {level}")
    return acks


# --------------------------------------------------------------------------------------------- wake


async def wake_stage(stage: Stage, task: WakeTask, context: Context) -> list[OmniACK]:
    """Wake one stage, or some of its tags; the caller has checked that the state table allows it."""
    if _nothing_to_wake(stage, task):
        return _acks(stage, task.task_id, await stage.call_all("noop", task.task_id, timeout_s=context.finish_s))
    before = _before(stage)
    prepare = "begin_wake" if may_begin_early(stage, task, SLEEP) else "prepare_wake"
    stage.set_state(MemoryState.WAKING, stage.level, reason="wake")
    context.token.on_cancel(lambda: stage.cancel_order(task.task_id))
    answers = await stage.call_all(prepare, task, timeout_s=context.deadline.left_s())
    culprit = _why_not(answers, context, "wake")
    if culprit is not None:
        return await _roll_back(stage, task.task_id, "abort_wake", before, answers, context)
    return await _commit_wake(stage, task, before, [a.value for a in answers], context)


def _nothing_to_wake(stage: Stage, task: WakeTask) -> bool:
    order = Order.WAKE if task.reload else Order.WAKE_NO_RELOAD
    if decide(order, stage.state, stage.level) == Action.NOOP:
        return True
    if task.tags is None or stage.state == MemoryState.NEEDS_WEIGHTS:
        return False
    return not set(task.tags) & (set(stage.tags) - set(stage.awake_tags))


async def _commit_wake(
    stage: Stage, task: WakeTask, before: _Before, outlooks: Sequence[WakeOutlook], context: Context
) -> list[OmniACK]:
    outlook = _together(outlooks)
    if outlook.arriving:
        answers, late = await commit_beside(stage, task.task_id, SLEEP, context)
    else:
        answers, late = await stage.call_all("commit_wake", task.task_id, timeout_s=context.finish_s), None
    if first_error(answers) is not None:
        acks = await _undo(stage, task.task_id, before, answers, context)
        return acks if late is None else _all_errors(stage, task.task_id, late)
    acks = _acks(stage, task.task_id, answers)
    state = _state_after(outlook)
    level = None if outlook.all_awake else acks[0].metadata["level"]
    stage.set_state(state, level, awake_tags=outlook.awake_tags, reason="woken")
    if outlook.all_awake:
        stage.recoverable = stage.reproducible
    if state == MemoryState.AWAKE:
        stage.reopen(SLEEP)
    return acks


def _together(outlooks: Sequence[WakeOutlook]) -> WakeOutlook:
    """What the ranks' outlooks come to: the weights are valid if every rank's are."""
    return msgspec.structs.replace(outlooks[0], weights_valid=all(outlook.weights_valid for outlook in outlooks))


def _state_after(outlook: WakeOutlook) -> MemoryState:
    if not outlook.all_awake:
        return MemoryState.PARTLY_AWAKE
    return MemoryState.AWAKE if outlook.weights_valid else MemoryState.NEEDS_WEIGHTS


# ------------------------------------------------------------------------------------------- shared


def _why_not(answers: Sequence[RankAnswer], context: Context, order: str) -> BaseException | None:
    """Why a prepared order must be rolled back, or None."""
    error = first_error(answers)
    if error is None and context.token.cancelled:
        return TransitionCancelledError(f"the {order} was cancelled before it committed")
    return error


async def _roll_back(
    stage: Stage, task_id: str, abort: str, before: _Before, answers: Sequence[RankAnswer], context: Context
) -> list[OmniACK]:
    """Abort on every rank; each answers ERROR, its own or the culprit's."""
    stage.cancel_order(task_id)
    aborted = await stage.call_all(abort, task_id, timeout_s=ABORT_S)
    culprit = _culprit(answers)
    stuck = first_error(aborted)
    if stuck is not None:
        stage.fail(stuck)
    else:
        why = "cancelled" if culprit is None or context.token.cancelled else str(culprit.error)
        before.back(stage, f"rolled back: {why}")
    return _rolled_back(stage, task_id, answers)


async def _undo(
    stage: Stage, task_id: str, before: _Before, answers: Sequence[RankAnswer], context: Context
) -> list[OmniACK]:
    """A rank did not commit: the others take the order back if they can, else the stage has FAILED.

    With a rank that is gone or says nothing there is no taking back: its part of the stage stays unknown.
    """
    lost = next((a.error for a in answers if isinstance(a.error, DeadlineError | WorkerDiedError)), None)
    stuck = lost or first_error(await stage.call_all("undo", task_id, timeout_s=context.finish_s))
    if stuck is not None:
        stage.fail(first_error(answers) or stuck)
    else:
        stage.requeue()  # a rank that slept and woke again has an empty KV cache
        before.back(stage, f"taken back: {first_error(answers)}")
    return _rolled_back(stage, task_id, answers)


def _culprit(answers: Sequence[RankAnswer]) -> RankAnswer | None:
    return next((answer for answer in answers if answer.error is not None), None)


def _rolled_back(stage: Stage, task_id: str, answers: Sequence[RankAnswer]) -> list[OmniACK]:
    """An ERROR ACK a rank: its own error, or whose fault it is that it may not stay where it is."""
    culprit = _culprit(answers)
    innocent: OmniError = TransitionCancelledError("cancelled before it committed; memory is as before")
    if culprit is not None:
        kept = "called off" if stage.state == MemoryState.FAILED else "rolled back"
        innocent = RolledBackError(f"{kept}, because {culprit.where.title} answered: {culprit.error}")
    return [_error(stage, task_id, answer, answer.error or innocent) for answer in answers]


def _acks(stage: Stage, task_id: str, answers: Sequence[RankAnswer]) -> list[OmniACK]:
    return [a.value if a.error is None else _error(stage, task_id, a, a.error) for a in answers]


def _all_errors(stage: Stage, task_id: str, error: BaseException) -> list[OmniACK]:
    ranks = [where for replica in stage.replicas for where in replica.executor.ranks]
    return [error_ack(task_id, where, error, **_known(stage)) for where in ranks]


def _error(stage: Stage, task_id: str, answer: RankAnswer, error: BaseException) -> OmniACK:
    return error_ack(task_id, answer.where, error, **_known(stage))


def _known(stage: Stage) -> dict[str, Any]:
    return {"source": source_of(stage.device_name), "weight_version": stage.weight_version}


def _plain(error: BaseException, order: str) -> BaseException:
    if isinstance(error, OrderCancelled):
        return TransitionCancelledError(f"the {order} was cancelled before it committed; nothing changed")
    return error
