"""What one rank's orders share: its parts, its books, what is in progress."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.worker.ack import AckBuilder
    from omni_notebook.worker.ballast import Ballast
    from omni_notebook.worker.runner import Synchronizing
    from omni_notebook.worker.weights import Weights


class Done(msgspec.Struct, frozen=True):
    """The last order that committed, so that it can be undone if another rank did not commit.

    `missing`, `lost`: the books about the weights as they were before it.
    """

    task_id: str
    tags: tuple[str, ...]
    level: int
    slept: bool
    missing: frozenset[str]
    lost: bool


@dataclass(slots=True, kw_only=True)
class Rank:
    """One rank's parts and books; `levels` holds every sleeping tag, `cancelled` the orders that should stop.

    `alone`: the stage has no other rank, so that nothing moves with this one.
    """

    pool: MemoryPool
    runner: Synchronizing
    weights: Weights
    ballast: Ballast
    acks: AckBuilder
    alone: bool = False
    levels: dict[str, int] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    done: Done | None = None

    def note(self, task_id: str, tags: tuple[str, ...], level: int, *, slept: bool) -> None:
        """Remember an order that commits now, before the books about the weights change."""
        weights = self.weights
        self.done = Done(task_id, tags, level, slept, weights.missing, weights.lost)

    @property
    def level(self) -> int | None:
        """The level that the sleeping tags are at, decided by those whose contents matter; None = all awake."""
        if not self.levels:
            return None
        tags = self.pool.tags()
        matter = [level for tag, level in self.levels.items() if not tags[tag].recomputable]
        return max(matter or self.levels.values())


def ms_since(started_s: float) -> float:
    """Milliseconds since a `time.perf_counter()` reading."""
    return (time.perf_counter() - started_s) * 1000


def no_such(order: str, task_id: str) -> str:
    """The message for an order that this rank does not know."""
    return f"no {order} {task_id} was prepared on this rank; nothing changed"
