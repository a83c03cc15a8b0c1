"""A stage: one model, its replicas, its memory and pause states, its locks. All of it belongs to the engine's loop."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import DeadlineError, StageFailedError
from omni_notebook.protocol import MemoryState, PauseState, RankId, RequestState, StageStatus
from omni_notebook.stages.lora import LORA_REASON, StageLoras, gone
from omni_notebook.stages.model import make_model
from omni_notebook.stages.replica import Replica
from omni_notebook.stages.vllm_replica import VllmReplica
from omni_notebook.stages.waiting import CancelToken, Deadline, Signal
from omni_notebook.worker.reports import WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_notebook.config import StageConfig
    from omni_notebook.errors import WorkerDiedError
    from omni_notebook.executors.base import ExecutorFactory, RankAnswer
    from omni_notebook.stages.requests import StageRequest
    from omni_notebook.transport.connector import Connector
    from omni_notebook.worker.reports import LoadReport

SHUTDOWN_S = 5.0
POLL_S = 0.002
VERSION_CHARS = 10


class Stage:
    """State and parts of one stage; orders are carried out by `stages.transitions`."""

    def __init__(
        self,
        stage_id: int,
        config: StageConfig,
        make_executor: ExecutorFactory,
        on_change: Callable[[Stage, str], None],
    ) -> None:
        self.stage_id = stage_id
        self.config = config
        self.model = make_model(config)
        self.connector: Connector | None = None
        self.in_transit: Callable[[], int] = lambda: 0
        self.at_gate: Callable[[], int] = lambda: 0
        self.arrives = False
        self.arriving = False
        self.made_room: Callable[[], None] = lambda: None
        self.heard: Callable[[], None] = lambda: None
        self.replicas: list[Replica | VllmReplica] = []
        self.state = MemoryState.WAKING
        self.level: int | None = None
        self.tags: dict[str, int] = {}
        self.awake_tags: tuple[str, ...] = ()
        self.pause_state = PauseState.OPEN
        self.pause_mode: str | None = None
        self.pause_token = CancelToken()
        self.weight_version = ""
        self.source: str | None = None
        self.source_version: str | None = None
        self.reproducible = True
        self.device_name = "unknown"
        self.recoverable = True
        self.last_error: str | None = None
        self.loras = StageLoras(config.max_loras)
        self.changed = Signal()
        self.order_lock = asyncio.Lock()
        self.pause_lock = asyncio.Lock()
        self._make_executor = make_executor
        self._on_change = on_change

    # -------------------------------------------------------------------------------- starting

    async def start(self) -> None:
        """Make the replicas and load them.

        Raises:
            Exception: what the first rank that failed raised; nothing is left then.
        """
        self.replicas = [self._make_replica(n) for n in range(self.config.num_replicas)]
        try:
            await self._bring_up()
        except BaseException:
            await self.stop()
            raise

    async def _bring_up(self) -> None:
        """Let each replica's ranks meet, load them all, agree on the weights' name."""
        await asyncio.gather(*(self._meet(replica) for replica in self.replicas))
        answers = await self.call_all("load", timeout_s=None)  # what starts the ranks bounds it all
        raise_first(answers)
        reports: list[LoadReport] = [answer.value for answer in answers]
        version = await self.name_weights([report.weight_version for report in reports], timeout_s=None)
        self._loaded(reports[0], version)

    async def _bring_up_within(self, deadline: Deadline) -> None:
        try:
            async with asyncio.timeout(deadline.left_s()):
                await self._bring_up()
        except TimeoutError as error:
            if not deadline.passed:
                raise  # a rank's own
            msg = (
                f"the new ranks of stage {self.stage_id} had not loaded within {deadline.seconds:g} s, they were given "
                f"up; restart({self.stage_id}, timeout=...) gives them longer"
            )
            raise DeadlineError(msg) from error

    async def _meet(self, replica: Replica | VllmReplica) -> None:
        """Ranks that hold a model together find one another; control orders never need that."""
        if self.config.tensor_parallel_size == 1 or self.config.runtime_name == "vllm":  # vLLM's ranks have met
            return
        opened = await replica.executor.call("open_rendezvous")
        raise_first(opened)
        address = next(answer.value for answer in opened if answer.value is not None)
        raise_first(await replica.executor.call("join", address))

    async def name_weights(self, versions: Sequence[str], *, timeout_s: float | None) -> str:
        """One name for all ranks' weights: theirs, or where each named its own part, the parts' together."""
        if len(set(versions)) == 1:
            return versions[0]
        parts = "".join(versions[: self.config.tensor_parallel_size])
        version = hashlib.sha256(parts.encode()).hexdigest()[:VERSION_CHARS]
        raise_first(await self.call_all("set_weight_version", version, timeout_s=timeout_s))
        return version

    def _make_replica(self, number: int) -> Replica | VllmReplica:
        specs = tuple(
            WorkerSpec(
                where=RankId(self.stage_id, number, rank),
                config=self.config,
                source=self.source,
                version=self.source_version,
                load_weights=self.reproducible,
            )
            for rank in range(self.config.tensor_parallel_size)
        )
        kind: Any = VllmReplica if self.config.runtime_name == "vllm" else Replica
        made: Replica | VllmReplica = kind(
            executor=self._make_executor(specs, self._rank_died),
            scheduler=self.model.make_scheduler(self.connector, self.loras),
            changed=self.changed,
            weight_version=lambda: self.weight_version,
            on_failure=self.fail,
            on_start=self.made_room,
        )
        if isinstance(made, VllmReplica):
            made.executor.when_read(self.heard)
        return made

    def _rank_died(self, where: RankId, error: WorkerDiedError) -> None:  # noqa: ARG002  (the error names the rank)
        """A rank ended by itself: the stage has FAILED at this moment, whatever it was doing."""
        self.fail(error)

    def _loaded(self, report: LoadReport, version: str) -> None:
        for replica in self.replicas:
            replica.loaded()
        self.weight_version = version
        self.device_name = report.device_name
        self.arrives = report.arrives
        self.tags = dict(report.tags)
        self.last_error = None
        self.recoverable = self.reproducible
        if not self.reproducible:
            self.close("sleep")
        state = MemoryState.AWAKE if self.reproducible else MemoryState.NEEDS_WEIGHTS
        self.set_state(state, None, awake_tags=tuple(report.tags), reason="loaded")

    def came_from(self, source: str | None, version: str | None) -> None:
        """The weights are those of a checkpoint folder, or (None) of tensors that no path reproduces."""
        self.source, self.source_version = source, version if source is not None else None
        self.reproducible = self.recoverable = source is not None

    async def restart(self, deadline: Deadline) -> None:
        """Replace the replicas; requests that are here run again on the new ones, once adapters are brought back.

        Raises:
            DeadlineError: the new ranks had not loaded in time; as below.
            Exception: what the first rank that failed to load raised; the stage is FAILED, its requests have ended, and
                nothing of the new ranks is left.
        """
        old = self.replicas
        self.state = MemoryState.WAKING  # the one way out of FAILED
        self.set_state(MemoryState.WAKING, None, awake_tags=(), reason="restart")
        await self.stop()
        reasons = old[0].closed_by - {"restart", "shutdown", "failed", "sleep"}
        self.replicas = [self._make_replica(n) for n in range(self.config.num_replicas)]
        for new, before in zip(self.replicas, old, strict=True):
            new.closed_by = {*reasons, LORA_REASON}
            before.scheduler.requeue()
            new.scheduler = before.scheduler
        try:
            await self._bring_up_within(deadline)
        except Exception as error:
            self.fail(error)
            await self.stop()
            raise

    async def stop(self) -> bool:
        """End the replicas and give all memory back; whether that was seen within `SHUTDOWN_S`."""
        for replica in self.replicas:
            replica.close("shutdown")
            await replica.stop()
            replica.executor.shutdown()
        deadline = Deadline(SHUTDOWN_S)
        while not (ended := all(r.executor.ended for r in self.replicas)) and not deadline.passed:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        return ended

    # ----------------------------------------------------------------------------------- state

    def set_state(
        self, state: MemoryState, level: int | None, *, awake_tags: tuple[str, ...] | None = None, reason: str = ""
    ) -> None:
        """Change the memory state and tell everyone; a stage that has FAILED stays so until `restart`."""
        if self.state == MemoryState.FAILED and state != MemoryState.FAILED:
            return  # a rank died while an order was on its way to another end
        self.state = state
        self.level = level
        if awake_tags is not None:
            self.awake_tags = awake_tags
        self.tell(reason)

    def open_early(self) -> None:
        """Let those who wait for a wake begin while it still copies; `arriving` is taken back when it has ended."""
        self.arriving = True
        self.tell("requests begin while memory comes")

    def set_pause(self, state: PauseState, mode: str | None, reason: str = "") -> None:
        """Change the pause state and tell everyone."""
        self.pause_state = state
        self.pause_mode = mode
        self.tell(reason)

    def end_pause(self) -> CancelToken:
        """Call off the pause that is in progress, if one is; the token of the one that may begin now."""
        before, self.pause_token = self.pause_token, CancelToken()
        before.cancel()
        return self.pause_token

    def fail(self, error: BaseException) -> None:
        """The stage can not go on; `restart` helps. The first error is the cause, those after it are consequences."""
        if self.state == MemoryState.FAILED:
            return
        self.last_error = f"{type(error).__name__}: {error}"
        self.close("failed")
        for replica in self.replicas:
            replica.end_all(self.failed_error())
        self.set_state(MemoryState.FAILED, self.level, awake_tags=(), reason=self.last_error)

    def tell(self, reason: str = "") -> None:
        """Wake whoever waits for this stage."""
        self.changed.notify()
        self._on_change(self, reason)

    def failed_error(self) -> StageFailedError:
        """Why this stage does nothing, and the call that helps."""
        return StageFailedError(
            f"stage {self.stage_id} has FAILED ({self.last_error}); call restart({self.stage_id}), then generate again"
        )

    # ------------------------------------------------------------------------------- scheduling

    def close(self, reason: str) -> None:
        """Start no further batch until the reason is taken back."""
        for replica in self.replicas:
            replica.close(reason)

    def reopen(self, reason: str) -> None:
        """Take a reason back."""
        for replica in self.replicas:
            replica.reopen(reason)

    def kick(self) -> None:
        """Look again whether batches can start."""
        for replica in self.replicas:
            replica.kick()

    @property
    def open(self) -> bool:
        """Whether batches may start."""
        return bool(self.replicas) and all(r.open for r in self.replicas)

    @property
    def at_rest(self) -> bool:
        """Whether no replica has a batch on its device."""
        return all(r.at_rest for r in self.replicas)

    @property
    def drained(self) -> bool:
        """Whether no replica has a request."""
        return all(r.drained for r in self.replicas)

    @property
    def quiesced(self) -> bool:
        """Closed by a pause, and at rest."""
        return self.at_rest and all("pause" in r.closed_by for r in self.replicas)

    @property
    def running(self) -> int:
        """Requests that have begun."""
        return sum(r.scheduler.running for r in self.replicas)

    @property
    def queued(self) -> int:
        """Requests that have not begun."""
        return sum(r.scheduler.queued for r in self.replicas)

    def add(self, request: StageRequest) -> None:
        """Give a request to the least loaded replica."""
        if self.state == MemoryState.FAILED:
            request.end(RequestState.FAILED, self.failed_error())
            return
        if request.lora is not None and request.lora_id not in self.loras:
            request.end(RequestState.FAILED, gone(request.lora, self.stage_id))
            return
        min(self.replicas, key=lambda r: r.scheduler.running + r.scheduler.queued).add(request)

    def abort(self, request_id: str) -> bool:
        """End one request; whether it was here."""
        return any(r.abort(request_id) for r in self.replicas)

    def requeue(self) -> None:
        """Device state is gone: what was begun will begin again."""
        for replica in self.replicas:
            replica.requeue()

    # ---------------------------------------------------------------------------------- calls

    async def call_all(self, method: str, *args: Any, timeout_s: float | None) -> list[RankAnswer]:
        """Call every rank of every replica at once and gather the answers; None: somebody else bounds the wait."""
        gathered = await asyncio.gather(*(r.executor.call(method, *args, timeout_s=timeout_s) for r in self.replicas))
        return [answer for answers in gathered for answer in answers]

    def cancel_order(self, task_id: str) -> None:
        """Tell every rank that an order should stop if it has not committed."""
        for replica in self.replicas:
            replica.executor.cancel(task_id)

    def status(self, *, in_transit: int, waiting_at_gate: int) -> StageStatus:
        """A snapshot; never waits."""
        return StageStatus(
            stage_id=self.stage_id,
            name=self.config.title,
            kind=self.config.kind,
            runtime=self.config.runtime_name,
            model=self.config.model,
            state=self.state,
            level=self.level,
            awake_tags=self.awake_tags,
            pause_state=self.pause_state,
            pause_mode=self.pause_mode,
            weight_version=self.weight_version or None,
            recoverable=self.recoverable,
            running=self.running,
            queued=self.queued,
            in_transit=in_transit,
            waiting_at_gate=waiting_at_gate,
            ballast_bytes=self.config.ballast_bytes,
            ranks=tuple(status for r in list(self.replicas) for status in r.executor.memory()),
            last_error=self.last_error,
            loras=self.loras.status(),
        )


def raise_first(answers: Sequence[RankAnswer]) -> None:
    """Raise the first rank's error, if any raised."""
    error = first_error(answers)
    if error is not None:
        raise error


def first_error(answers: Sequence[RankAnswer]) -> BaseException | None:
    """The first rank's error, if any raised."""
    return next((a.error for a in answers if a.error is not None), None)
