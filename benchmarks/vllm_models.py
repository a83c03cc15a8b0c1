"""Random causal language models of any size, written as Hugging Face folders; the weights' values are of no matter."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "torch_dtype": "float32",
}
BIG: dict[str, Any] = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
"""1.9 billion parameters: 3.8 GB in bfloat16."""
LLAMA_8B: dict[str, Any] = {
    **BIG,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 128256,
}
"""The sizes of Llama 3 8B: 16.1 GB in bfloat16."""
_SHARDS = 2


def write_llama(folder: Path, shape: dict[str, Any], *, seed: int = 1, device: str = "cpu") -> Path:
    """Write a random Llama with this shape, in shards; one that is there already stays. Returns the folder."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    dtype = getattr(torch, shape["torch_dtype"])
    layers = shape["num_hidden_layers"]
    size = {"total_size": 0}
    table: dict[str, str] = {}
    for number in range(_SHARDS):
        part = {name: _random(name, at, dtype, device) for name, at in _shapes(shape, range(number, layers, _SHARDS))}
        if number == 0:
            part |= {name: _random(name, at, dtype, device) for name, at in _ends(shape)}
        file = f"model-{number + 1:05}-of-{_SHARDS:05}.safetensors"
        save_file(part, folder / file)
        table |= dict.fromkeys(part, file)
        size["total_size"] += sum(tensor.nbytes for tensor in part.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": size, "weight_map": table}))
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    return folder


def _config(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **shape,
    }


def _shapes(shape: dict[str, Any], layers: range) -> list[tuple[str, tuple[int, ...]]]:
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    one = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return [(f"model.layers.{layer}.{name}.weight", at) for layer in layers for name, at in one.items()]


def _ends(shape: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    table = (shape["vocab_size"], shape["hidden_size"])
    return [("model.embed_tokens.weight", table), ("lm_head.weight", table), ("model.norm.weight", (table[1],))]


def _random(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    value = torch.randn(shape, device=device) * (2.0 / shape[1] ** 0.5)
    if name == "lm_head.weight":
        value[2] = 0.0  # the end token: texts are as long as asked for
    return torch.as_tensor(value.to(dtype).cpu())
