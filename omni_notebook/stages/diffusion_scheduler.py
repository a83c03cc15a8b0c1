"""Request-level diffusion scheduling: FIFO; a batch shares steps, guidance and adapter and is not preemptible."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from omni_notebook.stages.image_requests import ImageScheduler, deliver_image
from omni_notebook.stages.scheduler import Batch
from omni_notebook.worker.batches import BATCH_PREFIX, DiffusionBatch, Executed, ImageAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.stages.requests import StageRequest
    from omni_notebook.worker.batches import PipelineBatch, Prefetch


class DiffusionScheduler(ImageScheduler):
    """The head of the queue always runs next; later requests of the same kind join its batch."""

    def __init__(self, *, max_batch_size: int) -> None:
        super().__init__(max_batch_size=max_batch_size)
        self._batch_id = ""

    def _next(self) -> list[StageRequest]:
        """The head and those that can be denoised with it."""
        waiting = self._requests.waiting
        if not waiting:
            return []
        kind = self._kind(waiting[0])
        return list(itertools.islice((r for r in waiting if self._kind(r) == kind), self._max_batch_size))

    def _kind(self, request: StageRequest) -> tuple[Any, ...]:
        """What requests of one batch have in common."""
        params = request.params
        return (params.num_inference_steps, params.guidance_scale, params.width, params.height, request.lora_id)

    def schedule(self) -> Batch | None:
        """The next batch, taken from the queue."""
        chosen = self._next()
        if not chosen:
            return None
        self._requests.start(chosen)
        payload = self._payload(chosen)
        self._batch_id = payload.batch_id
        return Batch(tuple(chosen), payload, payload.batch_id, self._milestones(payload))

    def _milestones(self, payload: DiffusionBatch | PipelineBatch) -> tuple[int, ...]:  # noqa: ARG002
        """After which steps the requests' progress is told."""
        return ()

    def _payload(self, requests: Sequence[StageRequest]) -> DiffusionBatch | PipelineBatch:
        """What the ranks get."""
        params = requests[0].params
        return DiffusionBatch(
            batch_id=batch_id(requests),
            images=tuple(r.payload.first_step(r.seed, r.lora_id) for r in requests),
            num_inference_steps=params.num_inference_steps,
            guidance_scale=params.guidance_scale,
        )

    def prefetch(self) -> Prefetch | None:
        """The conditioning of the next batch, and whose on the device is still wanted."""
        return self._requests.prefetch(self._next())

    def executed(self, batch: Batch, answer: Executed) -> None:
        """The running batch is computed; its images are being copied and encoded."""
        self._note(batch, answer)
        self._requests.leave(batch.requests)

    def finish(self, batch: Batch, answer: list[ImageAnswer], weight_version: str) -> None:  # noqa: ARG002
        """Deliver each image, with the weight versions that the rank recorded; drop those of aborted requests."""
        self._requests.gone(batch.requests)
        for request, image in zip(batch.requests, answer, strict=True):
            deliver_image(request, image, batch_size=len(batch.requests))

    def abandoned_batch(self) -> str | None:
        """The running batch's id if all its requests were aborted, else None."""
        running = self._requests.running
        return self._batch_id if running and all(request.aborted for request in running) else None

    @property
    def running(self) -> int:
        """Requests in the running batch, aborted ones among them, and those whose images are on their way out."""
        return self._requests.begun


def batch_id(requests: Sequence[StageRequest]) -> str:
    """A batch's name, by its first request."""
    return f"{BATCH_PREFIX}{requests[0].request_id}-{requests[0].arrived_s}"
