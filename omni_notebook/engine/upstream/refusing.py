"""What refuses an order over upstream before anything has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.errors import PauseError, StageBusyError
from omni_notebook.protocol import PauseMode, PauseState
from omni_notebook.stages.state_table import Action, Order, decide, refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.engine.upstream.stage import UpStage

START_ANEW = "vllm_omni can not restart a stage: call shutdown() and start the engine anew"


def refuse_state(order: Order, stages: Sequence[UpStage]) -> None:
    """Raise what the state of one of the stages has against an order: of its memory, or of a pause."""
    for stage in stages:
        if decide(order, stage.state, stage.level) == Action.REFUSE:
            raise refusal(order, stage.stage_id, stage.state, stage.level, way_out=START_ANEW)
        if order != Order.WAKE and stage.pause_state in {PauseState.PAUSING, PauseState.PAUSE_FAILED}:
            msg = (
                f"stage {stage.stage_id} is {stage.pause_state}: {order} is refused until the pause holds; call "
                f"pause_generation(mode={str(stage.pause_mode)!r}, stage_ids=[{stage.stage_id}]) again, or "
                "resume_generation(). Nothing changed"
            )
            raise PauseError(msg)


def is_kept(stage: UpStage) -> bool:
    """Whether a pause holds the stage's scheduler closed."""
    paused = stage.pause_state == PauseState.PAUSED
    return paused and (stage.is_ar or stage.pause_mode == PauseMode.KEEP)


def busy(order: Order, stage: UpStage, in_transit: int) -> StageBusyError:
    """The error of a stage that has requests, with how many."""
    msg = (
        f"stage {stage.stage_id} is busy: 0 running, 0 queued, {in_transit} in transit (vllm_omni does not tell where "
        f"a request is); {order} is refused, nothing changed. Call pause_generation(mode='keep', "
        f"stage_ids=[{stage.stage_id}]) first, or sleep(..., mode='keep' | 'wait' | 'abort')"
    )
    return StageBusyError(msg, stage_id=stage.stage_id, running=0, queued=0, in_transit=in_transit)
