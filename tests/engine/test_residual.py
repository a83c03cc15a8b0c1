"""What a process still holds, once all its ranks that one order moves have moved: on its device, not in host memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from omni_notebook.engine.residual import measure_together
from omni_notebook.memory.base import Held
from omni_notebook.protocol import AckMetadata, OmniACK, ResidualBytes, gib

MIB = 1024**2
RSS = 3000 * MIB


def answer(stage_id, device, n_bytes, *, pid=7, graphs=0):
    held = Held(
        total_bytes=n_bytes, scope="process", parts=ResidualBytes(untagged=0, graphs=graphs, other=n_bytes - graphs)
    )
    metadata = AckMetadata(
        source="Platform_X",
        pid=pid,
        device=device,
        residual_bytes=held.total_bytes,
        residual=held.parts,
        rank_residual_gib=gib(n_bytes),
        current_vram_gib=gib(n_bytes),
    )
    return OmniACK(task_id="t", status="SUCCESS", stage_id=stage_id, rank=0, freed_bytes=1, metadata=metadata.to_dict())


def stages(*pids):
    """Each with one rank, which says of its process what it takes of the host."""
    ranks = [SimpleNamespace(pid=pid, process_bytes=RSS) for pid in pids]
    return [
        SimpleNamespace(replicas=[SimpleNamespace(executor=SimpleNamespace(memory=lambda rank=rank: [rank]))])
        for rank in ranks
    ]


def left(ack):
    return {key: ack.metadata[key] for key in ("residual_bytes", "residual", "rank_residual_gib", "current_vram_gib")}


@pytest.mark.parametrize("last", [0, 1])
def test_ranks_of_one_process_on_a_gpu_answer_what_the_last_of_them_saw_the_driver_tell(last):
    first = [2500 * MIB, 700 * MIB] if last else [700 * MIB, 2500 * MIB]
    acks = [answer(n, "cuda:0", n_bytes, graphs=n_bytes // 10) for n, n_bytes in enumerate(first)]
    expected = left(answer(last, "cuda:0", 700 * MIB, graphs=70 * MIB))
    measure_together(acks, stages(7, 7))
    assert [left(ack) for ack in acks] == [expected, expected]


def test_ranks_of_one_process_on_several_devices_keep_their_own_figures():
    acks = [answer(0, "cuda:0", 700 * MIB), answer(1, "cuda:1", 900 * MIB), answer(2, "cpu", 400 * MIB)]
    before = [left(ack) for ack in acks]
    measure_together(acks, stages(7, 7, 7))
    assert [left(ack) for ack in acks] == before


def test_ranks_of_one_process_on_the_cpu_answer_what_the_process_holds_now():
    acks = [answer(0, "cpu", 9000 * MIB), answer(1, "cpu", 5000 * MIB), answer(2, "cpu", 100 * MIB, pid=8)]
    measure_together(acks, stages(7, 7, 8))
    assert [ack.metadata["residual_bytes"] for ack in acks] == [RSS, RSS, 100 * MIB]
    assert acks[0].metadata["rank_residual_gib"] == gib(RSS)
