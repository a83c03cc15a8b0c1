"""Request-level diffusion scheduling: FIFO; a batch shares steps and guidance and is not preemptible."""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omni_notebook.protocol import RequestState
from omni_notebook.stages.requests import StageOutput
from omni_notebook.stages.scheduler import Batch
from omni_notebook.worker.batches import (
    BATCH_PREFIX,
    DiffusionBatch,
    Executed,
    ImageAnswer,
    ImageCondition,
    ImageStep,
    Prefetch,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.errors import OmniError
    from omni_notebook.stages.requests import StageRequest

_keys = itertools.count(1)


@dataclass(slots=True)
class ImagePrompt:
    """A diffusion request's payload: plan ids (the model's plan length) and the thinker's hidden states, if any.

    `key` names its conditioning on the device; `prefetched`: it is there already, or on its way.
    `step_versions`: the weight version of every denoise step that it took, as (version, steps) in order.
    """

    plan_ids: tuple[int, ...]
    hidden: Any | None
    key: int = field(default_factory=lambda: next(_keys))
    prefetched: bool = False
    step_versions: list[tuple[str, int]] = field(default_factory=list)

    @property
    def condition(self) -> ImageCondition:
        """What crosses to the ranks."""
        return ImageCondition(plan_ids=self.plan_ids, hidden=self.hidden)


class DiffusionScheduler:
    """The head of the queue always runs next; later requests of the same kind join its batch."""

    def __init__(self, *, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._waiting: deque[StageRequest] = deque()
        self._running: tuple[StageRequest, ...] = ()
        self._leaving: list[StageRequest] = []
        self._ahead: set[int] = set()
        self._batch_id = ""

    def add(self, request: StageRequest) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def _next(self) -> list[StageRequest]:
        """The head and those that can be denoised with it."""
        if not self._waiting:
            return []
        kind = _kind(self._waiting[0])
        return list(itertools.islice((r for r in self._waiting if _kind(r) == kind), self._max_batch_size))

    def schedule(self) -> Batch | None:
        """The next batch, taken from the queue."""
        chosen = self._next()
        if not chosen:
            return None
        for request in chosen:
            self._waiting.remove(request)
            request.started_s = time.perf_counter()
            if request.payload.prefetched:
                self._ahead.discard(request.payload.key)  # the batch takes it
        self._running = tuple(chosen)
        payload = _payload(chosen)
        self._batch_id = payload.batch_id
        return Batch(self._running, payload, payload.batch_id)

    def prefetch(self) -> Prefetch | None:
        """The conditioning of the next batch that is not on the device yet, and whose there is still wanted."""
        following = self._next()
        fresh = [r for r in following if not r.payload.prefetched]
        for request in fresh:
            request.payload.prefetched = True
        before, self._ahead = self._ahead, {r.payload.key for r in self._waiting if r.payload.prefetched}
        if not fresh and before <= self._ahead:
            return None
        return Prefetch(
            conditions={r.payload.key: r.payload.condition for r in fresh},
            keep=(*(r.payload.key for r in self._running if r.payload.prefetched), *self._ahead),
        )

    def executed(self, batch: Batch, answer: Executed) -> None:
        """The running batch is computed; its images are being copied and encoded."""
        for request in batch.requests:
            request.payload.step_versions.extend(answer.step_versions)
        self._leaving.extend(self._running)
        self._running = ()

    def finish(self, batch: Batch, answer: list[ImageAnswer], weight_version: str) -> None:
        """Deliver each image; results of aborted requests are dropped."""
        self._gone(batch)
        for request, image in zip(batch.requests, answer, strict=True):
            if request.aborted:
                continue
            request.deliver(
                StageOutput(
                    state=RequestState.FINISHED,
                    final=True,
                    finish_reason="stop",
                    pixels=[image.pixels],
                    png=[image.png],
                    weight_version=request.payload.step_versions[-1][0]
                    if request.payload.step_versions
                    else weight_version,
                    metrics={
                        "seed": request.seed,
                        "num_inference_steps": request.params.num_inference_steps,
                        "guidance_scale": request.params.guidance_scale,
                        "batch_size": len(batch.requests),
                        "step_weight_versions": [list(step) for step in request.payload.step_versions],
                        **request.timings_ms(),
                    },
                )
            )

    def _gone(self, batch: Batch) -> None:
        """A batch is through."""
        ended = set(batch.requests)
        self._running = tuple(r for r in self._running if r not in ended)
        self._leaving = [r for r in self._leaving if r not in ended]

    def fail(self, batch: Batch, error: BaseException) -> None:
        """End the batch's requests with an error."""
        self._gone(batch)
        for request in batch.requests:
            if not request.aborted:
                request.end(RequestState.FAILED, error)

    def requeue(self) -> None:
        """Begin the running batch again later, and what was computed but is not delivered; nothing is prefetched."""
        for request in reversed((*self._leaving, *self._running)):
            if not request.aborted:
                request.payload.step_versions.clear()
                self._waiting.appendleft(request)
        self._running, self._leaving = (), []
        for request in self._waiting:
            request.payload.prefetched = False

    def end_all(self, error: OmniError) -> None:
        """End every request with an error: the stage has failed."""
        ending = [r for r in (*self._leaving, *self._running, *self._waiting) if not r.aborted]
        self._waiting.clear()
        for request in ending:
            request.aborted = True
            request.end(RequestState.FAILED, error)

    def abort(self, request_id: str) -> bool:
        """End one request; the result of one that was computed is dropped."""
        for request in (*self._waiting, *self._running, *self._leaving):
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
        return [r.request_id for r in (*self._leaving, *self._running, *self._waiting) if not r.aborted]

    @property
    def running(self) -> int:
        """Requests in the running batch, aborted ones among them, and those whose images are on their way out."""
        return len(self._running) + len(self._leaving)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)


def _kind(request: StageRequest) -> tuple[Any, ...]:
    params = request.params
    return (params.num_inference_steps, params.guidance_scale, params.width, params.height)


def _payload(requests: Sequence[StageRequest]) -> DiffusionBatch:
    first = requests[0].params
    images = tuple(
        ImageStep(key=r.payload.key, seed=r.seed, condition=None if r.payload.prefetched else r.payload.condition)
        for r in requests
    )
    return DiffusionBatch(
        batch_id=f"{BATCH_PREFIX}{requests[0].request_id}-{requests[0].arrived_s}",
        images=images,
        num_inference_steps=first.num_inference_steps,
        guidance_scale=first.guidance_scale,
    )
