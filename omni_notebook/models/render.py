"""Draws plans as pictures: the truth that the demo's diffusion model learns from and is judged against."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

from omni_notebook.models.scene import BACKGROUND, COLOURS, COLUMNS, MAX_OBJECTS, PALETTE, SHAPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from omni_notebook.models.scene import SceneObject

IMAGE_SIZE = 64
TEXTURE_SIZE = 192
TEXTURE_EXTENT = 1.5
"""A texture covers [-1.5, 1.5] in units of the shape's radius."""

_ALONE_RADIUS, _ALONE_CENTRES = 16.0, (18.0, 32.0, 46.0)
_GROUP_RADIUS, _GROUP_CENTRES = 9.5, (12.0, 32.0, 52.0)
_SHIFT_PX, _TURN_RADIANS, _SCALE = 1.5, math.radians(10), (0.9, 1.06)


def shape_textures(device: torch.device | str = "cpu") -> Tensor:
    """Return each shape's signed distance, negative inside, in units of its radius: (shapes, 1, 192, 192)."""
    axis = torch.linspace(-TEXTURE_EXTENT, TEXTURE_EXTENT, TEXTURE_SIZE, device=device)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    points = torch.stack([x, y], dim=-1)
    return torch.stack([_distance(name, points) for name in SHAPES])[:, None]


def describe(plans: Sequence[Sequence[SceneObject]]) -> Tensor:
    """Return the plans as numbers, (B, 3, 4) long: shape (−1 = nothing there), colour, row, column."""
    table = torch.full((len(plans), MAX_OBJECTS, 4), -1, dtype=torch.long)
    for row, plan in enumerate(plans):
        for place, item in enumerate(plan):
            cell = divmod(item.cell, len(COLUMNS))
            table[row, place] = torch.tensor([SHAPES.index(item.shape), COLOURS.index(item.colour), *cell])
    return table


def render(table: Tensor, textures: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw described plans, (B, 3, 64, 64) float in [0, 1], on the device of `table`.

    With a generator every symbol is moved, turned and scaled a little; without one it stands straight in its cell.
    """
    device = table.device
    colours = torch.tensor(list(PALETTE.values()), device=device) / 255
    background = torch.tensor(BACKGROUND, device=device) / 255
    image = background[None, :, None, None].expand(len(table), 3, IMAGE_SIZE, IMAGE_SIZE)
    alone = (table[:, 1, 0] < 0)[:, None]
    for place in range(MAX_OBJECTS):
        shape, colour, cell = table[:, place, 0], table[:, place, 1], table[:, place, 2:]
        alpha = _coverage(textures[shape.clamp(min=0)], cell.clamp(min=0), alone, generator)
        alpha = alpha * (shape >= 0)[:, None, None, None]
        image = image + alpha * (colours[colour.clamp(min=0)][:, :, None, None] - image)
    return image


def _coverage(texture: Tensor, cell: Tensor, alone: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return how much of each pixel the symbol covers, (B, 1, 64, 64)."""
    device, count = cell.device, len(cell)
    jitter = torch.zeros(count, 4, device=device)
    if generator is not None:
        jitter = torch.rand(count, 4, generator=generator, device=device) * 2 - 1
    small, large = (torch.tensor(c, device=device)[cell] for c in (_GROUP_CENTRES, _ALONE_CENTRES))
    centre = torch.where(alone, large, small).flip(1) + jitter[:, :2] * _SHIFT_PX
    scale = 1 + torch.where(jitter[:, 2] < 0, jitter[:, 2] * (1 - _SCALE[0]), jitter[:, 2] * (_SCALE[1] - 1))
    radius = torch.where(alone[:, 0], _ALONE_RADIUS, _GROUP_RADIUS) * scale
    turn = jitter[:, 3] * _TURN_RADIANS
    axis = torch.arange(IMAGE_SIZE, device=device) + 0.5
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    offset = torch.stack([x, y], dim=-1)[None] - centre[:, None, None]
    cos, sin = turn.cos()[:, None, None], turn.sin()[:, None, None]
    turned = torch.stack([offset[..., 0] * cos + offset[..., 1] * sin, offset[..., 1] * cos - offset[..., 0] * sin], -1)
    grid = turned / (radius[:, None, None, None] * TEXTURE_EXTENT)
    distance = F.grid_sample(texture, grid, padding_mode="border", align_corners=True)
    return (0.5 - distance * radius[:, None, None, None]).clamp(0, 1)


def _distance(name: str, points: Tensor) -> Tensor:
    length: Tensor = points.norm(dim=-1)
    if name == "circle":
        return length - 0.95
    if name == "ring":
        return (length - 0.74).abs() - 0.22
    return _polygon_distance(torch.tensor(_outline(name), device=points.device), points)


def _outline(name: str) -> list[tuple[float, float]]:
    """Return a polygon's corners (y grows downwards), within the unit circle."""
    if name == "star":
        radii = (1.05, 0.45)
        return [_polar(radii[i % 2], math.pi * i / 5 - math.pi / 2, shift=0.06) for i in range(10)]
    if name == "heart":
        return [_heart(2 * math.pi * i / 64) for i in range(64)]
    if name == "cross":
        a, b = 0.95, 0.32
        quarter = [(b, -a), (b, -b), (a, -b), (a, b), (b, b), (b, a)]
        return quarter + [(-x, -y) for x, y in quarter]
    corners = {
        "square": [(-0.82, -0.82), (0.82, -0.82), (0.82, 0.82), (-0.82, 0.82)],
        "triangle": [(0.0, -0.95), (1.0, 0.8), (-1.0, 0.8)],
        "diamond": [(0.0, -1.05), (0.72, 0.0), (0.0, 1.05), (-0.72, 0.0)],
    }
    return corners[name]


def _polar(radius: float, angle: float, *, shift: float) -> tuple[float, float]:
    return radius * math.cos(angle), radius * math.sin(angle) + shift


def _heart(angle: float) -> tuple[float, float]:
    x = 16 * math.sin(angle) ** 3
    y = 13 * math.cos(angle) - 5 * math.cos(2 * angle) - 2 * math.cos(3 * angle) - math.cos(4 * angle)
    return x / 16.5, -(y + 2.5) / 16.5


def _polygon_distance(corners: Tensor, points: Tensor) -> Tensor:
    """Signed distance to a polygon: nearest edge, sign by counting crossings of a ray (even-odd rule)."""
    starts, ends = corners, corners.roll(-1, 0)
    edge = ends - starts
    to_point = points[..., None, :] - starts
    along = ((to_point * edge).sum(-1) / (edge * edge).sum(-1)).clamp(0, 1)
    nearest = (to_point - along[..., None] * edge).norm(dim=-1).amin(-1)
    above = (starts[:, 1] > points[..., None, 1]) != (ends[:, 1] > points[..., None, 1])
    crossing = starts[:, 0] + edge[:, 0] * to_point[..., 1] / torch.where(edge[:, 1] == 0, 1.0, edge[:, 1])
    inside = (above & (points[..., None, 0] < crossing)).sum(-1) % 2 == 1
    return torch.where(inside, -nearest, nearest)
