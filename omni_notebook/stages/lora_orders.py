"""Orders that change a stage's adapters: all or nothing over its ranks and replicas, and over several stages.

The caller holds the stages' order locks and has checked their states and requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import ConfigError, DeadlineError, LoRAError, WorkerDiedError
from omni_notebook.protocol import MemoryState, PauseMode
from omni_notebook.stages.lora import LORA_REASON, Installed, gone
from omni_notebook.stages.quiesce import quiesce
from omni_notebook.stages.stage import first_error, raise_first
from omni_notebook.stages.transitions import ABORT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from omni_notebook.executors.base import RankAnswer
    from omni_notebook.protocol import LoRARequest
    from omni_notebook.stages.stage import Stage
    from omni_notebook.stages.transitions import Context
    from omni_notebook.stages.waiting import Deadline

    Answers = list[list[RankAnswer]]

_LOST = (DeadlineError, WorkerDiedError)


@contextlib.asynccontextmanager
async def _at_rest(stages: Sequence[Stage], context: Context) -> AsyncIterator[None]:
    """Nothing is on a device of the stages, and nothing starts."""
    for stage in stages:
        stage.close(LORA_REASON)
    try:
        for stage in stages:
            raise_first(await quiesce(stage, PauseMode.KEEP, LORA_REASON, context.deadline, context.token))
        yield
    finally:
        for stage in stages:
            stage.reopen(LORA_REASON)


async def _everywhere(stages: Sequence[Stage], method: str, *args: Any, timeout_s: float) -> Answers:
    return list(await asyncio.gather(*(stage.call_all(method, *args, timeout_s=timeout_s) for stage in stages)))


# ---------------------------------------------------------------------------------------------- add


async def add(stages: Sequence[Stage], request: LoRARequest, digest: str, context: Context) -> None:
    """Put an adapter, whose files have this digest, on every rank of the stages.

    Raises:
        ConfigError: a rank can not take it, or its files were changed meanwhile; nothing changed.
        LoRAError: a rank failed; it was removed from all, or the stage has FAILED.
        OrderCancelled: the caller went away before the ranks took it; nothing changed.
    """
    lora_id = request.lora_int_id
    async with _at_rest(stages, context):
        prepared = await _everywhere(stages, "prepare_lora", request, timeout_s=context.deadline.left_s())
        try:
            for stage, answers in zip(stages, prepared, strict=True):
                _check_prepared(stage, request, answers, digest)
            context.token.check()
        except BaseException:
            await _everywhere(stages, "abort_lora", lora_id, timeout_s=ABORT_S)
            raise
        committed = await _everywhere(stages, "commit_lora", lora_id, timeout_s=context.finish_s)
        if any(first_error(answers) is not None for answers in committed):
            raise await _taken_back(stages, request, committed, context)
        for stage, answers, reports in zip(stages, committed, prepared, strict=True):
            stage.loras.put(Installed(request, digest, reports[0].value.rank))
            _tell(stage, answers, f"adapter {request.title} added")


def _check_prepared(stage: Stage, request: LoRARequest, answers: Sequence[RankAnswer], digest: str) -> None:
    failed = next((answer for answer in answers if answer.error is not None), None)
    if failed is not None:
        raise _named(stage, request, failed, "nothing changed")
    if any(answer.value.digest != digest for answer in answers):
        msg = f"{request.lora_path}: the files of adapter {request.title} changed while they were read; nothing changed"
        raise ConfigError(msg)


def _named(stage: Stage, request: LoRARequest, failed: RankAnswer, now: str) -> BaseException:
    """The error of a rank that could not take an adapter, with the rank's name in it."""
    error = failed.error
    if isinstance(error, _LOST):
        return error  # it names the rank
    text = f"{failed.where.title} of stage {stage.stage_id} could not take adapter {request.title}: "
    if isinstance(error, ConfigError):
        return ConfigError(f"{text}{error}; {now}")
    return LoRAError(f"{text}{type(error).__name__}: {error}; {now}")


async def _taken_back(
    stages: Sequence[Stage], request: LoRARequest, committed: Answers, context: Context
) -> BaseException:
    """Remove the adapter from every rank, and say why; a stage of which a rank is lost or will not has FAILED."""
    for stage, answers in zip(stages, committed, strict=True):
        stuck = _lost(answers) or await _take_back(stage, request.lora_int_id, context.finish_s)
        if stuck is not None:
            stage.fail(first_error(answers) or stuck)
    stage, failed = _culprit(stages, committed)
    if stage.state == MemoryState.FAILED:
        return _named(stage, request, failed, f"the stage has FAILED, call restart({stage.stage_id})")
    return _named(stage, request, failed, "it was removed from every rank, nothing changed")


def _lost(answers: Sequence[RankAnswer]) -> BaseException | None:
    """The error of a rank that died or said nothing in time."""
    return next((answer.error for answer in answers if isinstance(answer.error, _LOST)), None)


def _culprit(stages: Sequence[Stage], answered: Answers) -> tuple[Stage, RankAnswer]:
    """The first rank that failed, and its stage."""
    pairs = zip(stages, answered, strict=True)
    return next((stage, answer) for stage, answers in pairs for answer in answers if answer.error is not None)


