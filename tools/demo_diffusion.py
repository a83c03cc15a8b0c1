"""Trains the demo's diffusion transformer on rendered scenes and has the judge look at what it draws."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from demo_thinker import SPECIALS, Encoder, plan_states
from demo_training import Schedule, fit, save_weights
from omni_notebook.models.dit import MODEL_TYPE, DiT, DiTConfig
from omni_notebook.models.flow import Condition, initial_noise, sample, training_loss
from omni_notebook.models.loaders import load_into, read_config
from omni_notebook.models.render import IMAGE_SIZE, describe, render, shape_textures
from omni_notebook.models.scene import PLAN_LENGTH, PLAN_VOCAB_SIZE, Plan, encode_plan, random_plans

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from demo_judge import Judge
    from demo_prompts import Example
    from omni_notebook.models.decoder import Decoder

CONFIG = DiTConfig(
    image_size=IMAGE_SIZE,
    patch_size=8,
    channels=3,
    hidden_size=192,
    num_layers=5,
    num_heads=4,
    mlp_size=512,
    plan_vocab_size=PLAN_VOCAB_SIZE,
    plan_length=PLAN_LENGTH,
    cond_hidden_size=256,
)
GUIDANCE, STEPS = 2.0, 20
NO_HIDDEN, NO_PLAN_BUT_HIDDEN, NOTHING = 0.5, 0.1, 0.1


class Scenes:
    """Training rows on the device: plan ids, hidden states (and whether there are any), pictures as bytes."""

    def __init__(self, thinker: Decoder, folder: Path, examples: Sequence[Example], seed: int, device: str) -> None:
        plans, hidden = _from_prompts(thinker, folder, examples, device)
        plain = random_plans(len(examples), seed)
        self.plan_ids = torch.tensor([encode_plan(plan) for plan in [*plans, *plain]], device=device)
        self.hidden = hidden
        table = describe([*plans, *plain]).to(device)
        generator, textures = torch.Generator(device).manual_seed(seed), shape_textures(device)
        parts = [(render(part, textures, generator) * 255).round().byte() for part in table.split(1024)]
        self.images = torch.cat(parts)

    def batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Condition]:
        """Return images in [−1, 1] and a condition with parts of it left out at random."""
        device = self.images.device
        rows = torch.randint(len(self.images), (count,), generator=generator, device=device)
        draw = torch.rand(2, count, generator=generator, device=device)
        known = (rows < len(self.hidden)) & (draw[0] >= NO_HIDDEN)
        nothing = draw[1] < NOTHING
        no_plan = nothing | (known & (draw[1] < NOTHING + NO_PLAN_BUT_HIDDEN))
        hidden = self.hidden[rows.clamp(max=len(self.hidden) - 1)]
        condition = Condition(self.plan_ids[rows] * ~no_plan[:, None], hidden, known & ~nothing)
        return self.images[rows].float() / 127.5 - 1, condition


@torch.inference_mode()
def _from_prompts(
    thinker: Decoder, folder: Path, examples: Sequence[Example], device: str
) -> tuple[list[Plan], Tensor]:
    plans: list[Plan] = []
    states = []
    for ids, lengths, rows in Encoder(folder).batches(examples, 65536):
        hidden, tokens = plan_states(thinker, ids.long().to(device), lengths.to(device))
        states.append((hidden * _is_plan(tokens)[..., None])[:, :PLAN_LENGTH].half())
        plans += [examples[row][1] for row in rows]
    return plans, torch.cat(states)


def _is_plan(tokens: Tensor) -> Tensor:
    return tokens >= len(SPECIALS)


def train(
    folder: Path, scenes: Scenes, schedule: Schedule, metadata: dict[str, str], config: DiTConfig = CONFIG
) -> None:
    """Train by rectified flow and write config.json and model.safetensors."""
    torch.manual_seed(schedule.seed)
    model = DiT(config).to(schedule.device)
    model.reset_parameters()
    predict = torch.compile(model) if schedule.compiled else model
    generator = torch.Generator(schedule.device).manual_seed(schedule.seed)

    def loss(_step: int) -> Tensor:
        images, condition = scenes.batch(schedule.batch, generator)
        return training_loss(predict, images, condition, generator)

    steps = fit("diffusion", model, loss, schedule)
    save_weights(model, folder, {**metadata, "steps": str(steps)})
    (folder / "config.json").write_text(
        json.dumps({"model_type": MODEL_TYPE, **asdict(config)}, indent=2) + "\n", encoding="utf-8"
    )


def load(folder: Path, device: str) -> DiT:
    """Return the shipped diffusion transformer in float32."""
    model = DiT(DiTConfig.from_dict(read_config(folder))).to(device)
    load_into(model, folder)
    return model.eval()


def draw(
    model: DiT,
    plan_ids: Tensor,
    hidden: Tensor | None,
    *,
    seed: int = 0,
    guidance: float = GUIDANCE,
    steps: int = STEPS,
) -> Tensor:
    """Return pictures in [0, 1], one a row of plan ids, seeds counted up from `seed`."""
    device = plan_ids.device
    noise = torch.stack([initial_noise(model.config.image_shape, seed + row) for row in range(len(plan_ids))])
    size = 16 if device.type == "cpu" else 512  # what fits the caches
    conditions = zip(
        plan_ids.split(size), [None] * len(plan_ids) if hidden is None else hidden.split(size), strict=False
    )
    parts = [
        sample(model, part.to(device), Condition(*given), steps=steps, guidance=guidance)
        for part, given in zip(noise.split(size), conditions, strict=True)
    ]
    return (torch.cat(parts).clamp(-1, 1) + 1) / 2


def evaluate(
    model: DiT, judge: Judge, plans: Sequence[Plan], hidden: Tensor, *, guidance: float = GUIDANCE, steps: int = STEPS
) -> dict[str, float]:
    """Return the judged share of right scenes under each condition."""
    ids = torch.tensor([encode_plan(plan) for plan in plans], device=hidden.device)
    other = [*list(plans[1:]), plans[0]]
    zeros = torch.zeros_like(ids)
    pictures = draw(model, ids, None, guidance=guidance, steps=steps)
    cases = {
        "from plan": (pictures, plans),
        "from plan and hidden states": (draw(model, ids, hidden, guidance=guidance, steps=steps), plans),
        "from hidden states alone": (draw(model, zeros, hidden, guidance=guidance, steps=steps), plans),
        "judged against another prompt": (pictures, other),
        "plan zeroed": (draw(model, zeros, None, guidance=guidance, steps=steps), plans),
    }
    return {name: float(judge.right(images, wanted).float().mean()) for name, (images, wanted) in cases.items()}
