"""Wakes beside which requests begin: their outputs wait for the commit, and are thrown away if there is none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from omni_notebook.errors import DeadlineError
from omni_notebook.executors.base import RankAnswer
from omni_notebook.memory.base import TransitionCancelledError
from omni_notebook.protocol import MemoryState
from omni_notebook.stages.replica import Replica
from omni_notebook.stages.stage import first_error
from omni_notebook.stages.waiting import Deadline

if TYPE_CHECKING:
    from omni_notebook.protocol import WakeTask
    from omni_notebook.stages.stage import Stage
    from omni_notebook.stages.transitions import Context


class Committed(NamedTuple):
    """The ranks' answers to a commit; `late`: what they answer ACKs with instead, where the deadline called it off."""

    answers: list[RankAnswer]
    late: DeadlineError | None = None


def may_begin_early(stage: Stage, task: WakeTask, reason: str) -> bool:
    """Whether requests wait for nothing but this wake, of all of a level 1, and its rank can let them begin early."""
    if not stage.arrives or task.tags is not None or (stage.state, stage.level) != (MemoryState.ASLEEP, 1):
        return False
    only = all(replica.closed_by == {reason} for replica in stage.replicas)
    return only and bool(stage.queued or stage.at_gate())


async def commit_beside(stage: Stage, task_id: str, reason: str, context: Context) -> Committed:
    """Commit a wake that is still copying; requests begin meanwhile. Without a commit they are queued as before.

    Raises:
        Exception: a bug; the stage is closed, and what began is withheld for good.
    """
    (replica,) = (one for one in stage.replicas if isinstance(one, Replica))
    calling = replica.executor.call("commit_wake", task_id, timeout_s=context.finish_s)
    committing = asyncio.create_task(calling)  # its order goes out before that of any batch
    replica.withhold()
    late, good = False, False
    try:
        stage.open_early()
        stage.reopen(reason)
        await asyncio.wait({committing}, timeout=context.deadline.left_s())
        late = not committing.done()
        if late:
            stage.cancel_order(task_id)
        answers = await committing
        good = first_error(answers) is None
    finally:
        stage.arriving = False
        if not good:
            stage.close(reason)
        replica.release(committed=good)
    if good:
        return Committed(answers)
    return await _queue_again(stage, answers, context, late=late)


async def _queue_again(stage: Stage, answers: list[RankAnswer], context: Context, *, late: bool) -> Committed:
    """What began is begun again later; its batch reads memory that must not go before it has ended."""
    rest = Deadline(context.finish_s)
    if not await stage.changed.until(lambda: stage.at_rest, rest):
        error = DeadlineError(f"stage {stage.stage_id}: a batch had not ended {rest.seconds:g} s after its wake failed")
        return Committed([RankAnswer(answer.where, None, error) for answer in answers])
    stage.requeue()
    if late and isinstance(first_error(answers), TransitionCancelledError):
        return Committed(answers, DeadlineError(f"the wake had not ended after {context.deadline.seconds:g} s"))
    return Committed(answers)
