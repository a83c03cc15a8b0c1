"""Request-level diffusion scheduling: FIFO; a batch shares steps, guidance and adapter and is not preemptible."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_notebook.protocol import RequestState
from omni_notebook.stages.requests import StageOutput
from omni_notebook.stages.scheduler import Batch
from omni_notebook.worker.batches import BATCH_PREFIX, DiffusionBatch, ImageAnswer, ImageStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.errors import OmniError
    from omni_notebook.stages.requests import StageRequest


@dataclass(slots=True, frozen=True)
class ImagePrompt:
    """A diffusion request's payload: plan ids (the model's plan length) and the thinker's hidden states, if any."""

    plan_ids: tuple[int, ...]
    hidden: Any | None


class DiffusionScheduler:
    """The head of the queue always runs next; later requests of the same kind join its batch."""

    def __init__(self, *, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._waiting: deque[StageRequest] = deque()
        self._running: tuple[StageRequest, ...] = ()
        self._batch_id = ""

    def add(self, request: StageRequest) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def schedule(self) -> Batch | None:
        """The head and those that can be denoised with it."""
        if not self._waiting:
            return None
        kind = _kind(self._waiting[0])
        chosen = [r for r in self._waiting if _kind(r) == kind][: self._max_batch_size]
        for request in chosen:
            self._waiting.remove(request)
            request.started_s = time.perf_counter()
        self._running = tuple(chosen)
        payload = _payload(chosen)
        self._batch_id = payload.batch_id
        return Batch(self._running, payload)

    def finish(self, batch: Batch, answer: list[ImageAnswer], weight_version: str) -> None:
        """Deliver each image; results of aborted requests are dropped."""
        self._running = ()
        for request, image in zip(batch.requests, answer, strict=True):
            if request.aborted:
                continue
            request.deliver(
                StageOutput(
                    state=RequestState.FINISHED,
                    final=True,
                    finish_reason="stop",
                    pixels=[image.pixels],
                    weight_version=weight_version,
                    metrics={
                        "seed": request.seed,
                        "num_inference_steps": request.params.num_inference_steps,
                        "guidance_scale": request.params.guidance_scale,
                        "batch_size": len(batch.requests),
                        **request.timings_ms(),
                    },
                )
            )

    def fail(self, batch: Batch, error: BaseException) -> None:
        """End the batch's requests with an error."""
        self._running = ()
        for request in batch.requests:
            if not request.aborted:
                request.end(RequestState.FAILED, error)

    def requeue(self) -> None:
        """Begin the running batch again later."""
        for request in reversed(self._running):
            if not request.aborted:
                self._waiting.appendleft(request)
        self._running = ()

    def end_all(self, error: OmniError) -> None:
        """End every request with an error: the stage has failed."""
        ending = [r for r in (*self._running, *self._waiting) if not r.aborted]
        self._waiting.clear()
        for request in ending:
            request.aborted = True
            request.end(RequestState.FAILED, error)

    def abort(self, request_id: str) -> bool:
        """End one request; a running one's result is dropped when its batch ends."""
        for request in (*self._waiting, *self._running):
            if request.request_id == request_id and not request.aborted:
                request.aborted = True
                if request in self._waiting:
                    self._waiting.remove(request)
                request.end(RequestState.ABORTED)
                return True
        return False

    def abandoned_batch(self) -> str | None:
        """The running batch's id if all its requests were aborted, else None."""
        abandoned = self._running and all(request.aborted for request in self._running)
        return self._batch_id if abandoned else None

    def request_ids(self) -> Sequence[str]:
        """Running ones first."""
        return [r.request_id for r in (*self._running, *self._waiting) if not r.aborted]

    @property
    def running(self) -> int:
        """Requests in the running batch, aborted ones among them: the device works on them."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)


def _kind(request: StageRequest) -> tuple[Any, ...]:
    params = request.params
    return (params.num_inference_steps, params.guidance_scale, params.width, params.height, request.lora_id)


def _payload(requests: Sequence[StageRequest]) -> DiffusionBatch:
    first = requests[0].params
    return DiffusionBatch(
        batch_id=f"{BATCH_PREFIX}{requests[0].request_id}-{requests[0].arrived_s}",
        images=tuple(
            ImageStep(plan_ids=r.payload.plan_ids, hidden=r.payload.hidden, seed=r.seed, lora_id=r.lora_id)
            for r in requests
        ),
        num_inference_steps=first.num_inference_steps,
        guidance_scale=first.guidance_scale,
    )
