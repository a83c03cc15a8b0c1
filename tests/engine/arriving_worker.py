"""A rank whose pool is ours for CUDA over a GPU in host memory, where a wake's copies can be followed by batches."""

from __future__ import annotations

from typing import Any

from omni_notebook.memory import cuda
from omni_notebook.worker import worker
from tests.engine.faulty_worker import FaultyWorker
from tests.memory.fake_cuda import MIB
from tests.memory.fake_ranges import OwnMachine

ARRIVING = "tests.engine.arriving_worker:ArrivingWorker"
STEPS = ("begin_wake", "finish_wake")
"""Steps of the pool that can be made to fail, beside those of every faulty worker."""


def fake_pool(_device: str, **_known: Any) -> Any:
    """A pool on a machine of its own; torch computes on what is the GPU's memory as it does on a CPU's."""
    pool: Any = OwnMachine(256 * MIB).pool()
    pool.device = "cpu"
    pool.reader = lambda: None
    return pool


class ArrivingWorker(FaultyWorker):
    """A faulty worker on such a machine."""

    def __init__(self, spec: Any) -> None:
        worker.create_pool = fake_pool
        cuda.PART_BYTES = MIB  # a segment holds a few layers
        super().__init__(spec)
        for step in STEPS:
            setattr(self._pool, step, self._perhaps(step, getattr(self._pool, step)))
