"""Rectified flow, one step at a time: straight paths from noise (t = 0) to an image (t = 1).

Liu et al. 2023 (rectified flow), Ho and Salimans 2022 (classifier-free guidance), Li and He 2025 (the network predicts
the clean image x; the velocity is (x − z) / (1 − t)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIN_REMAINING = 0.02
"""Smallest 1 − t that a velocity is divided by."""
_TRAINING_TIME, _TRAINING_SPREAD, _TRAINING_REMAINING = -0.6, 1.0, 0.05


@dataclass(frozen=True, slots=True)
class Condition:
    """What a batch of images is drawn from.

    plan_ids: (B, P) long. hidden: (B, P, hidden) or None. hidden_mask: (B,), false where a request has none of them.
    """

    plan_ids: Tensor
    hidden: Tensor | None = None
    hidden_mask: Tensor | None = None

    def with_unconditional(self) -> Condition:
        """Return this batch followed by as many empty plans, for guidance in one forward pass."""
        plan_ids = torch.cat([self.plan_ids, torch.zeros_like(self.plan_ids)])
        if self.hidden is None:
            return Condition(plan_ids)
        given = self.hidden_mask
        if given is None:
            given = torch.ones(len(self.plan_ids), dtype=torch.bool, device=self.plan_ids.device)
        hidden = torch.cat([self.hidden, torch.zeros_like(self.hidden)])
        return Condition(plan_ids, hidden, torch.cat([given.bool(), torch.zeros_like(given, dtype=torch.bool)]))


def training_loss(
    model: Callable[..., Tensor], images: Tensor, condition: Condition, generator: torch.Generator
) -> Tensor:
    """Return the mean squared error of the velocity at random times, a scalar to minimise.

    images: (B, C, H, W), clean, values in [−1, 1]. generator: on their device. Times are logit-normal (Esser et al.
    2024). Leave the plan out of a part of the rows, or guidance has nothing to compare with.
    """
    normal = torch.randn(len(images), generator=generator, device=images.device)
    time = torch.sigmoid(_TRAINING_TIME + _TRAINING_SPREAD * normal)
    noise = torch.randn(images.shape, generator=generator, device=images.device)
    mixed = noise + time[:, None, None, None] * (images - noise)
    clean = model(mixed, time, condition.plan_ids, condition.hidden, condition.hidden_mask).float()
    error = (clean - images).square().mean((1, 2, 3))
    return (error / (1 - time).clamp(min=_TRAINING_REMAINING).square()).mean()


def initial_noise(shape: Sequence[int], seed: int) -> Tensor:
    """Return one request's noise, float32 on the CPU: it depends on the seed alone, never on the batch or device."""
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed % 2**63), dtype=torch.float32)


def timesteps(steps: int) -> Tensor:
    """Return the times of a run, (steps + 1,) from 0 to 1; raise ValueError for fewer than one step."""
    if steps < 1:
        msg = f"num_inference_steps must be at least 1, not {steps}"
        raise ValueError(msg)
    return torch.linspace(0.0, 1.0, steps + 1)


@torch.inference_mode()
def euler_step(
    model: Callable[..., Tensor],
    x: Tensor,
    span: tuple[Tensor, Tensor],
    condition: Condition,
    guidance: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the batch one step further along (Euler), and the clean images that the model predicted on the way.

    x: (B, C, H, W). span: each image's times before and after the step, two of (B,) float32. guidance: other than 1,
    the model runs on twice the batch.
    """
    now, following = span
    if guidance == 1.0:
        clean = model(x, now, condition.plan_ids, condition.hidden, condition.hidden_mask)
    else:
        both = condition.with_unconditional()
        doubled = model(torch.cat([x, x]), torch.cat([now, now]), both.plan_ids, both.hidden, both.hidden_mask)
        guided, free = doubled.chunk(2)
        clean = free + guidance * (guided - free)
    fraction = ((following - now) / (1.0 - now).clamp(min=MIN_REMAINING)).to(x.dtype)[:, None, None, None]
    return x + fraction * (clean - x), clean


@torch.inference_mode()
def denoise_step(
    model: Callable[..., Tensor],
    x: Tensor,
    t_index: int | Tensor,
    times: Tensor,
    condition: Condition,
    guidance: float = 1.0,
) -> Tensor:
    """Return the batch one step further along (Euler).

    x: (B, C, H, W). t_index: the step to make, 0 … steps − 1, one for all or (B,) long, so that requests at different
    steps can share a batch. times: from `timesteps`. guidance: other than 1, the model runs on twice the batch.
    """
    index = torch.as_tensor(t_index, device=times.device).expand(len(x))
    now, following = (times[i].to(x.device, torch.float32) for i in (index, index + 1))
    return euler_step(model, x, (now, following), condition, guidance)[0]


def sample(
    model: Callable[..., Tensor],
    x: Tensor,
    condition: Condition,
    *,
    steps: int = 20,
    guidance: float = 1.0,
) -> Tensor:
    """Run all steps from noise `x`, (B, C, H, W); return the images, values about [−1, 1]."""
    times = timesteps(steps)
    for index in range(steps):
        x = denoise_step(model, x, index, times, condition, guidance)
    return x


def to_uint8(x: Tensor) -> Tensor:
    """Return (B, C, H, W) values in [−1, 1] as bytes (B, H, W, C) on the CPU."""
    return ((x.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()


def to_pil(x: Tensor) -> list[Image.Image]:
    """Return the batch as RGB (three channels) or grey (one) pictures."""
    return [Image.fromarray(picture.squeeze(-1).numpy()) for picture in to_uint8(x)]
