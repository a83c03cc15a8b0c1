"""A diffusion transformer that predicts the clean image, conditioned on a plan and on the thinker's hidden states.

Peebles and Xie 2023 (DiT, adaLN-zero), Chen et al. 2024 (PixArt-α: one modulation shared by all blocks, plus an offset
a block), Li and He 2025 (predict the clean image; large patches then suffice).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from omni_notebook.errors import ConfigError
from omni_notebook.models.parallel import SOLO, ColumnParallelLinear, ParallelModel, RowParallelLinear, check_split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_notebook.models.parallel import TensorParallel

MODEL_TYPE = "omni_dit"
_TIME_FEATURES = 128
_PARTS = 6


@dataclass(frozen=True, slots=True)
class DiTConfig:
    """The shape of a diffusion transformer. `cond_hidden_size` is the width of the thinker's hidden states."""

    image_size: int
    patch_size: int
    channels: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    plan_vocab_size: int
    plan_length: int
    cond_hidden_size: int

    def __post_init__(self) -> None:
        """Raise ConfigError, naming the key, for sizes that fit no model."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                msg = f"{item.name} must be a positive integer, not {value!r}"
                raise ConfigError(msg)
        if self.hidden_size % self.num_heads:
            msg = f"hidden_size ({self.hidden_size}) is no multiple of num_heads ({self.num_heads})"
            raise ConfigError(msg)
        if self.image_size % self.patch_size:
            msg = f"image_size ({self.image_size}) is no multiple of patch_size ({self.patch_size})"
            raise ConfigError(msg)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a config.json; raise ConfigError that names the key which is missing or wrong."""
        if data.get("model_type") != MODEL_TYPE:
            msg = f"model_type {data.get('model_type')!r} is not a diffusion transformer of ours ({MODEL_TYPE})"
            raise ConfigError(msg)
        for item in fields(cls):
            if item.name not in data:
                msg = f"{item.name} is missing from the model's config.json"
                raise ConfigError(msg)
        return cls(**{item.name: data[item.name] for item in fields(cls)})

    def check_parallel(self, size: int) -> None:
        """Raise ConfigError, naming the key, unless this transformer can be split over `size` ranks."""
        check_split(size, "num_heads", self.num_heads)
        check_split(size, "mlp_size", self.mlp_size)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width of one image."""
        return (self.channels, self.image_size, self.image_size)

    @property
    def patches(self) -> int:
        """Image tokens of one picture."""
        return (self.image_size // self.patch_size) ** 2


class DiT(ParallelModel):
    """Predicts the clean image from a noisy one. May be built under `torch.device("meta")`; it has no buffers.

    With `parallel` it is one rank's part: its heads and its share of each block's feed-forward layer; embeddings and
    modulation are whole on each rank, and every rank returns the same images. Raises ConfigError for a size that it can
    not be split over.
    """

    def __init__(self, config: DiTConfig, parallel: TensorParallel = SOLO) -> None:
        config.check_parallel(parallel.size)
        super().__init__(parallel)
        self.config = config
        width, pixels = config.hidden_size, config.channels * config.patch_size**2
        self.patch_in = nn.Linear(pixels, width)
        self.patch_position = nn.Parameter(torch.zeros(config.patches, width))
        self.plan_embedding = nn.Embedding.from_pretrained(torch.empty(config.plan_vocab_size, width), freeze=False)
        self.plan_position = nn.Parameter(torch.zeros(config.plan_length, width))
        self.hidden_in = nn.Linear(config.cond_hidden_size, width, bias=False)
        self.time_in = nn.Linear(_TIME_FEATURES, width)
        self.time_out = nn.Linear(width, width)
        self.modulation = nn.Linear(width, _PARTS * width)
        self.blocks = nn.ModuleList(_Block(config, parallel) for _ in range(config.num_layers))
        self.final_modulation = nn.Linear(width, 2 * width)
        self.patch_out = nn.Linear(width, pixels)

    def reset_buffers(self) -> None:
        """Do nothing: there are none. Here so that runners treat every model alike."""

    def reset_parameters(self) -> None:
        """Set the weights that training starts from: small positions, zero gates, zero output."""
        for name, value in self.named_parameters():
            if name.startswith(("modulation", "final_modulation", "patch_out")) or name.endswith("bias"):
                nn.init.zeros_(value)
            elif name.endswith(("position", "plan_embedding.weight", "offset")):
                nn.init.normal_(value, std=0.0 if name.endswith("offset") else 0.02)
            else:
                nn.init.xavier_uniform_(value)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        plan_ids: Tensor,
        hidden: Tensor | None = None,
        hidden_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the predicted clean images, (B, C, H, W).

        x: (B, C, H, W) noisy images, pixel values in [−1, 1]. t: (B,), 0 = noise, 1 = clean. plan_ids: (B, P) long, 0 =
        empty. hidden: (B, P, cond_hidden), the thinker's state that wrote each plan token, or None. hidden_mask: (B,),
        false where a request of the batch has no hidden states.
        """
        tokens = torch.cat([self._plan_tokens(plan_ids, hidden, hidden_mask), self._patch_tokens(x)], dim=1)
        condition = F.silu(self._time(t, x.dtype))
        shared = self.modulation(condition).unflatten(-1, (_PARTS, -1))
        for block in self.blocks:
            tokens = block(tokens, shared)
        shift, scale = self.final_modulation(condition)[:, None].chunk(2, dim=-1)
        tokens = _norm(tokens[:, plan_ids.shape[1] :]) * (1 + scale) + shift
        return self._unpatch(self.patch_out(tokens))

    def _plan_tokens(self, plan_ids: Tensor, hidden: Tensor | None, hidden_mask: Tensor | None) -> Tensor:
        tokens: Tensor = self.plan_embedding(plan_ids) + self.plan_position
        if hidden is None:
            return tokens
        extra: Tensor = self.hidden_in(_norm(hidden.to(tokens.dtype)))
        return tokens + (extra if hidden_mask is None else extra * hidden_mask.to(tokens.dtype)[:, None, None])

    def _patch_tokens(self, x: Tensor) -> Tensor:
        size, grid = self.config.patch_size, self.config.image_size // self.config.patch_size
        patches = x.reshape(x.shape[0], -1, grid, size, grid, size).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        tokens: Tensor = self.patch_in(patches) + self.patch_position
        return tokens

    def _unpatch(self, pixels: Tensor) -> Tensor:
        size, grid = self.config.patch_size, self.config.image_size // self.config.patch_size
        tiles = pixels.reshape(pixels.shape[0], grid, grid, -1, size, size).permute(0, 3, 1, 4, 2, 5)
        return tiles.reshape(pixels.shape[0], *self.config.image_shape)

    def _time(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """Embed times by sines and cosines of falling frequency (Vaswani et al. 2017), t in thousandths."""
        half = _TIME_FEATURES // 2
        frequencies = torch.exp(torch.arange(half, device=t.device) * (-math.log(10000.0) / half))
        angles = t.float()[:, None] * 1000.0 * frequencies
        embedded = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
        result: Tensor = self.time_out(F.silu(self.time_in(embedded)))
        return result


class _Block(nn.Module):
    def __init__(self, config: DiTConfig, parallel: TensorParallel) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_heads
        self.head_dim = width // config.num_heads
        self.offset = nn.Parameter(torch.zeros(_PARTS, width))
        self.q = ColumnParallelLinear(width, width, parallel, units=heads)
        self.k = ColumnParallelLinear(width, width, parallel, units=heads)
        self.v = ColumnParallelLinear(width, width, parallel, units=heads)
        self.out = RowParallelLinear(width, width, parallel)
        self.fc1 = ColumnParallelLinear(width, config.mlp_size, parallel)
        self.fc2 = RowParallelLinear(config.mlp_size, width, parallel)

    def forward(self, tokens: Tensor, shared: Tensor) -> Tensor:
        """Run one block. tokens: (B, N, width). shared: (B, 6, width), shift, scale, gate, twice."""
        parts = (shared + self.offset)[:, :, None].unbind(1)
        tokens = tokens + parts[2] * self._attend(_norm(tokens) * (1 + parts[1]) + parts[0])
        inner = F.gelu(self.fc1(_norm(tokens) * (1 + parts[4]) + parts[3]), approximate="tanh")
        result: Tensor = tokens + parts[5] * self.fc2(inner)
        return result

    def _attend(self, tokens: Tensor) -> Tensor:
        query, key, value = (
            layer(tokens).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(_norm(query), _norm(key), value)
        result: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return result


def _norm(x: Tensor) -> Tensor:
    """Scale the last dimension to unit root mean square (Zhang and Sennrich 2019), without weights."""
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)
