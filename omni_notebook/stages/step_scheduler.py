"""Step-level diffusion scheduling: one denoise step a turn; requests join and end between steps; previews stream."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from omni_notebook.protocol import RequestState
from omni_notebook.stages.image_requests import ImageScheduler, deliver_image
from omni_notebook.stages.requests import StageOutput
from omni_notebook.stages.scheduler import Batch
from omni_notebook.worker.batches import BATCH_PREFIX, DenoiseStep, Executed, ImageAnswer, StepBatch

if TYPE_CHECKING:
    from omni_notebook.stages.requests import StageRequest
    from omni_notebook.worker.batches import Prefetch


class StepScheduler(ImageScheduler):
    """Continuous batching of denoise steps; requests at different steps, and of different lengths, share a turn.

    Requests with another guidance or adapter take turns with them. A request that was aborted leaves at the next turn.
    """

    def __init__(self, *, max_batch_size: int) -> None:
        super().__init__(max_batch_size=max_batch_size)
        self._turns = itertools.count()

    def _next(self) -> list[StageRequest]:
        """Those that join at the next turn."""
        room = self._max_batch_size - len(self._requests.running)
        return list(itertools.islice(self._requests.waiting, max(room, 0)))

    def schedule(self) -> Batch | None:
        """One step for the request that has waited longest since its last one, and for all that can share its turn."""
        requests = self._requests
        requests.gone([r for r in requests.running if r.aborted])
        joining = self._next()
        requests.start(joining)
        if not requests.running:
            return None
        kind = _kind(requests.running[0])
        chosen = [r for r in requests.running if _kind(r) == kind]
        requests.running = [r for r in requests.running if r not in chosen] + chosen
        batch_id = f"{BATCH_PREFIX}step-{next(self._turns)}"
        payload = StepBatch(
            batch_id=batch_id,
            images=tuple(_step(r) for r in chosen),
            guidance_scale=chosen[0].params.guidance_scale,
            lora_id=chosen[0].lora_id,
            keep=tuple(r.payload.key for r in requests.running),
        )
        return Batch(tuple(chosen), payload, batch_id)

    def prefetch(self) -> Prefetch | None:
        """The conditioning of those that join as soon as there is room."""
        return self._requests.prefetch(list(itertools.islice(self._requests.waiting, self._max_batch_size)))

    def executed(self, batch: Batch, answer: Executed) -> None:
        """One more step is done; requests at their last one are through but for their images."""
        self._note(batch, answer)
        self._requests.leave([r for r in batch.requests if _complete(r)])

    def finish(self, batch: Batch, answer: list[ImageAnswer], weight_version: str) -> None:  # noqa: ARG002
        """Deliver previews, and the images of those that took their last step in this turn."""
        for request, step, image in zip(batch.requests, batch.payload.images, answer, strict=True):
            if step.last:
                self._requests.gone([request])
                deliver_image(request, image, batch_size=len(batch.requests))
            elif not request.aborted:
                request.deliver(_preview(request, step, image))

    def abandoned_batch(self) -> str | None:
        """None: a turn is short, it ends by itself."""
        return None

    @property
    def running(self) -> int:
        """Requests that have begun and were not aborted, those with images on their way out among them."""
        return sum(not r.aborted for r in (*self._requests.running, *self._requests.leaving))


def _kind(request: StageRequest) -> tuple[float, int]:
    return (request.params.guidance_scale, request.lora_id)


def _step(request: StageRequest) -> DenoiseStep:
    index, steps = request.payload.steps_done, request.params.num_inference_steps
    start = request.payload.first_step(request.seed, request.lora_id) if index == 0 else None
    return DenoiseStep(key=request.payload.key, index=index, num_inference_steps=steps, start=start)


def _complete(request: StageRequest) -> bool:
    return bool(request.payload.steps_done >= request.params.num_inference_steps)


def _preview(request: StageRequest, step: DenoiseStep, image: ImageAnswer) -> StageOutput:
    """What the image will be, as the model sees it after this step."""
    done = step.index + 1
    return StageOutput(
        state=RequestState.RUNNING,
        final=False,
        pixels=[image.pixels],
        weight_version=request.payload.step_versions[-1][0],
        progress=done / step.num_inference_steps,
        metrics={"seed": request.seed, "step": done, "num_inference_steps": step.num_inference_steps},
    )
