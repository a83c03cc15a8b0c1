"""What the demo's three trainings share: a schedule, one loop, and how weights are written."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor, nn

WARMUP_SHARE = 0.04


@dataclass(frozen=True)
class Schedule:
    """How long and on what to train. `batch` counts tokens for the thinker, images otherwise.

    Training ends, rate annealed, after `steps` or `limit_s` seconds, whichever comes first.
    """

    steps: int
    batch: int
    rate: float
    device: str
    seed: int = 0
    average: float = 0.0
    compiled: bool = False
    limit_s: float = math.inf


def fit(name: str, model: nn.Module, loss: Callable[[int], Tensor], schedule: Schedule) -> int:
    """Minimise `loss(step)` by AdamW, warm-up and cosine; return the steps made.

    The model is left with the running average of its weights if one is kept.
    """
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=schedule.rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    parameters: list[torch.Tensor] = list(model.parameters())
    averages = [value.detach().clone() for value in parameters]
    step, progress, started = 0, 0.0, time.perf_counter()
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate * _share(progress)
        with torch.autocast(schedule.device, torch.bfloat16, enabled=schedule.device == "cuda"):
            value = loss(step)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        torch._foreach_lerp_(averages, [p.detach() for p in parameters], 1 - min(schedule.average, step / (step + 10)))
        if step == 0:
            started = time.perf_counter()  # the first step compiles
        elapsed = time.perf_counter() - started
        if step % max(1, schedule.steps // 20) == 0:
            print(f"{name} step {step} loss {value.item():.4f} {elapsed:.0f} s", flush=True)
        step += 1
        progress = max(step / schedule.steps, elapsed / schedule.limit_s)
    if schedule.average:
        with torch.no_grad():
            torch._foreach_copy_(parameters, averages)
    print(f"{name} {step} steps in {time.perf_counter() - started:.0f} s", flush=True)
    model.eval()
    return step


def _share(progress: float) -> float:
    if progress < WARMUP_SHARE:
        return (progress + 1e-4) / WARMUP_SHARE
    return 0.5 * (1 + math.cos(math.pi * (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)))


def save_weights(model: nn.Module, folder: Path, metadata: dict[str, str]) -> None:
    """Write the model's weights in half precision with what they came from."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", torch.float16).contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt", **metadata})
    (folder / "model.safetensors").chmod(0o644)
