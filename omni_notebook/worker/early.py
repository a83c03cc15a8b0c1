"""Batches of a rank that begin while a wake still copies."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from omni_notebook.memory.base import ArrivingPool
from omni_notebook.worker.graphs import NO_GRAPHS
from omni_notebook.worker.lane import Lane
from omni_notebook.worker.runner import ArrivingRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from omni_notebook.memory.base import MapReport, RestoreReport
    from omni_notebook.protocol import OmniACK
    from omni_notebook.worker.arriving import Followed
    from omni_notebook.worker.graphs import Recall
    from omni_notebook.worker.rank import Rank


class EarlyBatches:
    """A wake's copies, waited for on a thread of its own, and what runs beside them on the rank's.

    `recall`: what the wake can say of graphs, which belong to the thread of the batches.
    """

    def __init__(self, pool: ArrivingPool, runner: ArrivingRunner) -> None:
        self._pool, self._runner = pool, runner
        self._arrivals: Followed | None = None
        self.recall: Recall = NO_GRAPHS
        self._lane = Lane("wake")

    def begin(self, tags: Collection[str], cancelled: Callable[[], bool]) -> MapReport:
        """Map, and begin to copy what the model needs in the order in which it does; see `ArrivingPool.begin_wake`."""
        order = self._runner.tensors_in_order()
        mapped, self._arrivals = self._pool.begin_wake(tags, order=order, cancelled=cancelled)
        self.recall = self._runner.recall_later()
        return mapped

    def follow(self) -> AbstractContextManager[None]:
        """Around each batch: it follows copies that are on their way."""
        arrivals = self._arrivals
        return contextlib.nullcontext() if arrivals is None else self._runner.arriving(arrivals)

    def finish(self, commit: Callable[[RestoreReport], OmniACK]) -> Future[OmniACK]:
        """Call `commit` once all has come; nothing is committed, and all stays mapped, where a copy failed."""

        def finish() -> OmniACK:
            try:
                return commit(self._pool.finish_wake())
            finally:
                self._arrivals = None

        return self._lane.submit(finish)

    def end(self) -> None:
        """Nothing is on its way any more."""
        self._arrivals = None

    def close(self) -> None:
        """Wait for copies, and end the thread."""
        self._lane.close()


def early_batches(rank: Rank) -> EarlyBatches | None:
    """None, where the pool, the runner or another rank leaves no way to begin early."""
    pool, runner = rank.pool, rank.runner
    if rank.alone and isinstance(pool, ArrivingPool) and isinstance(runner, ArrivingRunner):
        return EarlyBatches(pool, runner)
    return None
