"""`/v1/omni/…`: the orders of the cockpit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Header, Query, Request
from sse_starlette.sse import EventSourceResponse
from starlette.responses import JSONResponse

import omni_notebook
from omni_notebook.engine import history as past
from omni_notebook.engine.remote.peers import ORDER_HEADER
from omni_notebook.errors import ArgumentError
from omni_notebook.protocol import LoRARequest
from omni_notebook.server.answers import acks_answer, unbroken
from omni_notebook.server.bodies import (
    AbortBody,
    HistoryQuery,
    LoraBody,
    PauseBody,
    RestartBody,
    ResumeBody,
    SleepBody,
    WakeBody,
    WeightsBody,
)
from omni_notebook.server.helping import PREFIX
from omni_notebook.server.names import name_of
from omni_notebook.server.stages import asked, number, numbers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from omni_notebook.engine.history import History
    from omni_notebook.verbs.engine_api import Engine, Subscription


async def engine_of(request: Request) -> Engine:
    """The engine that the server serves.

    A coroutine, as all that a request depends on is: a function would be called on another thread.
    """
    engine: Engine = request.app.state.engine
    return engine


async def known_query(request: Request) -> None:
    """What stands behind the `?` of an order is known, or refused by name.

    Raises:
        ArgumentError: it is not.
    """
    known = {field.name for field in request.scope["route"].dependant.query_params}
    unknown = [name for name in request.query_params if name not in known]
    if unknown and request.method != "GET":
        msg = f"query.{unknown[0]}: there is no such parameter; what an order takes stands in its body. Nothing changed"
        raise ArgumentError(msg)


Served = Annotated[Any, Depends(engine_of)]


class Listeners:
    """Whoever follows the events; all of them are let go when the server ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._all: set[Subscription] = set()
        self._ended = False

    async def lines(self) -> AsyncIterator[dict[str, str]]:
        """The status, then events until the client leaves or the server ends."""
        subscription = self._engine.subscribe()
        self._all.add(subscription)
        try:
            yield {"event": "status", "data": _encoded(self._engine.status())}
            if self._ended:
                return
            async for event in subscription:
                found = msgspec.to_builtins(event)
                yield {"event": found["type"], "data": _encoded(found)}
                await asyncio.sleep(0)  # many are there at once: a client that has left is noticed between two
        finally:
            self._all.discard(subscription)
            subscription.close()

    def end(self) -> None:
        """Let them go, after what is queued; from any thread."""
        self._ended = True
        for subscription in tuple(self._all):
            subscription.close()


def _encoded(value: Any) -> str:
    return unbroken(msgspec.json.encode(value)).decode()


router = APIRouter(prefix=PREFIX, tags=["omni"], dependencies=[Depends(known_query)])


@router.post("/sleep")
async def sleep(body: SleepBody, engine: Served) -> JSONResponse:
    """Put stages to sleep; one measured ACK a rank."""
    acks = await engine.sleep(
        numbers(engine, body.stage_ids),
        body.level,
        body.mode,
        body.timeout,
        discard=body.discard,
        raise_on_error=False,
    )
    return acks_answer(acks)


@router.post("/wakeup")
async def wakeup(engine: Served, body: WakeBody | None = None) -> JSONResponse:
    """Wake stages, or some of their tags; one measured ACK a rank."""
    body = body or WakeBody()
    stage_ids = numbers(engine, body.stage_ids)
    acks = await engine.wake_up(stage_ids, body.tags, body.reload, body.timeout, raise_on_error=False)
    return acks_answer(acks)


@router.post("/pause")
async def pause(body: PauseBody, engine: Served) -> JSONResponse:
    """Close admission, and with "keep" the schedulers of diffusion stages."""
    stage_ids = numbers(engine, body.stage_ids)
    await engine.pause_generation(body.mode, stage_ids, body.wait_for_inflight_requests, body.clear_cache, body.timeout)
    return _done()


@router.post("/resume")
async def resume(engine: Served, body: ResumeBody | None = None) -> JSONResponse:
    """Open what a pause closed."""
    await engine.resume_generation(None if body is None else numbers(engine, body.stage_ids))
    return _done()


@router.post("/weights")
async def weights(body: WeightsBody, engine: Served) -> JSONResponse:
    """Load a checkpoint folder into a stage."""
    stage_id = number(engine, body.stage_id)
    await engine.load_weights(stage_id, body.path, body.version, body.timeout)
    return _done(weight_version=engine.status().stages[stage_id].weight_version)


