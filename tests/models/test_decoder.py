from __future__ import annotations

import dataclasses

import pytest
import torch

from omni_notebook.errors import ConfigError
from omni_notebook.models.decoder import Decoder, DecoderConfig
from omni_notebook.models.loaders import load_into, read_config
from omni_notebook.models.tokenizer import TextTokenizer

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
    "tied": dataclasses.replace(SMALL, tie_embeddings=True),
    "qwen2": dataclasses.replace(SMALL, qkv_bias=True),
    "qwen3": dataclasses.replace(SMALL, qk_norm=True, num_kv_heads=1),
}


def _random(config):
    torch.manual_seed(0)
    model = Decoder(config).eval()
    torch.nn.init.normal_(model.model.embed_tokens.weight)  # built without initialisation: a checkpoint fills it
    return model


def _all_at_once(model, ids):
    return model(ids, torch.arange(ids.shape[1])[None])


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@torch.inference_mode()
def test_prefill_and_batched_decode_equal_the_pass_without_a_cache(config):
    model = _random(config)
    lengths, slots = (5, 9, 1), (3, 0, 2)
    sequences = [torch.randint(config.vocab_size, (1, length + 4)) for length in lengths]
    kv = torch.zeros(config.kv_shape(4, 20))
    for ids, length, slot in zip(sequences, lengths, slots, strict=True):
        hidden = model(ids[:, :length], torch.arange(length)[None], kv, torch.tensor([slot]), kv_length=length)
        torch.testing.assert_close(hidden, _all_at_once(model, ids[:, :length]), atol=1e-5, rtol=1e-5)
    for step in range(4):
        places = torch.tensor(lengths)[:, None] + step
        tokens = torch.cat([ids[:, length + step][:, None] for ids, length in zip(sequences, lengths, strict=True)])
        hidden = model(tokens, places, kv, torch.tensor(slots), kv_length=9 + step + 1 if step % 2 else None)
        for row, (ids, length) in enumerate(zip(sequences, lengths, strict=True)):
            wanted = _all_at_once(model, ids[:, : length + step + 1])[:, -1]
            torch.testing.assert_close(hidden[row], wanted, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_slot_used_again_forgets_its_last_owner():
    model = _random(SMALL)
    kv = torch.zeros(SMALL.kv_shape(1, 32))
    long, short = torch.randint(50, (1, 30)), torch.randint(50, (1, 4))
    for ids in (long, short):
        hidden = model(ids, torch.arange(ids.shape[1])[None], kv, torch.tensor([0]))
    torch.testing.assert_close(hidden, _all_at_once(model, short), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_other_slots_keep_their_bytes():
    model = _random(SMALL)
    kv = torch.full(SMALL.kv_shape(3, 8), 7.0)
    model(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), kv, torch.tensor([1]))
    assert torch.all(kv[:, :, [0, 2]] == 7)
    assert torch.all(kv[:, :, 1, 2:] == 7)
    assert not torch.any(kv[:, :, 1, :2] == 7)


def test_built_on_meta_then_filled_it_equals_the_one_built_in_memory(thinker, thinker_folder):
    config = DecoderConfig.from_hf(read_config(thinker_folder))
    with torch.device("meta"):
        model = Decoder(config)
    assert all(value.is_meta for value in model.state_dict().values())
    model.to_empty(device="cpu")
    model.inv_freq.fill_(float("nan"))
    addresses = {name: value.data_ptr() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    model.reset_buffers()
    load_into(model, thinker_folder)
    assert addresses == {n: v.data_ptr() for n, v in [*model.named_parameters(), *model.named_buffers()]}
    ids = torch.tensor([TextTokenizer.load(thinker_folder).encode("a red star above a blue circle")])
    with torch.inference_mode():
        assert torch.equal(_all_at_once(model, ids), _all_at_once(thinker, ids))


def test_on_meta_reset_buffers_waits_until_parameters_have_memory():
    with torch.device("meta"):
        model = Decoder(SMALL)
    for name, value in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(torch.zeros(value.shape)))
    model.reset_buffers()
    assert model.inv_freq.device.type == "cpu"
    torch.testing.assert_close(model.inv_freq[:2], torch.tensor([1.0, 10000 ** (-1 / 8)]))


def test_half_precision_runs_close_to_single(thinker, thinker_folder):
    model = Decoder(DecoderConfig.from_hf(read_config(thinker_folder))).to(torch.bfloat16)
    model.inv_freq = thinker.inv_freq.clone()
    load_into(model, thinker_folder)
    ids = torch.tensor([TextTokenizer.load(thinker_folder).encode("a green ring below a pink heart")])
    with torch.inference_mode():
        half, single = (m.logits(_all_at_once(m, ids))[0, -1] for m in (model, thinker))
    assert half.argmax() == single.argmax()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"vocab_size": "many"}, "vocab_size must be"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 63}, "head_dim"),
        ({"head_dim": None, "num_attention_heads": 3}, "hidden_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling 'llama3'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_scaling 'yarn'"),
        ({"rope_scaling": "linear"}, "rope_parameters"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window 4096"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_a_config_this_decoder_cannot_run_is_refused_by_key(thinker_folder, change, says):
    with pytest.raises(ConfigError, match=says):
        DecoderConfig.from_hf(read_config(thinker_folder) | change)


def test_configs_of_both_transformers_generations_are_read(thinker_folder):
    data = read_config(thinker_folder)
    new = {key: value for key, value in data.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    assert DecoderConfig.from_hf(new).rope_theta == 5000.0
    assert DecoderConfig.from_hf(data | {"rope_scaling": None, "rope_theta": 20.0}).rope_theta == 20.0
    qwen = DecoderConfig.from_hf(data | {"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": False})
    assert qwen.qkv_bias
    assert not qwen.output_bias


def test_a_cache_without_slots_is_refused():
    model = Decoder(SMALL)
    with pytest.raises(ValueError, match="slots"):
        model(torch.tensor([[1]]), torch.tensor([[0]]), torch.zeros(SMALL.kv_shape(1, 4)))
