"""The application: routes, guards, and errors as answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

import omni_notebook
from omni_notebook.errors import OmniError
from omni_notebook.server import auditing, control, generating, helping, openai
from omni_notebook.server.answers import problem, refusal, unforeseen
from omni_notebook.server.guards import (
    BodyGuard,
    EndGuard,
    HostGuard,
    KeyGuard,
    LeaveGuard,
    NameGuard,
    OrdersGuard,
    WordsGuard,
)
from omni_notebook.server.leaving import ClientGone
from omni_notebook.server.metrics import Metrics
from omni_notebook.server.names import name_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from omni_notebook.server.settings import ServerSettings
    from omni_notebook.verbs.engine_api import Engine

MOST_NAMED = 10
"""Mistakes of a body that are named one by one."""
GONE = 499
"""Nobody reads it; nginx's number for a client that closed its connection."""


def make_app(engine: Engine, settings: ServerSettings, ended: Callable[[], None]) -> FastAPI:
    """An application that serves this engine and does not own it; calls `ended` when the engine was shut down."""
    metrics = Metrics(engine)
    app = FastAPI(
        title="omni-notebook",
        version=omni_notebook.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lambda _app: _following(metrics, ended),
    )
    app.state.engine, app.state.settings, app.state.started_s = engine, settings, time.time()
    app.state.metrics = metrics
    app.state.listeners = control.Listeners(engine)
    app.state.in_hand = Counter()
    app.state.audits = auditing.Audits(engine)
    app.include_router(control.router)
    app.include_router(generating.router)
    app.include_router(auditing.router)
    app.include_router(openai.router)
    app.get("/health", tags=["health"])(_health)
    app.head("/health", include_in_schema=False)(_health)
    app.get("/metrics", tags=["health"], response_class=PlainTextResponse)(_metrics)
    app.add_exception_handler(openai.UnknownModelError, openai.unknown_model)
    app.add_exception_handler(auditing.EndedError, _ended)
    app.add_exception_handler(OmniError, _problem)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _bug)
    app.add_middleware(BodyGuard, most=settings.body_bytes, patience_s=settings.patience_s)
    app.add_middleware(OrdersGuard, in_hand=app.state.in_hand)
    app.add_middleware(NameGuard, name=name_of(engine))
    if settings.api_key is None:
        app.add_middleware(HostGuard, hosts=settings.hosts)
    else:
        app.add_middleware(KeyGuard, key=settings.api_key)
    app.add_middleware(LeaveGuard)
    app.add_middleware(EndGuard)
    app.add_middleware(WordsGuard)
    return app


async def _health(request: Request) -> JSONResponse:
    """Whether every stage can work."""
    await request.app.state.engine.check_health()
    return JSONResponse({"status": "ok"})


async def _metrics(request: Request) -> Response:
    """The engine's figures, for Prometheus."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@contextlib.asynccontextmanager
async def _following(metrics: Metrics, ended: Callable[[], None]) -> AsyncIterator[None]:
    """Count ACKs while the server runs, and hear of the engine's end."""
    following = asyncio.create_task(metrics.follow(), name="omni-metrics")
    following.add_done_callback(lambda task: None if task.cancelled() or task.exception() else ended())
    await asyncio.sleep(0)  # it listens from its first step on
    try:
        yield
    finally:
        following.cancel()
        await asyncio.wait({following})


def _problem(request: Request, error: Any) -> Response:
    path = request.url.path
    order = path.startswith(helping.PREFIX) and path != generating.PATH
    text_only = getattr(request.state, "text_only", False)
    return problem(error, request.app.state.engine, order=order, text_only=text_only)


def _ended(_request: Request, error: Any) -> Response:
    return refusal(503, str(error), error.error_code, {"Connection": "close"})


def _invalid(request: Request, error: Any) -> Response:
    found = _merged(error.errors())
    if found[0]["loc"] == ("body",) and "json" not in request.headers.get("content-type", ""):
        told = "the body is read as JSON only where a header says so: send 'Content-Type: application/json'"
        return refusal(422, told, "BAD_ARGUMENT")
    named = [_one(one) for one in found[:MOST_NAMED]]
    named += [f"and {len(found) - MOST_NAMED} more"] if len(found) > MOST_NAMED else []
    return refusal(422, "; ".join(named), "BAD_ARGUMENT")


def _merged(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of what fits neither a number nor a name one mistake, where pydantic finds one of each."""
    merged: list[dict[str, Any]] = []
    for one in found:
        *field, kind = one["loc"]
        if kind == "int" and one["type"] in {"int_type", "int_from_float"}:
            merged.append({**one, "loc": tuple(field), "msg": "Input should be a number or a name"})
        elif kind == "int" and one["type"] != "extra_forbidden":
            merged.append({**one, "loc": tuple(field)})
        elif kind != "str" or not merged or merged[-1]["loc"] != tuple(field):
            merged.append(one)
    return merged


def _one(found: dict[str, Any]) -> str:
    """`body.level: Input should be 1 or 2`."""
    where = ".".join(str(part) for part in found["loc"])
    what = "there is no such field" if found["type"] == "extra_forbidden" else found["msg"]
    return f"{where}: {what}"


def _http(request: Request, error: Any) -> Response:
    headers, path = dict(error.headers or {}), request.url.path
    told = {
        400: f"the body is no JSON that can be read here: {_said(error.__cause__)}",
        404: f"there is no {path} here; GET /openapi.json lists what there is",
        405: f"{path} takes {headers.get('Allow') or headers.get('allow')}, not {request.method}",
    }
    return refusal(error.status_code, told.get(error.status_code, error.detail), "HTTP", headers)


def _said(cause: BaseException | None) -> str:
    """What stopped the reader; Python's own words name its calls."""
    if isinstance(cause, RecursionError):
        return "it is nested too deeply"
    return "it is not UTF-8 text" if isinstance(cause, UnicodeError) else "a number has too many digits"


def _bug(_request: Request, error: Any) -> Response:
    return unforeseen(error)


def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=GONE)
