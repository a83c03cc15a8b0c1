"""A small Llama with random weights, written as a Hugging Face folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from omni_notebook.models.decoder import Decoder, DecoderConfig

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_llama(folder: Path, seed: int, **changes: object) -> Path:
    """Write one; its tokens never end a text early, because the end token's row of the head is zero."""
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(DecoderConfig.from_hf(config))
    state = {
        name: torch.ones(value.shape) if value.dim() == 1 else torch.randn(value.shape, generator=generator) * 0.2
        for name, value in model.state_dict().items()
    }
    state["lm_head.weight"][config["eos_token_id"]] = 0.0
    save_file(state, folder / "model.safetensors")
    return folder


def of_a_type_that_does_not_load(folder: Path, name: str) -> Path:
    """Give a tensor of a folder a type that fits by its name and shape, and that no loader can copy to its place."""
    header: dict[str, dict[str, object]] = {}
    written = bytearray()
    for key, value in load_file(folder / "model.safetensors").items():
        data = value.numpy().tobytes()[: value.numel() // 2 if key == name else None]
        offsets = [len(written), len(written) + len(data)]
        header[key] = {"dtype": "F4" if key == name else "F32", "shape": list(value.shape), "data_offsets": offsets}
        written += data
    table = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(table).to_bytes(8, "little") + table + written)
    return folder
