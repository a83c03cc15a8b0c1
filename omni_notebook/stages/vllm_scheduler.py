"""The requests of a vLLM stage: vLLM decides what runs; these are the books about what was given to it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import RemoteWorkerError
from omni_notebook.protocol import RequestState
from omni_notebook.stages.requests import StageOutput
from omni_notebook.worker.faults import rebuild
from omni_notebook.worker.vllm.wire import TextRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from omni_notebook.errors import OmniError
    from omni_notebook.stages.requests import StageRequest
    from omni_notebook.transport.connector import Connector
    from omni_notebook.worker.vllm.wire import TextOutput


@dataclass(slots=True)
class TextPrompt:
    """A request's payload: the prompt (text, or ids), and what was generated so far.

    `versions`: the weight version that each token came from, as [version, tokens] in order. `cached`: tokens of the
    prompt whose keys and values vLLM had already, None before the first output.
    """

    prompt: str | tuple[int, ...]
    prompt_ids: tuple[int, ...] | None = None
    generated: list[int] = field(default_factory=list)
    text: str = ""
    versions: list[list[Any]] = field(default_factory=list)
    cached: int | None = None

    def __post_init__(self) -> None:
        if self.prompt_ids is None and not isinstance(self.prompt, str):
            self.prompt_ids = self.prompt

    def note(self, weight_version: str, tokens: int) -> None:
        """So many tokens more came from these weights."""
        if self.versions and self.versions[-1][0] == weight_version:
            self.versions[-1][1] += tokens
        else:
            self.versions.append([weight_version, tokens])


class VllmScheduler:
    """FIFO into vLLM; those that vLLM has are running. `decode` makes text of tokens; None: vLLM's own text."""

    def __init__(
        self, connector: Connector | None = None, decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        self._connector = connector
        self._decode = decode
        self._waiting: deque[StageRequest] = deque()
        self._running: dict[str, StageRequest] = {}

    def add(self, request: StageRequest) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def take(self, held: Container[str] = ()) -> TextRequest | None:
        """The next that vLLM may have, but for these ids; one for a closed, full stage holds back only its like."""
        waiting = (one for one in self._waiting if one.request_id not in held)
        request = next((one for one in waiting if self._may_start(one)), None)
        if request is None:
            return None
        self._waiting.remove(request)
        request.started_s = request.started_s or time.perf_counter()
        self._running[request.request_id] = request
        return _for_vllm(request)

    def _may_start(self, request: StageRequest) -> bool:
        if self._connector is None or not request.feeds_next:
            return True
        if not self._connector.may_start(request.request_id):
            return False
        self._connector.started(request.request_id)
        return True

    def finish(self, outputs: Iterable[TextOutput], weight_version: str) -> None:
        """Deliver what vLLM has made; outputs of requests that have ended are dropped."""
        for output in outputs:
            request = self._running.get(output.request_id)
            if request is not None:
                self._take_output(request, output, weight_version)

    def _take_output(self, request: StageRequest, output: TextOutput, weight_version: str) -> None:
        prompt: TextPrompt = request.payload
        if output.fault is not None:
            del self._running[request.request_id]
            request.end(RequestState.FAILED, rebuild(output.fault))
            return
        if prompt.cached is None:
            prompt.prompt_ids, prompt.cached = prompt.prompt_ids or output.prompt_token_ids, output.cached_tokens
        prompt.generated.extend(output.token_ids)
        prompt.text = prompt.text + output.text if self._decode is None else self._decode(prompt.generated)
        if output.token_ids:
            prompt.note(weight_version, len(output.token_ids))
        request.weight_version = weight_version
        if output.finish_reason is not None:
            del self._running[request.request_id]
        if output.finish_reason == "abort":  # unasked: vLLM's own `sleep` does
            _end_aborted(request)
        elif output.finish_reason == "error":
            request.end(RequestState.FAILED, _given_up(request))
        else:
            _deliver(request, output.finish_reason)

    def requeue(self) -> None:
        """VLLM is gone with all that it had: running requests wait again, and go on after what they have."""
        for request in sorted(self._running.values(), key=lambda one: one.arrived_s, reverse=True):
            self._waiting.appendleft(request)
        self._running.clear()

    def end_all(self, error: OmniError) -> None:
        """End every request with an error: the stage has failed."""
        for request in [*self._running.values(), *self._waiting]:
            request.aborted = True
            request.end(RequestState.FAILED, error)
        self._running.clear()
        self._waiting.clear()

    def abort(self, request_id: str) -> bool:
        """End one request; whether it was here."""
        request = self._running.pop(request_id, None) or next(
            (one for one in self._waiting if one.request_id == request_id), None
        )
        if request is None:
            return False
        if request in self._waiting:
            self._waiting.remove(request)
        request.aborted = True
        _end_aborted(request)
        return True

    def has(self, request_id: str) -> bool:
        """Whether vLLM has this request."""
        return request_id in self._running

    def request_ids(self) -> Sequence[str]:
        """Running ones first."""
        return [*self._running, *(request.request_id for request in self._waiting)]

    @property
    def running(self) -> int:
        """Requests that vLLM has."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Requests that it has not."""
        return len(self._waiting)


def _for_vllm(request: StageRequest) -> TextRequest:
    prompt: TextPrompt = request.payload
    params = request.params
    return TextRequest(
        request_id=request.request_id,
        prompt=prompt.prompt if prompt.prompt_ids is None else prompt.prompt_ids,
        generated=tuple(prompt.generated),
        seed=request.seed,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop_token_ids=params.stop_token_ids,
        lora=request.lora,
    )


def _end_aborted(request: StageRequest) -> None:
    prompt: TextPrompt = request.payload
    request.end(RequestState.ABORTED, text=prompt.text, token_ids=list(prompt.generated))


def _given_up(request: StageRequest) -> RemoteWorkerError:
    """VLLM could not go on with this request; only its log says why."""
    prompt: TextPrompt = request.payload
    msg = (
        f"request {request.request_id}: vLLM ended it with an error after {len(prompt.generated)} tokens, "
        "the stage's log says why; the stage goes on, generate again"
    )
    return RemoteWorkerError(msg, type_name="FinishReason.ERROR")


def _deliver(request: StageRequest, reason: str | None) -> None:
    prompt: TextPrompt = request.payload
    done = reason is not None
    request.deliver(
        StageOutput(
            state=RequestState.FINISHED if done else RequestState.RUNNING,
            final=done,
            text=prompt.text,
            token_ids=list(prompt.generated),
            finish_reason=reason,
            weight_version=request.weight_version,
            metrics={
                "seed": request.seed,
                "prompt_tokens": len(prompt.prompt_ids or ()),
                "cached_tokens": prompt.cached,
                "new_tokens": len(prompt.generated),
                "token_weight_versions": [list(run) for run in prompt.versions],
                **request.timings_ms(),
            },
        )
    )
