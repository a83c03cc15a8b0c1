"""A plain vLLM-Omni server: the specification's sleep and wakeup, OpenAI's images and chat, and nothing besides.

Sources: the specification's server examples; vllm_omni 0.30, `entrypoints/openai/api_server.py` and
`entrypoints/async_omni.py`: `stage_ids` must be named, an AR stage answers without having measured (0 bytes), a wake
after level 2 is not implemented, and after the sleep of an AR stage requests are held until `resume_generation`, which
it does not offer over HTTP.
"""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any

from omni_notebook.engine.answers import failure
from omni_notebook.engine.remote.decoding import error_of, opened
from omni_notebook.engine.remote.servers import OMNI, acks_from, unread
from omni_notebook.errors import ArgumentError, ServerLostError, SleepError, UnsupportedError, WakeError
from omni_notebook.protocol import (
    CompletionOutput,
    EngineStatus,
    MemoryState,
    OmniRequestOutput,
    PauseState,
    RankStatus,
    RequestState,
    StageStatus,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from omni_notebook.engine.remote.line import Line
    from omni_notebook.protocol import OmniACK

_KNOWS = """\
this is a plain vLLM-Omni server: it tells no states, memory, requests or events. Stages are listed once they answered \
an order of this connection, with the state that it led to; others may have moved them since"""
_ACKS = """\
its ACKs are as it told them: an AR stage answers 0 bytes without having measured, and nothing is cross-checked. After \
the sleep of an AR stage it holds requests until a resume, which it does not offer over HTTP"""
NOTES = (_KNOWS, _ACKS)
_OK = 200
_UNKNOWN = "unknown"


class Plain:
    """What such a server can, and what is known of its stages from its answers.

    Args:
        models: what `GET /v1/models` told.
    """

    host: str | None = None
    pid: int | None = None

    def __init__(self, models: dict[str, Any]) -> None:
        names = [one.get("id") for one in models["data"] if isinstance(one, dict)]
        self._model = str(names[0]) if names else _UNKNOWN
        self._met_s = time.monotonic()
        self._stages: dict[int, StageStatus] = {}

    def has(self, what: str) -> None:
        """Refuse what is not among its endpoints.

        Raises:
            UnsupportedError: always: what it has does not ask.
        """
        msg = f"a plain vLLM-Omni server has no {what} over HTTP (it has sleep, wake_up, generate); nothing changed"
        raise UnsupportedError(msg)

    async def status(self, line: Line) -> EngineStatus:
        """What its answers told of its stages, if it is there."""
        await line.get("/v1/models")
        return EngineStatus(
            model=self._model,
            closed=False,
            paused=False,
            uptime_s=time.monotonic() - self._met_s,
            stages=tuple(self._stages[number] for number in sorted(self._stages)),
            notes=NOTES,
        )

    async def sleep(self, line: Line, body: dict[str, Any], *, strict: bool) -> list[OmniACK]:
        """The specification's sleep.

        Raises:
            ArgumentError: no stages are named.
            UnsupportedError: a mode, or a level 2 that must be recoverable.
        """
        ids = _named(body)
        if body.get("mode") is not None:
            self.has("sleep with a mode")
        if body["level"] == 2 and not body.get("discard"):
            msg = (
                f"stage {ids[0]} could not be woken: vLLM-Omni's servers have no way back from level 2 (0.30). Use "
                "level 1, or sleep(..., discard=True) (magic: --discard) if the weights may be lost. Nothing changed"
            )
            raise UnsupportedError(msg)
        sent = {"stage_ids": ids, "level": body["level"]}
        acks = acks_from(line, "sleep", await line.order("sleep", f"{OMNI}/sleep", sent, body.get("timeout")), ids)
        self._note(acks, MemoryState.ASLEEP, body["level"])
        if strict and not all(ack.ok for ack in acks):
            raise SleepError(failure("sleep", acks, self._of(acks)), acks)
        return acks

    async def wake(self, line: Line, body: dict[str, Any], *, strict: bool) -> list[OmniACK]:
        """The specification's wakeup; an empty list where it says that nothing slept.

        Raises:
            ArgumentError: no stages are named.
            UnsupportedError: tags, or a wake without its weights.
        """
        ids = _named(body)
        if body.get("tags") is not None or not body.get("reload", True):
            self.has("wake by tags or without a reload")
        answer = await line.order("wake", f"{OMNI}/wakeup", {"stage_ids": ids}, body.get("timeout"))
        if answer.status == _OK and answer.body.get("status") == "SKIPPED":
            return []
        acks = acks_from(line, "wake", answer, ids)
        self._note(acks, MemoryState.AWAKE, None)
        if strict and not all(ack.ok for ack in acks):
            raise WakeError(failure("wake", acks, self._of(acks)), acks)
        return acks

    def _of(self, acks: Sequence[OmniACK]) -> list[StageStatus]:
        return [stage for number, stage in self._stages.items() if number in {ack.stage_id for ack in acks}]

    def _note(self, acks: Sequence[OmniACK], state: MemoryState, level: int | None) -> None:
        """Where stages are whose ranks all say that they did it."""
        for number in {ack.stage_id for ack in acks if ack.stage_id >= 0}:
            mine = [ack for ack in acks if ack.stage_id == number]
            if all(ack.ok for ack in mine):
                self._stages[number] = _status(number, self._model, mine, state, level)

    # --------------------------------------------------------------------------------- requests

    async def generate(self, line: Line, body: dict[str, Any]) -> AsyncIterator[OmniRequestOutput]:
        """One output, the last: text of a chat if only text is wanted, else the images of a prompt.

        Raises:
            UnsupportedError: token ids, an adapter, or other outputs.
        """
        prompt = body["prompt"] if isinstance(body["prompt"], dict) else {"prompt": body["prompt"]}
        if "prompt_token_ids" in prompt or body.get("lora_request") is not None:
            self.has("generate with token ids or adapters")
        wanted = body.get("output_modalities")
        if wanted not in (None, ["image"], ["text"]):
            self.has(f"generate of {wanted}")
        if wanted == ["text"] and prompt.get("negative_prompt") is not None:
            self.has("text with a negative prompt")
        ask = self._chat if wanted == ["text"] else self._images
        yield await ask(line, {**body, **prompt})

    async def _images(self, line: Line, body: dict[str, Any]) -> OmniRequestOutput:
        params = dict(body.get("sampling_params") or {})
        width, height = params.pop("width", None), params.pop("height", None)
        size = f"{width}x{height}" if width and height else None
        negative = {"negative_prompt": body.get("negative_prompt")}
        sent = {"prompt": body["prompt"], **negative, "response_format": "b64_json", "size": size, **params}
        found = await self._asked(line, body, "/v1/images/generations", sent)
        try:
            png = [base64.b64decode(one["b64_json"]) for one in found["data"]]
            images = [opened(one) for one in png]
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ServerLostError(unread(line, f"request {body['request_id']}", error)) from None
        return _output(body, "image", images=images, png=png, metrics={**params})

    async def _chat(self, line: Line, body: dict[str, Any]) -> OmniRequestOutput:
        params = dict(body.get("sampling_params") or {})
        messages = [{"role": "user", "content": body["prompt"]}]
        sent = {"model": self._model, "messages": messages, "modalities": ["text"], **params}
        found = await self._asked(line, body, "/v1/chat/completions", sent)
        try:
            choice = found["choices"][0]
            text, reason = str(choice["message"]["content"] or ""), choice.get("finish_reason")
        except (KeyError, IndexError, TypeError) as error:
            raise ServerLostError(unread(line, f"request {body['request_id']}", error)) from None
        outputs = [CompletionOutput(text=text, token_ids=[], finish_reason=reason)]
        return _output(body, "text", text=text, outputs=outputs, metrics={**params})

    async def _asked(self, line: Line, body: dict[str, Any], path: str, sent: dict[str, Any]) -> dict[str, Any]:
        answer = await line.order(f"request {body['request_id']}", path, sent, body.get("timeout"))
        if answer.status != _OK:
            raise error_of(answer.status, answer.content, f"POST {line.address.url}{path}")
        return answer.body


def _named(body: dict[str, Any]) -> list[int]:
    ids: list[int] | None = body.get("stage_ids")
    if not ids:
        msg = "a plain vLLM-Omni server does not tell which stages it has: name them, stage_ids=[0]. Nothing changed"
        raise ArgumentError(msg)
    return ids


def _output(body: dict[str, Any], kind: str, **known: Any) -> OmniRequestOutput:
    """A request's only output; which stage made it was not told."""
    return OmniRequestOutput(
        request_id=body["request_id"],
        stage_id=-1,
        finished=True,
        final_output_type=kind,
        state=RequestState.FINISHED,
        **known,
    )


def _status(number: int, model: str, acks: Sequence[OmniACK], state: MemoryState, level: int | None) -> StageStatus:
    """A stage as far as its ranks' answers tell; what they do not tell is empty, `NOTES` say so."""
    ranks = tuple(
        RankStatus(
            rank=ack.rank,
            replica=int(ack.metadata["replica"]),
            pid=ack.metadata["pid"],
            device=ack.metadata["device"] or _UNKNOWN,
            alive=True,
            tags={},
            host_backup_bytes=None,
            process_bytes=ack.metadata["residual_bytes"],
        )
        for ack in acks
    )
    return StageStatus(
        stage_id=number,
        name=_UNKNOWN,
        kind=_UNKNOWN,
        runtime="vllm-omni",
        model=model,
        state=state,
        level=level,
        awake_tags=(),
        pause_state=PauseState.OPEN,
        pause_mode=None,
        weight_version=None,
        recoverable=level != 2,
        running=0,
        queued=0,
        in_transit=0,
        waiting_at_gate=0,
        ballast_bytes=0,
        ranks=ranks,
        last_error=None,
    )
