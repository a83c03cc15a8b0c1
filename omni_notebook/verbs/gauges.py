"""How far a start, a sleep or a wake is, read from the waiting thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.verbs import hints
from omni_notebook.verbs.frontend import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.protocol import StageStatus
    from omni_notebook.verbs.engine_api import Engine


class StartGauge:
    """Takes what the constructor reports from whatever thread; the latest report wins."""

    def __init__(self) -> None:
        self.cancelled = False
        self._latest = Progress("starting")

    def report(self, label: str, fraction: float) -> None:
        """The engine's `progress` callback.

        Raises:
            StartCancelled: someone cancelled; the constructor gives up.
        """
        if self.cancelled:
            raise StartCancelled
        self._latest = Progress(label, fraction)

    def __call__(self) -> Progress:
        """The latest report."""
        return self._latest


class StartCancelled(Exception):  # noqa: N818  (an order, not an error)
    """Raised inside the engine's constructor to end a start that is no longer wanted."""


class MemoryGauge:
    """The share of the stages' memory that has left (`falling`) or come back, by what is resident now."""

    def __init__(self, stages: Sequence[int] | None, *, falling: bool) -> None:
        self.engine: Engine | None = None
        self._stages = stages
        self._falling = falling

    def __call__(self) -> Progress:
        """What is resident now of what is mapped."""
        picked = [] if self.engine is None else hints.pick(self.engine.status(), self._stages)
        mapped = mapped_bytes(picked)
        label = ", ".join(f"stage {stage.stage_id} {stage.state}" for stage in picked)
        if not mapped:
            return Progress(label)
        share = min(1.0, resident_bytes(picked) / mapped)
        return Progress(label, 1.0 - share if self._falling else share)


def resident_bytes(stages: Sequence[StageStatus]) -> int:
    """Bytes of the stages' pools that are physically there."""
    return sum(tag.resident_bytes for stage in stages for rank in stage.ranks for tag in rank.tags.values())


def held_bytes(stages: Sequence[StageStatus]) -> int:
    """What the stages' pools have there; what a rank's process holds where its engine does not tell pools."""
    return sum(
        sum(tag.resident_bytes for tag in rank.tags.values()) if rank.tags else rank.process_bytes or 0
        for stage in stages
        for rank in stage.ranks
    )


def mapped_bytes(stages: Sequence[StageStatus]) -> int:
    """Bytes that the stages' pools span."""
    return sum(tag.mapped_bytes for stage in stages for rank in stage.ranks for tag in rank.tags.values())
