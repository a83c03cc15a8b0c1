"""`POST /v1/omni/audit`: an audit on the server's machine, beside the ranks that it looks at."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse

from omni_notebook.engine.loop import ended
from omni_notebook.errors import OmniError, StageBusyError
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
    from concurrent.futures import Future

    from omni_notebook.verbs.auditing.plan import Plan
    from omni_notebook.verbs.auditing.result import AuditResult
    from omni_notebook.verbs.engine_api import Engine

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

    async def run(self, plan: Plan) -> AuditResult:
        """Carry one out; a cancelled one wakes its stages first.

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
        wait = self._wait = Background()
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
            raise EndedError(str(stopped))
        return running.result()

    def end(self) -> None:
        """Tell the one that is on its way to stop, and begin no other; from any thread."""
        self._ended = True
        self._wait.stop.set()


@router.post("/audit")
async def audit(body: AuditBody, request: Request) -> JSONResponse:
    """Sleep, look from outside, wake, generate again: a verdict, and the record it was made from."""
    audits: Audits = request.app.state.audits
    plan = plan_from(numbers(request.app.state.engine, body.stage_ids), body.probe_bytes, **body.wishes())
    result = await while_connected(request, audits.run(plan))
    return JSONResponse(await asyncio.to_thread(_answer, result))


def _answer(result: AuditResult) -> dict[str, Any]:
    pictures = {name: [base64.b64encode(one).decode() for one in some] for name, some in result.pictures.items()}
    return {"status": "SUCCESS", "verdict": result.verdict, "report": result.to_dict(), "pictures": pictures}