@router.get("/loras")
async def loras(engine: Served) -> JSONResponse:
    """The adapters of each stage."""
    return JSONResponse({"stages": [_loras(stage) for stage in engine.status().stages]})


def _loras(stage: Any) -> dict[str, Any]:
    return {"stage_id": stage.stage_id, "loras": msgspec.to_builtins(stage.loras)}


@router.post("/loras")
async def add_lora(body: LoraBody, engine: Served) -> JSONResponse:
    """Add an adapter."""
    request = LoRARequest(body.lora_name, body.lora_int_id, body.lora_path)
    return _done(added=await engine.add_lora(request, numbers(engine, body.stage_ids), body.timeout))


@router.delete("/loras/{lora_int_id}")
async def remove_lora(lora_int_id: int, engine: Served) -> JSONResponse:
    """Remove an adapter."""
    return _done(removed=await engine.remove_lora(lora_int_id))


@router.post("/loras/{lora_int_id}/pin")
async def pin_lora(lora_int_id: int, engine: Served) -> JSONResponse:
    """Keep an adapter in its slot."""
    return _done(pinned=await engine.pin_lora(lora_int_id))


@router.post("/restart")
async def restart(body: RestartBody, engine: Served) -> JSONResponse:
    """Start a stage's ranks anew, from its last checkpoint."""
    await engine.restart(number(engine, body.stage_id), body.timeout)
    return _done()


@router.post("/abort")
async def abort(body: AbortBody, engine: Served) -> JSONResponse:
    """End a request; whether it was in progress."""
    return _done(found=await engine.abort(body.request_id))


@router.get("/status")
async def status(engine: Served) -> JSONResponse:
    """A snapshot of all stages and ranks; waits for nobody."""
    return JSONResponse(msgspec.to_builtins(engine.status()))


@router.get("/logs")
async def logs(engine: Served, stage_id: str, rank: int = 0, replica: int = 0) -> JSONResponse:
    """The last lines that a rank's process wrote, newest last; none of a rank in the server's own process."""
    return JSONResponse({"lines": engine.logs(number(engine, asked(stage_id)), rank, replica)})


@router.get("/history")
async def history(engine: Served, wanted: Annotated[HistoryQuery, Query()]) -> JSONResponse:
    """Past ACKs in this machine's ledger, newest first; `session=this`: those of this process."""
    stage = None if wanted.stage is None else number(engine, asked(wanted.stage))
    session = wanted.session if wanted.session in {None, "this"} else asked(str(wanted.session))
    since = _moment(wanted.since)
    read = past.history, stage, wanted.rank, since, session, wanted.errors, wanted.limit
    return JSONResponse(await asyncio.to_thread(_told, *read))


def _moment(since: str | None) -> str | float | None:
    """A time in a person's words, or in seconds since 1970."""
    with contextlib.suppress(ValueError):
        return None if since is None else float(since)
    return since


def _told(read: Callable[..., History], *wanted: Any) -> dict[str, Any]:
    found = read(*wanted)
    acks: list[dict[str, Any]] = [msgspec.to_builtins(ack) for ack in found.newest]
    return {"path": str(found.path), "complete": found.complete, "any": found.any, "acks": acks}


@router.get("/version")
async def version(
    request: Request, engine: Served, order: Annotated[str | None, Header(alias=ORDER_HEADER)] = None
) -> JSONResponse:
    """What serves here, and where; `engine` is another one after every start.

    `order`, where one is asked about: whether it is under way here.
    """
    facts: dict[str, Any] = {"name": "omni-notebook", "version": omni_notebook.__version__}
    facts |= {"host": socket.gethostname(), "pid": os.getpid(), "engine": name_of(engine)}
    about = {} if order is None else {"order": order.encode("latin-1", "replace") in request.app.state.in_hand}
    return JSONResponse({**facts, **about})


@router.get("/events")
async def events(request: Request) -> EventSourceResponse:
    """The status, then ACKs, state changes, memory samples and request progress as server-sent events."""
    return EventSourceResponse(request.app.state.listeners.lines(), ping=15)


def _done(**more: Any) -> JSONResponse:
    return JSONResponse({"status": "SUCCESS", **more})
