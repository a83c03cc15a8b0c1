"""Finished images on their way out of a rank: device to host, then PNG; runs on the output thread."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from omni_notebook.models.flow import to_uint8
from omni_notebook.worker.batches import ImageAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.worker.batches import DenoiseStep


def answers(images: torch.Tensor) -> list[ImageAnswer]:
    """(B, C, H, W) in [−1, 1] as bytes and as PNG, in the batch's order."""
    return [ImageAnswer(pixels=pixels, png=_png(pixels)) for pixels in to_uint8(images).numpy()]


def step_answers(images: torch.Tensor, steps: Sequence[DenoiseStep]) -> list[ImageAnswer]:
    """The same of one turn's images, of which only the complete ones are encoded."""
    pictures = to_uint8(images).numpy()
    return [
        ImageAnswer(pixels=pixels, png=_png(pixels) if step.last else b"")
        for pixels, step in zip(pictures, steps, strict=True)
    ]


def unit_answers(images: torch.Tensor) -> list[ImageAnswer]:
    """(B, 3, H, W) in [0, 1] as bytes and as PNG, rounded as diffusers does."""
    pictures = (images.float().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()
    return [ImageAnswer(pixels=pixels, png=_png(pixels)) for pixels in pictures]


def _png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()
