"""CUDA graphs beside a wake that still copies: one pass without them follows the copies, and each is checked when used.

A whole rank on the demo's weights, over a GPU in host memory and graphs whose replays run the model again.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omni_notebook.memory import cuda
from omni_notebook.protocol import SleepTask, WakeTask
from omni_notebook.worker import worker
from omni_notebook.worker.graphs import Graphs
from omni_notebook.worker.model_runner import ModelRunner
from tests.engine.arriving_worker import fake_pool
from tests.memory.fake_cuda import MIB
from tests.worker.fake_graphs import Counted, FakeCuda
from tests.worker.worker_rank import TOKENS, WorkerRank

THINKER, PAINTER = 0, 1
STEPS = 6
"""Of a picture that `WorkerRank` draws."""


class Rank(WorkerRank):
    """One whose model runs by graphs; `calls` tells how it ran."""

    @property
    def runner(self):
        return self._worker._runner

    @property
    def calls(self):
        return self.runner._graphs._run.calls

    def fall_asleep(self):
        self.prepare_sleep(SleepTask(task_id="s", level=1))
        assert self.commit_sleep("s").ok
        self.calls.clear()

    def golden_beside_a_wake(self):
        """As `golden`; the wake commits behind the first batch."""
        assert self.begin_wake(WakeTask(task_id="w")).arriving
        execute, acks = self._worker.execute, []

        def execute_and_commit(batch):
            answers = execute(batch)
            if not acks:
                acks.append(self.commit_wake("w").result(10))
            return answers

        self._worker.execute = execute_and_commit
        try:
            return self.golden(), acks[0]
        finally:
            del self._worker.execute


@pytest.fixture
def rank(request, monkeypatch):
    def graphed(self, run, _config):
        fake = FakeCuda()
        self._graphs = Graphs(Counted(run, fake), "cpu", cuda=fake)
        return self._graphs

    monkeypatch.setattr(worker, "create_pool", fake_pool)
    monkeypatch.setattr(cuda, "PART_BYTES", MIB)
    monkeypatch.setattr(ModelRunner, "_graphed", graphed)
    rank = Rank(0, 1, request.param)
    rank.load()
    yield rank
    rank.shutdown()


def on(stage_id):
    return pytest.mark.parametrize("rank", [stage_id], indirect=True)


def are_same(one, other):
    return all(np.array_equal(mine, its) for mine, its in zip(one, other, strict=True))


@on(THINKER)
def test_text_that_begins_beside_a_wake_goes_on_as_ever(rank):
    """No check writes to the cache of sequences that live: their later states attend to all that they fed."""
    golden = rank.golden()
    rank.fall_asleep()
    (tokens, *states), ack = rank.golden_beside_a_wake()
    assert (tokens, are_same(states, golden[1:])) == (golden[0], True)
    assert ack.metadata["cuda_graph_recalled"] is None
    assert ack.metadata["note"] == "each CUDA graph is checked at its next use"
    assert rank.calls == ["replay", "itself"] + ["replay"] * (TOKENS - 2)  # prefills never go by graphs


@on(PAINTER)
def test_a_picture_that_begins_beside_a_wake_goes_by_graphs_from_its_second_step_on(rank):
    golden = rank.golden()
    rank.fall_asleep()
    drawn, _ack = rank.golden_beside_a_wake()
    assert are_same(drawn, golden)
    assert rank.calls == ["itself", "replay", "itself"] + ["replay"] * (STEPS - 2)
    rank.calls.clear()
    assert are_same(rank.golden(), golden)
    assert rank.calls == ["replay"] * STEPS


@on(PAINTER)
def test_a_graph_is_not_used_before_a_whole_pass_has_followed_the_copies(rank):
    golden = rank.golden()
    rank.fall_asleep()
    fails, blocks = [True], rank.runner.model.blocks

    def stop(*_known):
        if fails.pop():
            msg = "no room"
            raise RuntimeError(msg)

    hook = blocks[2].register_forward_pre_hook(stop)
    rank.begin_wake(WakeTask(task_id="w"))
    with pytest.raises(RuntimeError, match="no room"):
        rank.draw()
    hook.remove()
    assert are_same([rank.draw()], golden)
    assert rank.calls[:2] == ["itself", "itself"]
    assert rank.commit_wake("w").result(10).ok


@on(PAINTER)
@pytest.mark.parametrize("found", ["by a batch", "by the next wake"])
def test_a_graph_that_gives_other_bytes_after_an_early_wake_is_found_before_anybody_sees_them(rank, found):
    golden = rank.golden()
    rank.fall_asleep()
    (made,) = rank.runner._graphs._graphs.values()
    made.graph.recorded.clear()
    with torch.inference_mode():
        made.output.fill_(7.0)
    if found == "by a batch":
        drawn, _ack = rank.golden_beside_a_wake()
        assert are_same(drawn, golden)
        assert rank.calls == ["itself"] * STEPS
    else:
        rank.begin_wake(WakeTask(task_id="w"))
        assert rank.commit_wake("w").result(10).ok
    rank.fall_asleep()
    if found == "by a batch":
        rank.begin_wake(WakeTask(task_id="next"))
        ack = rank.commit_wake("next").result(10)
    else:
        rank.prepare_wake(WakeTask(task_id="next"))
        ack = rank.commit_wake("next")
    assert ack.metadata["cuda_graph_recalled"] is False
    assert "gave other bytes than the model" in ack.metadata["note"]
    assert are_same(rank.golden(), golden)
