"""Adapters on our models: the same as merged weights, row by row, on one rank and on two; and what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_notebook.errors import ConfigError, LoRAError
from omni_notebook.memory.base import LORA
from omni_notebook.memory.cpu import CpuPool
from omni_notebook.models.decoder import Decoder
from omni_notebook.models.dit import DiT
from omni_notebook.models.loaders import SINGLE_FILE
from omni_notebook.models.lora import (
    CONFIG_FILE,
    TENSORS_FILE,
    check_fits,
    check_rank,
    read_adapter,
    shapes,
    targets,
)
from omni_notebook.protocol import LoRARequest
from omni_notebook.worker.lora import Loras
from tests import adapters
from tests.models.model_rank import ModelRank, run_decoder, run_dit
from tests.models.test_parallel import DIT, VARIANTS
from tests.rank_processes import Ranks

KINDS = {
    "decoder": (Decoder, VARIANTS["llama"], run_decoder),
    "decoder with biases": (Decoder, VARIANTS["biased"], run_decoder),
    "dit": (DiT, DIT, lambda model: [run_dit(model)]),
}
ROWS = {"decoder": 2, "decoder with biases": 2, "dit": 3}


class Case:
    """A kind of model: seeded weights, the layers that an adapter can change, what running it gives, its rows."""

    def __init__(self, kind):
        self.make, self.config, self.run = KINDS[kind]
        self.rows = ROWS[kind]
        self.known = shapes(lambda: self.make(self.config))
        generator = torch.Generator().manual_seed(1)
        shape_of = {name: value.shape for name, value in self.make(self.config).state_dict().items()}
        self.weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shape_of.items()}

    def model(self, weights=None):
        model = self.make(self.config)
        model.load_state_dict(weights or self.weights)
        return model.eval()


@pytest.fixture(params=KINDS)
def case(request):
    return Case(request.param)


@pytest.fixture
def pool(tmp_path):
    pool = CpuPool(spill_dir=str(tmp_path))
    yield pool
    pool.close()


def put(loras, folder, lora_id):
    loras.prepare(LoRARequest(f"a{lora_id}", lora_id, str(folder)))
    loras.commit(lora_id)


def near(one, other):
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(one, other, strict=True))


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# -------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("stabilised", [False, True], ids=["alpha / r", "alpha / root of r"])
def test_an_adapter_is_the_same_as_merged_weights(case, pool, tmp_path, stabilised):
    tensors = adapters.matrices(case.known)
    folder = adapters.write(tmp_path / "a", tensors, use_rslora=stabilised)
    scale = adapters.ALPHA / (math.sqrt(adapters.RANK) if stabilised else adapters.RANK)
    model = case.model()
    base = case.run(model)
    loras = Loras(model, pool, slots=2, max_rank=8)
    put(loras, folder, 3)
    with loras.applied([3] * case.rows):
        changed = case.run(model)
    wanted = case.run(case.model(adapters.merged(case.weights, tensors, scale)))
    assert near(changed, wanted)
    assert not near(changed, base)
    assert equal(case.run(model), base)


def test_names_and_parameters_of_the_base_model_stay_and_its_hooks_go_with_the_last_adapter(case, pool, tmp_path):
    model = case.model()
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    loras = Loras(model, pool, slots=2, max_rank=8)
    assert LORA not in pool.tags()
    put(loras, adapters.write(tmp_path / "a", adapters.matrices(case.known)), 1)
    assert LORA in pool.tags()
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    loras.remove(1)
    assert LORA not in pool.tags()
    assert not any(module._forward_hooks for module in model.modules())


def test_rows_with_two_adapters_and_with_none_share_a_batch_and_none_sees_the_others(case, pool, tmp_path):
    model, rows = case.model(), case.rows
    base = case.run(model)
    loras = Loras(model, pool, slots=2, max_rank=8)
    alone = {0: base}
    for lora_id in (1, 2):
        put(loras, adapters.write(tmp_path / str(lora_id), adapters.matrices(case.known, seed=lora_id)), lora_id)
        with loras.applied([lora_id] * rows):
            alone[lora_id] = case.run(model)
    assert not near(alone[1], alone[2])
    for ids in ([0, 1, 2][:rows], [2, 0, 1][:rows], [1, 2, 1][:rows]):
        with loras.applied(ids):
            mixed = case.run(model)
        for row, lora_id in enumerate(ids):
            picked = [part[row] for part in mixed], [part[row] for part in alone[lora_id]]
            assert near(*picked)
            assert lora_id or equal(*picked)


def test_guidance_doubles_the_rows_and_each_half_uses_its_adapters(pool, tmp_path):
    model = DiT(DIT).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    loras = Loras(model, pool, slots=2, max_rank=8)
    put(loras, adapters.write(tmp_path / "a", adapters.matrices(shapes(lambda: DiT(DIT)))), 1)
    x = torch.randn(2, *DIT.image_shape, generator=generator)
    plan = torch.randint(DIT.plan_vocab_size, (2, DIT.plan_length), generator=generator)
    times = torch.tensor([0.3, 0.6])
    with torch.inference_mode(), loras.applied([0, 1]):
        single = model(x, times, plan)
        double = model(torch.cat([x, x]), torch.cat([times, times]), torch.cat([plan, plan]))
    assert torch.allclose(double, torch.cat([single, single]), atol=1e-5)


def test_patterns_give_single_layers_their_own_rank_and_factor(case, tmp_path, pool):
    first, second = sorted(case.known)[:2]
    tensors = adapters.matrices({first: case.known[first]}, rank=2) | adapters.matrices(
        {second: case.known[second]}, seed=2
    )
    patterns = {"rank_pattern": {first: 2}, "alpha_pattern": {second.rpartition(".")[2]: 1.5, "never.there": 7}}
    adapter = read_adapter(adapters.write(tmp_path / "a", tensors, **patterns))
    alphas = {path: 1.5 if path.endswith(second.rpartition(".")[2]) else adapters.ALPHA for path in (first, second)}
    assert adapter.pairs[first].scale == alphas[first] / 2
    assert adapter.pairs[second].scale == alphas[second] / adapters.RANK
    assert {path: pair.rank for path, pair in adapter.pairs.items()} == {first: 2, second: adapters.RANK}


@pytest.mark.parametrize("config", [{"target_modules": ".*q"}, {"target_modules": None}, {"target_modules": ["x"]}])
def test_the_tensors_decide_about_the_layers_whatever_target_modules_says(case, tmp_path, config):
    folder = adapters.write(tmp_path / "a", adapters.matrices(case.known, name=".default"), **config)
    assert set(read_adapter(folder).pairs) == set(case.known)


def test_half_types_are_taken_as_they_are(case, tmp_path):
    tensors = {name: value.to(torch.bfloat16) for name, value in adapters.matrices(case.known).items()}
    adapter = read_adapter(adapters.write(tmp_path / "a", tensors))
    path, target = next(iter(targets(case.make(case.config)).items()))
    a, b = target.share(adapter.pairs[path])
    key = f"base_model.model.{path}.lora_"
    assert torch.equal(a, tensors[f"{key}A.weight"].float())
    assert torch.equal(b, (tensors[f"{key}B.weight"].float() * 2.0).T)


# ------------------------------------------------------------------------------------------ slots


def test_more_adapters_than_slots_take_turns_by_least_recent_use_and_come_back_as_they_were(case, pool, tmp_path):
    model, rows = case.model(), case.rows
    loras = Loras(model, pool, slots=2, max_rank=8)
    for lora_id in (1, 2, 3):
        put(loras, adapters.write(tmp_path / str(lora_id), adapters.matrices(case.known, seed=lora_id)), lora_id)
    assert set(loras._slots) == {1, 2}

    def drawn(lora_id):
        with loras.applied([lora_id] * rows):
            return case.run(model)

    first = {lora_id: drawn(lora_id) for lora_id in (1, 2)}
    drawn(1)
    first[3] = drawn(3)
    assert set(loras._slots) == {1, 3}  # 2 was the least recently used
    assert set(loras._hosted) == {2}
    assert all(equal(drawn(lora_id), first[lora_id]) for lora_id in (2, 1, 3, 2))
    loras.pin(1)
    for lora_id in (2, 3, 2, 3):
        assert equal(drawn(lora_id), first[lora_id])
        assert 1 in loras._slots
    with pytest.raises(LoRAError, match="no slot is left"), loras.applied([2, 3]):
        raise AssertionError
    loras.pin(3)
    with pytest.raises(LoRAError, match="no slot is left"):
        loras.pin(2)
    loras.unpin(3)
    assert equal(drawn(2), first[2])


def test_an_adapter_that_is_not_there_is_never_silently_off(case, pool):
    loras = Loras(case.model(), pool, slots=2, max_rank=8)
    with pytest.raises(LoRAError, match="adapter 7 is not on this rank"), loras.applied([0, 7]):
        raise AssertionError


def test_an_adapter_with_other_layers_takes_more_memory_and_all_of_it_survives_both_levels(case, pool, tmp_path):
    model, rows = case.model(), case.rows
    loras = Loras(model, pool, slots=2, max_rank=8)
    half = sorted(case.known)[: len(case.known) // 2]
    put(loras, adapters.write(tmp_path / "1", adapters.matrices({path: case.known[path] for path in half})), 1)
    span = pool.tags()[LORA].span_bytes
    put(loras, adapters.write(tmp_path / "2", adapters.matrices(case.known, seed=2)), 2)
    assert pool.tags()[LORA].span_bytes > span

    def drawn():
        drawings = []
        for lora_id in (1, 2):
            with loras.applied([lora_id] * rows):
                drawings += case.run(model)
        return drawings

    before = drawn()
    for level in (1, 2):
        prepared = pool.prepare_sleep(level)
        assert prepared.backup[LORA] == "spill"
        assert pool.commit_sleep().freed[LORA] == pool.tags()[LORA].span_bytes
        pool.map_restore()
        pool.commit_wake()
        assert equal(drawn(), before)


# ----------------------------------------------------------------------------------------- two ranks


@pytest.fixture(scope="module")
def two():
    started = Ranks(2)
    try:
        started.make(ModelRank)
        yield started
        started.call("leave")
    finally:
        started.close()


def test_two_ranks_give_what_one_gives_and_read_their_own_parts(case, pool, tmp_path, two):
    save_file(case.weights, tmp_path / SINGLE_FILE)
    folders = [adapters.write(tmp_path / str(i), adapters.matrices(case.known, seed=i)) for i in (1, 2)]
    model = case.model()
    loras = Loras(model, pool, slots=2, max_rank=8)
    for lora_id, folder in enumerate(folders, start=1):
        put(loras, folder, lora_id)
    ids = [2, 1, 0][: case.rows]
    with loras.applied(ids):
        whole = case.run(model)
    answers = two.call(
        "run_adapted", case.make.__name__, case.config, tmp_path, [str(folder) for folder in folders], ids
    )
    for parts, bytes_of_pool in answers:
        assert near(parts, whole)
        assert bytes_of_pool < sum(info.used_bytes for info in pool.tags().values())
    assert equal(answers[0][0], answers[1][0])


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is no LoRA"),
        ({"use_dora": True}, r"use_dora=True \(DoRA\)"),
        ({"bias": "lora_only"}, "bias='lora_only' is not supported"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"alora_invocation_tokens": [3, 4]}, r"alora_invocation_tokens=\[3, 4\]"),
        ({"use_qalora": True}, r"use_qalora=True \(QALoRA\)"),
        ({"layer_replication": [[0, 1]]}, r"layer_replication=\[\[0, 1\]\]"),
        ({"trainable_token_indices": [1]}, r"trainable_token_indices=\[1\]"),
        ({"target_parameters": ["experts"]}, r"target_parameters=\['experts'\]"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq' changed the base model's weights"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' changed the base model's weights"),
        ({"r": None}, "r must be a number above 0, not None"),
        ({"r": 0}, "r must be a number above 0, not 0"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number above 0, not 'x'"),
        ({"lora_alpha": math.nan}, "lora_alpha must be a number above 0, not nan"),
        ({"r": 8}, r"no pair of the rank 8 that adapter_config\.json says"),
        ({"rank_pattern": ["q"]}, r"rank_pattern=\['q'\] is no table"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern: '\(' is no pattern"),
        ({"alpha_pattern": {"q": -1}}, r"alpha_pattern\['q'\] must be a number above 0, not -1"),
    ],
    ids=str,
)
def test_a_config_that_is_not_plain_lora_is_refused_by_the_keys_name(case, tmp_path, changes, says):
    folder = adapters.write(tmp_path / "a", adapters.matrices(case.known), **changes)
    with pytest.raises(ConfigError, match=says) as caught:
        read_adapter(folder)
    assert CONFIG_FILE in str(caught.value)
    assert "\n" not in str(caught.value)


PATH = "base_model.model.layer.lora_"
GOOD = {f"{PATH}A.weight": torch.ones(4, 6), f"{PATH}B.weight": torch.ones(5, 4)}


def changed(**parts):
    renamed = {f"{PATH}{key}.weight": value for key, value in parts.items()}
    return {name: value for name, value in {**GOOD, **renamed}.items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, "holds no tensor"),
        (changed(A=None), "layer has no lora_A"),
        (changed(B=None), "layer has no lora_B"),
        (changed(B=torch.ones(5, 3)), r"layer has lora_A \(4, 6\) and lora_B \(5, 3\)"),
        (changed(A=torch.ones(6)), r"layer\.lora_A\.weight is float32 \(6,\), not a matrix"),
        (changed(A=torch.ones(4, 6, dtype=torch.int64)), r"is int64 \(4, 6\), not a matrix"),
        (changed(A=torch.full((4, 6), math.nan)), r"layer\.lora_A\.weight holds NaN or infinite values"),
        (changed(B=torch.full((5, 4), math.inf)), r"layer\.lora_B\.weight holds NaN or infinite values"),
        ({**GOOD, f"{PATH}A.default.weight": torch.ones(4, 6)}, "is there twice"),
        ({**GOOD, "base_model.model.emb.lora_embedding_A": torch.ones(4, 6)}, r"emb\.lora_embedding_A adapts an embed"),
        ({**GOOD, "base_model.model.layer.lora_magnitude_vector": torch.ones(5)}, "lora_magnitude_vector is no LoRA"),
        ({**GOOD, "base_model.model.lm_head.weight": torch.ones(5, 4)}, r"lm_head\.weight is no LoRA matrix"),
        ({"layer.lora_A.weight": torch.ones(4, 6)}, r"layer\.lora_A\.weight is no LoRA matrix"),
    ],
)
def test_a_tensor_that_is_no_half_of_a_pair_is_refused_by_name(tmp_path, tensors, says):
    folder = adapters.write(tmp_path / "a", tensors)
    with pytest.raises(ConfigError, match=says) as caught:
        read_adapter(folder)
    assert TENSORS_FILE in str(caught.value)


@pytest.mark.parametrize("cut", [4, 200, -5], ids=["no header", "half a header", "a short body"])
def test_a_truncated_file_is_refused(tmp_path, cut):
    folder = adapters.write(tmp_path / "a", GOOD)
    data = (folder / TENSORS_FILE).read_bytes()
    (folder / TENSORS_FILE).write_bytes(data[:cut])
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        read_adapter(folder)


@pytest.mark.parametrize("text", ["{", "[1]"], ids=["no JSON", "no object"])
def test_a_broken_config_is_refused(tmp_path, text):
    folder = adapters.write(tmp_path / "a", GOOD)
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"adapter_config\.json: (cannot be read as JSON|holds no JSON object)"):
        read_adapter(folder)


@pytest.mark.parametrize("missing", [None, CONFIG_FILE, TENSORS_FILE])
def test_a_missing_folder_or_file_is_refused_by_name(tmp_path, missing):
    if missing is not None:
        (adapters.write(tmp_path / "a", GOOD) / missing).unlink()
    with pytest.raises(ConfigError, match="no such adapter folder" if missing is None else missing):
        read_adapter(tmp_path / "a")


def test_a_layer_that_the_model_does_not_have_and_one_of_another_shape_are_named(case, tmp_path):
    path, (out, into) = next(iter(sorted(case.known.items())))
    strange = read_adapter(adapters.write(tmp_path / "a", adapters.matrices({"nowhere.q": (4, 4)})))
    with pytest.raises(ConfigError, match=r"the model has no layer nowhere\.q that an adapter can change"):
        check_fits(strange, case.known)
    wide = read_adapter(adapters.write(tmp_path / "b", adapters.matrices({path: (out, into + 1)})))
    with pytest.raises(ConfigError, match=rf"{path} has lora_A \(4, {into + 1}\).*needs \(r, {into}\) and \({out}, r"):
        check_fits(wide, case.known)


def test_the_output_head_is_no_place_for_an_adapter(tmp_path):
    assert "lm_head" not in shapes(lambda: Decoder(VARIANTS["llama"]))


def test_too_large_a_rank_names_the_option_that_allows_it(case, tmp_path):
    adapter = read_adapter(adapters.write(tmp_path / "a", adapters.matrices(case.known)))
    check_rank(adapter, 4)
    with pytest.raises(ConfigError, match=r"rank 4, more than max_lora_rank=3; start .* max_lora_rank=4 or more"):
        check_rank(adapter, 3)


def test_a_refused_adapter_changes_nothing(case, pool, tmp_path):
    model = case.model()
    loras = Loras(model, pool, slots=2, max_rank=3)
    base = case.run(model)
    with pytest.raises(ConfigError, match="max_lora_rank"):
        loras.prepare(LoRARequest("a", 1, str(adapters.write(tmp_path / "a", adapters.matrices(case.known)))))
    with pytest.raises(KeyError):
        loras.commit(1)
    assert pool.tags() == {}
    assert equal(case.run(model), base)


def test_values_that_the_models_type_can_not_hold_are_refused(case, tmp_path, pool):
    model = case.make(case.config).to(torch.float16)
    tensors = {name: value * 1e5 for name, value in adapters.matrices(case.known).items()}
    loras = Loras(model, pool, slots=2, max_rank=8)
    with pytest.raises(ConfigError, match=r"does not fit the range of torch\.float16"):
        loras.prepare(LoRARequest("a", 1, str(adapters.write(tmp_path / "a", tensors))))


def test_the_digest_is_of_both_files(case, tmp_path):
    folder = adapters.write(tmp_path / "a", adapters.matrices(case.known))
    digest = read_adapter(folder).digest
    assert read_adapter(folder).digest == digest
    (folder / CONFIG_FILE).write_text(json.dumps(adapters.config(lora_alpha=3)), encoding="utf-8")
    assert read_adapter(folder).digest != digest
    adapters.write(folder, {k: -v for k, v in load_file(folder / TENSORS_FILE).items()})
    assert read_adapter(folder).digest != digest
