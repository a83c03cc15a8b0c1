"""Bringing a stage's scheduler to rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.errors import DeadlineError
from omni_notebook.protocol import PauseMode

if TYPE_CHECKING:
    from omni_notebook.executors.base import RankAnswer
    from omni_notebook.stages.stage import Stage
    from omni_notebook.stages.waiting import CancelToken, Deadline


async def quiesce(
    stage: Stage, mode: PauseMode, reason: str, deadline: Deadline, token: CancelToken
) -> list[RankAnswer]:
    """Close every replica's scheduler for `reason` and wait until nothing is on a device.

    keep: the running batch ends and is delivered, the rest stays. wait: running, queued and in-transit requests end
    first. abort: queued requests get a terminal ABORTED output, the running batch ends and its result is dropped.
    Returns every rank's answer to the barrier; where one is an error the stage is not at rest.

    Raises:
        DeadlineError: not at rest in time; the scheduler stays closed (keep, abort).
        OrderCancelled: the caller went away; likewise.
    """
    if mode == PauseMode.WAIT and not await stage.changed.until(
        lambda: stage.drained and not stage.in_transit(), deadline, token
    ):
        raise DeadlineError(_too_long(stage, "its requests had not all ended", deadline))
    if mode == PauseMode.ABORT:
        for replica in stage.replicas:
            replica.abort_all()
    stage.close(reason)
    if not await stage.changed.until(lambda: stage.at_rest, deadline, token):
        raise DeadlineError(_too_long(stage, "its running batch had not ended", deadline))
    return await stage.call_all("barrier", timeout_s=deadline.left_s())


def _too_long(stage: Stage, what: str, deadline: Deadline) -> str:
    return (
        f"stage {stage.stage_id} did not come to rest within {deadline.seconds:g} s: {what} "
        f"({stage.running} running, {stage.queued} queued, {stage.in_transit()} in transit)"
    )
