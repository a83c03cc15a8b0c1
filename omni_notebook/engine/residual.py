"""What a process still holds after several of its ranks slept in one order."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from omni_notebook.protocol import gib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.protocol import OmniACK
    from omni_notebook.stages.stage import Stage


def measure_together(acks: Sequence[OmniACK], stages: Sequence[Stage]) -> None:
    """Measure the residual of processes that several ranks share again, once all of them have moved.

    Ranks of one process move at the same time, so what the first of them saw left still held the others' memory.
    """
    slept = [ack for ack in acks if ack.metadata["residual_bytes"] is not None]
    ranks_of = Counter(ack.metadata["pid"] for ack in slept)
    shared = {pid for pid, count in ranks_of.items() if count > 1}
    if not shared:
        return
    ranks = [rank for stage in stages for replica in stage.replicas for rank in replica.executor.memory()]
    held = {rank.pid: rank.process_bytes for rank in ranks if rank.pid in shared}
    for ack in slept:
        n_bytes = held.get(ack.metadata["pid"])
        if n_bytes is not None:
            ack.metadata["residual_bytes"] = n_bytes
            ack.metadata["residual"]["other"] = n_bytes
            ack.metadata["rank_residual_gib"] = ack.metadata["current_vram_gib"] = gib(n_bytes)
