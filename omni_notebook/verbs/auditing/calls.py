"""`omni.audit` and `omni.audit_async`: the audit from Python."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, cast

from omni_notebook.engine.loop import ended
from omni_notebook.errors import ArgumentError
from omni_notebook.verbs.auditing.auditor import Auditor
from omni_notebook.verbs.auditing.elsewhere import AuditThere
from omni_notebook.verbs.auditing.plan import PROMPT, SEED, plan_from
from omni_notebook.verbs.interrupts import InterruptedVerb, interrupts_held
from omni_notebook.verbs.session import CANCEL_GRACE_S, current, session
from omni_notebook.verbs.waits import Background, Foreground, in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.verbs.auditing.plan import Plan
    from omni_notebook.verbs.auditing.result import AuditResult
    from omni_notebook.verbs.engine_api import Engine, ServedEngine
    from omni_notebook.verbs.frontend import Frontend
    from omni_notebook.verbs.waits import Wait

ENGINE_THREAD = "omni-engine"


def audit(  # noqa: PLR0913  (the words of the verb, all optional)
    engine: Any = None,
    stage_ids: Sequence[int] | int | None = None,
    level: int = 2,
    prompt: str = PROMPT,
    *,
    seed: int = SEED,
    cycles: int = 1,
    probe: int | str | None = None,
    sampling_params: dict[str, Any] | None = None,
) -> AuditResult:
    """Put stages to sleep and wake them, and see whether all of it is true: memory gone, memory back, same outputs.

    Works in a notebook's cell as well as in a script: it waits for the engine's own loop. `audit_async` is for code
    that must not block.

    Args:
        engine: None = the one that `%omni start` started.
        stage_ids: None = all; they must be awake, and the engine idle.
        level: of the sleep; weights that could not be had again are never given up.
        prompt: what to generate before and after, with `seed` and `sampling_params`.
        seed: of the generation.
        cycles: how often; `GROWTH_CYCLES` or more also judge whether the residual grows.
        probe: bytes, or "4GiB", that a process of its own takes and gives back while the stages sleep.
        sampling_params: more of them, as `generate` takes them.

    Raises:
        ArgumentError, AsleepError, PausedError, StageBusyError: refused; nothing was changed.
        EngineClosedError: no engine, or it was stopped meanwhile.
        InterruptedVerb: Ctrl-C; the stages are awake, or the message says what they are.
    """
    plan = plan_from(stage_ids, probe, level=level, prompt=prompt, seed=seed, cycles=cycles, sampling=sampling_params)
    return in_front(current() if engine is None else engine, plan, session().frontend)


async def audit_async(engine: Any = None, stage_ids: Sequence[int] | int | None = None, **known: Any) -> AuditResult:
    """`audit` for code that must not block: `result = await omni.audit_async(level=2)`.

    A cancelled one wakes the stages first. Takes what `audit` takes and raises what it raises.
    """
    probe, sampling = known.pop("probe", None), known.pop("sampling_params", None)
    try:
        plan = plan_from(stage_ids, probe, sampling=sampling, **known)
    except TypeError as error:
        msg = f"audit_async: {error}; nothing was changed"
        raise ArgumentError(msg) from None
    wait = Background()
    auditor = auditor_of(current() if engine is None else engine, plan, wait)
    running = in_thread(auditor.run, "omni-audit")
    try:
        await ended(running)
    except asyncio.CancelledError:
        wait.stop.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * CANCEL_GRACE_S):
                await ended(running)
        raise
    return running.result()


def auditor_of(engine: Engine, plan: Plan, wait: Wait) -> Auditor | AuditThere:
    """Whoever can look at the ranks' processes: this one, or the server of an engine that is there."""
    return Auditor(engine, plan, wait) if engine.url is None else AuditThere(cast("ServedEngine", engine), plan, wait)


def in_front(engine: Engine, plan: Plan, frontend: Frontend) -> AuditResult:
    """An audit that the caller waits for.

    Raises:
        ArgumentError: the caller is the engine's own thread.
        InterruptedVerb: Ctrl-C; one that came at the very end brings the result along.
    """
    if threading.current_thread().name == ENGINE_THREAD:
        msg = "audit waits for the engine and can not be called on its own thread; await audit_async(...)"
        raise ArgumentError(msg)
    result = None
    try:
        with interrupts_held() as held:
            result = auditor_of(engine, plan, Foreground(frontend, held)).run()
    except KeyboardInterrupt as interrupt:
        if result is None or isinstance(interrupt, InterruptedVerb):
            raise
        msg = f"interrupted too late: the audit ended with {result.verdict}"
        raise InterruptedVerb(msg, result) from None
    return result
