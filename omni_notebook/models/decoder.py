"""A Llama-family decoder over a static key-value cache that its caller owns.

Touvron et al. 2023 (Llama 2), Su et al. 2021 (rotary positions), Ainslie et al. 2023 (grouped-query attention). Module
names are those of Hugging Face checkpoints, so that a folder loads without a table of names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from omni_notebook.errors import ConfigError
from omni_notebook.models.parallel import SOLO, ColumnParallelLinear, ParallelModel, RowParallelLinear, check_split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_notebook.models.parallel import TensorParallel

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a decoder; `from_hf` reads it from a config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes that fit no decoder."""
        if self.num_heads % self.num_kv_heads:
            msg = f"num_attention_heads ({self.num_heads}) is no multiple of num_key_value_heads ({self.num_kv_heads})"
            raise ConfigError(msg)
        if self.head_dim % 2:
            msg = f"head_dim ({self.head_dim}) is odd; rotary positions need pairs"
            raise ConfigError(msg)

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """Read a Hugging Face config; raise ConfigError that names the key which is missing, wrong or unsupported."""
        kind = data.get("model_type")
        if kind not in MODEL_TYPES:
            msg = f"model_type {kind!r} is not supported; one of {', '.join(MODEL_TYPES)}"
            raise ConfigError(msg)
        _refuse_unsupported(data)
        heads = _size(data, "num_attention_heads")
        hidden = _size(data, "hidden_size")
        if data.get("head_dim") is None and hidden % heads:
            msg = f"hidden_size ({hidden}) is no multiple of num_attention_heads ({heads})"
            raise ConfigError(msg)
        bias = bool(data.get("attention_bias", False))
        return cls(
            vocab_size=_size(data, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(data, "intermediate_size"),
            num_layers=_size(data, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_size(data, "num_key_value_heads", heads),
            head_dim=_size(data, "head_dim", hidden // heads),
            max_positions=_size(data, "max_position_embeddings"),
            rope_theta=_rope_theta(data),
            rms_norm_eps=_number(data, "rms_norm_eps", 1e-6),
            tie_embeddings=bool(data.get("tie_word_embeddings", False)),
            qkv_bias=bias or kind == "qwen2",
            output_bias=bias and kind != "qwen2",
            mlp_bias=bool(data.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
        )

    def check_parallel(self, size: int) -> None:
        """Raise ConfigError, naming the key, unless this decoder can be split over `size` ranks."""
        check_split(size, "num_attention_heads", self.num_heads)
        check_split(size, "num_key_value_heads", self.num_kv_heads, shared=True)
        check_split(size, "intermediate_size", self.intermediate_size)

    def kv_shape(self, slots: int, max_length: int, parallel_size: int = 1) -> tuple[int, int, int, int, int, int]:
        """Return a rank's cache's shape: layers, 2 (keys, values), slots, positions, heads, head size.

        With more ranks than key-value heads each rank holds one head, and some the same.
        """
        heads = max(self.num_kv_heads // parallel_size, 1)
        return (self.num_layers, 2, slots, max_length, heads, self.head_dim)


class Decoder(ParallelModel):
    """Token ids to last hidden states; `logits` turns those into scores.

    May be built under `torch.device("meta")`; after its memory exists call `reset_buffers`. With `parallel` it is one
    rank's part: its heads and its share of the feed-forward layers; embeddings and output head are whole on each rank,
    and every rank returns the same states. Raises ConfigError for a size that it can not be split over.
    """

    def __init__(self, config: DecoderConfig, parallel: TensorParallel = SOLO) -> None:
        config.check_parallel(parallel.size)
        super().__init__(parallel)
        self.config = config
        self.model = _Backbone(config, parallel)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("inv_freq", torch.empty(config.head_dim // 2, dtype=torch.float32), persistent=False)
        self.inv_freq: Tensor
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the rotary frequencies (not in any checkpoint), in place where their memory exists already."""
        if self.inv_freq.is_meta and (device := self.model.embed_tokens.weight.device).type != "meta":
            self.inv_freq = torch.empty(self.config.head_dim // 2, dtype=torch.float32, device=device)
        if not self.inv_freq.is_meta:
            self.inv_freq.copy_(_inverse_frequencies(self.config))

    def checkpoint_ignores(self, name: str) -> bool:
        """Return whether a checkpoint may hold this tensor although the module has no place for it."""
        return name.endswith("rotary_emb.inv_freq") or (self.config.tie_embeddings and name == "lm_head.weight")

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: Tensor | None = None,
        slots: Tensor | None = None,
        *,
        kv_length: int | None = None,
    ) -> Tensor:
        """Return the last hidden states after the final norm, (B, T, hidden).

        token_ids, positions: (B, T) long. kv: (layers, 2, slots, max_len, kv_heads of this rank, head_dim), written in
        place at [slot, position]; every token attends to its slot's keys with index ≤ its position. Places never
        written must hold finite numbers (zeros): a masked NaN is still a NaN. slots: (B,) long.
        kv_length: an upper bound of the positions plus one that the caller knows, so that the rest of the cache is not
        read; default the whole cache. Without kv the tokens attend to those before them (training).
        """
        hidden = self.model.embed_tokens(token_ids)
        angles = positions[..., None].float() * self.inv_freq.float()
        rotary = (angles.cos()[:, :, None], angles.sin()[:, :, None])
        if kv is None:
            views: list[_LayerCache | None] = [None] * self.config.num_layers
        elif slots is None:
            msg = "a cache needs slots: which of its rows each sequence owns"
            raise ValueError(msg)
        else:
            length = kv.shape[3] if kv_length is None else kv_length
            mask = torch.arange(length, device=kv.device) <= positions[:, None, :, None]
            views = [_LayerCache(layer, slots, positions, mask) for layer in kv]
        for block, view in zip(self.model.layers, views, strict=True):
            hidden = block(hidden, rotary, view)
        normed: Tensor = self.model.norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return scores, (…, vocab), of hidden states (…, hidden)."""
        weight = self.model.embed_tokens.weight if self.config.tie_embeddings else self.lm_head.weight
        return F.linear(hidden, weight)


@dataclass(frozen=True, slots=True)
class _LayerCache:
    """One layer of the cache, seen by one batch. `mask` is (B, 1, T, length), true where attention may look."""

    storage: Tensor
    slots: Tensor
    positions: Tensor
    mask: Tensor

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write (B, T, kv_heads, head_dim); return the batch's whole history, (B, kv_heads, length, head_dim) each."""
        rows = self.slots[:, None]
        self.storage[0, rows, self.positions] = keys.to(self.storage.dtype)
        self.storage[1, rows, self.positions] = values.to(self.storage.dtype)
        seen = self.storage[:, :, : self.mask.shape[-1]].index_select(1, self.slots).to(keys.dtype)
        return seen[0].transpose(1, 2), seen[1].transpose(1, 2)


class _Backbone(nn.Module):
    def __init__(self, config: DecoderConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.hidden_size), freeze=False
        )
        self.layers = nn.ModuleList(_Block(config, parallel) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class _Block(nn.Module):
    def __init__(self, config: DecoderConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config, parallel)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _FeedForward(config, parallel)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], cache: _LayerCache | None) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, cache)
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.head_dim = config.head_dim

        def heads(count: int) -> ColumnParallelLinear:
            features = count * config.head_dim
            return ColumnParallelLinear(config.hidden_size, features, parallel, bias=config.qkv_bias, units=count)

        self.q_proj = heads(config.num_heads)
        self.k_proj = heads(config.num_kv_heads)
        self.v_proj = heads(config.num_kv_heads)
        queries = config.num_heads * config.head_dim
        self.o_proj = RowParallelLinear(queries, config.hidden_size, parallel, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], cache: _LayerCache | None) -> Tensor:
        split = (*hidden.shape[:2], -1, self.head_dim)
        query, key = self.q_proj(hidden).view(split), self.k_proj(hidden).view(split)
        value = self.v_proj(hidden).view(split)
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = _rotate(query, *rotary).transpose(1, 2), _rotate(key, *rotary)
        if cache is None:
            keys, values, mask = key.transpose(1, 2), value.transpose(1, 2), None
        else:
            keys, values = cache.update(key, value)
            mask = cache.mask
        out = F.scaled_dot_product_attention(query, keys, values, mask, is_causal=cache is None, enable_gqa=True)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result


class _FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig, parallel: TensorParallel) -> None:
        super().__init__()
        outer, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = ColumnParallelLinear(outer, inner, parallel, bias=bias)
        self.up_proj = ColumnParallelLinear(outer, inner, parallel, bias=bias)
        self.down_proj = RowParallelLinear(inner, outer, parallel, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return result


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of a head by its angle, in float32, as Hugging Face's Llama lays the pairs out."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


def _inverse_frequencies(config: DecoderConfig) -> Tensor:
    """theta^(−2i/d), in float32 on the host: the same values whatever device the model lives on."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device="cpu").float() / config.head_dim
    return 1.0 / torch.pow(torch.tensor(config.rope_theta, dtype=torch.float32, device="cpu"), exponents)


def _rope(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rope table: `rope_parameters` (transformers 5) or `rope_scaling` (4)."""
    table = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(table, dict):
        msg = f"rope_parameters must be an object, not {table!r}"
        raise ConfigError(msg)
    return table


def _rope_theta(data: Mapping[str, Any]) -> float:
    table = _rope(data)
    return _number(table if "rope_theta" in table else data, "rope_theta", 10000.0)


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    scaling = _rope(data).get("rope_type", _rope(data).get("type", "default"))
    if scaling != "default":
        msg = f"rope_scaling {scaling!r} is not supported by this runtime; use runtime='vllm' for this model"
        raise ConfigError(msg)
    if data.get("hidden_act", "silu") != "silu":
        msg = f"hidden_act {data['hidden_act']!r} is not supported; only 'silu'"
        raise ConfigError(msg)
    window = data.get("sliding_window") is not None and data.get("use_sliding_window", data["model_type"] == "mistral")
    if window:
        msg = f"sliding_window {data['sliding_window']!r} is not supported; only full attention"
        raise ConfigError(msg)
    if data.get("quantization_config") is not None:
        msg = "quantization_config is not supported by this runtime; use runtime='vllm' for this model"
        raise ConfigError(msg)
    if _number(data, "partial_rotary_factor", 1.0) != 1.0:
        msg = f"partial_rotary_factor {data['partial_rotary_factor']!r} is not supported; only 1.0"
        raise ConfigError(msg)


def _size(data: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = data.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        msg = f"{key} is missing from the model's config.json"
        raise ConfigError(msg)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = f"{key} must be a positive integer, not {value!r}"
        raise ConfigError(msg)
    return value


def _number(data: Mapping[str, Any], key: str, default: float) -> float:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        msg = f"{key} must be a positive number, not {value!r}"
        raise ConfigError(msg)
    return float(value)
