"""A small classifier that reads a picture back into a scene: it never sees a generated picture in training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import nn

from demo_training import Schedule, fit
from omni_notebook.models.render import describe, render, shape_textures
from omni_notebook.models.scene import COLOURS, COLUMNS, ROWS, SHAPES, random_plans

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from omni_notebook.models.scene import Plan

CELLS = len(ROWS) * len(COLUMNS)
EMPTY = len(SHAPES)


class Judge(nn.Module):
    """Reads pictures, (B, 3, 64, 64) in [0, 1], into scores of shape (or nothing) and colour for each of nine cells."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 24, 5, 2, 2), nn.ReLU(), nn.Conv2d(24, 48, 3, 2, 1), nn.ReLU(), nn.Conv2d(48, 48, 3, 1, 1),
            nn.ReLU(), nn.Conv2d(48, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 24, 1), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.shapes = nn.Linear(24 * 64, CELLS * (EMPTY + 1))
        self.colours = nn.Linear(24 * 64, CELLS * len(COLOURS))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, 9, shapes + 1) and (B, 9, colours)."""
        found = self.features(images - 0.5)
        return self.shapes(found).unflatten(-1, (CELLS, -1)), self.colours(found).unflatten(-1, (CELLS, -1))

    @torch.inference_mode()
    def right(self, images: Tensor, plans: Sequence[Plan]) -> Tensor:
        """Return for each picture whether it shows its plan and nothing else, (B,) bool."""
        shapes, colours = _grid(describe(plans).to(images.device))
        shape_scores, colour_scores = self(images)
        colour_right = (colour_scores.argmax(-1) == colours) | (shapes == EMPTY)
        right: Tensor = ((shape_scores.argmax(-1) == shapes) & colour_right).all(-1)
        return right


def _grid(table: Tensor) -> tuple[Tensor, Tensor]:
    """Turn described plans, (B, 3, 4), into shape and colour of each cell, (B, 9)."""
    shapes = torch.full((len(table), CELLS + 1), EMPTY, device=table.device)
    colours = torch.zeros_like(shapes)
    cell = torch.where(table[..., 0] >= 0, table[..., 2] * len(COLUMNS) + table[..., 3], CELLS)
    return shapes.scatter(1, cell, table[..., 0])[:, :CELLS], colours.scatter(1, cell, table[..., 1])[:, :CELLS]


def train(file: Path, schedule: Schedule, examples: int) -> None:
    """Train on rendered truth with a little noise and write the weights."""
    torch.manual_seed(schedule.seed)
    judge = Judge().to(schedule.device)
    table = describe(random_plans(examples, schedule.seed + 1)).to(schedule.device)
    textures = shape_textures(schedule.device)
    generator = torch.Generator(schedule.device).manual_seed(schedule.seed)

    def loss(_step: int) -> Tensor:
        rows = torch.randint(len(table), (schedule.batch,), generator=generator, device=schedule.device)
        images = render(table[rows], textures, generator)
        images = images + 0.03 * torch.randn(images.shape, generator=generator, device=schedule.device)
        shapes, colours = _grid(table[rows])
        shape_scores, colour_scores = judge(images)
        there = (shapes != EMPTY).flatten()
        colour_loss = F.cross_entropy(colour_scores.flatten(0, 1), colours.flatten(), reduction="none")
        return F.cross_entropy(shape_scores.flatten(0, 1), shapes.flatten()) + (colour_loss * there).mean()

    fit("judge", judge, loss, schedule)
    file.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"seed": str(schedule.seed), "steps": str(schedule.steps)}
    save_file({n: v.half().contiguous().cpu() for n, v in judge.state_dict().items()}, file, metadata=metadata)


def load(file: Path, device: str = "cpu") -> Judge:
    """Return the judge in float32."""
    judge = Judge()
    judge.load_state_dict({name: value.float() for name, value in load_file(file).items()})
    return judge.to(device).eval()


def score_on_truth(judge: Judge, count: int = 5000, seed: int = 987654, device: str = "cpu") -> float:
    """Return the share of freshly rendered scenes, never trained on, that the judge reads right."""
    plans = random_plans(count, seed)
    generator = torch.Generator(device).manual_seed(seed)
    images = render(describe(plans).to(device), shape_textures(device), generator)
    return float(judge.right(images, plans).float().mean())
