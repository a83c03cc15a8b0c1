"""DESIGN §5's table of orders and states, each cell from a real engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from omni_notebook.errors import AsleepError, NeedsWeightsError, OmniError, StageFailedError
from omni_notebook.protocol import LoRARequest, MemoryState
from omni_notebook.stages.state_table import TABLE, Order, decide
from tests import adapters
from tests.engine.engine_helpers import collect, fault

if TYPE_CHECKING:
    from pathlib import Path

    from omni_notebook.engine.async_omni import AsyncOmni

AT_1, AT_2 = "ASLEEP (level 1)", "ASLEEP (level 2)"
STATES = ("AWAKE", AT_1, AT_2, "PARTLY_AWAKE", "NEEDS_WEIGHTS", "FAILED")
SLEEP_1, SLEEP_2, WAKE, MAP_ONLY = "sleep(1)", "sleep(2)", "wake", "wake(reload=False)"
GENERATE, LOAD, RESTART, LORA = "generate", "load_weights", "restart", "a change of LoRA adapters"
HELD = AsleepError
# order → for each state: the state after it, or the error that refuses it (state unchanged), or HELD
EXPECTED: dict[str, tuple[object, ...]] = {
    SLEEP_1: (AT_1, "no-op", AsleepError, AT_1, NeedsWeightsError, StageFailedError),
    SLEEP_2: (AT_2, AT_2, "no-op", AT_2, AT_2, StageFailedError),
    WAKE: ("no-op", "AWAKE", "AWAKE", "AWAKE", "AWAKE", StageFailedError),
    MAP_ONLY: ("no-op", "AWAKE", "NEEDS_WEIGHTS", "AWAKE", "no-op", StageFailedError),
    GENERATE: ("AWAKE", HELD, HELD, HELD, NeedsWeightsError, StageFailedError),
    LOAD: ("AWAKE", AsleepError, AsleepError, AsleepError, "AWAKE", StageFailedError),
    LORA: ("AWAKE", AsleepError, AsleepError, AsleepError, NeedsWeightsError, StageFailedError),
    RESTART: ("AWAKE",) * 6,
}
CELLS = [(order, state, EXPECTED[order][i]) for order in EXPECTED for i, state in enumerate(STATES)]


def state_of(engine: AsyncOmni) -> str:
    stage = engine.status().stages[0]
    return f"ASLEEP (level {stage.level})" if stage.state == "ASLEEP" else str(stage.state)


async def bring_to(engine: AsyncOmni, state: str) -> None:
    """Stage 0 into a state, by real orders."""
    if state == AT_1:
        await engine.sleep([0], level=1)
    elif state in {AT_2, "NEEDS_WEIGHTS"}:
        await engine.sleep([0], level=2)
    elif state == "PARTLY_AWAKE":
        await engine.sleep([0], level=1)
        await engine.wake_up([0], tags=["weights"])
    elif state == "FAILED":
        gone = RuntimeError("the driver is gone")
        with fault(engine, 0, "commit_sleep", gone), fault(engine, 0, "undo", gone):
            acks = await engine.sleep([0], level=1, raise_on_error=False)
        assert [ack.status for ack in acks] == ["ERROR"]
    if state == "NEEDS_WEIGHTS":
        await engine.wake_up([0], reload=False)
    assert state_of(engine) == state


async def give(engine: AsyncOmni, order: str, adapter: LoRARequest) -> list[bool]:
    """Carry an order out; the ACKs' no-op flags."""
    folder = engine.status().stages[0].model
    if order in {SLEEP_1, SLEEP_2}:
        acks = await engine.sleep([0], level=1 if order == SLEEP_1 else 2)
    elif order in {WAKE, MAP_ONLY}:
        acks = await engine.wake_up([0], reload=order == WAKE)
    else:
        acks = []
        if order == GENERATE:
            outputs = await collect(engine, output_modalities="text", admission_timeout=0)
            assert outputs[-1].finished
            assert outputs[-1].text
        elif order == LOAD:
            await engine.load_weights(0, folder)
        elif order == LORA:
            assert await engine.add_lora(adapter)
            assert await engine.list_loras() == [1]
            assert await engine.remove_lora(1)
        else:
            await engine.restart(0)
    assert all(ack.status == "SUCCESS" for ack in acks)
    return [ack.metadata["noop"] for ack in acks]


@pytest.mark.parametrize(("order", "state", "expected"), CELLS, ids=[f"{o}-on-{s}" for o, s, _ in CELLS])
def test_cell(engine: AsyncOmni, order: str, state: str, expected: object, tmp_path: Path) -> None:
    tensors = adapters.matrices(engine._core.stages[0].model.adaptable)
    adapter = LoRARequest("style", 1, str(adapters.write(tmp_path / "style", tensors)))

    async def run() -> None:
        await bring_to(engine, state)
        if isinstance(expected, type) and issubclass(expected, OmniError):
            with pytest.raises(expected) as caught:
                await give(engine, order, adapter)
            assert state_of(engine) == state
            assert await engine.list_loras() == []
            assert "call " in str(caught.value)
        else:
            noops = await give(engine, order, adapter)
            assert state_of(engine) == (state if expected == "no-op" else expected)
            if order in {SLEEP_1, SLEEP_2, WAKE, MAP_ONLY}:
                assert noops == [expected == "no-op"]

    asyncio.run(run())


def test_the_table_has_every_order_and_state() -> None:
    assert set(TABLE) == set(Order)
    for order in Order:
        for state in MemoryState:
            if state not in {MemoryState.FALLING_ASLEEP, MemoryState.WAKING}:
                assert decide(order, state, 1) is not None
