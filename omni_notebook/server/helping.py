"""The requests that open what is closed, for whoever reads an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_notebook.protocol import MemoryState, PauseState

if TYPE_CHECKING:
    from omni_notebook.protocol import EngineStatus, StageStatus

_WAKES = frozenset({MemoryState.ASLEEP, MemoryState.PARTLY_AWAKE, MemoryState.NEEDS_WEIGHTS})


def requests_that_help(status: EngineStatus) -> list[dict[str, Any]]:
    """`[{"method": "POST", "path": "/v1/omni/wakeup", "body": {"stage_ids": [0]}}]`; empty if all is open."""
    failed = [stage for stage in status.stages if stage.state is MemoryState.FAILED]
    lost = [stage for stage in status.stages if _is_lost(stage)]
    asleep = [stage for stage in status.stages if stage.state in _WAKES and not _is_lost(stage)]
    paused = [stage for stage in status.stages if stage.pause_state is not PauseState.OPEN]
    helping = [_post("restart", {"stage_id": stage.stage_id}) for stage in failed]
    helping += [_post("weights", {"stage_id": stage.stage_id, "path": "FOLDER"}) for stage in lost]
    if asleep:
        helping.append(_post("wakeup", {"stage_ids": [stage.stage_id for stage in asleep]}))
    if paused:
        helping.append(_post("resume", {}))
    return helping


def _is_lost(stage: StageStatus) -> bool:
    """Whether it needs weights that no checkpoint gives back."""
    return stage.state is MemoryState.NEEDS_WEIGHTS and not stage.recoverable


def _post(order: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"method": "POST", "path": f"/v1/omni/{order}", "body": body}
