"""OpenAI's endpoints: models, images, chat."""

from __future__ import annotations

import base64
import contextlib
import secrets
import time
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.responses import JSONResponse, StreamingResponse

from omni_notebook.errors import OmniError
from omni_notebook.server.answers import AbortedError, problem, refusal, unbroken
from omni_notebook.server.bodies import ChatBody, ImagesBody
from omni_notebook.server.control import Served, known_query
from omni_notebook.server.leaving import while_connected

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from omni_notebook.protocol import OmniRequestOutput

PREFIX = "/v1"
router = APIRouter(prefix=PREFIX, tags=["openai"], dependencies=[Depends(known_query)])
Wait = Annotated[
    float, Query(ge=0, le=3600, allow_inf_nan=False, description="seconds to wait where a stage is asleep or paused")
]
RequestId = Annotated[
    str | None,
    Header(alias="X-Request-Id", pattern=r"^[!-~]{1,200}$", description="what /v1/omni/abort calls this request"),
]
_SEEDS = 2**63


class UnknownModelError(OmniError):
    """A request names a model that is not served here."""


def names_of(request: Request) -> tuple[str, ...]:
    """What requests may call the model."""
    served: tuple[str, ...] = request.app.state.settings.served_model_names
    return served or (request.app.state.engine.status().model,)


def _check_model(request: Request, model: str | None) -> str:
    names = names_of(request)
    if model is not None and model not in names:
        msg = f"there is no model {model!r} here; served are: {', '.join(names)}"
        raise UnknownModelError(msg)
    return model or names[0]


@router.get("/models")
async def models(request: Request) -> JSONResponse:
    """The names of the one model that is served."""
    created = int(request.app.state.started_s)
    facts = {"object": "model", "created": created, "owned_by": "omni-notebook"}
    listed = [{"id": name, **facts} for name in names_of(request)]
    return JSONResponse({"object": "list", "data": listed})


# ------------------------------------------------------------------------------------------- images


@router.post("/images/generations")
async def images(
    body: ImagesBody, request: Request, engine: Served, request_id: RequestId = None, wait: Wait = 0.0
) -> JSONResponse:
    """Pictures of a prompt, as base64 of PNG files."""
    model = _check_model(request, body.model)
    params = body.sampling()
    seed = params.pop("seed", None)
    first = secrets.randbelow(_SEEDS - body.n) if seed is None else seed
    known, pictures = request_id or f"img-{uuid.uuid4().hex}", []
    for place in range(body.n):
        one = {**params, "seed": first + place}
        named = known if place == 0 else f"{known}-{place}"
        more = {"request_id": named, "output_modalities": ["image"], "admission_timeout": wait}
        outputs = _outputs(request, engine, body.prompt, one, **more)
        pictures.append(_picture(await while_connected(request, _last(outputs))))
    answer = {"created": int(time.time()), "model": model, "data": pictures}
    return JSONResponse(answer, headers={"X-Request-Id": known})


def _outputs(
    request: Request, engine: Any, prompt: str, params: dict[str, Any], **known: Any
) -> AsyncGenerator[OmniRequestOutput]:
    limit_s = request.app.state.settings.request_s
    outputs: AsyncGenerator[OmniRequestOutput] = engine.generate(
        prompt, sampling_params=params, timeout=limit_s, **known
    )
    return outputs


async def _last(outputs: AsyncGenerator[OmniRequestOutput]) -> OmniRequestOutput:
    """A request's last output."""
    async with contextlib.aclosing(outputs):
        found = await anext(outputs)
        async for output in outputs:
            found = output
    return found


def _picture(output: OmniRequestOutput) -> dict[str, Any]:
    if not output.png:
        msg = f"request {output.request_id} ended without a picture: it was {output.state}; send it again"
        raise AbortedError(msg)
    return {
        "b64_json": base64.b64encode(output.png[0]).decode(),
        "request_id": output.request_id,
        "weight_version": output.weight_version,
        "metrics": msgspec.to_builtins(output.metrics),
    }


# --------------------------------------------------------------------------------------------- chat


@router.post("/chat/completions", response_model=None)
async def chat(
    body: ChatBody, request: Request, engine: Served, request_id: RequestId = None, wait: Wait = 0.0
) -> JSONResponse | StreamingResponse:
    """The text of the autoregressive stage."""
    request.state.text_only = True
    model = _check_model(request, body.model)
    prompt = "\n".join(message.text for message in body.messages)
    known = request_id or f"chatcmpl-{uuid.uuid4().hex}"
    more = {"request_id": known, "output_modalities": ["text"], "admission_timeout": wait}
    outputs = _outputs(request, engine, prompt, body.sampling(), **more)
    headers = {"X-Request-Id": known}
    if not body.stream:
        output = await while_connected(request, _last(outputs))
        return JSONResponse(_completion(model, output), headers=headers)
    first = await while_connected(request, anext(outputs))  # what is refused has a status of its own
    usage = body.stream_options is not None and body.stream_options.include_usage
    chunks = _chunks(model, first, outputs, usage=usage)
    return StreamingResponse(_to_the_end(chunks, engine), media_type="text/event-stream", headers=headers)


async def _to_the_end(chunks: AsyncGenerator[str], engine: Any) -> AsyncGenerator[str]:
    """The chunks; what fails half-way is told as the last but one event: the status has been sent already."""
    async with contextlib.aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except OmniError as error:
            yield f"data: {unbroken(bytes(problem(error, engine).body)).decode()}\n\n"
    yield "data: [DONE]\n\n"


def _completion(model: str, output: OmniRequestOutput) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": output.text},
        "finish_reason": _reason(output),
    }
    return {**_head(model, "chat.completion", output), "choices": [choice], "usage": _usage(output)}


def _head(model: str, kind: str, output: OmniRequestOutput) -> dict[str, Any]:
    return {"id": output.request_id, "object": kind, "created": int(time.time()), "model": model}


def _reason(output: OmniRequestOutput) -> str:
    return "stop" if not output.outputs or output.outputs[0].finish_reason is None else output.outputs[0].finish_reason


def _usage(output: OmniRequestOutput) -> dict[str, int]:
    prompt = int(output.metrics.get("prompt_tokens") or 0)
    new = int(output.metrics.get("new_tokens") or 0)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


async def _chunks(
    model: str, first: OmniRequestOutput, outputs: AsyncGenerator[OmniRequestOutput], *, usage: bool
) -> AsyncGenerator[str]:
    head, told, output = _head(model, "chat.completion.chunk", first), "", first
    yield _event({**head, "choices": [_choice({"role": "assistant", "content": ""})]})
    async with contextlib.aclosing(outputs):  # a client that left ends the request
        while True:
            if output.text != told:
                yield _event({**head, "choices": [_choice({"content": output.text[len(told) :]})]})
                told = output.text
            if output.finished:
                break
            output = await anext(outputs)
    yield _event({**head, "choices": [_choice({}, _reason(output))]})
    if usage:
        yield _event({**head, "choices": [], "usage": _usage(output)})


def _choice(delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": reason}


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {unbroken(msgspec.json.encode(chunk)).decode()}\n\n"


def unknown_model(_request: Request, error: Exception) -> JSONResponse:
    """404, as OpenAI's server says it."""
    return refusal(404, str(error), "model_not_found")
