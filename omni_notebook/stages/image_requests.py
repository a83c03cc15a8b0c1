"""The requests of a diffusion stage, wherever they are: waiting, running, or with their images on the way out."""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omni_notebook.protocol import RequestState
from omni_notebook.stages.requests import StageOutput
from omni_notebook.worker.batches import ImageCondition, ImageStep, Prefetch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from omni_notebook.errors import OmniError
    from omni_notebook.stages.requests import StageRequest
    from omni_notebook.stages.scheduler import Batch
    from omni_notebook.worker.batches import Executed, ImageAnswer

_keys = itertools.count(1)


@dataclass(slots=True, kw_only=True)
class Drawing:
    """What every diffusion request's payload has.

    `key` names what the ranks hold of it; `prefetched`: its conditioning is there already, or on its way.
    `step_versions`: the weight version of every denoise step that it took, as [version, steps] in order.
    """

    key: int = field(default_factory=lambda: next(_keys))
    prefetched: bool = False
    step_versions: list[list[Any]] = field(default_factory=list)

    @property
    def steps_done(self) -> int:
        """Denoise steps that it took."""
        return sum(steps for _, steps in self.step_versions)

    def note(self, version: str, steps: int) -> None:
        """It took `steps` more on these weights."""
        if self.step_versions and self.step_versions[-1][0] == version:
            self.step_versions[-1][1] += steps
        else:
            self.step_versions.append([version, steps])


@dataclass(slots=True)
class ImagePrompt(Drawing):
    """What our DiT draws from: plan ids (the model's plan length) and the thinker's hidden states, if any."""

    plan_ids: tuple[int, ...]
    hidden: Any | None

    def first_step(self, seed: int, lora_id: int) -> ImageStep:
        """What a rank needs to begin; the conditioning comes along unless it was sent ahead."""
        condition = None if self.prefetched else self._condition
        return ImageStep(key=self.key, seed=seed, condition=condition, lora_id=lora_id)

    @property
    def _condition(self) -> ImageCondition:
        return ImageCondition(plan_ids=self.plan_ids, hidden=self.hidden)

    def send_ahead(self) -> ImageCondition:
        """Its conditioning, to be prefetched."""
        self.prefetched = True
        return self._condition


class ImageRequests:
    """Three places in a request's way through a diffusion stage; a scheduler moves requests from one to the next."""

    def __init__(self) -> None:
        self.waiting: deque[StageRequest] = deque()
        self.running: list[StageRequest] = []
        self.leaving: list[StageRequest] = []
        self._ahead: set[int] = set()

    def start(self, requests: Iterable[StageRequest]) -> None:
        """They run now."""
        for request in requests:
            self.waiting.remove(request)
            self.running.append(request)
            request.started_s = time.perf_counter()
            if request.payload.prefetched:
                self._ahead.discard(request.payload.key)  # its batch takes it

    def leave(self, requests: Iterable[StageRequest]) -> None:
        """They are computed; their images are being copied and encoded."""
        for request in requests:
            if request in self.running:
                self.running.remove(request)
                self.leaving.append(request)

    def gone(self, requests: Iterable[StageRequest]) -> None:
        """They are through."""
        ended = set(requests)
        self.running = [r for r in self.running if r not in ended]
        self.leaving = [r for r in self.leaving if r not in ended]

    def prefetch(self, following: Sequence[StageRequest]) -> Prefetch | None:
        """The conditioning of those who run next that is not on the device yet, and whose there is still wanted."""
        conditions = {r.payload.key: r.payload.send_ahead() for r in following if not r.payload.prefetched}
        before, self._ahead = self._ahead, {r.payload.key for r in self.waiting if r.payload.prefetched}
        if not conditions and before <= self._ahead:
            return None
        running = (r.payload.key for r in self.running if r.payload.prefetched)
        return Prefetch(conditions=conditions, keep=(*running, *self._ahead))

    def requeue(self) -> None:
        """What was begun, or computed but not delivered, begins again later; the ranks hold nothing of it any more."""
        for request in reversed((*self.leaving, *self.running)):
            if not request.aborted:
                request.payload.step_versions.clear()
                self.waiting.appendleft(request)
        self.running, self.leaving = [], []
        for request in self.waiting:
            request.payload.prefetched = False

    def fail(self, requests: Iterable[StageRequest], error: BaseException) -> None:
        """End them with an error."""
        ending = list(requests)
        self.gone(ending)
        for request in ending:
            if not request.aborted:
                request.end(RequestState.FAILED, error)

    def end_all(self, error: OmniError) -> None:
        """End every request with an error: the stage has failed."""
        ending = [r for r in self if not r.aborted]
        self.waiting.clear()
        for request in ending:
            request.aborted = True
            request.end(RequestState.FAILED, error)

    def abort(self, request_id: str) -> StageRequest | None:
        """End one request; the result of one that runs, or was computed, is dropped. None: it is not here."""
        for request in self:
            if request.request_id == request_id and not request.aborted:
                request.aborted = True
                if request in self.waiting:
                    self.waiting.remove(request)
                request.end(RequestState.ABORTED)
                return request
        return None

    def __iter__(self) -> Iterator[StageRequest]:
        """Those that are furthest first."""
        return iter((*self.leaving, *self.running, *self.waiting))

    def ids(self) -> list[str]:
        """Of all that were not aborted."""
        return [r.request_id for r in self if not r.aborted]

    @property
    def begun(self) -> int:
        """Requests that run, aborted ones among them, and those whose images are on their way out."""
        return len(self.running) + len(self.leaving)


class ImageScheduler:
    """What schedulers of a diffusion stage share: everything but what runs next and what is delivered."""

    def __init__(self, *, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._requests = ImageRequests()

    def add(self, request: StageRequest) -> None:
        """Queue a request."""
        self._requests.waiting.append(request)

    def _note(self, batch: Batch, answer: Executed) -> None:
        """Remember the weight versions that the ranks recorded."""
        for request in batch.requests:
            for version, steps in answer.step_versions:
                request.payload.note(version, steps)

    def fail(self, batch: Batch, error: BaseException) -> None:
        """End the batch's requests with an error."""
        self._requests.fail(batch.requests, error)

    def requeue(self) -> None:
        """Begin what was begun, or computed but not delivered, again later; nothing is prefetched."""
        self._requests.requeue()

    def end_all(self, error: OmniError) -> None:
        """End every request with an error: the stage has failed."""
        self._requests.end_all(error)

    def abort(self, request_id: str) -> bool:
        """End one request; the result of one that runs or was computed is dropped."""
        return self._requests.abort(request_id) is not None

    def request_ids(self) -> Sequence[str]:
        """Running ones first."""
        return self._requests.ids()

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._requests.waiting)


def deliver_image(request: StageRequest, image: ImageAnswer, **metrics: Any) -> None:
    """Hand a finished image over, unless the request was aborted."""
    if request.aborted:
        return
    prompt: Drawing = request.payload
    request.deliver(
        StageOutput(
            state=RequestState.FINISHED,
            final=True,
            finish_reason="stop",
            pixels=[image.pixels],
            png=[image.png],
            weight_version=prompt.step_versions[-1][0],
            metrics={
                "seed": request.seed,
                "num_inference_steps": request.params.num_inference_steps,
                "guidance_scale": request.params.guidance_scale,
                "step_weight_versions": [list(run) for run in prompt.step_versions],
                **metrics,
                **request.timings_ms(),
            },
        )
    )
