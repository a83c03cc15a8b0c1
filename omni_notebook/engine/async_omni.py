"""`AsyncOmni`: the embedded engine. The specification's "Methods" table, and what a notebook needs beside it."""

from __future__ import annotations

import uuid
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from omni_notebook.config import PipelineConfig, load_pipeline
from omni_notebook.engine import arguments
from omni_notebook.engine.closing import Closer
from omni_notebook.engine.core import Core
from omni_notebook.engine.entry import Ask, Entry
from omni_notebook.engine.loop import EngineLoop
from omni_notebook.engine.lora_calls import LoRACalls
from omni_notebook.engine.scoped import Looped
from omni_notebook.errors import UnsupportedError
from omni_notebook.protocol import MemoryState, SleepTask, WakeTask, new_task_id

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from omni_notebook.engine.events import Subscription
    from omni_notebook.protocol import EngineStatus, LoRARequest, OmniACK, OmniRequestOutput, OmniSamplingParams

T = TypeVar("T")


class AsyncOmni(Looped, LoRACalls):
    """All stages of one pipeline, in this process.

    Every coroutine may be awaited from any event loop and thread; `status`, `subscribe` and `shutdown` are plain
    calls. Constructing is synchronous, and legal inside a running loop.

    Args:
        model: "demo", a pipeline YAML file, or a model folder.
        enable_sleep_mode: False refuses `sleep`.
        pipeline: a ready config instead of `model`.
        progress: called with (what, fraction 0 … 1) while starting, from the engine's thread.
        default_timeout: seconds that an order may take.
        stage_overrides: `{stage_id: {StageConfig field: value}}`.
        **overrides: `StageConfig` fields for every stage.

    Raises:
        ConfigError: unknown model, option or a bad checkpoint; nothing is left.
        UnsupportedError: not in this release or on this platform.
    """

    url: str | None = None
    """Where a server answers for it; None: it is in this process."""
    host: str | None = None
    """The machine of its ranks; None: this one."""

    def __init__(
        self,
        model: str | os.PathLike[str] = "demo",
        enable_sleep_mode: bool = True,
        *,
        pipeline: PipelineConfig | None = None,
        progress: Callable[[str, float], None] | None = None,
        default_timeout: float | None = None,
        stage_overrides: dict[int, dict[str, Any]] | None = None,
        **overrides: Any,
    ) -> None:
        if default_timeout is not None:
            overrides["default_timeout"] = default_timeout
        chosen = pipeline if pipeline is not None else str(model)
        config = load_pipeline(chosen, overrides=overrides, stage_overrides=stage_overrides)
        self.enable_sleep_mode = enable_sleep_mode
        self._loop = EngineLoop("omni-engine")
        self._core = Core(config)
        self._closer = Closer(self._core, self._loop)
        weakref.finalize(self, self._closer.collected)
        starting = self._loop.submit(self._core.start(progress or _silent))
        try:
            starting.result()
        except BaseException:
            starting.cancel()
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
        """Put stages to sleep; one measured ACK a rank, all with one task_id.

        Args:
            stage_ids: None = all stages.
            level: 1 keeps the weights on the host and can lose nothing; 2 discards them and reloads at wake.
            mode: quiesce first: "keep", "wait" or "abort"; None refuses a busy stage.
            timeout: seconds for locks, quiescing and the transition.
            discard: False refuses a level 2 of weights that no path reproduces.
            raise_on_error: False returns ERROR ACKs instead of raising.

        Raises:
            ArgumentError: unknown stage, level or mode.
            StageBusyError, PauseError, AsleepError, NeedsWeightsError, StageFailedError, StepLevelError: refused,
                nothing changed.
            SleepError: a rank answered ERROR; `.acks` has all answers.
            DeadlineError: another order held a stage for the whole timeout; nothing changed.
        """

        async def run() -> list[OmniACK]:
            self._core.check_open()
            stages = arguments.pick_stages(self._core.stages, stage_ids)
            task = SleepTask(task_id=new_task_id(), level=arguments.check_level(level), discard=discard)
            checked = None if mode is None else arguments.check_mode(mode)
            if not self.enable_sleep_mode:
                msg = (
                    "sleep is off: the engine was started with enable_sleep_mode=False; start it with True. "
                    "Nothing changed"
                )
                raise UnsupportedError(msg)
            deadline = self._core.deadline(timeout, stages)
            return await self._core.orders.sleep(stages, task, checked, deadline, strict=raise_on_error)

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
        """Wake stages, or some of their tags; one measured ACK a rank.

        Args:
            stage_ids: None = all stages.
            tags: None = all tags; else for example ["weights"] (→ PARTLY_AWAKE).
            reload: False maps a level-2 sleeper without loading (→ NEEDS_WEIGHTS, then `load_weights`).
            timeout: seconds for the lock and the transition.
            raise_on_error: False returns ERROR ACKs instead of raising.

        Raises:
            ArgumentError: unknown stage or tag.
            StageFailedError: refused, nothing changed.
            WakeError: a rank answered ERROR; memory is as before, a later wake works.
            DeadlineError: another order held a stage for the whole timeout; nothing changed.
        """

        async def run() -> list[OmniACK]:
            self._core.check_open()
            stages = arguments.pick_stages(self._core.stages, stage_ids)
            checked = arguments.check_tags(tags, stages)
            task = WakeTask(task_id=new_task_id(), tags=checked, reload=reload)
            deadline = self._core.deadline(timeout, stages)
            return await self._core.orders.wake(stages, task, deadline, strict=raise_on_error)

        return await self._run(run)

    async def is_sleeping(self, stage_ids: Sequence[int] | int | None = None) -> bool:
        """Whether any of the stages (None = all) is not AWAKE.

        Raises:
            ArgumentError: unknown stage.
        """

        async def run() -> bool:
            stages = arguments.pick_stages(self._core.stages, stage_ids)
            return any(stage.state != MemoryState.AWAKE for stage in stages)

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
        """Close admission; bring AR schedulers, and with "keep" diffusion schedulers, to rest.

        Args:
            mode: "abort" ends AR requests, "wait" lets them end, "keep" freezes them; on a diffusion stage "keep"
                lets the running batch end and holds the queue, the others only close admission.
            stage_ids: None = all stages.
            wait_for_inflight_requests: the same as mode="wait".
            clear_cache: AR stages: frozen requests give up their keys and values and compute them again after the
                resume, token for token as before. No effect on a diffusion stage.
            timeout: seconds.

        Raises:
            ArgumentError: unknown stage or mode.
            DeadlineError, PauseError: the pause did not complete (PAUSE_FAILED); retry it or resume.
            StepLevelError (a NotImplementedError): "keep" on a step-level stage; nothing changed.
        """
        mode = "wait" if wait_for_inflight_requests else mode
        await self._run(lambda: self._core.pause(mode, stage_ids, timeout, clear_cache=clear_cache))

    async def resume_generation(self, stage_ids: Sequence[int] | int | None = None) -> None:
        """Open paused schedulers; admission opens once no paused stage is left.

        Raises:
            ArgumentError: unknown stage.
        """

        async def run() -> None:
            self._core.resume(stage_ids)

        await self._run(run)

    async def is_paused(self) -> bool:
        """Whether admission is closed by a pause."""

        async def run() -> bool:
            return self._core.gates.paused

        return await self._run(run)

    # ------------------------------------------------------------------------------- requests

    async def generate(  # noqa: PLR0913  (vLLM's keyword beside the specification's)
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
        """Outputs as they come: text so far, the final text, then images.

        Args:
            prompt: a string or `{"prompt_token_ids": [...]}`.
            request_id: None makes one.
            sampling_params: a dict of `OmniSamplingParams` fields, or the class.
            output_modalities: `["text"]` ends with the AR stage and needs no later one awake.
            admission_timeout: seconds to wait at closed gates; 0 refuses at once.
            timeout: seconds for the whole request; None = no bound once it is admitted.
            lora_request: an adapter that was added, its name or its number; the stages that have it apply it.

        Raises:
            ArgumentError: prompt, id, adapter or a parameter does not fit; nothing was started.
            PausedError, AsleepError, NeedsWeightsError, StageFailedError: a gate is closed; names the call that helps.
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
        entry = Entry(self._core, self._loop, ask, arguments.check_timeout(timeout))
        done = False
        try:
            await entry.begin()
            while not done:
                output = entry.ready()
                if output is None:
                    await entry.wait()
                    continue
                done = output.finished
                yield output
        finally:
            if not done:
                entry.leave()

    async def abort(self, request_id: str) -> bool:
        """End a request with a terminal output (state "aborted"); whether it was there, at a gate or past it."""

        async def run() -> bool:
            return self._core.abort(request_id)

        return await self._run(run)

    # -------------------------------------------------------------------------------- weights

    async def load_weights(
        self,
        stage_id: int,
        source: str | os.PathLike[str] | Mapping[str, Any] | Iterable[tuple[str, Any]],
        version: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Load new weights into a stage, in place; their version is `version`, else the checksum's start.

        Args:
            stage_id: one stage.
            source: a checkpoint folder, or whole tensors (torch on any device, or numpy) by the checkpoint's names: a
                mapping, or an iterable of (name, tensor), gone through on a thread of its own. What can be gone through
                twice is checked before anything is written, an iterator tensor by tensor.
            version: what ACKs, status and outputs call these weights.
            timeout: seconds for the lock, quiescing, the tensors to come, and loading.

        Raises:
            ArgumentError: unknown stage, or a source or version that can be none.
            ConfigError: the weights do not fit, or the iterator raised (`__cause__`); the old ones are untouched.
            DeadlineError: no more tensors came, or another order held the stage; the old weights are untouched.
            NeedsWeightsError: it broke off half way; the message says whether a wake brings back the old ones.
            StageBusyError, PauseError, AsleepError, StageFailedError: refused, nothing changed, nothing was read.
        """

        async def run() -> None:
            self._core.check_open()
            stage = arguments.pick_stage(self._core.stages, stage_id)
            checked = arguments.check_weights(source), arguments.check_version(version)
            await self._core.orders.load_weights(stage, *checked, self._core.deadline(timeout, [stage]))

        await self._run(run)

    async def restart(self, stage_id: int, timeout: float | None = None) -> None:
        """End a stage's ranks and start new ones from its last checkpoint; its requests run again.

        Weights that were given as tensors are gone: the stage then is NEEDS_WEIGHTS. The new ranks have what is left of
        `timeout`, but at least half an hour. If they do not come up the stage is FAILED, its requests have ended, and
        nothing of them is left.

        Raises:
            ArgumentError: unknown stage.
            DeadlineError: its running batch did not end in time, or the new ranks did not come up.
            ConfigError: the checkpoint does not load; the stage is FAILED.
        """

        async def run() -> None:
            self._core.check_open()
            stage = arguments.pick_stage(self._core.stages, stage_id)
            await self._core.orders.restart(stage, self._core.deadline(timeout, [stage]))

        await self._run(run)

    # ------------------------------------------------------------------------- plain calls

    async def check_health(self) -> None:
        """Return if every stage can work.

        Raises:
            StageFailedError, WorkerDiedError: names the stage and the restart.
            EngineClosedError: the engine was shut down.
        """

        async def run() -> None:
            self._core.check_health()

        await self._run(run)

    def status(self) -> EngineStatus:
        """A snapshot, memory measured now; never waits for a worker, never changes state."""
        return self._core.status()

    def logs(self, stage_id: int, rank: int = 0, replica: int = 0) -> list[str]:
        """The last lines that a rank's process wrote, newest last; empty for a rank in this process. Never waits.

        Raises:
            ArgumentError: unknown stage, replica or rank.
        """
        return self._core.logs(stage_id, rank, replica)

    async def record_audit(self, verdict: str, report: Any) -> None:
        """Put an audit on record in the ledger: its verdict, and its report as JSON text or what JSON can hold.

        Returns once it is on disk, or can not be (`status().notes` says why); raises nothing for that.
        """

        async def run() -> None:
            self._core.ledger.record_audit(verdict, report)
            await self._core.ledger.written()

        await self._run(run)

    def subscribe(self) -> Subscription:
        """An async iterator of events from now on: ACKs, state changes, memory samples, request progress."""
        return self._core.hub.subscribe()

    def shutdown(self) -> None:
        """End every request and stage and give all memory back; returns once that is done, whoever began it."""
        self._closer.close()

    @property
    def _adapters(self) -> Core:
        return self._core


def _silent(what: str, fraction: float) -> None:
    """Progress that nobody asked for."""
