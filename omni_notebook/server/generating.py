"""`POST /v1/omni/generate`: `AsyncOmni.generate` as it is, each output an event."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import StreamingResponse

from omni_notebook.errors import OmniError, RemoteWorkerError
from omni_notebook.protocol import OmniRequestOutput
from omni_notebook.server.answers import event, problem
from omni_notebook.server.bodies import GenerateBody
from omni_notebook.server.control import Served, known_query
from omni_notebook.server.helping import PREFIX
from omni_notebook.server.leaving import while_connected

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

PATH = f"{PREFIX}/generate"
_TOLD = tuple(name for name in OmniRequestOutput.__dataclass_fields__ if name != "images")
router = APIRouter(tags=["omni"], dependencies=[Depends(known_query)])


@router.post(PATH, response_model=None)
async def generate(body: GenerateBody, request: Request, engine: Served) -> StreamingResponse:
    """A request's outputs as server-sent events, `output` each; the last one has `finished`, or there is an `error`."""
    text_only = request.state.text_only = body.output_modalities == ["text"]
    longest_s = request.app.state.settings.request_s
    timeout = longest_s if body.timeout is None else min(body.timeout, longest_s)
    outputs: AsyncGenerator[OmniRequestOutput] = engine.generate(**body.arguments(), timeout=timeout)
    first = await while_connected(request, anext(outputs))  # what is refused has a status of its own
    told = _events(first, outputs, engine, text_only=text_only)
    return StreamingResponse(told, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _events(
    first: OmniRequestOutput, outputs: AsyncGenerator[OmniRequestOutput], engine: Any, *, text_only: bool
) -> AsyncGenerator[bytes]:
    async with contextlib.aclosing(outputs):  # a client that left ends the request
        try:
            yield event("output", _encoded(first))
            async for output in outputs:
                yield event("output", _encoded(output))
        except OmniError as error:
            yield event("error", bytes(problem(error, engine, text_only=text_only).body))
        except Exception as error:  # noqa: BLE001  (a rank in this process raises what its model raised)
            told = RemoteWorkerError(str(error) or type(error).__name__, type_name=type(error).__name__)
            yield event("error", bytes(problem(told, engine).body))


def _encoded(output: OmniRequestOutput) -> bytes:
    """JSON of its fields; bytes are base64, and pictures stand there as PNG files only."""
    return msgspec.json.encode({name: getattr(output, name) for name in _TOLD})
