"""The diffusion stage on our own DiT: a plan in, an image out."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_notebook.errors import ArgumentError
from omni_notebook.models.dit import DiT, DiTConfig
from omni_notebook.models.loaders import read_config
from omni_notebook.models.lora import shapes
from omni_notebook.models.scene import encode_plan
from omni_notebook.stages.diffusion_scheduler import DiffusionScheduler
from omni_notebook.stages.image_requests import ImagePrompt
from omni_notebook.stages.step_scheduler import StepScheduler

if TYPE_CHECKING:
    from omni_notebook.config import StageConfig
    from omni_notebook.protocol import OmniSamplingParams
    from omni_notebook.stages.lora import StageLoras
    from omni_notebook.stages.requests import StageOutput
    from omni_notebook.stages.scheduler import Scheduler
    from omni_notebook.transport.connector import Connector


class DiffusionModel:
    """A scene plan as text (and the thinker's hidden states, where it gives them) in, an image out."""

    output_type = "image"
    unadaptable: str | None = None

    def __init__(self, config: StageConfig) -> None:
        self._shape = DiTConfig.from_dict(read_config(Path(config.model)))
        self._shape.check_parallel(config.tensor_parallel_size)
        self._max_batch_size = config.max_batch_size
        self._step_execution = config.step_execution

    @functools.cached_property
    def adaptable(self) -> dict[str, tuple[int, int]]:
        """See `StageModel.adaptable`."""
        return shapes(lambda: DiT(self._shape))

    def make_scheduler(self, connector: Connector | None, loras: StageLoras) -> Scheduler:  # noqa: ARG002
        """FIFO batches of requests that share steps, guidance and adapter, or single steps of all that run."""
        kind = StepScheduler if self._step_execution else DiffusionScheduler
        return kind(max_batch_size=self._max_batch_size)

    def check(self, params: OmniSamplingParams) -> None:
        """The size must be the model's own."""
        for name, value in (("width", params.width), ("height", params.height)):
            if value not in {None, self._shape.image_size}:
                msg = (
                    f"{name}={value}: this model draws {self._shape.image_size} × {self._shape.image_size} pixels only"
                )
                raise ArgumentError(msg)

    def first(self, prompt: Any, params: OmniSamplingParams) -> ImagePrompt:  # noqa: ARG002
        """A plan text without hidden states."""
        if not isinstance(prompt, str) or not prompt.strip():
            msg = "a diffusion stage by itself takes a plan text such as 'red star top center'; nothing was started"
            raise ArgumentError(msg)
        return self._prompt(prompt, None)

    def following(self, upstream: StageOutput, params: OmniSamplingParams) -> ImagePrompt:  # noqa: ARG002
        """The plan that the stage before wrote, with its hidden states if they fit this model."""
        hidden = None if not upstream.hidden else np.stack(upstream.hidden)
        fits = hidden is not None and hidden.shape[1] == self._shape.cond_hidden_size
        return self._prompt(upstream.text, hidden if fits else None)

    def _prompt(self, plan: str, hidden: Any | None) -> ImagePrompt:
        try:
            return ImagePrompt(tuple(encode_plan(plan)), hidden)
        except ValueError as error:
            msg = f"{plan!r} is not a scene plan: {error}"
            raise ArgumentError(msg) from None
