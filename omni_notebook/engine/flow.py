"""One request's way through the stages of its route, and the queue that its client reads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_notebook.engine import tracing
from omni_notebook.errors import OmniError
from omni_notebook.protocol import (
    CompletionOutput,
    LoRARequest,
    OmniRequestOutput,
    OmniSamplingParams,
    RequestEvent,
    RequestState,
)
from omni_notebook.stages.requests import StageOutput, StageRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_notebook.stages.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a client asked for; `lora_stages` are those that apply `lora`, as it was when the request was admitted."""

    request_id: str
    prompt: Any
    params: OmniSamplingParams
    seed: int
    lora: LoRARequest | None = None
    lora_stages: frozenset[int] = frozenset()


class Flow:
    """A request on its way; belongs to the engine's loop."""

    def __init__(
        self,
        asked: Asked,
        route: Sequence[Stage],
        *,
        ring: Callable[[], None],
        on_event: Callable[[RequestEvent], None],
        on_end: Callable[[Flow], None],
    ) -> None:
        self.request_id = asked.request_id
        self.route = tuple(route)
        self.at = 0
        self.ended = False
        self._state = RequestState.WAITING
        self._asked = asked
        self._text: StageOutput | None = None
        self._on_event = on_event
        self._on_end = on_end
        self._outputs: deque[OmniRequestOutput | BaseException] = deque()
        self._lock = threading.Lock()
        self._ring = ring
        self._span = tracing.begun(
            "request",
            request_id=asked.request_id,
            stage_ids=[stage.stage_id for stage in route],
            lora=None if asked.lora is None else asked.lora.lora_name,
        )

    @property
    def stage(self) -> Stage:
        """The stage that it is in."""
        return self.route[self.at]

    def heads_for(self, stage: Stage) -> bool:
        """Whether it will come to `stage` and is not there yet."""
        return not self.ended and stage in self.route[self.at + 1 :]

    def lora_id(self, stage: Stage) -> int:
        """The adapter that it uses or will use in `stage`; 0: none, or it has been there."""
        return 0 if self.ended or stage not in self.route[self.at :] else _id(self._lora(stage))

    def uses(self, stage: Stage, lora_id: int) -> bool:
        """Whether it needs this adapter in `stage`."""
        return self.lora_id(stage) == lora_id

    def _lora(self, stage: Stage) -> LoRARequest | None:
        return self._asked.lora if stage.stage_id in self._asked.lora_stages else None

    def begin(self, payload: Any) -> None:
        """Enter the stage that it is at."""
        self._tell(RequestState.WAITING)
        self.stage.add(self._request(payload))

    def turn_away(self, payload: Any) -> None:
        """End it as aborted before it has entered a stage."""
        self._request(payload).end(RequestState.ABORTED)

    def _request(self, payload: Any) -> StageRequest:
        stage = self.stage
        return StageRequest(
            request_id=self.request_id,
            seed=self._asked.seed,
            params=self._asked.params,
            payload=payload,
            deliver=self._take,
            progress=self._progress,
            feeds_next=self.at + 1 < len(self.route),
            lora=self._lora(stage),
        )

    def _progress(self, share: float) -> None:
        if not self.ended:
            self._tell(RequestState.RUNNING, share)

    def _take(self, output: StageOutput) -> None:
        """A stage's output: pass it to the client, and a finished one on to the next stage."""
        if self.ended:
            return
        stage = self.stage
        last = self.at + 1 == len(self.route)
        if output.final and stage.model.output_type == "text":
            self._text = output
        ends = output.final and (last or output.state != RequestState.FINISHED)
        self._tell(output.state if ends or not output.final else RequestState.RUNNING, output.progress)
        if output.error is not None:
            self._end(output.error)
            return
        self._publish(self._request_output(output, stage, ends=ends))
        if ends:
            self._end(None)
            return
        self._ring()
        if output.final:
            self._move_on()

    def _move_on(self) -> None:
        self._left_upstream()
        self.at += 1
        try:
            self.begin(self._payload_for(self.stage))
        except OmniError as error:
            self._tell(RequestState.FAILED)
            self._end(error)

    def _payload_for(self, stage: Stage) -> Any:
        """What a stage gets: the last text that was made, or the prompt where no stage makes text."""
        if self._text is None:
            return stage.model.first(self._asked.prompt, self._asked.params)
        return stage.model.following(self._text, self._asked.params)

    def _left_upstream(self) -> None:
        if self.stage.connector is not None:
            self.stage.connector.arrived(self.request_id)

    def fail(self, error: BaseException) -> None:
        """End it with an error, wherever it is; what its stage still makes of it is dropped."""
        self._tell(RequestState.FAILED)
        self._end(error)
        self.stage.abort(self.request_id)

    def _end(self, error: BaseException | None) -> None:
        self.ended = True
        self._left_upstream()
        self._end_span(error)
        if error is not None:
            self._outputs.append(error)
        asyncio.get_running_loop().call_soon(self._ring)  # once replica and scheduler have done with it too
        for stage in self.route:
            stage.kick()  # its end may have made room for another one at the connector
        self._on_end(self)

    def _end_span(self, error: BaseException | None) -> None:
        self._span.note(stage_id=self.stage.stage_id, request_state=str(self._state))
        if error is not None:
            self._span.failed(error)
        self._span.end()

    def _publish(self, output: OmniRequestOutput) -> None:
        """Queue an output; a newer partial text replaces one that nobody has read."""
        with self._lock:
            tail = self._outputs[-1] if self._outputs else None
            if isinstance(tail, OmniRequestOutput) and _same_partial(tail, output):
                self._outputs.pop()
            self._outputs.append(output)

    def _request_output(self, output: StageOutput, stage: Stage, *, ends: bool) -> OmniRequestOutput:
        lora = self._asked.lora
        if lora is not None and not any(map(self._lora, self.route[: self.at + 1])):
            lora = None  # no stage so far has applied it
        text = [CompletionOutput(text=output.text, token_ids=output.token_ids, finish_reason=output.finish_reason)]
        return OmniRequestOutput(
            request_id=self.request_id,
            stage_id=stage.stage_id,
            finished=ends,
            final_output_type=self.route[-1].model.output_type,
            state=str(output.state),
            text=output.text,
            outputs=text if stage.model.output_type == "text" else [],
            images=[_picture(pixels) for pixels in output.pixels],
            png=output.png,
            weight_version=output.weight_version,
            metrics={**output.metrics, **({} if lora is None else {"lora": lora.lora_name})},
        )

    def _tell(self, state: RequestState, progress: float | None = None) -> None:
        self._state = state
        self._on_event(RequestEvent(time.time(), self.request_id, self.stage.stage_id, state, progress))

    def ready(self) -> OmniRequestOutput | None:
        """The next output if it is there already; any thread may ask.

        Raises:
            OmniError: the request failed.
        """
        with self._lock:
            output = self._outputs.popleft() if self._outputs else None
        if isinstance(output, BaseException):
            raise output
        return output

    @property
    def has_news(self) -> bool:
        """Whether `ready` has something; any thread may ask."""
        return bool(self._outputs)


def _id(lora: LoRARequest | None) -> int:
    return 0 if lora is None else lora.lora_int_id


def _same_partial(tail: OmniRequestOutput, output: OmniRequestOutput) -> bool:
    return (tail.state, tail.stage_id) == (RequestState.RUNNING, output.stage_id)


def _picture(pixels: Any) -> Any:
    from PIL import Image  # noqa: PLC0415  (loaded when the first image is made)

    return Image.fromarray(pixels)
