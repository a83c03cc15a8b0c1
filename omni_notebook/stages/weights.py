"""New weights into a stage, and a stage made anew."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import ConfigError, DeadlineError, NeedsWeightsError, WorkerDiedError
from omni_notebook.protocol import MemoryState, PauseMode
from omni_notebook.stages.lora_orders import bring_back
from omni_notebook.stages.quiesce import quiesce
from omni_notebook.stages.stage import first_error, raise_first
from omni_notebook.stages.tensor_source import TensorSource
from omni_notebook.stages.transitions import SLEEP, Context
from omni_notebook.stages.waiting import Deadline, OrderCancelled

if TYPE_CHECKING:
    import asyncio

    from omni_notebook.protocol import RankId
    from omni_notebook.stages.stage import Stage
    from omni_notebook.stages.tensor_source import Answer

WEIGHTS_REASON = "weights"
_UNCHANGED = re.compile(r"[.;] nothing changed$", re.IGNORECASE)
"""What a rank says at the end of its error, which the stage says with its state."""
FAILED_PATIENCE_S = 2.0
"""What a FAILED stage has on its device is given this long to end."""
START_S = 1800.0
"""New ranks are given at least this long to load: vLLM's may compile first. A hanging one must not hold the stage."""
ADAPTERS_S = 120.0
"""And then this long to read the stage's adapters."""


async def load_weights(stage: Stage, source: str | TensorSource, version: str | None, context: Context) -> None:
    """Load a checkpoint folder, or tensors as they come, into every rank; the caller has checked state and requests.

    Raises:
        ConfigError, DeadlineError: it does not fit, or the tensors did not come; the old weights are untouched.
        NeedsWeightsError: new weights had begun to replace the old ones, and not all ranks have all of them.
        Exception: what the first rank that failed raised.
    """
    stage.close(WEIGHTS_REASON)
    try:
        raise_first(await quiesce(stage, PauseMode.KEEP, WEIGHTS_REASON, context.deadline, context.token))
        stage.weight_version = await _Load(stage, source, version, context).run()
        stage.requeue()
        stage.came_from(source if isinstance(source, str) else None, version)
        stage.set_state(MemoryState.AWAKE, None, awake_tags=tuple(stage.tags), reason=f"weights {stage.weight_version}")
        stage.reopen(SLEEP)
    finally:
        stage.reopen(WEIGHTS_REASON)
        if isinstance(source, TensorSource):
            source.close()


