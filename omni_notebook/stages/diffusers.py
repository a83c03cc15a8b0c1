"""The diffusion stage on a diffusers pipeline: a prompt in, an image out. diffusers itself is the ranks' business."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_notebook.config import is_hub_name
from omni_notebook.errors import ArgumentError
from omni_notebook.models.pipeline_folder import check_parallel, read_pipeline
from omni_notebook.models.pipeline_lora import ADAPTED
from omni_notebook.stages.diffusion_scheduler import DiffusionScheduler, batch_id
from omni_notebook.stages.image_requests import Drawing
from omni_notebook.worker.batches import PipelineBatch, PromptImage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.config import StageConfig
    from omni_notebook.protocol import OmniSamplingParams
    from omni_notebook.stages.lora import StageLoras
    from omni_notebook.stages.requests import StageOutput, StageRequest
    from omni_notebook.transport.connector import Connector
    from omni_notebook.worker.batches import DiffusionBatch

_SPLIT = "adapters of a pipeline that is split over ranks are not in this release; use tensor_parallel_size=1"
MILESTONES = 10
"""How often a batch tells its progress, its end included."""
_KEYS = frozenset({"prompt", "negative_prompt"})


@dataclass(slots=True)
class PipelinePrompt(Drawing):
    """What a pipeline draws from."""

    prompt: str
    negative_prompt: str | None = None


class PipelineScheduler(DiffusionScheduler):
    """FIFO batches of requests that share steps, guidance, size and adapter; the pipeline reads the prompts itself."""

    def _kind(self, request: StageRequest) -> tuple[Any, ...]:
        return (*super()._kind(request), request.payload.negative_prompt is None)

    def _payload(self, requests: Sequence[StageRequest]) -> PipelineBatch:
        first = requests[0]
        return PipelineBatch(
            batch_id=batch_id(requests),
            images=tuple(
                PromptImage(prompt=r.payload.prompt, negative_prompt=r.payload.negative_prompt, seed=r.seed)
                for r in requests
            ),
            num_inference_steps=first.params.num_inference_steps,
            guidance_scale=first.params.guidance_scale,
            width=first.params.width,
            height=first.params.height,
            lora_id=first.lora_id,
        )

    def _milestones(self, payload: DiffusionBatch | PipelineBatch) -> tuple[int, ...]:
        """At most ten, evenly spread."""
        steps = payload.num_inference_steps
        count = min(steps, MILESTONES)
        return tuple(steps * place // count for place in range(1, count))

    def prefetch(self) -> None:
        """Nothing: text encoders are a part of the pipeline."""


def _fetched(model: str) -> str:
    """The folder of a pipeline from the hub that the ranks have fetched."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (comes with diffusers)

    return str(snapshot_download(model, local_files_only=True))


class DiffusersModel:
    """A prompt (or the text of the stage before) in, an image out.

    Raises:
        ConfigError: the folder is not a whole pipeline.
        UnsupportedError: the pipeline can not be split over so many ranks.
    """

    output_type = "image"

    def __init__(self, config: StageConfig) -> None:
        self._model = config.model
        self._folder = None if is_hub_name(config.model) else read_pipeline(config.model)
        if self._folder is not None:
            self._folder.shapes()  # reads every header: a file that is cut short is found before anything starts
            check_parallel(self._folder, config.tensor_parallel_size)
        self._max_batch_size = config.max_batch_size
        self.unadaptable = _SPLIT if config.tensor_parallel_size > 1 else None

    @functools.cached_property
    def adaptable(self) -> dict[str, tuple[int, int]]:
        """See `StageModel.adaptable`: matrices of the denoiser, named component.layer."""
        folder = self._folder or read_pipeline(_fetched(self._model))
        named = {
            f"{part}.{name.removesuffix('.weight')}": shape
            for part in ADAPTED
            if part in folder.components
            for name, shape in folder.components[part].shapes().items()
            if name.endswith(".weight")
        }
        return {name: (shape[0], shape[1]) for name, shape in named.items() if len(shape) == 2}

    def make_scheduler(self, connector: Connector | None, loras: StageLoras) -> PipelineScheduler:  # noqa: ARG002
        """FIFO batches of what is equal."""
        return PipelineScheduler(max_batch_size=self._max_batch_size)

    def check(self, params: OmniSamplingParams) -> None:
        """A size must be whole; whether the pipeline can draw it, the pipeline says."""
        if (params.width is None) != (params.height is None):
            msg = f"width={params.width}, height={params.height}: give both, or none for the pipeline's own size"
            raise ArgumentError(msg)
        for name, value in (("width", params.width), ("height", params.height)):
            if value is not None and value < 1:
                msg = f"{name}={value}: a picture has at least one pixel; nothing was started"
                raise ArgumentError(msg)

    def first(self, prompt: Any, params: OmniSamplingParams) -> PipelinePrompt:  # noqa: ARG002
        """A string, or `{"prompt": …, "negative_prompt": …}`."""
        given = prompt if isinstance(prompt, dict) else {"prompt": prompt}
        negative = given.get("negative_prompt")
        fits = given.keys() <= _KEYS and isinstance(given.get("prompt"), str) and isinstance(negative, str | None)
        if not fits or not given["prompt"].strip():
            msg = (
                'a pipeline takes a text that is not empty, or {"prompt": text, "negative_prompt": text}; nothing was '
                "started"
            )
            raise ArgumentError(msg)
        return PipelinePrompt(given["prompt"], negative)

    def following(self, upstream: StageOutput, params: OmniSamplingParams) -> PipelinePrompt:
        """The text that the stage before wrote."""
        return self.first(upstream.text, params)
