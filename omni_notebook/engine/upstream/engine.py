"""`UpstreamOmni`: an installed `vllm_omni` engine that answers as `AsyncOmni` does."""

from __future__ import annotations

import contextlib
import uuid
import weakref
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from omni_notebook.engine import arguments, tracing
from omni_notebook.engine.closing import Closer
from omni_notebook.engine.entry import Ask
from omni_notebook.engine.loop import EngineLoop
from omni_notebook.engine.lora_calls import LoRACalls
from omni_notebook.engine.scoped import Looped
from omni_notebook.engine.upstream import package, seats
from omni_notebook.engine.upstream.core import SHUTDOWN_S, UpCore
from omni_notebook.engine.upstream.outside import Outside
from omni_notebook.engine.upstream.refusing import START_ANEW
from omni_notebook.engine.upstream.requests import Client
from omni_notebook.errors import EngineClosedError, UnsupportedError
from omni_notebook.protocol import MemoryState, PauseState, new_task_id
from omni_notebook.stages.waiting import CancelToken

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Sequence

    from omni_notebook.engine.events import Subscription
    from omni_notebook.protocol import EngineStatus, LoRARequest, OmniACK, OmniRequestOutput, OmniSamplingParams

T = TypeVar("T")
END_GRACE_S = 2.0


