"""`POST /v1/omni/audit`: an audit on the server's machine, beside the ranks that it looks at."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from omni_notebook.engine.loop import ended
from omni_notebook.errors import OmniError, StageBusyError
from omni_notebook.server.answers import event, problem, refusal, unforeseen
from omni_notebook.server.bodies import AuditBody
from omni_notebook.server.control import known_query
from omni_notebook.server.helping import PREFIX
from omni_notebook.server.leaving import while_connected
from omni_notebook.server.stages import numbers
from omni_notebook.verbs.auditing.auditor import Auditor
from omni_notebook.verbs.auditing.plan import plan_from
from omni_notebook.verbs.session import CANCEL_GRACE_S
from omni_notebook.verbs.waits import Background, in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from concurrent.futures import Future

    from starlette.types import Receive, Scope, Send

    from omni_notebook.verbs.auditing.plan import Plan
    from omni_notebook.verbs.auditing.result import AuditResult
    from omni_notebook.verbs.engine_api import Engine
    from omni_notebook.verbs.frontend import Progress

_log = logging.getLogger("uvicorn.error")
_LOOK_S = 0.05
_PING_S = 15.0
END_S = 2 * CANCEL_GRACE_S
"""Seconds in which an audit that was told to stop wakes its stages and ends."""
router = APIRouter(prefix=PREFIX, tags=["omni"], dependencies=[Depends(known_query)])


class EndedError(OmniError):
    """The server's end was an audit's end too; the message says what state the stages are in."""

    error_code = "ENDED"


class Audits:
    """One audit at a time, on a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: Future[AuditResult] | None = None
        self._wait = Background()
        self._ended = False

    @property
    def running(self) -> bool:
        """Whether one is on its way."""
        return self._running is not None and not self._running.done()

    async def run(self, plan: Plan, wait: Background) -> AuditResult:
        """Carry one out, with `wait` for its steps; a cancelled one wakes its stages first.

        Raises:
            StageBusyError: another one is on its way, or the engine is not idle; nothing was changed.
            EndedError: the server ends.
            OmniError: see `Auditor`.
        """
        if self.running:
            msg = "another audit is on its way, and each would see the other's sleeps; nothing was changed"
            raise StageBusyError(msg, stage_id=(plan.stage_ids or (0,))[0], running=0, queued=0, in_transit=0)
        if self._ended:
            msg = "the server is ending; nothing was changed"
            raise EndedError(msg)
        self._wait = wait
        running = self._running = in_thread(lambda: Auditor(self._engine, plan, wait).run(), "omni-audit")
        try:
            await ended(running)
        except asyncio.CancelledError:
            wait.stop.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await ended(running)
            raise
        stopped = running.exception()
        if isinstance(stopped, KeyboardInterrupt):  # raised in a task, it would end the server's loop
            msg = f"the server ends: {str(stopped).removeprefix('interrupted: ')}"
            raise EndedError(msg)
        return running.result()

    def end(self) -> None:
        """Tell the one that is on its way to stop, and begin no other; from any thread."""
        self._ended = True
        self._wait.stop.set()


@router.post("/audit", response_model=None)
async def audit(body: AuditBody, request: Request) -> Response:
    """Sleep, look from outside, wake, generate again: a verdict, and the record it was made from.

    With `Accept: text/event-stream` it comes as the last of server-sent events, after those that tell how far it is.
    """
    audits: Audits = request.app.state.audits
    plan = plan_from(numbers(request.app.state.engine, body.stage_ids), body.probe_bytes, **body.wishes())
    wait = Background()
    if "text/event-stream" not in request.headers.get("accept", ""):
        return JSONResponse(await asyncio.to_thread(_answer, await while_connected(request, audits.run(plan, wait))))
    running = asyncio.create_task(audits.run(plan, wait), name="omni-audit-streamed")
    try:
        await while_connected(request, _begun(running, wait))
    except BaseException:
        running.cancel()
        raise
    return _Streamed(_events(running, wait, request.app.state.engine), running)


class _Streamed(StreamingResponse):
    """Events of an audit that ends with its client, also with one that leaves before the first of them."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], running: asyncio.Task[AuditResult]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store"})
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel()


async def _begun(running: asyncio.Task[AuditResult], wait: Background) -> None:
    """Return at its first step, or when it is over; a refusal is raised, and so has a status of its own."""
    while not running.done() and not wait.begun:
        await asyncio.wait({running}, timeout=_LOOK_S)
    if running.done():
        running.result()


async def _events(running: asyncio.Task[AuditResult], wait: Background, engine: Engine) -> AsyncGenerator[bytes]:
    """What changed about how far it is, then how it ended."""
    last: Progress | None = None
    told_s = time.monotonic()
    while not running.done():
        now = wait.progress() if wait.begun else None
        if now is not None and now != last:
            last, told_s = now, time.monotonic()
            yield event("progress", json.dumps({"label": now.label, "fraction": now.fraction}).encode())
        elif time.monotonic() - told_s > _PING_S:
            told_s = time.monotonic()
            yield b": still there\n\n"
        await asyncio.wait({running}, timeout=_LOOK_S)
    try:
        answer = await asyncio.to_thread(_answer, running.result())
    except OmniError as error:
        ended = isinstance(error, EndedError)
        told = refusal(503, str(error), error.error_code) if ended else problem(error, engine, order=True)
        yield event("error", bytes(told.body))
    except Exception as error:  # noqa: BLE001  (whoever waits is told of it; the log has it)
        _log.exception("an audit ended with an error of the server's own")
        yield event("error", bytes(unforeseen(error).body))
    else:
        yield event("result", json.dumps(answer).encode())


def _answer(result: AuditResult) -> dict[str, Any]:
    pictures = {name: [base64.b64encode(one).decode() for one in some] for name, some in result.pictures.items()}
    return {"status": "SUCCESS", "verdict": result.verdict, "report": result.to_dict(), "pictures": pictures}
