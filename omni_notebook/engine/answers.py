"""What the ranks' answers to an order come to, in words; of stages here or on a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from omni_notebook.protocol import ROLLED_BACK, MemoryState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from omni_notebook.protocol import OmniACK


class Placed(Protocol):
    """A stage, or its status."""

    @property
    def stage_id(self) -> int:
        """Its place in the pipeline."""

    @property
    def state(self) -> MemoryState:
        """Where its memory is."""

    @property
    def level(self) -> int | None:
        """How deep it sleeps."""


def in_words(state: MemoryState, level: int | None) -> str:
    """`ASLEEP (level 2)`, `AWAKE`."""
    return f"{state} (level {level})" if state == MemoryState.ASLEEP and level else str(state)


def failure(order: str, acks: Sequence[OmniACK], stages: Iterable[Placed]) -> str:
    """What failed first, how many more, and where the stages are now; of no `stages` that it is not known."""
    wrong = [ack for ack in acks if not ack.ok]
    states = ", ".join(f"stage {s.stage_id} is {in_words(s.state, s.level)}" for s in stages)
    first = next((ack for ack in wrong if ack.metadata["error_code"] != ROLLED_BACK), wrong[0])
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    now = f"Now: {states}" if states else "Where the stages are now is not known"
    return f"{order} failed: stage {first.stage_id} {first.error_msg}{more}. {now}; all answers are in .acks"
