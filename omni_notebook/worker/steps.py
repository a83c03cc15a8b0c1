"""Half denoised images between the turns of step-level execution."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from omni_notebook.models.flow import euler_step, initial_noise, timesteps

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.worker.batches import DenoiseStep, ImageStep, StepBatch
    from omni_notebook.worker.conditioning import Conditioner, OneCondition


class _Begun(NamedTuple):
    """One image: where it is, (C, H, W), its times, (steps + 1,), and what it is drawn from."""

    x: torch.Tensor
    times: torch.Tensor
    condition: OneCondition


class Steps:
    """Takes one step a turn for a batch that may change between turns."""

    def __init__(self, conditioner: Conditioner, image_shape: tuple[int, ...]) -> None:
        self._conditioner = conditioner
        self._image_shape = image_shape
        self._begun: dict[int, _Begun] = {}

    def __len__(self) -> int:
        return len(self._begun)

    def turn(self, model: Callable[..., torch.Tensor], batch: StepBatch) -> torch.Tensor:
        """The clean images as the model sees them after the step, (B, C, H, W), in the batch's order."""
        for key in self._begun.keys() - set(batch.keep):
            del self._begun[key]
        rows = [self._row(step) for step in batch.images]
        now, following = (
            torch.stack([row.times[step.index + ahead] for row, step in zip(rows, batch.images, strict=True)])
            for ahead in (0, 1)
        )
        condition = self._conditioner.together([row.condition for row in rows])
        x, clean = euler_step(
            model, torch.stack([row.x for row in rows]), (now, following), condition, batch.guidance_scale
        )
        for place, (row, step) in enumerate(zip(rows, batch.images, strict=True)):
            if step.last:
                self._begun.pop(step.key)
            else:
                self._begun[step.key] = row._replace(x=x[place])
        return torch.stack([x[n] if step.last else clean[n] for n, step in enumerate(batch.images)])

    def _row(self, step: DenoiseStep) -> _Begun:
        if step.start is not None:
            self._begun[step.key] = self._begin(step.start, step.num_inference_steps)
        return self._begun[step.key]

    def _begin(self, image: ImageStep, steps: int) -> _Begun:
        noise = self._conditioner.placed(initial_noise(self._image_shape, image.seed))
        return _Begun(noise, timesteps(steps).to(noise.device), self._conditioner.one(image))

    def drop(self) -> None:
        """Forget every image; they begin again."""
        self._begun.clear()
