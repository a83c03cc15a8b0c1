"""The sleep gate of a stage whose memory arrives: open to those who wait, to nobody else."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from omni_notebook.engine.gates import Gates
from omni_notebook.errors import AsleepError, PausedError, StageFailedError
from omni_notebook.protocol import MemoryState, PauseState


def arriving(**known: object) -> SimpleNamespace:
    state = {"stage_id": 0, "state": MemoryState.WAKING, "level": 1, "pause_state": PauseState.OPEN}
    return SimpleNamespace(**state | {"pause_mode": None, "recoverable": True, "arriving": True} | known)


def admitted(stage: SimpleNamespace, timeout_s: float) -> Gates:
    gates = Gates([stage])
    asyncio.run(gates.admit([0], timeout_s))
    return gates


def test_who_waits_passes_while_memory_arrives_and_is_counted_no_more() -> None:
    gates = admitted(arriving(), 5.0)
    assert (gates.first[0], gates.waiting[0]) == (0, 0)


def test_who_does_not_wait_is_refused() -> None:
    with pytest.raises(AsleepError, match="WAKING"):
        admitted(arriving(), 0.0)


def test_a_wake_whose_memory_does_not_arrive_holds_everyone() -> None:
    with pytest.raises(AsleepError, match="waited"):
        admitted(arriving(arriving=False), 0.01)


def test_a_stage_that_fails_while_memory_arrives_refuses_all() -> None:
    with pytest.raises(StageFailedError):
        admitted(arriving(state=MemoryState.FAILED), 5.0)


def test_a_pause_holds_those_who_wait() -> None:
    with pytest.raises(PausedError):
        admitted(arriving(pause_state=PauseState.PAUSED, pause_mode="keep"), 0.01)
