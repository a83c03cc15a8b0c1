"""A restart that does not come up: the stage is FAILED and holds nothing, its requests have ended; the next serves."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import ConfigError, DeadlineError, StageFailedError
from omni_notebook.executors.mp import executor as mp_executor
from omni_notebook.stages import weights
from tests.engine.engine_helpers import golden, held, until
from tests.engine.faults import state_of
from tests.engine.painting import PAINTER, draw, executing, replicas, stage

if TYPE_CHECKING:
    from pathlib import Path


def resident(engine: AsyncOmni) -> int:
    return sum(tag.resident_bytes for rank in stage(engine).ranks for tag in rank.tags.values())


async def kept(engine: AsyncOmni) -> asyncio.Task[Any]:
    """A request that waits in a painter that was paused meanwhile."""
    with held(engine, PAINTER):
        running = draw(engine, 4)
        await until(lambda: executing(engine))
        waiting = draw(engine, 5)
        await until(lambda: stage(engine).queued == 1)
        pausing = asyncio.create_task(engine.pause_generation(mode="keep", stage_ids=[PAINTER]))
        await until(lambda: str(stage(engine).pause_state) == "PAUSING")
    await pausing
    await running
    return waiting


def test_a_restart_without_its_weights_leaves_nothing_that_runs_and_ends_the_requests(
    painter: AsyncOmni, other_weights: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(other_weights, tmp_path / "mine")

    async def run() -> None:
        await painter.load_weights(PAINTER, folder)
        mine, children = await golden(painter), set(psutil.Process().children())
        waiting = await kept(painter)
        shutil.rmtree(folder)
        with pytest.raises(ConfigError, match="mine"):
            await painter.restart(PAINTER)
        with pytest.raises(StageFailedError, match="mine"):
            await waiting
        assert (state_of(painter), resident(painter)) == ("FAILED", 0)
        assert all(one.executor.ended for one in replicas(painter))
        assert set(psutil.Process().children()) <= children
        shutil.copytree(other_weights, folder)
        await painter.resume_generation()
        await painter.restart(PAINTER)
        assert await golden(painter) == mine

    asyncio.run(run())


def test_a_restart_that_hangs_gives_the_new_ranks_up_and_holds_neither_the_stage_nor_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(engine: AsyncOmni) -> None:
        before, children = await golden(engine), set(psutil.Process().children())
        waiting = await kept(engine)
        with monkeypatch.context() as patch:
            patch.setattr(mp_executor, "WORKER", "tests.executors.echo_worker:HangingWorker")
            patch.setattr(weights, "START_S", 1.0)
            with pytest.raises(DeadlineError, match=r"had not loaded within 1 s.*restart\(1, timeout="):
                await asyncio.wait_for(engine.restart(PAINTER, timeout=0.5), 20)
        with pytest.raises(StageFailedError, match="had not loaded within 1 s"):
            await waiting
        assert state_of(engine) == "FAILED"
        await until(lambda: set(psutil.Process().children()) <= children)
        await engine.resume_generation()
        await engine.restart(PAINTER)
        assert await golden(engine) == before

    with AsyncOmni("demo", executor="mp") as engine:
        asyncio.run(run(engine))
