"""Real workers on the demo's weights, several ranks over gloo: exact, asleep and awake, and when a rank fails."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from omni_notebook.config import StageConfig, load_pipeline
from omni_notebook.errors import ConfigError, PeerLostError
from omni_notebook.models.loaders import SINGLE_FILE
from omni_notebook.protocol import RankId
from omni_notebook.stages.diffusion import DiffusionModel
from omni_notebook.worker.batches import BatchCancelledError
from omni_notebook.worker.group import JoinError
from omni_notebook.worker.reports import WorkerSpec
from omni_notebook.worker.worker import Worker
from tests.rank_processes import Ranks
from tests.worker.worker_rank import WorkerRank

THINKER, PAINTER = 0, 1


@contextlib.contextmanager
def _loaded(ranks, stage_id, *known):
    ranks.make(WorkerRank, stage_id, *known)
    try:
        ranks.call("load")
        yield
    finally:
        ranks.answers("shutdown")


@pytest.fixture(scope="module")
def alone():
    """What one rank by itself makes of both stages: {stage id: golden}."""
    ranks = Ranks(1)
    try:
        goldens = {}
        for stage_id in (THINKER, PAINTER):
            with _loaded(ranks, stage_id):
                [goldens[stage_id]] = ranks.call("golden")
        return goldens
    finally:
        ranks.close()


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request):
    started = Ranks(request.param)
    yield started
    started.close()


@pytest.fixture(params=[THINKER, PAINTER], ids=["thinker", "painter"])
def stage(ranks, request):
    """Loaded ranks of one stage."""
    with _loaded(ranks, request.param):
        yield request.param


def _bytes(golden):
    return [part.tobytes() if isinstance(part, np.ndarray) else part for part in golden]


def _same(one, other):
    return all(_bytes(a) == _bytes(b) for a, b in zip(one, other, strict=True))


def test_split_output_is_that_of_one_rank_the_same_on_all_and_the_same_again(ranks, stage, alone):
    first, again = (ranks.call("golden") for _ in range(2))
    assert _same([first[0]] * 2 * ranks.size, [*first, *again])
    if stage == THINKER:
        assert first[0][0] == alone[THINKER][0]
        for mine, reference in zip(first[0][1:], alone[THINKER][1:], strict=True):
            np.testing.assert_allclose(mine, reference, atol=1e-3, rtol=1e-3)
    else:
        difference = np.abs(first[0][0].astype(int) - alone[PAINTER][0].astype(int))
        print(f"{ranks.size} ranks: pixels differ by at most {difference.max()}, {np.mean(difference > 0):.4%} differ")
        assert difference.max() <= 2


def test_every_rank_draws_the_same_tokens_at_a_temperature(ranks):
    with _loaded(ranks, THINKER):
        tokens = [golden[0] for golden in ranks.call("golden", 0.9)]
    assert tokens == [tokens[0]] * ranks.size


def test_ranks_hold_their_part_and_take_one_name_for_the_weights(ranks, stage):
    file = Path(load_pipeline("demo").stages[stage].model) / SINGLE_FILE
    whole_bytes = file.stat().st_size * 2  # float16 in the file, float32 in memory
    sizes = [n_bytes for _, n_bytes in ranks.call("parameters")]
    assert sizes == [sizes[0]] * ranks.size
    assert sizes[0] < 0.8 * whole_bytes
    ranks.call("set_weight_version", "v7")
    assert [ack.metadata["weight_version"] for ack in ranks.call("noop", "t")] == ["v7"] * ranks.size


def test_after_sleep_at_both_levels_the_output_is_bit_identical(ranks, stage):
    golden, (addresses, _) = ranks.call("golden"), ranks.call("parameters")[0]
    for level in (1, 2, 1):
        ranks.call("sleep", f"sleep {level}", level)
        acks = ranks.call("commit_sleep", f"sleep {level}")
        assert [ack.rank for ack in acks] == list(range(ranks.size))
        for ack in acks:
            assert ack.status == "SUCCESS"
            assert ack.freed_bytes > 0
            assert ack.metadata["recoverable"] is True
        outlooks = ranks.call("wake", f"wake {level}")
        assert all(outlook.all_awake and outlook.weights_valid for outlook in outlooks)
        assert [ack.status for ack in ranks.call("commit_wake", f"wake {level}")] == ["SUCCESS"] * ranks.size
        assert ranks.call("weights_checksum_holds") == [True] * ranks.size
        assert ranks.call("parameters")[0][0] == addresses
        assert _same(golden, ranks.call("golden"))


def test_a_prepared_sleep_that_is_aborted_leaves_the_output(ranks, stage):
    golden = ranks.call("golden")
    ranks.call("sleep", "aborted", 1)
    ranks.call("abort_sleep", "aborted")
    assert _same(golden, ranks.call("golden"))


def test_a_batch_cancelled_on_one_rank_stops_on_all_at_the_same_step_and_the_next_one_runs(ranks):
    with _loaded(ranks, PAINTER):
        golden = ranks.call("golden")
        for culprit in range(ranks.size):
            answers = ranks.answers("draw_until_cancelled", culprit, 0.2)
            assert [type(answer) for answer in answers] == [BatchCancelledError] * ranks.size
            assert _same(golden, ranks.call("golden"))


def test_a_rank_that_fails_within_a_batch_lets_the_others_fail_at_once(ranks):
    wanted = [MemoryError if rank == 1 else PeerLostError for rank in range(ranks.size)]
    with _loaded(ranks, PAINTER):
        ranks.call("break_next_batch", 1)
        started_s = time.monotonic()
        answers = ranks.answers("golden")
        assert time.monotonic() - started_s < 10.0
        assert [type(answer) for answer in answers] == wanted
        assert [type(answer) for answer in ranks.answers("golden")] == [PeerLostError] * ranks.size
        ranks.call("sleep", "still", 1)  # control orders need no other rank
        assert [ack.status for ack in ranks.call("commit_sleep", "still")] == ["SUCCESS"] * ranks.size
    with _loaded(ranks, PAINTER):  # as a restart does
        ranks.call("golden")


@pytest.mark.parametrize(("number", "patience_s"), [(signal.SIGKILL, 5.0), (signal.SIGSTOP, 15.0)])
def test_the_others_raise_when_a_rank_is_gone_or_hangs_during_a_batch(number, patience_s):
    ranks = Ranks(2)
    try:
        ranks.make(WorkerRank, PAINTER, 8.0)
        ranks.call("load")
        for rank in range(2):
            ranks.send(rank, "draw", 1000)
        time.sleep(0.5)
        started_s = time.monotonic()
        ranks.signal(1, number)
        answer = ranks.receive(0)
        took_s = time.monotonic() - started_s
        assert isinstance(answer, PeerLostError)
        assert "restart(stage_id)" in str(answer)
        assert took_s < patience_s
        for method in ("ping", "memory", "shutdown", "shutdown"):
            ranks.send(0, method)
            assert not isinstance(ranks.receive(0, 5.0), Exception)
    finally:
        ranks.close()


def test_the_stage_s_config_says_how_many_ranks(monkeypatch):
    monkeypatch.setattr(StageConfig, "_refuse_what_does_not_run_yet", lambda _self: None, raising=False)
    config = msgspec.structs.replace(load_pipeline("demo").stages[PAINTER], tensor_parallel_size=2)
    worker = Worker(WorkerSpec(where=RankId(1, 0, 0), config=config))
    assert worker.open_rendezvous().startswith("tcp://127.0.0.1:")
    worker.shutdown()
    uneven = msgspec.structs.replace(config, tensor_parallel_size=3)
    for refused in (lambda: Worker(WorkerSpec(where=RankId(1, 0, 0), config=uneven)), lambda: DiffusionModel(uneven)):
        with pytest.raises(ConfigError, match="can not be split over tensor_parallel_size=3"):
            refused()


def test_a_rank_of_several_that_has_not_joined_can_not_load():
    config = load_pipeline("demo").stages[THINKER]
    worker = Worker(WorkerSpec(where=RankId(0, 0, 1), config=config, tensor_parallel_size=2))
    with pytest.raises(JoinError, match="call join"):
        worker.load()
    worker.shutdown()


def test_one_rank_by_itself_opens_and_joins_nothing():
    worker = Worker(WorkerSpec(where=RankId(0, 0, 0), config=load_pipeline("demo").stages[THINKER]))
    assert worker.open_rendezvous() is None
    worker.join("")
    worker.load()
    worker.shutdown()


@pytest.mark.parametrize(("stage_id", "says"), [(THINKER, "num_attention_heads"), (PAINTER, "num_heads")])
def test_a_stage_that_can_not_be_split_is_refused_before_anything_is_built(stage_id, says):
    config = load_pipeline("demo").stages[stage_id]
    with pytest.raises(ConfigError, match=rf"{says} \(4\) can not be split over tensor_parallel_size=3"):
        Worker(WorkerSpec(where=RankId(stage_id, 0, 0), config=config, tensor_parallel_size=3))