async def _take_back(stage: Stage, lora_id: int, timeout_s: float) -> BaseException | None:
    """Remove an adapter from every rank of a stage; what stood in the way, if anything did."""
    removed = await stage.call_all("remove_lora", lora_id, timeout_s=timeout_s)
    error = first_error(removed)
    if error is None:
        _tell(stage, removed)
    return error


def _tell(stage: Stage, answers: Sequence[RankAnswer], reason: str = "") -> None:
    """Take the tags that the ranks have now."""
    stage.tags = dict(answers[0].value)
    stage.set_state(stage.state, stage.level, awake_tags=tuple(stage.tags), reason=reason)


# ----------------------------------------------------------------------------------- remove and pin


async def remove(stages: Sequence[Stage], lora_id: int, context: Context) -> None:
    """Take an adapter off every rank of the stages that have it.

    Raises:
        LoRAError: a rank did not let go of it in two tries; the stage has FAILED, a restart comes up without it.
    """
    async with _at_rest(stages, context):
        for stage in stages:
            request = stage.loras[lora_id].request
            error = await _take_back(stage, lora_id, context.finish_s)
            if error is not None and not isinstance(error, _LOST):
                error = await _take_back(stage, lora_id, context.finish_s)
            stage.loras.drop(lora_id)
            stage.loras.on_lost(request, gone(request, stage.stage_id))  # those that came meanwhile
            if error is not None:
                stage.fail(error)
                msg = (
                    f"adapter {request.title} was not removed from every rank of stage {stage.stage_id}: {error}; the "
                    f"stage has FAILED, call restart({stage.stage_id})"
                )
                raise LoRAError(msg) from error
            stage.tell(f"adapter {request.title} removed")


async def pin(stages: Sequence[Stage], lora_id: int, context: Context) -> None:
    """Put an adapter into a slot of every rank for good.

    Raises:
        LoRAError: a rank could not; it is pinned nowhere, or the stage has FAILED.
    """
    async with _at_rest(stages, context):
        pinned = await _everywhere(stages, "pin_lora", lora_id, timeout_s=context.finish_s)
        if all(first_error(answers) is None for answers in pinned):
            for stage in stages:
                stage.loras[lora_id].pinned = True
                stage.tell(f"adapter {stage.loras[lora_id].request.title} pinned")
            return
        raise await _unpinned(stages, lora_id, pinned, context)


async def _unpinned(stages: Sequence[Stage], lora_id: int, pinned: Answers, context: Context) -> BaseException:
    undone = await _everywhere(stages, "unpin_lora", lora_id, timeout_s=context.finish_s)
    for stage, before, after in zip(stages, pinned, undone, strict=True):
        stuck = _lost(before) or first_error(after)
        if stuck is not None:
            stage.fail(first_error(before) or stuck)
    stage, failed = _culprit(stages, pinned)
    fallen = [one.stage_id for one in stages if one.state == MemoryState.FAILED]
    now = "; ".join(f"stage {number} has FAILED, call restart({number})" for number in fallen) or "it is pinned nowhere"
    where = f"{failed.where.title} of stage {stage.stage_id}"
    return LoRAError(f"{where} could not pin adapter {lora_id}: {failed.error}; {now}")


# -------------------------------------------------------------------------------------------- restart


async def bring_back(stage: Stage, deadline: Deadline) -> None:
    """Put the adapters on the new ranks of a stage that was restarted, from their paths; then let it run.

    One whose files are gone or not those that were added is lost, and requests that name it end with an error.

    Raises:
        Exception: a rank was lost on the way, or did not answer in time; the stage is FAILED.
    """
    lost = []
    try:
        for installed in stage.loras:
            why = await _put_back(stage, installed, deadline)
            if why is not None:
                lost.append(gone(installed.request, stage.stage_id, why))
                stage.loras.drop(installed.request.lora_int_id)
                stage.loras.on_lost(installed.request, lost[-1])
    except Exception as error:
        stage.fail(error)
        raise
    if lost:
        stage.last_error = "restarted, but " + "; ".join(map(str, lost))
        stage.tell(stage.last_error)
    stage.reopen(LORA_REASON)


async def _put_back(stage: Stage, installed: Installed, deadline: Deadline) -> str | None:
    """Why an adapter could not come back; None: it is there, and pinned if it was.

    Raises:
        Exception: a rank was lost, or keeps a part of what did not come back whole.
    """
    request, lora_id = installed.request, installed.request.lora_int_id
    answers = await stage.call_all("prepare_lora", request, timeout_s=deadline.left_s())
    if first_error(answers) is None and any(answer.value.digest != installed.digest for answer in answers):
        raise_first(await stage.call_all("abort_lora", lora_id, timeout_s=ABORT_S))
        return f"the files in {request.lora_path} are not those that were added"
    if first_error(answers) is None:
        answers = await stage.call_all("commit_lora", lora_id, timeout_s=deadline.left_s())
    if first_error(answers) is None:
        _tell(stage, answers)
        if installed.pinned:
            answers = await stage.call_all("pin_lora", lora_id, timeout_s=deadline.left_s())
    error = first_error(answers)
    if error is None:
        return None
    stuck = error if isinstance(error, _LOST) else await _take_back(stage, lora_id, deadline.left_s())
    if stuck is not None:
        raise stuck
    return str(error)
