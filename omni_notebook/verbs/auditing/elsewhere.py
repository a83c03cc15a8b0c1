"""An audit of an engine on a server: carried out there, beside the ranks; its result is here as if it had been here."""

from __future__ import annotations

import base64
import binascii
import contextlib
import time
from typing import TYPE_CHECKING, Any

import msgspec

from omni_notebook.errors import OmniError
from omni_notebook.protocol import sampling_params_from
from omni_notebook.verbs import hints
from omni_notebook.verbs.auditing.plan import is_awake
from omni_notebook.verbs.auditing.record import Record
from omni_notebook.verbs.auditing.result import AuditResult
from omni_notebook.verbs.frontend import Progress
from omni_notebook.verbs.interrupts import InterruptedVerb
from omni_notebook.verbs.session import CANCEL_GRACE_S
from omni_notebook.verbs.waits import promptly

if TYPE_CHECKING:
    from omni_notebook.protocol import StageStatus
    from omni_notebook.verbs.auditing.plan import Plan
    from omni_notebook.verbs.engine_api import ServedEngine
    from omni_notebook.verbs.waits import Wait

_POLL_S = 0.05


class AuditThere:
    """One audit; raises what `Auditor` raises, and `ServerLostError`."""

    def __init__(self, engine: ServedEngine, plan: Plan, wait: Wait) -> None:
        self._engine = engine
        self._plan = plan
        self._wait = wait
        self._told: Progress | None = None

    def run(self) -> AuditResult:
        """Have it carried out; whoever is interrupted leaves, which ends it there."""
        self._plan.stages(self._engine.status())
        sampling_params_from(self._plan.params)
        future = self._engine.submit(self._engine.audit_there(self._body(), self._tell))
        try:
            return result_of(self._wait(future, self.progress))
        except KeyboardInterrupt:
            future.cancel()
            msg = f"interrupted: the audit there ends early and wakes the stages; {self._now()}"
            raise InterruptedVerb(msg) from None

    def _body(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "stage_ids": None if plan.stage_ids is None else list(plan.stage_ids),
            "level": plan.level,
            "prompt": plan.prompt,
            "seed": plan.seed,
            "sampling_params": plan.sampling or None,
            "cycles": plan.cycles,
            "probe_bytes": plan.probe_bytes or None,
        }

    def _tell(self, label: str, share: float | None) -> None:
        self._told = Progress(label, share)

    def progress(self) -> Progress:
        """Which step of which cycle, as the server tells it; of one that does not, what the stages do there."""
        if self._told is not None:
            return self._told
        with contextlib.suppress(OmniError):
            now = hints.pick(self._engine.status(), self._plan.stage_ids)
            return Progress(f"auditing at {self._engine.url}: {', '.join(map(hints.named_state, now))}")
        return Progress(f"auditing at {self._engine.url}")

    def _now(self) -> str:
        """The states once the server has had a moment to wake what slept."""
        deadline = time.monotonic() + 2 * CANCEL_GRACE_S
        try:
            now = promptly(self._engine, self._looked)
            while not is_awake(now) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                now = promptly(self._engine, self._looked)
        except OmniError as error:
            return str(error)
        return f"now {hints.describe(now)}"

    def _looked(self) -> list[StageStatus]:
        return hints.pick(self._engine.status(), self._plan.stage_ids)


def result_of(answer: dict[str, Any]) -> AuditResult:
    """The result that a server's answer holds.

    Raises:
        OmniError: it holds none, or one of another version.
    """
    try:
        record = msgspec.convert(answer.get("report"), Record)
        listed = msgspec.convert(answer.get("pictures") or {}, dict[str, list[str]])
        pictures = {name: [base64.b64decode(one, validate=True) for one in files] for name, files in listed.items()}
    except (msgspec.ValidationError, binascii.Error) as error:
        msg = f"the audit there ended, but its report can not be read here ({error}): is the server another version?"
        raise OmniError(msg) from None
    return AuditResult(record, pictures)
