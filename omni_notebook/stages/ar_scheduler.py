"""Continuous batching: a step is every running sequence's next token, new sequences' prefills among them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omni_notebook.protocol import RequestState
from omni_notebook.stages.requests import StageOutput
from omni_notebook.stages.scheduler import Batch
from omni_notebook.worker.batches import ArBatch, SequenceAnswer, SequenceStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.errors import OmniError
    from omni_notebook.models.tokenizer import TextTokenizer
    from omni_notebook.stages.lora import StageLoras
    from omni_notebook.stages.requests import StageRequest
    from omni_notebook.transport.connector import Connector


@dataclass(slots=True)
class ArPrompt:
    """An AR request's payload: the prompt, and what was generated so far.

    `fed`: tokens whose keys and values are in the cache. `versions`: the weight version that each token came from, as
    [version, tokens] in order. `told`: the text that was delivered last.
    """

    prompt_ids: tuple[int, ...]
    generated: list[int] = field(default_factory=list)
    hidden: list[Any] = field(default_factory=list)
    versions: list[list[Any]] = field(default_factory=list)
    fed: int = 0
    told: str = ""

    @property
    def replaying(self) -> bool:
        """Whether the next step feeds tokens that a lost cache held already, in the same portions as the first time."""
        return self.fed + len(self.portion) < len(self.prompt_ids) + len(self.generated)

    @property
    def portion(self) -> tuple[int, ...]:
        """What the next step feeds: the prompt at once, then token by token."""
        if self.fed == 0:
            return self.prompt_ids
        return (self.generated[self.fed - len(self.prompt_ids)],)

    def note(self, weight_version: str) -> None:
        """One more token came from these weights."""
        if self.versions and self.versions[-1][0] == weight_version:
            self.versions[-1][1] += 1
        else:
            self.versions.append([weight_version, 1])


class ArScheduler:
    """FIFO admission into `slots` sequences; a sequence keeps its slot until it ends."""

    def __init__(
        self,
        *,
        slots: int,
        max_len: int,
        tokenizer: TextTokenizer,
        connector: Connector | None = None,
        loras: StageLoras | None = None,
    ) -> None:
        self._free = list(range(slots))
        self._max_len = max_len
        self._tokenizer = tokenizer
        self._connector = connector
        self._loras = loras
        self._waiting: deque[StageRequest] = deque()
        self._running: dict[int, StageRequest] = {}

    def add(self, request: StageRequest) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def schedule(self) -> Batch | None:
        """One step over all running sequences, after new ones took the free slots."""
        while self._free and (request := self._next()) is not None:
            self._waiting.remove(request)
            request.started_s = request.started_s or time.perf_counter()
            self._running[self._free.pop(0)] = request
            if self._connector is not None and request.feeds_next:
                self._connector.started(request.request_id)
        if not self._running:
            return None
        steps = tuple(self._step(slot, request) for slot, request in self._running.items())
        return Batch(tuple(self._running.items()), ArBatch(steps))

    def _next(self) -> StageRequest | None:
        """The first request that may start; one for a closed, full stage holds back nobody but its like.

        One whose adapter finds no slot waits for those that run to end: adapters that came later do not pass it.
        """
        beside = [request.lora_id for request in self._running.values()]
        for request in self._waiting:
            if self._loras is not None and not self._loras.may_start(request.lora_id, beside):
                beside.append(request.lora_id)
            elif self._connector is None or not request.feeds_next or self._connector.may_start(request.request_id):
                return request
        return None

    def _step(self, slot: int, request: StageRequest) -> SequenceStep:
        prompt: ArPrompt = request.payload
        return SequenceStep(
            slot=slot,
            token_ids=prompt.portion,
            start=prompt.fed,
            prompt_len=len(prompt.prompt_ids),
            seed=request.seed,
            temperature=request.params.temperature,
            top_p=request.params.top_p,
            top_k=request.params.top_k,
            want_hidden=request.feeds_next and not prompt.replaying,
            lora_id=request.lora_id,
        )

    def finish(self, batch: Batch, answer: list[SequenceAnswer], weight_version: str) -> None:
        """Append each sequence's token, unless it only fills a lost cache again; end those that are complete."""
        for (slot, request), step, result in zip(batch.requests, batch.payload.sequences, answer, strict=True):
            if request.aborted:
                continue
            prompt: ArPrompt = request.payload
            replayed, prompt.fed = prompt.replaying, step.start + len(step.token_ids)
            if replayed:
                continue
            prompt.note(weight_version)
            request.weight_version = weight_version
            if result.hidden is not None:
                prompt.hidden.extend(result.hidden)
            reason = self._append(request, result.token_id)
            if reason is not None:
                self._release(slot)
            self._deliver(request, reason)

    def _append(self, request: StageRequest, token_id: int) -> str | None:
        """Take a token; why the sequence ends with it, or None."""
        prompt: ArPrompt = request.payload
        if token_id in self._tokenizer.eos_token_ids or token_id in request.params.stop_token_ids:
            return "stop"
        prompt.generated.append(token_id)
        full = len(prompt.prompt_ids) + len(prompt.generated) >= self._max_len
        return "length" if full or len(prompt.generated) >= request.params.max_tokens else None

    def _deliver(self, request: StageRequest, reason: str | None) -> None:
        prompt: ArPrompt = request.payload
        done = reason is not None
        text = self._tokenizer.decode(prompt.generated)
        prompt.told = text if done else _settled(text, prompt.told)
        request.deliver(
            StageOutput(
                state=RequestState.FINISHED if done else RequestState.RUNNING,
                final=done,
                text=prompt.told,
                token_ids=list(prompt.generated),
                finish_reason=reason,
                hidden=prompt.hidden[: len(prompt.generated)] if done else None,
                weight_version=request.weight_version,
                metrics={
                    "seed": request.seed,
                    "prompt_tokens": len(prompt.prompt_ids),
                    "new_tokens": len(prompt.generated),
                    "token_weight_versions": [list(run) for run in prompt.versions],
                    **request.timings_ms(),
                },
            )
        )

    def fail(self, batch: Batch, error: BaseException) -> None:
        """End every sequence of the batch with an error."""
        for slot, request in batch.requests:
            if not request.aborted:
                self._release(slot)
                request.end(RequestState.FAILED, error)

    def requeue(self) -> None:
        """KV is gone: running sequences wait again; what they had is computed again as it was the first time."""
        for slot, request in sorted(self._running.items(), key=lambda item: item[1].arrived_s, reverse=True):
            request.payload.fed = 0
            self._release(slot)
            self._waiting.appendleft(request)

    def end_all(self, error: OmniError) -> None:
        """End every request with an error: the stage has failed."""
        for request_id in self.request_ids():
            request = self._take(request_id)
            if request is not None:
                request.aborted = True
                request.end(RequestState.FAILED, error)

    def abort(self, request_id: str) -> bool:
        """End one request; a step that is running drops its token."""
        request = self._take(request_id)
        if request is None:
            return False
        request.aborted = True
        text = self._tokenizer.decode(request.payload.generated)
        request.end(RequestState.ABORTED, text=text, token_ids=list(request.payload.generated))
        return True

    def _take(self, request_id: str) -> StageRequest | None:
        for slot, request in list(self._running.items()):
            if request.request_id == request_id:
                self._release(slot)
                return request
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return request
        return None

    def _release(self, slot: int) -> None:
        del self._running[slot]
        self._free.append(slot)
        self._free.sort()

    def prefetch(self) -> None:
        """Token ids are all that a step needs, and they come with it."""

    def executed(self, batch: Batch, answer: Any) -> None:
        """No AR batch has outputs on their way: `finish` takes the answer of the step."""

    def abandoned_batch(self) -> str | None:
        """None: a step is short, it ends by itself."""
        return None

    def request_ids(self) -> Sequence[str]:
        """Running ones first."""
        return [r.request_id for r in (*self._running.values(), *self._waiting)]

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)


def _settled(text: str, told: str) -> str:
    """What of a text no further token changes: half a character at its end is U+FFFD until the other half comes.

    A byte-fallback decoder reads a run of bytes as a whole, so that characters before the half are U+FFFD again too.
    """
    whole = text.rstrip("\ufffd").rstrip()  # as the tokenizer leaves it
    return told if told.startswith(whole) else whole
