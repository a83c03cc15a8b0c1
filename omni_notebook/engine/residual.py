"""What a process still holds after several of its ranks slept in one order."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from omni_notebook.protocol import gib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.protocol import OmniACK
    from omni_notebook.stages.stage import Stage

_TOGETHER = ("residual_bytes", "residual", "rank_residual_gib", "current_vram_gib")


def measure_together(acks: Sequence[OmniACK], stages: Sequence[Stage]) -> None:
    """Give the ranks that share a process and a device one residual: what is left once all of them have moved.

    They move at the same time, so what the first of them saw left still held the others' memory. On a CPU the process
    is measured again; a GPU's ranks move one after the other, and the least that one of them saw is what the last saw.
    """
    sharing: defaultdict[tuple[int, str], list[OmniACK]] = defaultdict(list)
    for ack in acks:
        if ack.metadata["residual_bytes"] is not None:
            sharing[ack.metadata["pid"], ack.metadata["device"]].append(ack)
    for (pid, device), several in sharing.items():
        if len(several) == 1:
            continue
        if device == "cpu":
            _measure_again(several, _rss_bytes(pid, stages))
        else:
            _take_the_last(several)


def _rss_bytes(pid: int, stages: Sequence[Stage]) -> int | None:
    ranks = [rank for stage in stages for replica in stage.replicas for rank in replica.executor.memory()]
    return next((rank.process_bytes for rank in ranks if rank.pid == pid), None)


def _measure_again(acks: Sequence[OmniACK], n_bytes: int | None) -> None:
    if n_bytes is None:
        return
    for ack in acks:
        ack.metadata["residual_bytes"] = n_bytes
        ack.metadata["residual"]["other"] = n_bytes
        ack.metadata["rank_residual_gib"] = ack.metadata["current_vram_gib"] = gib(n_bytes)


def _take_the_last(acks: Sequence[OmniACK]) -> None:
    last = min(acks, key=lambda ack: ack.metadata["residual_bytes"]).metadata
    known = {key: last[key] for key in _TOGETHER}
    for ack in acks:
        ack.metadata.update(known, residual=dict(known["residual"]))