class UpstreamOmni(Looped, LoRACalls):
    """A `vllm_omni` AsyncOmni behind this package's API; see docs/upstream.md for what is measured by whom.

    Every coroutine may be awaited from any event loop and thread; `status`, `subscribe` and `shutdown` are plain calls.

    Args:
        model: what `vllm_omni` takes for a model.
        enable_sleep_mode: False refuses `sleep`.
        progress: called with (what, fraction 0 … 1) while starting, from the caller's thread.
        default_timeout: seconds that an order may take.
        **options: keyword arguments of `vllm_omni`'s AsyncOmni, as they are.

    Raises:
        UnsupportedError: it is not installed; the message has the line that installs it.
        UpstreamError: it did not start; nothing is left.
    """

    url: str | None = None
    """It is in this process."""
    host: str | None = None
    """Its ranks are on this machine."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        enable_sleep_mode: bool = True,
        *,
        progress: Callable[[str, float], None] | None = None,
        default_timeout: float | None = None,
        **options: Any,
    ) -> None:
        package.check_installed()
        self.enable_sleep_mode = enable_sleep_mode
        tell = progress or _silent
        tell(f"vllm_omni starts {model}", 0.0)
        before = {one.pid for one in seats.descendants()}
        try:
            upstream = package.make(str(model), {**options, "enable_sleep_mode": enable_sleep_mode})
            outside = Outside(package.device_type())
        except BaseException:
            _end_new(before)
            raise
        try:
            self._core = UpCore(upstream, str(model), outside, package.version(), default_timeout)
        except BaseException:
            with contextlib.suppress(Exception):  # its processes are ended below, whatever it says
                upstream.shutdown()
            _end_new(before)
            raise
        self._loop = EngineLoop("omni-upstream")
        self._closer = Closer(self._core, self._loop, SHUTDOWN_S)
        weakref.finalize(self, self._closer.collected)
        try:
            self._loop.submit(self._core.start()).result()
            tell(f"{len(self._core.stages)} stages are ready", 1.0)
        except BaseException:
            self.shutdown()
            raise

    # ------------------------------------------------------------------------- sleep and wake

    async def sleep(
        self,
        stage_ids: Sequence[int] | int | None = None,
        level: int = 1,
        mode: str | None = None,
        timeout: float | None = None,
        *,
        discard: bool = True,
        raise_on_error: bool = True,
    ) -> list[OmniACK]:
        """Put stages to sleep at level 1; one ACK a rank, measured from outside, all with one task_id.

        Args:
            stage_ids: None = all stages.
            level: 1; a 2 is refused, because upstream can not wake from it, whatever `discard` says.
            mode: bring requests to rest first: "keep", "wait" or "abort"; None refuses a busy stage.
            timeout: seconds for everything.
            discard: not used.
            raise_on_error: False returns ERROR ACKs instead of raising.

        Raises:
            ArgumentError: unknown stage, level or mode.
            UnsupportedError: level 2, or the engine was started without sleep mode; nothing changed.
            StageBusyError, PauseError, StageFailedError: refused, nothing changed.
            SleepError: a rank's answer is ERROR; `.acks` has all.
            DeadlineError: nothing slept.
        """
        del discard

        async def run() -> list[OmniACK]:
            stages = self._core.pick(stage_ids)
            checked = arguments.check_level(level)
            quiet = None if mode is None else arguments.check_mode(mode)
            if not self.enable_sleep_mode:
                msg = (
                    "sleep is off: the engine was started with enable_sleep_mode=False; start it with True. "
                    "Nothing changed"
                )
                raise UnsupportedError(msg)
            self._core.sleeping.refuse_level_2(checked)
            token, task_id, deadline = CancelToken(), new_task_id(), self._core.deadline(timeout)
            with _span("sleep", stages, task_id=task_id, level=checked, mode=mode) as span:
                work = self._core.sleeping.sleep(stages, task_id, quiet, deadline, token)
                acks: list[OmniACK] = await self._core.supervise(work, token)
                span.answered(acks)
            if raise_on_error:
                self._core.sleeping.raise_if_failed("sleep", acks, stages)
            return acks

        return await self._run(run)

    async def wake_up(
        self,
        stage_ids: Sequence[int] | int | None = None,
        tags: Sequence[str] | str | None = None,
        reload: bool = True,
        timeout: float | None = None,
        *,
        raise_on_error: bool = True,
    ) -> list[OmniACK]:
        """Wake stages; one ACK a rank, `mapped_bytes` measured from outside.

        Args:
            stage_ids: None = all stages.
            tags: None; a stage wakes whole here.
            reload: not used: level 1 has nothing to reload.
            timeout: seconds for everything.
            raise_on_error: False returns ERROR ACKs instead of raising.

        Raises:
            ArgumentError: unknown stage.
            UnsupportedError: `tags` are given.
            StageFailedError: refused, nothing changed.
            WakeError: a rank's answer is ERROR; the stage has FAILED.
        """
        del reload

        async def run() -> list[OmniACK]:
            stages = self._core.pick(stage_ids)
            if tags is not None:
                msg = (
                    f"tags={tags!r}: over vllm_omni a stage is woken whole, because nobody tells what a tag holds; "
                    "leave tags out. Nothing changed"
                )
                raise UnsupportedError(msg)
            token, task_id, deadline = CancelToken(), new_task_id(), self._core.deadline(timeout)
            with _span("wake", stages, task_id=task_id) as span:
                work = self._core.sleeping.wake(stages, task_id, deadline, token)
                acks: list[OmniACK] = await self._core.supervise(work, token)
                span.answered(acks)
            if raise_on_error:
                self._core.sleeping.raise_if_failed("wake", acks, stages)
            return acks

        return await self._run(run)

    async def is_sleeping(self, stage_ids: Sequence[int] | int | None = None) -> bool:
        """Whether any of the stages (None = all) is not AWAKE."""

        async def run() -> bool:
            return any(stage.state != MemoryState.AWAKE for stage in self._core.pick(stage_ids))

        return await self._run(run)

    # ---------------------------------------------------------------------- pause and resume

    async def pause_generation(
        self,
        mode: str = "abort",
        stage_ids: Sequence[int] | int | None = None,
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Close admission; upstream closes AR schedulers, and with "keep" diffusion schedulers.

        Raises:
            ArgumentError: unknown stage or mode.
            DeadlineError, PauseError: it did not complete (PAUSE_FAILED); retry it or resume.
            StepLevelError (a NotImplementedError): "keep" on a step-level stage; nothing changed.
        """

        async def run() -> None:
            stages = self._core.pick(stage_ids)
            checked = arguments.check_mode("wait" if wait_for_inflight_requests else mode)
            token, deadline = CancelToken(), self._core.deadline(timeout)
            with _span("pause", stages, mode=str(checked)):
                work = self._core.pausing.pause(
                    stages, checked, clear_cache=clear_cache, deadline=deadline, token=token
                )
                await self._core.supervise(work, token)

        await self._run(run)

    async def resume_generation(self, stage_ids: Sequence[int] | int | None = None) -> None:
        """Open paused schedulers; admission opens once no paused stage is left.

        Raises:
            ArgumentError: unknown stage.
            PauseError: upstream did not open one.
        """

        async def run() -> None:
            await self._core.supervise(self._core.pausing.resume(self._core.pick(stage_ids)), CancelToken())

        await self._run(run)

    async def is_paused(self) -> bool:
        """Whether admission is closed by a pause."""

        async def run() -> bool:
            return any(stage.pause_state != PauseState.OPEN for stage in self._core.stages)

        return await self._run(run)

    # ------------------------------------------------------------------------------- requests

    async def generate(  # noqa: PLR0913  (the embedded engine's signature)
        self,
        prompt: str | dict[str, Any],
        request_id: str | None = None,
        sampling_params: OmniSamplingParams | dict[str, Any] | None = None,
        *,
        output_modalities: Sequence[str] | str | None = None,
        admission_timeout: float = 60.0,
        timeout: float | None = None,
        lora_request: LoRARequest | str | int | None = None,
    ) -> AsyncIterator[OmniRequestOutput]:
        """Outputs as upstream gives them; the last one has `finished`. Takes what `AsyncOmni.generate` takes.

        While any stage sleeps upstream refuses every request, so that all stages must be awake.

        Raises:
            ArgumentError: prompt, id, adapter or a parameter does not fit; nothing was started.
            PausedError, AsleepError, StageFailedError: a gate is closed; names the call that helps.
            UpstreamError, WorkerDiedError: it failed in upstream; its own words.
            DeadlineError: `timeout` passed; the request was aborted.
        """
        ask = Ask(
            prompt=prompt,
            request_id=uuid.uuid4().hex[:12] if request_id is None else request_id,
            sampling_params=sampling_params,
            output_modalities=output_modalities,
            admission_timeout=admission_timeout,
            lora_request=lora_request,
        )
        bound_s = arguments.check_timeout(timeout)
        client, done = Client(ask), False
        self._loop.call(lambda: self._core.requests.begin(client))
        try:
            while not done:
                output = await client.next(inf if bound_s is None else bound_s, lambda: self._loop.closed)
                done = output.finished
                yield output
        finally:
            if not done:
                with contextlib.suppress(EngineClosedError, RuntimeError):
                    self._loop.call(lambda: self._core.requests.leave(client))

    async def abort(self, request_id: str) -> bool:
        """End a request with a terminal output (state "aborted"); whether it was in progress, or waited at a gate."""
        return await self._run(lambda: self._core.requests.abort(request_id))

    # --------------------------------------------------------------------- weights and adapters

    async def load_weights(
        self, stage_id: int, source: Any, version: str | None = None, timeout: float | None = None
    ) -> None:
        """Refused: `vllm_omni` 0.30 has no such call (its `start_weight_update` does nothing).

        Raises:
            UnsupportedError: always; nothing changed.
        """
        del source, version, timeout
        self._core.pick(stage_id)
        msg = f"vllm_omni {self._core.version} has no call that loads weights into a running stage; {_ANEW_WITH}"
        raise UnsupportedError(msg)

    async def restart(self, stage_id: int, timeout: float | None = None) -> None:
        """Refused: `vllm_omni` 0.30 has no such call.

        Raises:
            UnsupportedError: always; nothing changed.
        """
        del timeout
        self._core.pick(stage_id)
        msg = f"{START_ANEW}. Nothing changed"
        raise UnsupportedError(msg)

    # ------------------------------------------------------------------------- plain calls

    async def check_health(self) -> None:
        """Return if every stage can work.

        Raises:
            StageFailedError, WorkerDiedError, UpstreamError, DeadlineError: says what is wrong.
            EngineClosedError: the engine was shut down.
        """
        await self._run(self._core.check_health)

    def status(self) -> EngineStatus:
        """A snapshot, memory seen from outside, at most 0.2 s old; never waits for upstream, never changes state."""
        return self._core.status()

    def logs(self, stage_id: int, rank: int = 0, replica: int = 0) -> list[str]:
        """Refused: upstream keeps none.

        Raises:
            UnsupportedError: always.
        """
        del rank, replica
        self._core.pick(stage_id)
        msg = "vllm_omni keeps no lines a rank: its processes write to this process's own output"
        raise UnsupportedError(msg)

    async def record_audit(self, verdict: str, report: Any) -> None:
        """Put an audit on record in the ledger; raises nothing."""

        async def run() -> None:
            self._core.ledger.record_audit(verdict, report)
            await self._core.ledger.written()

        await self._run(run)

    def subscribe(self) -> Subscription:
        """An async iterator of events from now on: ACKs, state changes, memory samples, request progress."""
        return self._core.hub.subscribe()

    def shutdown(self) -> None:
        """End every request, upstream and every process of it, also where upstream does not; idempotent."""
        self._closer.close()

    @property
    def _adapters(self) -> UpCore:
        return self._core


_ANEW_WITH = "start the engine anew with the checkpoint. Nothing changed"


def _span(name: str, stages: Any, **attributes: Any) -> Any:
    return tracing.span(name, stage_ids=[stage.stage_id for stage in stages], **attributes)


def _end_new(before: set[int]) -> None:
    """A start that failed leaves no process."""
    seats.end(seats.new_since(before), END_GRACE_S)


def _silent(what: str, fraction: float) -> None:
    """Progress that nobody asked for."""
