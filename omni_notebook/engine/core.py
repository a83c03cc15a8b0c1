"""The engine behind `AsyncOmni`: stages, gates, orders, requests. Everything here belongs to the engine's loop."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_notebook.engine import arguments, pausing, tracing
from omni_notebook.engine.events import EventHub
from omni_notebook.engine.flow import Asked, Flow
from omni_notebook.engine.gates import Gates
from omni_notebook.engine.ledger import Ledger
from omni_notebook.engine.ledger_file import ledger_path
from omni_notebook.engine.loop import Chime
from omni_notebook.engine.loras import Loras, check_lora_id, lora_request_from
from omni_notebook.engine.orders import Orders
from omni_notebook.errors import ArgumentError, EngineClosedError, StageFailedError, WorkerDiedError
from omni_notebook.executors import make_executor
from omni_notebook.protocol import (
    GIB,
    EngineStatus,
    MemoryState,
    PauseState,
    StateEvent,
    is_unicode,
    sampling_params_from,
)
from omni_notebook.stages.stage import Stage
from omni_notebook.stages.waiting import CancelToken, Deadline, OrderCancelled
from omni_notebook.transport.connector import Connector

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_notebook.config import PipelineConfig
    from omni_notebook.engine.entry import Ask
    from omni_notebook.protocol import OmniSamplingParams

ORDER_S = 120.0
QUIESCE_S = 300.0
SETTLE_S = 3.0
PROGRESS_S = 0.2


class _Request(NamedTuple):
    """What was asked for, checked; `wait_s` may pass at the gates."""

    params: OmniSamplingParams
    route: list[Stage]
    payload: Any
    wait_s: float

    @property
    def stage_ids(self) -> list[int]:
        return [stage.stage_id for stage in self.route]


class Core:
    """One pipeline's stages and what may be done with them."""

    def __init__(self, config: PipelineConfig) -> None:
        self.config = config
        self.ledger = Ledger(ledger_path(), config.name)
        self.hub = EventHub(self.ledger.take)
        self.orders = Orders(self.hub, self.ledger.written)
        self.stages: list[Stage] = []
        self.gates = Gates(self.stages)
        self.closed = False
        self._flows: dict[str, Flow] = {}
        self._at_gates: dict[CancelToken, str] = {}
        self._chime = Chime()
        self.loras = Loras(self.stages, self.orders, self._flows.values)
        self._started_s = time.monotonic()

    # -------------------------------------------------------------------------------- lifetime

    async def start(self, progress: Callable[[str, float], None]) -> None:
        """Make and load all stages at the same time; if one fails, none is left.

        `progress` is called again and again; what it raises calls the start off.

        Raises:
            Exception: what the first stage that failed raised, or `progress`.
        """
        now: tuple[str, float] = ("reading models", 0.0)
        progress(*now)
        self.ledger.open()
        for place, config in enumerate(self.config.stages):
            self.stages.append(Stage(place, config, make_executor(config), self._on_change))
        for place, stage in enumerate(self.stages):
            stage.in_transit = lambda stage=stage: self._in_transit(stage)  # type: ignore[misc]
            stage.at_gate = functools.partial(self.gates.first.__getitem__, place)
            stage.heard = self._chime.ring_now
            stage.loras.on_lost = functools.partial(self.loras.lost, stage)
            if place + 1 < len(self.stages):
                stage.connector = self._connector_to(self.stages[place + 1])
            if place > 0:
                stage.made_room = self.stages[place - 1].kick
        ready = 0

        async def start_one(stage: Stage) -> None:
            nonlocal ready, now
            await stage.start()
            ready += 1
            now = (f"stage {stage.stage_id} ({stage.config.title}) is ready", ready / len(self.stages))
            progress(*now)

        starting = [asyncio.create_task(start_one(stage)) for stage in self.stages]
        try:
            await _all_done(starting, lambda: progress(*now))
        except Exception:
            await self.shutdown()
            raise
        await self.ledger.written()

    @staticmethod
    def _connector_to(stage: Stage) -> Connector:
        return Connector(parked=lambda: stage.queued)

    async def shutdown(self) -> None:
        """End every request, every stage and every subscription; idempotent."""
        if self.closed:
            return
        self.closed = self.gates.closed = True
        self.gates.notify()
        for request_id in list(self._flows):
            self.abort(request_id)
        await self.orders.settle(SETTLE_S)
        await asyncio.gather(*(stage.stop() for stage in self.stages if stage.replicas))
        await self.ledger.close()
        self.hub.close()

    def _on_change(self, stage: Stage, reason: str) -> None:
        self.gates.notify()
        for other in self.stages:  # a stage that opens may let the one before it go on
            other.kick()
        self.hub.push(StateEvent(time.time(), stage.stage_id, stage.state, stage.level, stage.pause_state, reason))

    def check_open(self) -> None:
        """Raise EngineClosedError after `shutdown`."""
        if self.closed:
            msg = "the engine was shut down; start a new one"
            raise EngineClosedError(msg)

    # ---------------------------------------------------------------------------------- orders

    def deadline(self, timeout: float | None, stages: Sequence[Stage]) -> Deadline:
        """A call's own timeout, the engine's default, or 120 s + 1 s a GiB + 300 s to quiesce."""
        given = arguments.check_timeout(timeout)
        if given is None:
            given = self.config.default_timeout
        if given is None:
            n_bytes = sum(span for stage in stages for span in stage.tags.values())
            given = ORDER_S + n_bytes / GIB + QUIESCE_S
        return Deadline(given)

    async def pause(
        self, mode: str, stage_ids: Sequence[int] | int | None, timeout: float | None, *, clear_cache: bool
    ) -> None:
        """See `AsyncOmni.pause_generation`."""
        self.check_open()
        stages = arguments.pick_stages(self.stages, stage_ids)
        checked = arguments.check_mode(mode)
        token = CancelToken()
        pause = pausing.Pause(checked, clear_cache, self.deadline(timeout, stages), token)
        with tracing.span("pause", stage_ids=[stage.stage_id for stage in stages], mode=str(checked)):
            await self.orders.supervise(pausing.pause(stages, pause), token)

    def resume(self, stage_ids: Sequence[int] | int | None) -> None:
        """See `AsyncOmni.resume_generation`."""
        self.check_open()
        pausing.resume(arguments.pick_stages(self.stages, stage_ids))

    async def add_lora(self, request: Any, stage_ids: Any, timeout: float | None) -> bool:
        """See `AsyncOmni.add_lora`."""
        self.check_open()
        checked = lora_request_from(request)
        named = None if stage_ids is None else arguments.pick_stages(self.stages, stage_ids)
        return await self.loras.add(checked, named, self.deadline(timeout, self.stages))

    async def remove_lora(self, lora_int_id: Any, timeout: float | None) -> bool:
        """See `AsyncOmni.remove_lora`."""
        self.check_open()
        return await self.loras.remove(check_lora_id(lora_int_id), self.deadline(timeout, self.stages))

    async def pin_lora(self, lora_int_id: Any, timeout: float | None) -> bool:
        """See `AsyncOmni.pin_lora`."""
        self.check_open()
        return await self.loras.pin(check_lora_id(lora_int_id), self.deadline(timeout, self.stages))

    def check_health(self) -> None:
        """See `AsyncOmni.check_health`."""
        self.check_open()
        for stage in self.stages:
            if stage.state == MemoryState.FAILED:
                msg = f"stage {stage.stage_id} has FAILED: {stage.last_error}; call restart({stage.stage_id})"
                raise StageFailedError(msg)
            for replica in stage.replicas:
                if replica.executor.ended:
                    msg = f"stage {stage.stage_id} lost its worker; call restart({stage.stage_id})"
                    raise WorkerDiedError(msg, stage_id=stage.stage_id, rank=0)

    # -------------------------------------------------------------------------------- requests

    def admit_now(self, ask: Ask) -> Flow | None:
        """Check a request, and start it if the gates are open; None: they are not, `admit` waits there.

        Raises:
            ArgumentError: prompt, id, parameters or adapter do not fit; nothing was started.
            EngineClosedError: the engine was shut down.
        """
        request = self._checked(ask)
        return self._begun(ask, request) if self.gates.open_for(request.stage_ids) else None

    async def admit(self, ask: Ask) -> Flow:
        """Check a request, wait at the gates, and start it; one that is aborted there has ended with that output.

        Raises:
            ArgumentError: prompt, id, parameters or adapter do not fit; nothing was started.
            PausedError, AsleepError, NeedsWeightsError, StageFailedError: a gate is closed; see `Gates.admit`.
            EngineClosedError: the engine was shut down.
        """
        request = self._checked(ask)
        token = CancelToken()
        self._at_gates[token] = ask.request_id
        try:
            await self.gates.admit(request.stage_ids, request.wait_s, token)
        except OrderCancelled:
            flow = self._flow(ask, request)
            flow.turn_away(request.payload)
            return flow
        finally:
            del self._at_gates[token]
        self._check_id(ask.request_id)
        return self._begun(ask, request)

    def payload(self, ask: Ask) -> Any:
        """What the first stage makes of a prompt; callable from any thread.

        Raises:
            ArgumentError: prompt or parameters do not fit; nothing was started.
        """
        return self._route(ask.output_modalities)[0].model.first(ask.prompt, sampling_params_from(ask.sampling_params))

    def _checked(self, ask: Ask) -> _Request:
        self.check_open()
        params = sampling_params_from(ask.sampling_params)
        route = self._route(ask.output_modalities)
        for stage in route:
            stage.model.check(params)
        payload = route[0].model.first(ask.prompt, params) if ask.payload is None else ask.payload
        self.loras.resolve(ask.lora_request, route)
        self._check_id(ask.request_id)
        wait_s = arguments.check_timeout(ask.admission_timeout, "admission_timeout")
        return _Request(params, route, payload, 0.0 if wait_s is None else wait_s)

    def _begun(self, ask: Ask, request: _Request) -> Flow:
        adapter, lora_stages = self.loras.resolve(ask.lora_request, request.route)
        flow = self._flow(ask, request, lora=adapter, lora_stages=lora_stages)
        self._flows[flow.request_id] = flow
        flow.begin(request.payload)
        return flow

    def _flow(self, ask: Ask, request: _Request, **adapted: Any) -> Flow:
        params = request.params
        asked = Asked(
            request_id=ask.request_id,
            prompt=ask.prompt,
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(32),
            **adapted,
        )
        ring = functools.partial(self._chime.ring, ask.bell)
        return Flow(asked, request.route, ring=ring, on_event=self.hub.push, on_end=self._forget)

    def _forget(self, flow: Flow) -> None:
        self._flows.pop(flow.request_id, None)

    def _check_id(self, request_id: Any) -> None:
        if not isinstance(request_id, str) or not request_id or not is_unicode(request_id):
            msg = f"request_id={request_id!r} is not a non-empty string of Unicode text; nothing was started"
            raise ArgumentError(msg)
        if request_id in self._flows:
            msg = f"request_id {request_id!r} is already in progress; nothing was started"
            raise ArgumentError(msg)

    def _route(self, modalities: Sequence[str] | str | None) -> list[Stage]:
        """The stages that a request needs: up to the first that makes the wanted output."""
        if modalities is None:
            return list(self.stages)
        wanted = arguments.listed("output_modalities", modalities)
        kinds = [stage.model.output_type for stage in self.stages]
        wrong = next((m for m in wanted if m not in kinds), None)
        if not wanted or wrong is not None:
            msg = f"output_modalities={modalities!r}: this pipeline gives {', '.join(kinds)}. Nothing was started"
            raise ArgumentError(msg)
        return self.stages[: max(kinds.index(m) for m in wanted) + 1]

    def abort(self, request_id: str) -> bool:
        """End one request with a terminal output; whether it was in progress, or waited at a gate."""
        waiting = [token for token, name in self._at_gates.items() if name == request_id]
        for token in waiting:
            token.cancel()
        flow = self._flows.get(request_id)
        return (flow is not None and flow.stage.abort(request_id)) or bool(waiting)

    def abandon(self, flow: Flow) -> None:
        """End a request whose client went away; another one of the same id is not its."""
        if self._flows.get(flow.request_id) is flow:
            flow.stage.abort(flow.request_id)

    def _in_transit(self, stage: Stage) -> int:
        return sum(flow.heads_for(stage) for flow in list(self._flows.values()))

    # ---------------------------------------------------------------------------------- status

    def logs(self, stage_id: int, rank: int, replica: int) -> list[str]:
        """See `AsyncOmni.logs`; callable from any thread."""
        stage = arguments.pick_stage(self.stages, stage_id)
        arguments.check_below("replica", replica, len(stage.replicas))
        arguments.check_below("rank", rank, stage.config.tensor_parallel_size)
        return stage.replicas[replica].executor.log_tail(rank)

    def status(self) -> EngineStatus:
        """See `AsyncOmni.status`; callable from any thread."""
        stages = tuple(
            stage.status(in_transit=self._in_transit(stage), waiting_at_gate=self.gates.waiting[stage.stage_id])
            for stage in list(self.stages)
        )
        return EngineStatus(
            model=self.config.name,
            closed=self.closed,
            paused=any(s.pause_state != PauseState.OPEN for s in stages),
            uptime_s=time.monotonic() - self._started_s,
            stages=stages,
            notes=self.ledger.notes,
        )


async def _all_done(tasks: Sequence[asyncio.Task[None]], tick: Callable[[], None]) -> None:
    """Wait for all, calling `tick` now and then; none goes on once one, or `tick`, has raised.

    Raises:
        Exception: what the first of them that failed, or `tick`, raised.
    """
    try:
        while not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=PROGRESS_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
            tick()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
