"""Runs our rectified-flow DiT over a batch of images that share size, steps and guidance."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from omni_notebook.models.dit import DiT, DiTConfig
from omni_notebook.models.flow import denoise_step, initial_noise, timesteps
from omni_notebook.models.loaders import checkpoint_files, read_config
from omni_notebook.models.parallel import SOLO
from omni_notebook.worker.batches import BatchCancelledError, DiffusionBatch, Executed, StepBatch
from omni_notebook.worker.conditioning import Conditioner
from omni_notebook.worker.images import answers, step_answers
from omni_notebook.worker.model_runner import ModelRunner, torch_dtype
from omni_notebook.worker.runner import Deferred
from omni_notebook.worker.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.config import StageConfig
    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.models.parallel import TensorParallel
    from omni_notebook.worker.batches import Prefetch


class DiffusionRunner(ModelRunner):
    """A DiT; a batch is not preemptible."""

    _model: DiT

    def __init__(self, config: StageConfig, parallel_size: int = 1) -> None:
        self._shape = DiTConfig.from_dict(read_config(Path(config.model)))
        self._shape.check_parallel(parallel_size)
        self._config = config
        self._conditioner = Conditioner(self._shape)
        self._steps = Steps(self._conditioner, self._shape.image_shape)
        self._cancelled = ""

    def build(self, pool: MemoryPool, parallel: TensorParallel = SOLO) -> None:
        """The DiT, or this rank's part of it, in the pool."""
        self._parallel = parallel
        dtype = torch_dtype(self._config.dtype, pool.device, lambda: checkpoint_files(self._config.model))
        self._place(lambda: DiT(self._shape, parallel), dtype, pool)
        self._conditioner.place(self._device, dtype)
        self._denoise = self._graphed(self._model, self._config)

    @torch.inference_mode()
    def execute(self, batch: DiffusionBatch | StepBatch, weight_version: Callable[[], str]) -> Deferred:
        """All denoise steps of a batch, or one of each of its images; images in the batch's order."""
        if isinstance(batch, StepBatch):
            return self._turn(batch, weight_version)
        return self._whole(batch, weight_version)

    def _turn(self, batch: StepBatch, weight_version: Callable[[], str]) -> Deferred:
        version = weight_version()
        with self.loras.applied([batch.lora_id] * len(batch.images)) as adapted:
            images = self._steps.turn(self._model if adapted else self._denoise, batch)
        return Deferred(Executed(step_versions=((version, 1),)), lambda: step_answers(images, batch.images))

    def _whole(self, batch: DiffusionBatch, weight_version: Callable[[], str]) -> Deferred:
        noise = [self._conditioner.placed(initial_noise(self._shape.image_shape, one.seed)) for one in batch.images]
        condition, times = self._conditioner.batch(batch.images), timesteps(batch.num_inference_steps)
        images, versions = torch.stack(noise), []
        with self.loras.applied([image.lora_id for image in batch.images]) as adapted:
            model = self._model if adapted else self._denoise
            for index in range(batch.num_inference_steps):
                self._stop_if_cancelled(batch.batch_id)
                versions.append(weight_version())
                images = denoise_step(model, images, index, times, condition, batch.guidance_scale)
        steps = tuple((version, len(list(run))) for version, run in groupby(versions))
        return Deferred(Executed(step_versions=steps), lambda: answers(images))

    def cancel(self, task_id: str) -> None:
        """Stop a batch at its next step (any thread)."""
        self._cancelled = task_id

    def prefetch(self, wanted: Prefetch) -> None:
        """See `Runner.prefetch`."""
        self._conditioner.prefetch(wanted)

    def join_prefetch(self) -> None:
        """See `Runner.join_prefetch`."""
        self._conditioner.join()

    def drop_transient(self) -> None:
        """See `Runner.drop_transient`."""
        self._conditioner.drop()
        self._steps.drop()

    def close(self) -> None:
        """See `Runner.close`."""
        self._conditioner.close()

    def _stop_if_cancelled(self, batch_id: str) -> None:
        """Raise BatchCancelledError on all ranks at the same step: one that stopped alone would leave the others."""
        if self._parallel.any(self._cancelled == batch_id):
            msg = f"batch {batch_id} was cancelled: nobody waits for it any more"
            raise BatchCancelledError(msg)
