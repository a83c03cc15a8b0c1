"""Runs a diffusers pipeline over batches of prompts that share steps, guidance, size and adapter."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from omni_notebook.errors import ConfigError, UnsupportedError
from omni_notebook.memory.device.capturing import synchronize
from omni_notebook.models.pipeline_folder import SPLIT_KINDS, check_parallel, check_same, read_pipeline
from omni_notebook.worker.batches import BatchCancelledError, Executed, PipelineBatch, RequestRefusedError
from omni_notebook.worker.diffusers.library import find_folder, first_line, hushed, load_pipeline, step_callback
from omni_notebook.worker.diffusers.milestones import Milestones
from omni_notebook.worker.diffusers.parts import Part, check_apart
from omni_notebook.worker.diffusers.split import split
from omni_notebook.worker.graphs import NO_GRAPHS
from omni_notebook.worker.images import unit_answers
from omni_notebook.worker.model_runner import torch_dtype
from omni_notebook.worker.runner import Deferred

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from omni_notebook.config import StageConfig
    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.models.parallel import TensorParallel
    from omni_notebook.models.pipeline_folder import PipelineFolder
    from omni_notebook.worker.batches import Prefetch
    from omni_notebook.worker.diffusers.loras import PipelineLoras
    from omni_notebook.worker.graphs import Recall


class DiffusersRunner:
    """A pipeline whose sub-models' memory is in the pool, one tag each; a batch stops between two steps.

    Tokenizers, schedulers and processors are host objects and do not sleep.
    """

    def __init__(self, config: StageConfig, parallel_size: int = 1) -> None:
        self._config = config
        self._size = parallel_size
        self._parts: dict[str, Part] = {}
        self._cancelled, self._device = "", "cpu"
        self._milestones = Milestones()
        self._pipe: Any = None
        self._unread: Path | None = None

    # ------------------------------------------------------------------------------------ loading

    def build(self, pool: MemoryPool, parallel: TensorParallel) -> None:
        """Load the pipeline and move every sub-model into the pool.

        Raises:
            ConfigError: it can not be loaded, or two sub-models share memory.
            UnsupportedError: it is no pipeline from text to images.
            OutOfMemoryError: no room for it.
        """
        self._parallel, self._device = parallel, pool.device
        self._loaded = read_pipeline(find_folder(self._config.model))
        check_parallel(self._loaded, self._size)
        self._shapes = self._loaded.shapes()
        self._dtype = torch_dtype(self._config.dtype, pool.device, self._loaded.files)
        self._pipe = load_pipeline(self._loaded, self._config, self._dtype)
        modules = self._modules()
        check_apart(modules)
        for name, component in self._loaded.components.items():
            shards = split(modules[name], parallel) if self._size > 1 and component.kind in SPLIT_KINDS else {}
            part = self._parts[name] = Part(modules[name].eval(), name, self._dtype, shards)
            part.adopt(component, pool)
        gc.collect()  # modules refer to themselves: what they held before goes now
        self._unread = self._loaded.folder

    def _modules(self) -> dict[str, nn.Module]:
        """The sub-models by name.

        Raises:
            ConfigError: the pipeline made one that has no files.
        """
        found = {name: one for name, one in self._pipe.components.items() if isinstance(one, nn.Module)}
        odd = sorted(found.keys() ^ self._loaded.components.keys())
        if odd:
            what = "has no files of weights" if odd[0] in found else "has weights, but the pipeline did not load it"
            msg = f"{self._loaded.folder}: the component {odd[0]!r} {what}"
            raise ConfigError(msg)
        return found

    def folder(self, model: str) -> str:  # noqa: ARG002  (it was found when the pipeline was built)
        """Where the pipeline's files are."""
        return str(self._loaded.folder)

    @property
    def weight_tags(self) -> tuple[str, ...]:
        """The components."""
        return tuple(self._parts)

    def weight_files(self, folder: Path) -> Sequence[Path]:
        """Every component's safetensors files."""
        return read_pipeline(folder).files()

    def kept_tensors(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Buffers that no file has."""
        return {name: part.kept for name, part in self._parts.items()}

    def check_weights(self, folder: Path) -> None:
        """Raise ConfigError unless a pipeline's folder has the same components with the same tensors."""
        self._checked(folder)

    def _checked(self, folder: Path) -> PipelineFolder:
        other = read_pipeline(folder)
        check_same(self._loaded, self._shapes, other)
        return other

    def load_weights(
        self, folder: Path, between: Callable[[], None] | None = None, tags: Collection[str] | None = None
    ) -> None:
        """Fill the components `tags` (None = all) from a pipeline's folder, in place.

        Raises:
            ConfigError: the folder does not fit; checked before a parameter is touched.
        """
        other = self._checked(folder)
        built, self._unread = self._unread, None
        if tags is None and built == folder.resolve():
            return  # `build` has just read it
        for name, part in self._parts.items():
            if tags is None or name in tags:
                part.load(other.components[name], between or _nothing)

    def places(self) -> NoReturn:
        """Refuse tensors: components have their files' names for them.

        Raises:
            UnsupportedError: always; says what to do.
        """
        msg = (
            "a diffusers stage takes weights from a pipeline's folder: call pipeline.save_pretrained(folder) and give "
            "the folder. Nothing changed"
        )
        raise UnsupportedError(msg)

    def make_loras(self, pool: MemoryPool, *, slots: int, max_rank: int) -> PipelineLoras:  # noqa: ARG002
        """The pipeline's adapters."""
        from omni_notebook.worker.diffusers.loras import PipelineLoras  # noqa: PLC0415  (imports diffusers)

        self._loras = PipelineLoras(self._pipe, self._parts, pool, max_rank)
        return self._loras

    # ----------------------------------------------------------------------------------- batches

    def execute(self, batch: PipelineBatch, weight_version: Callable[[], str]) -> Deferred:
        """Draw a batch; images in the batch's order.

        Raises:
            BatchCancelledError: nobody waits for it any more.
            RequestRefusedError: the pipeline refuses the size, or another parameter.
        """
        version = weight_version()
        with self._milestones.of(batch.batch_id), self._loras.applied(batch.lora_id), hushed():
            self._stop_if_cancelled(batch.batch_id)
            images = self._draw(batch)
        check_images(images, batch)
        return Deferred(Executed(step_versions=((version, batch.num_inference_steps),)), lambda: unit_answers(images))

    @torch.no_grad()
    def _draw(self, batch: PipelineBatch) -> Any:
        """What the pipeline gives: (B, 3, H, W) in [0, 1]."""
        known: dict[str, Any] = {
            name: size for name, size in (("width", batch.width), ("height", batch.height)) if size is not None
        }
        if batch.images[0].negative_prompt is not None:
            known["negative_prompt"] = [image.negative_prompt for image in batch.images]
        try:
            return self._pipe(
                prompt=[image.prompt for image in batch.images],
                num_inference_steps=batch.num_inference_steps,
                guidance_scale=batch.guidance_scale,
                generator=[torch.Generator("cpu").manual_seed(image.seed) for image in batch.images],
                output_type="pt",
                **step_callback(self._pipe, self._after_step(batch)),
                **known,
            ).images
        except (ValueError, TypeError) as error:
            msg = f"{type(self._pipe).__name__} refused the request: {first_line(error)}"
            raise RequestRefusedError(msg) from error

    def _after_step(self, batch: PipelineBatch) -> Callable[[int], None]:
        def after_step(index: int) -> None:
            steps = batch.num_inference_steps
            turns = getattr(self._pipe, "_num_timesteps", None) or steps  # some schedulers take two a step
            self._milestones.passed((index + 1) * steps // turns)
            self._stop_if_cancelled(batch.batch_id)

        return after_step

    def _stop_if_cancelled(self, batch_id: str) -> None:
        """Raise BatchCancelledError on all ranks at the same step."""
        if self._parallel.any(self._cancelled == batch_id):
            msg = f"batch {batch_id} was cancelled: nobody waits for it any more"
            raise BatchCancelledError(msg)

    def cancel(self, task_id: str) -> None:
        """Stop a batch at its next step (any thread)."""
        self._cancelled = task_id

    def reached(self, batch_id: str, steps: int) -> Future[bool]:
        """See `Runner.reached`."""
        return self._milestones.ask(batch_id, steps)

    def prefetch(self, wanted: Prefetch) -> None:
        """Nothing: the pipeline reads prompts itself."""

    def join_prefetch(self) -> None:
        """Nothing is on its way."""

    def drop_transient(self) -> None:
        """Nothing is there between two batches."""

    def recall_graphs(self) -> Recall:
        """See `Runner.recall_graphs`: none are made."""
        return NO_GRAPHS

    def drop_graphs(self) -> None:
        """Nothing: none are made."""

    def synchronize(self) -> None:
        """Wait for the device."""
        synchronize(self._device)

    def close(self) -> None:
        """Let the pipeline go."""
        self._pipe = None
        self._parts.clear()


def check_images(images: Any, batch: PipelineBatch) -> None:
    """Raise unless a pipeline gave one picture a prompt, of the size that was asked for.

    Raises:
        UnsupportedError: it gives something else (a film, a mask).
        RequestRefusedError: it has rounded the size.
    """
    count = len(batch.images)
    if not isinstance(images, torch.Tensor) or images.ndim != 4 or images.shape[:2] != (count, 3):
        shape = tuple(images.shape) if isinstance(images, torch.Tensor) else type(images).__name__
        msg = f"the pipeline gave {shape}, not a picture of three colours a prompt; only such pipelines can be a stage"
        raise UnsupportedError(msg)
    height, width = images.shape[2:]
    if batch.width is not None and (batch.width, batch.height) != (width, height):
        msg = f"the pipeline drew {width} × {height} pixels instead of {batch.width} × {batch.height}; ask for that"
        raise RequestRefusedError(msg)


def _nothing() -> None:
    """Between two tensors."""
