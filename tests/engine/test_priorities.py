"""Who runs first where ranks compute on the processors that answer orders and run the notebook."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.executors.mp.child import NICE
from tests.engine.engine_helpers import golden


def nice_values(pid: int) -> list[int]:
    """Of a process's threads, the main one's first."""
    threads = sorted(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())
    stats = [Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split() for thread in threads]
    return [int(fields[16]) for fields in stats]


def test_ranks_compute_behind_whoever_answers_orders_and_behind_the_notebook() -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    with AsyncOmni("demo", executor="mp") as engine:
        asyncio.run(golden(engine))  # torch's own threads are there then
        pids = [rank.pid or 0 for stage in engine.status().stages for rank in stage.ranks]
        values = [nice_values(pid) for pid in pids]
    assert all(main == ours for main, *_ in values)
    assert all(others.count(ours + NICE) >= 2 for _, *others in values)
    assert set().union(*values) == {ours, ours + NICE}
    assert os.getpriority(os.PRIO_PROCESS, 0) == ours
