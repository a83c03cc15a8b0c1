"""The largest engine of the demo that this project promises: 4 stages × 2 replicas × 2 ranks, 16 processes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.protocol import GIB
from tests.engine.engine_helpers import collect
from tests.executors.executor_helpers import fds

if TYPE_CHECKING:
    from pathlib import Path

FOUR = """
name: four
stages:
  - {name: thinker, model: demo/thinker}
  - {name: editor, model: demo/thinker}
  - {name: painter, model: demo/dit}
  - {name: second painter, model: demo/dit}
"""
RANKS = 16


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_stages_of_two_replicas_of_two_ranks_draw_sleep_wake_and_leave_nothing(tmp_path: Path) -> None:
    file = tmp_path / "four.yaml"
    file.write_text(FOUR)
    before = fds(), set(psutil.Process().children(recursive=True))
    took: dict[str, float] = {}

    async def timed(what: str, call):
        started = time.monotonic()
        answer = await call
        took[what] = round(time.monotonic() - started, 2)
        return answer

    async def run(engine: AsyncOmni) -> None:
        async def draw() -> list[bytes]:
            return [o.images[0].tobytes() for o in await collect(engine) if o.images]

        pictures = await timed("draw", draw())
        assert len(pictures) == 2
        ram = sum(child.memory_info().rss for child in psutil.Process().children())
        took["RAM GiB"] = round(ram / GIB, 2)
        assert ram < 8 * GIB
        acks = await timed("sleep", engine.sleep(level=2))
        assert len(acks) == RANKS
        assert all(ack.ok and ack.freed_bytes == ack.metadata["expected_bytes"] > 0 for ack in acks)
        assert len({(a.stage_id, a.metadata["replica"], a.rank) for a in acks}) == RANKS
        assert len({ack.metadata["pid"] for ack in acks}) == RANKS
        assert len({ack.task_id for ack in acks}) == 1
        woken = await timed("wake", engine.wake_up())
        assert [ack.ok for ack in woken] == [True] * RANKS
        assert await timed("draw again", draw()) == pictures

    started = time.monotonic()
    with AsyncOmni(file, tensor_parallel_size=2, num_replicas=2) as engine:
        took["start"] = round(time.monotonic() - started, 2)
        assert len(psutil.Process().children()) == RANKS + len(before[1])
        asyncio.run(run(engine))
        started = time.monotonic()
    took["shutdown"] = round(time.monotonic() - started, 2)
    print(took)
    assert (fds(), set(psutil.Process().children(recursive=True))) == before
