"""Split models against whole ones: the shares of the ranks, what each reads, and real ranks over gloo."""

from __future__ import annotations

import dataclasses
import signal
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from omni_notebook.errors import ConfigError, OmniError, PeerLostError
from omni_notebook.memory import libc
from omni_notebook.memory.reading import HostReader
from omni_notebook.models.decoder import Decoder, DecoderConfig
from omni_notebook.models.dit import DiT, DiTConfig
from omni_notebook.models.loaders import SINGLE_FILE, load_into, read_config
from omni_notebook.models.parallel import TensorParallel, check_split
from omni_notebook.models.tensor_file import TensorFile
from omni_notebook.worker.group import JoinError
from tests.models.model_rank import ModelRank, run_decoder, run_dit
from tests.rank_processes import Ranks

SMALL = DecoderConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=64,
)
VARIANTS = {
    "llama": SMALL,
    "tied": dataclasses.replace(SMALL, tie_embeddings=True, num_kv_heads=4),
    "biased": dataclasses.replace(SMALL, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qwen3, one key-value head": dataclasses.replace(SMALL, qk_norm=True, num_kv_heads=1),
}
DIT = DiTConfig(
    image_size=8,
    patch_size=2,
    channels=3,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    mlp_size=48,
    plan_vocab_size=11,
    plan_length=5,
    cond_hidden_size=24,
)


def _random(model, folder):
    """Fill a whole model with random values, small biases and gates too; save it; return it."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    save_file(model.state_dict(), folder / SINGLE_FILE)
    return model.eval()


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request):
    started = Ranks(request.param)
    try:
        started.make(ModelRank)
        yield started
        started.call("leave")
    finally:
        started.close()


# ------------------------------------------------------------------------------- without processes


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_parts_of_all_ranks_are_the_whole_and_few_heads_are_shared_by_neighbours(size):
    parts = [TensorParallel(size, rank).part(8, 3) for rank in range(size)]
    assert [feature for part in parts for feature in range(24)[part]] == list(range(24))
    owners = [TensorParallel(size, rank).part(2, 5) for rank in range(size)]
    assert sorted({part.start for part in owners}) == ([0] if size == 1 else [0, 5])
    assert all(part.stop - part.start == (10 if size == 1 else 5) for part in owners)


@pytest.mark.parametrize("size", [2, 4])
def test_queries_meet_the_key_value_head_of_the_whole_model(size):
    config = dataclasses.replace(SMALL, num_heads=8, num_kv_heads=2)
    for rank in range(size):
        slices = Decoder(config, TensorParallel(size, rank)).checkpoint_slices()
        [queries, keys] = [
            range(count)[slices[f"model.layers.0.self_attn.{name}.weight"][0]]
            for name, count in (("q_proj", 8 * 16), ("k_proj", 2 * 16))
        ]
        wanted = {feature // 16 // 4 for feature in queries}
        assert {feature // 16 for feature in keys} == wanted


@pytest.mark.parametrize(
    ("change", "size", "says"),
    [
        ({}, 3, r"num_attention_heads \(4\) can not be split over tensor_parallel_size=3"),
        ({"intermediate_size": 46}, 4, r"intermediate_size \(46\)"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, r"num_key_value_heads \(6\)"),
    ],
)
def test_a_decoder_that_can_not_be_split_is_refused_in_one_line(change, size, says):
    with pytest.raises(ConfigError, match=says) as caught:
        Decoder(dataclasses.replace(SMALL, **change), TensorParallel(size))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "size", "says"),
    [({}, 3, r"num_heads \(4\) can not be split"), ({"mlp_size": 50}, 4, r"mlp_size \(50\)")],
)
def test_a_dit_that_can_not_be_split_is_refused_in_one_line(change, size, says):
    with pytest.raises(ConfigError, match=says):
        DiT(dataclasses.replace(DIT, **change), TensorParallel(size))


def test_a_rank_outside_its_group_and_an_uneven_split_are_refused():
    with pytest.raises(ConfigError, match="rank 2"):
        TensorParallel(2, 2)
    check_split(4, "heads", 2, shared=True)
    with pytest.raises(ConfigError, match=r"heads \(2\)"):
        check_split(4, "heads", 2)


def test_a_rank_by_itself_exchanges_nothing_and_names_no_slices(tmp_path):
    alone = TensorParallel()
    tensor = torch.ones(3)
    assert alone.all_reduce(tensor) is tensor
    assert [alone.any(flag) for flag in (True, False)] == [True, False]
    alone.leave()
    assert Decoder(SMALL).checkpoint_slices() == Decoder(SMALL).checkpoint_wholes() == {}


def test_one_of_several_without_a_group_can_not_exchange():
    with pytest.raises(PeerLostError, match="rank 1 of 2"):
        TensorParallel(2, 1).all_reduce(torch.ones(3))


def test_a_cache_of_all_ranks_holds_each_key_value_head():
    assert [SMALL.kv_shape(3, 8, size)[4] for size in (1, 2, 4)] == [2, 1, 1]


class _Counted:
    """A mapped tensor of a file that counts the bytes of the parts that are asked for."""

    def __init__(self, tensor, counts):
        self._tensor, self._counts = tensor, counts

    def __getitem__(self, index):
        part = self._tensor[index]
        self._counts.append(part.nbytes)
        return part


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["decoder", "dit"])
@pytest.mark.parametrize("reader", [None, HostReader()], ids=["mapped", "straight"])
def test_a_rank_reads_only_its_part_of_the_file(tmp_path, monkeypatch, kind, size, reader):
    config = dataclasses.replace(SMALL, hidden_size=256, intermediate_size=1024, num_heads=16, num_kv_heads=4)
    make = {"decoder": lambda p: Decoder(config, p), "dit": lambda p: DiT(DIT, p)}[kind]
    whole = _random(make(TensorParallel()), tmp_path)
    counts, mapped, read_at = [], TensorFile.mapped, libc.read_at

    def counted_read(*args):
        counts.append(read_at(*args))
        return counts[-1]

    monkeypatch.setattr(TensorFile, "mapped", lambda file, name: _Counted(mapped(file, name), counts))
    monkeypatch.setattr(libc, "read_at", counted_read)
    state = whole.state_dict()
    for rank in range(size):
        model = make(TensorParallel(size, rank))
        slices = model.checkpoint_slices()
        counts.clear()
        load_into(model, tmp_path, reader=reader)
        assert sum(counts) == sum(value.nbytes for value in model.state_dict().values())
        split = sum(value.nbytes for name, value in state.items() if name in slices)
        rest = sum(value.nbytes for name, value in state.items() if name not in slices)
        assert sum(counts) == rest + split // size
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name][slices.get(name, ())])


def test_loading_a_part_keeps_addresses(tmp_path):
    _random(Decoder(SMALL), tmp_path)
    model = Decoder(SMALL, TensorParallel(2, 1))
    before = [parameter.data_ptr() for parameter in model.parameters()]
    load_into(model, tmp_path)
    assert before == [parameter.data_ptr() for parameter in model.parameters()]


def test_a_checkpoint_of_another_size_is_refused_although_the_rank_s_part_would_fit(tmp_path):
    _random(Decoder(dataclasses.replace(SMALL, intermediate_size=96)), tmp_path)
    model = Decoder(SMALL, TensorParallel(2, 0))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)  # as made they are whatever was in memory, NaN among it
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ConfigError, match=r"has shape \(96, 32\), the model needs \(48, 32\)|has shape \(32, 96\)"):
        load_into(model, tmp_path)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


# ------------------------------------------------------------------------------------- real ranks


@pytest.mark.parametrize("name", VARIANTS)
def test_a_split_decoder_equals_the_whole_one_on_every_rank_and_itself_again(ranks, tmp_path, name):
    whole = run_decoder(_random(Decoder(VARIANTS[name]), tmp_path))
    first, again = (ranks.call("run_decoder", VARIANTS[name], tmp_path) for _ in range(2))
    for answer in (*first, *again):
        for mine, reference, rank_0 in zip(answer, whole, first[0], strict=True):
            np.testing.assert_allclose(mine, reference, atol=2e-4, rtol=2e-4)
            assert mine.tobytes() == rank_0.tobytes()


def test_a_split_decoder_in_half_precision_is_the_same_on_every_rank(ranks, tmp_path):
    whole = run_decoder(_random(Decoder(SMALL), tmp_path))
    answers = ranks.call("run_decoder", SMALL, tmp_path, torch.bfloat16)
    for answer in answers:
        for mine, reference, rank_0 in zip(answer, whole, answers[0], strict=True):
            np.testing.assert_allclose(mine, reference, atol=0.5, rtol=0.1)
            assert mine.tobytes() == rank_0.tobytes()


def test_a_split_dit_equals_the_whole_one_on_every_rank_and_itself_again(ranks, tmp_path):
    whole = run_dit(_random(DiT(DIT), tmp_path))
    first, again = (ranks.call("run_dit", DIT, tmp_path) for _ in range(2))
    for answer in (*first, *again):
        np.testing.assert_allclose(answer, whole, atol=2e-4, rtol=2e-4)
        assert answer.tobytes() == first[0].tobytes()


def test_a_sum_depends_neither_on_the_rank_nor_on_the_place_in_the_batch(ranks):
    values = np.random.default_rng(2).standard_normal((ranks.size, 37, 5)).astype(np.float32) * 1000
    answers = ranks.call("all_reduce", [values, *(values[:, row] for row in range(37))])
    for whole, *parts in answers:
        np.testing.assert_allclose(whole, values.sum(0), rtol=1e-4, atol=1e-2)
        assert whole.tobytes() == answers[0][0].tobytes()
        assert whole.tobytes() == b"".join(part.tobytes() for part in parts)


def test_half_types_are_summed_in_single_precision(ranks):
    values = np.array([256.0, 1.0, 1.0, 1.0], dtype=np.float32)[: ranks.size, None]
    wanted = torch.tensor(values.sum()).to(torch.bfloat16)  # step by step in bfloat16 it would stay 256
    assert ranks.call("all_reduce", [values], torch.bfloat16) == [[float(wanted)]] * ranks.size


def test_a_group_is_not_the_default_group_of_its_process(ranks):
    assert ranks.call("leaves_the_default_group_free") == [True] * ranks.size


def test_any_is_true_for_all_ranks_if_it_is_for_one(ranks):
    assert ranks.call("any", [False] * ranks.size) == [False] * ranks.size
    for culprit in range(ranks.size):
        flags = [rank == culprit for rank in range(ranks.size)]
        assert ranks.call("any", flags) == [True] * ranks.size


def test_a_rank_that_dies_or_stops_makes_the_others_raise_in_time():
    for number, patience_s in ((signal.SIGKILL, 5.0), (signal.SIGSTOP, 12.0)):
        ranks = Ranks(3)
        try:
            ranks.make(ModelRank, 6.0)
            ranks.call("any", [False] * 3)
            ranks.signal(1, number)
            started_s = time.monotonic()
            for rank in (0, 2):
                ranks.send(rank, "any", [False] * 3)
            answers = [ranks.receive(rank) for rank in (0, 2)]
            took_s = time.monotonic() - started_s
            assert [type(answer) for answer in answers] == [PeerLostError, PeerLostError]
            assert "rank 0 of 3" in str(answers[0])
            assert "restart" in str(answers[0])
            assert "\n" not in str(answers[0])
            assert took_s < patience_s
            ranks.send(0, "any", [False] * 3)
            assert isinstance(ranks.receive(0, 3.0), PeerLostError)
            ranks.send(0, "leave")
            assert ranks.receive(0, 3.0) is None
        finally:
            ranks.close()


def test_a_rank_that_waits_for_others_in_vain_says_so():
    ranks = Ranks(2)
    try:
        for rank in range(2):
            ranks.send(rank, "make", ModelRank, rank, 2, 2.0)
            assert ranks.receive(rank) is None
        address = ranks.call("open_rendezvous")
        assert address[0].startswith("tcp://127.0.0.1:")
        assert address[1] is None
        ranks.send(0, "join", address[0])
        answer = ranks.receive(0, 20.0)
        assert isinstance(answer, JoinError)
        assert "Nothing was loaded" in str(answer)
        ranks.send(1, "join", "127.0.0.1:5")
        answer = ranks.receive(1)
        assert isinstance(answer, OmniError)
        assert "tcp://host:port" in str(answer)
    finally:
        ranks.close()


def test_the_demo_can_be_split_over_two_and_four(thinker_folder, dit_folder):
    for size in (1, 2, 4):
        DecoderConfig.from_hf(read_config(thinker_folder)).check_parallel(size)
        DiTConfig.from_dict(read_config(dit_folder)).check_parallel(size)