class _Load:
    """New weights on their way into a stage's ranks, which are at rest."""

    def __init__(self, stage: Stage, source: str | TensorSource, version: str | None, context: Context) -> None:
        self._stage = stage
        self._source = source
        self._version = version
        self._context = context
        self._sent = False  # a rank may have been written to
        self._culprit: RankId | None = None

    async def run(self) -> str:
        """Load; the weights' name. After a failure the stage is as before, or NEEDS_WEIGHTS, or FAILED."""
        source = self._source
        try:
            versions = await (self._tensors(source) if isinstance(source, TensorSource) else self._folder(source))
            return await self._stage.name_weights(versions, timeout_s=self._context.finish_s)
        except Exception as error:
            await self._void(error)
            named = self._named(error)
            if named is error:
                raise
            raise named from error

    async def _folder(self, source: str) -> list[str]:
        await self._call("prepare_weights", source)
        return await self._call("load_weights", source, self._version, writes=True)

    async def _tensors(self, source: TensorSource) -> list[str]:
        headers = await self._read(source.headers()) if source.twice else None
        await self._call("prepare_tensors", headers)
        coming = source.chunk()
        while True:
            chunk = await self._read(coming)
            last = chunk.last
            if not last:
                coming = source.chunk()  # is made while this one is written
            await self._call("load_tensors", chunk, writes=True)
            del chunk
            if last:
                return await self._call("finish_tensors", self._version, writes=True)

    async def _read(self, coming: asyncio.Future[Answer]) -> Any:
        """What the source answers.

        Raises:
            ConfigError: it can not be used.
            DeadlineError: nothing came in time.
            StageFailedError: a rank died meanwhile.
            OrderCancelled: the caller went away.
        """
        stage, deadline = self._stage, self._context.deadline
        coming.add_done_callback(lambda _coming: stage.changed.notify())
        if not await stage.changed.until(lambda: coming.done() or _failed(stage), deadline, self._context.token):
            msg = f"the next tensor had not come when the {deadline.seconds:g} s of this call were over"
            raise DeadlineError(msg)
        if _failed(stage):
            raise stage.failed_error()
        value, error = coming.result()
        if error is not None:
            raise error
        return value

    async def _call(self, method: str, *args: Any, writes: bool = False) -> list[Any]:
        """Every rank's answer; a rank that is lost while it writes fails the stage.

        Raises:
            Exception: what the first rank that failed raised.
        """
        self._sent = self._sent or writes
        timeout_s = self._context.finish_s if writes else self._context.deadline.left_s()
        answers = await self._stage.call_all(method, *args, timeout_s=timeout_s)
        for answer in answers:
            if answer.error is not None:
                if writes and isinstance(answer.error, DeadlineError | WorkerDiedError):
                    self._stage.fail(answer.error)
                self._culprit = answer.where
                raise answer.error
        return [answer.value for answer in answers]

    async def _void(self, error: Exception) -> None:
        """Nothing changed if no rank has new or broken weights; else no rank keeps its own: never a mix of two."""
        stage = self._stage
        if not self._sent or _failed(stage):
            return
        valid = await stage.call_all("weights_valid", timeout_s=self._context.finish_s)
        if first_error(valid) is None and all(answer.value for answer in valid):
            return
        revoked = await stage.call_all("revoke_weights", timeout_s=self._context.finish_s)
        if first_error((*valid, *revoked)) is not None:
            stage.fail(error)
            return
        stage.close(SLEEP)
        stage.recoverable = stage.reproducible
        stage.set_state(MemoryState.NEEDS_WEIGHTS, None, reason=f"load_weights failed: {_said(error)}")

    def _named(self, error: Exception) -> Exception:
        """The error with the stage's state and the call that helps."""
        stage = self._stage
        if self._sent and stage.state == MemoryState.NEEDS_WEIGHTS:
            return NeedsWeightsError(self._broken_off(error))
        if isinstance(error, ConfigError | DeadlineError):
            number = stage.stage_id
            now = f"nothing changed, stage {number} is {stage.state}"
            if _failed(stage):
                now = f"stage {number} has FAILED, call restart({number})"
            error.args = (f"{_UNCHANGED.sub('', str(error))}; {now}",)
        return error

    def _broken_off(self, error: Exception) -> str:
        number = self._stage.stage_id
        who = "" if self._culprit is None else f"{self._culprit.title} of "
        what = f"could not load {self._source}" if isinstance(self._source, str) else "got new weights only in part"
        back = f", or wake_up([{number}]) to reload the weights from before"
        return (
            f"{who}stage {number} {what}: {_said(error)}; the stage is NEEDS_WEIGHTS. Call load_weights({number}, "
            f"{'path' if isinstance(self._source, str) else 'source'}){back if self._stage.reproducible else ''}"
        )


def _failed(stage: Stage) -> bool:
    return stage.state == MemoryState.FAILED


def _said(error: Exception) -> str:
    if isinstance(error, OrderCancelled):
        return "it was cancelled"
    return str(error) if isinstance(error, ConfigError | DeadlineError) else f"{type(error).__name__}: {error}"


async def restart(stage: Stage, context: Context) -> None:
    """End a stage's ranks and start new ones from the last checkpoint, with its adapters; its requests run again.

    Where no path reproduces the last weights, the new ranks have none (NEEDS_WEIGHTS) and the requests wait.

    Ranks in processes of their own are ended at the deadline, whatever they do; a FAILED stage's are soon. The new ones
    have what is left of it, but at least `START_S`.

    Raises:
        DeadlineError: the running batch did not end in time, and it runs in this process; nothing changed. Or the new
            ranks were not up in time; the stage is FAILED.
        Exception: what the first rank that did not load raised; the stage is FAILED.
    """
    failed = stage.state == MemoryState.FAILED
    stage.close("restart")
    patience = Deadline(min(FAILED_PATIENCE_S, context.deadline.left_s())) if failed else context.deadline
    try:
        at_rest = await stage.changed.until(lambda: stage.at_rest, patience, context.token)
    except OrderCancelled:
        stage.reopen("restart")
        raise
    if not at_rest and not failed and stage.config.executor_name == "uni":
        stage.reopen("restart")
        msg = f"stage {stage.stage_id} was not restarted: its running batch had not ended; abort it or wait longer"
        raise DeadlineError(msg)
    await stage.restart(Deadline(max(START_S, context.deadline.left_s())))
    await bring_back(stage, Deadline(max(ADAPTERS_S, context.deadline.left_s())))
