"""What tests of new weights share: the shipped tensors, others, and iterators that go wrong."""

from __future__ import annotations

import functools
import shutil
from typing import TYPE_CHECKING, Any

from omni_notebook.config import DEMO_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from omni_notebook.engine.async_omni import AsyncOmni

FILE = "model.safetensors"
FOLDERS = {0: DEMO_FOLDER / "thinker", 1: DEMO_FOLDER / "dit"}
BIG = "modulation.weight"
"""The painter's largest tensor; it comes late in the file, and later still in `late_first`."""


@functools.cache
def shipped(stage_id: int = 1) -> dict[str, torch.Tensor]:
    """A stage's tensors as they are in its file."""
    from safetensors.torch import load_file

    return load_file(FOLDERS[stage_id] / FILE)


@functools.cache
def others(stage_id: int = 1) -> dict[str, torch.Tensor]:
    """The same with noise in every matrix, float16 as in the file; the thinker needs more of it to say other things."""
    import torch

    noise = torch.Generator().manual_seed(5)
    return {
        name: (value + (0.2, 2.0)[stage_id == 0] * value.std() * torch.randn(value.shape, generator=noise)).half()
        for name, value in shipped(stage_id).items()
    }


def saved(tensors: dict[str, torch.Tensor], folder: Path, stage_id: int = 1) -> Path:
    """A checkpoint folder of these tensors."""
    from safetensors.torch import save_file

    shutil.copytree(FOLDERS[stage_id], folder)
    save_file(tensors, folder / FILE)
    return folder


def stream(tensors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """An iterator that can be gone through once."""
    yield from tensors.items()


def replaced(name: str, value: Any) -> dict[str, Any]:
    """The others with one tensor replaced, or, for None, left out."""
    changed = {**others(), name: value}
    return {key: tensor for key, tensor in changed.items() if tensor is not None}


def version(engine: AsyncOmni, stage_id: int = 1) -> str | None:
    """What a stage says its weights are."""
    return engine.status().stages[stage_id].weight_version


def state(engine: AsyncOmni, stage_id: int = 1) -> str:
    """A stage's memory state."""
    return str(engine.status().stages[stage_id].state)


async def restored(engine: AsyncOmni) -> None:
    """The shipped weights in every stage, whatever is there."""
    for stage in engine.status().stages:
        if stage.state not in {"AWAKE", "NEEDS_WEIGHTS"}:
            await engine.restart(stage.stage_id)
        await engine.load_weights(stage.stage_id, FOLDERS[stage.stage_id])
