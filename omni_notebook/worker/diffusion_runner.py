"""Runs our rectified-flow DiT over a batch of images that share size, steps and guidance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from omni_notebook.models.dit import DiT, DiTConfig
from omni_notebook.models.flow import Condition, denoise_step, initial_noise, timesteps, to_uint8
from omni_notebook.models.loaders import read_config
from omni_notebook.models.parallel import SOLO
from omni_notebook.worker.batches import BatchCancelledError, DiffusionBatch, ImageAnswer, ImageStep
from omni_notebook.worker.model_runner import ModelRunner, torch_dtype

if TYPE_CHECKING:
    from omni_notebook.config import StageConfig
    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.models.parallel import TensorParallel


class DiffusionRunner(ModelRunner):
    """A DiT; a batch is not preemptible."""

    _model: DiT

    def __init__(self, config: StageConfig, parallel_size: int = 1) -> None:
        self._shape = DiTConfig.from_dict(read_config(Path(config.model)))
        self._shape.check_parallel(parallel_size)
        self._dtype = torch_dtype(config.dtype)
        self._cancelled = ""

    def build(self, pool: MemoryPool, parallel: TensorParallel = SOLO) -> None:
        """The DiT, or this rank's part of it, in the pool."""
        self._parallel = parallel
        self._place(lambda: DiT(self._shape, parallel), self._dtype, pool)

    @torch.inference_mode()
    def execute(self, batch: DiffusionBatch) -> list[ImageAnswer]:
        """All denoise steps of the batch; images in the batch's order."""
        noise = torch.stack([initial_noise(self._shape.image_shape, image.seed) for image in batch.images])
        condition, times = self._condition(batch.images), timesteps(batch.num_inference_steps)
        images = noise.to(self._dtype)
        for index in range(batch.num_inference_steps):
            self._stop_if_cancelled(batch.batch_id)
            with self.loras.applied([image.lora_id for image in batch.images]):
                images = denoise_step(self._model, images, index, times, condition, batch.guidance_scale)
        return [ImageAnswer(pixels=pixels) for pixels in to_uint8(images).numpy()]

    def cancel(self, task_id: str) -> None:
        """Stop a batch at its next step (any thread)."""
        self._cancelled = task_id

    def _stop_if_cancelled(self, batch_id: str) -> None:
        """Raise BatchCancelledError on all ranks at the same step: one that stopped alone would leave the others."""
        if self._parallel.any(self._cancelled == batch_id):
            msg = f"batch {batch_id} was cancelled: nobody waits for it any more"
            raise BatchCancelledError(msg)

    def _condition(self, images: tuple[ImageStep, ...]) -> Condition:
        plan_ids = torch.tensor([image.plan_ids for image in images], dtype=torch.long)
        if all(image.hidden is None for image in images):
            return Condition(plan_ids)
        hidden = torch.zeros(*plan_ids.shape, self._shape.cond_hidden_size, dtype=self._dtype)
        for place, image in enumerate(images):
            if image.hidden is not None:
                rows = np.asarray(image.hidden)[: plan_ids.shape[1]]
                hidden[place, : len(rows)] = torch.from_numpy(rows).to(self._dtype)
        mask = torch.tensor([image.hidden is not None for image in images])
        return Condition(plan_ids, hidden, mask)
