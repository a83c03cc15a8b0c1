"""The engine behind `UpstreamOmni`: orders over upstream's calls. Everything here belongs to the engine's loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from typing import TYPE_CHECKING, Any

from omni_notebook.engine import arguments, tracing
from omni_notebook.engine.events import EventHub
from omni_notebook.engine.gates import Gates
from omni_notebook.engine.ledger import Ledger
from omni_notebook.engine.ledger_file import ledger_path
from omni_notebook.engine.loras import check_lora_id, lora_request_from
from omni_notebook.engine.supervising import Supervisor
from omni_notebook.engine.upstream import seats as seats_of
from omni_notebook.engine.upstream.bounded import Calls, DaemonPool
from omni_notebook.engine.upstream.loras import Loras
from omni_notebook.engine.upstream.outside import Look
from omni_notebook.engine.upstream.package import TESTED
from omni_notebook.engine.upstream.pausing import Pausing
from omni_notebook.engine.upstream.refusing import START_ANEW
from omni_notebook.engine.upstream.requests import Requests
from omni_notebook.engine.upstream.sleeping import Sleeping
from omni_notebook.engine.upstream.stage import UpStage, configs
from omni_notebook.errors import (
    DeadlineError,
    EngineClosedError,
    StageFailedError,
    UnsupportedError,
    WorkerDiedError,
)
from omni_notebook.protocol import EngineStatus, MemoryState, PauseState, StateEvent
from omni_notebook.stages.waiting import CancelToken, Deadline, acquire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from omni_notebook.engine.upstream.outside import Outside, Seen

ORDER_S = 600.0
"""Seconds for an order that names none: an upstream sleep copies weights and waits for its running batch."""
HEALTH_S = 10.0
SETTLE_S = 2.0
UPSTREAM_SHUTDOWN_S = 25.0
"""What an upstream shutdown may take before its processes are ended from here."""
END_GRACE_S = 2.0
SHUTDOWN_S = 40.0
"""All of the above together, and the ledger."""
GLANCE_S = 0.2


class UpCore(Supervisor):
    """One upstream engine's stages and what may be done with them."""

    def __init__(
        self, upstream: Any, model: str, outside: Outside, version: str, default_timeout: float | None
    ) -> None:
        self.upstream = upstream
        self.model = model
        self.version = version
        self.outside = outside
        self.calls = Calls()
        self.closed = False
        self._default_timeout = default_timeout
        self._started_s = time.monotonic()
        self._glance: tuple[float, dict[int, Seen]] = (0.0, {})
        self._order_lock = asyncio.Lock()
        self.outside.glance([])  # opens the driver once, before threads look
        self.ledger = Ledger(ledger_path(), model)
        super().__init__(self.ledger.written)
        self.hub = EventHub(self.ledger.take)
        self.stages = [
            UpStage(number, config, seats_of.find(upstream, number, outside), self._on_change)
            for number, config in enumerate(configs(upstream, model))
        ]
        self.family = seats_of.family(upstream, len(self.stages))
        self.gates = Gates(self.stages, START_ANEW)
        self.requests = Requests(self)
        self.sleeping = Sleeping(self)
        self.loras = Loras(self)
        self.pausing = Pausing(self)

    # -------------------------------------------------------------------------------- lifetime

    async def start(self) -> None:
        """Take the loop over."""
        asyncio.get_running_loop().set_default_executor(DaemonPool())
        self.ledger.open()
        for stage in self.stages:
            self._on_change(stage, "ready")
        await self.ledger.written()

    async def shutdown(self) -> None:
        """End requests, orders, upstream, and every process that it leaves; idempotent."""
        if self.closed:
            return
        self.closed = self.gates.closed = True
        self.gates.notify()
        family = {one.pid: one for one in (*self.family, *seats_of.family(self.upstream, len(self.stages)))}
        await self.requests.end_all(SETTLE_S)
        await self.settle(SETTLE_S)
        pump = getattr(self.upstream, "final_output_task", None)
        if pump is not None:
            pump.cancel()
        self.calls.cancel()
        ending = asyncio.get_running_loop().run_in_executor(None, self.upstream.shutdown)
        await asyncio.wait({ending}, timeout=UPSTREAM_SHUTDOWN_S)
        if ending.done():
            ending.exception()  # its processes are looked at below, whatever it says
        await asyncio.to_thread(seats_of.end, list(family.values()), END_GRACE_S)
        self.outside.close()
        await self.ledger.close()
        self.hub.close()

    def _on_change(self, stage: UpStage, reason: str) -> None:
        self.gates.notify()
        self.hub.push(StateEvent(time.time(), stage.stage_id, stage.state, stage.level, stage.pause_state, reason))

    def check_open(self) -> None:
        """Raise EngineClosedError after `shutdown`."""
        if self.closed:
            msg = "the engine was shut down; start a new one"
            raise EngineClosedError(msg)

    # ---------------------------------------------------------------------------------- orders

    def check_call(self, name: str, *arguments: str) -> None:
        """Return if this version has such a call.

        Raises:
            UnsupportedError: it has not; nothing changed.
        """
        known = inspect.signature(getattr(self.upstream, name)).parameters
        lacking = [argument for argument in arguments if argument not in known]
        if lacking:
            call = f"{name}({', '.join(f'{one}=…' for one in lacking)})"
            msg = f"vllm_omni {self.version} has no {call}, which {TESTED} has; nothing changed"
            raise UnsupportedError(msg)

    def pick(self, stage_ids: Any) -> list[UpStage]:
        """The named stages; None = all."""
        self.check_open()
        return arguments.pick_stages(self.stages, stage_ids)

    def deadline(self, timeout: float | None) -> Deadline:
        """A call's own timeout, the engine's default, or `ORDER_S`."""
        given = arguments.check_timeout(timeout)
        if given is None:
            given = ORDER_S if self._default_timeout is None else self._default_timeout
        return Deadline(given)

    def hold(self, deadline: Deadline, token: CancelToken) -> AbstractAsyncContextManager[None]:
        """One order at a time: upstream keeps one state for all its stages. It begins when no resume is under way."""
        return self._held(deadline, token)

    @contextlib.asynccontextmanager
    async def _held(self, deadline: Deadline, token: CancelToken) -> AsyncIterator[None]:
        if not await acquire(self._order_lock, deadline, token):
            msg = f"another order held the engine for {deadline.seconds:g} s; nothing changed, call again later"
            raise DeadlineError(msg)
        try:
            if not await self.pausing.resumes_done(deadline, token):
                msg = f"vllm_omni had not answered a resume after {deadline.seconds:g} s; nothing changed"
                raise DeadlineError(msg)
            yield
        finally:
            self._order_lock.release()

    # -------------------------------------------------------------------------------- adapters

    async def add_lora(self, request: Any, stage_ids: Any, timeout: float | None) -> bool:
        """See `Loras.add`."""
        checked, stages, token = lora_request_from(request), self.pick(stage_ids), CancelToken()
        return bool(await self.supervise(self.loras.add(checked, stages, self.deadline(timeout), token), token))

    async def remove_lora(self, lora_int_id: Any, timeout: float | None) -> bool:
        """See `Loras.remove`."""
        self.check_open()
        number, token = check_lora_id(lora_int_id), CancelToken()
        return bool(await self.supervise(self.loras.remove(number, self.deadline(timeout), token), token))

    async def pin_lora(self, lora_int_id: Any, timeout: float | None) -> bool:
        """See `Loras.pin`."""
        self.check_open()
        number, token = check_lora_id(lora_int_id), CancelToken()
        return bool(await self.supervise(self.loras.pin(number, self.deadline(timeout), token), token))

    # ------------------------------------------------------------------------------- measuring

    async def look(self, stage: UpStage) -> Look:
        """What a stage's processes hold once it is steady."""
        seen = await asyncio.to_thread(self.outside.look, stage.pids)
        return Look(seen, self.outside.devices_bytes())

    # ---------------------------------------------------------------------------------- health

    async def check_health(self) -> None:
        """See `UpstreamOmni.check_health`."""
        self.check_open()
        for stage in self.stages:
            if stage.state == MemoryState.FAILED:
                msg = f"stage {stage.stage_id} has FAILED: {stage.last_error}; {START_ANEW}"
                raise StageFailedError(msg)
            for seat in stage.seats:
                if seat.pid is not None and not seat.alive:
                    msg = f"stage {stage.stage_id} lost the process of rank {seat.rank} ({seat.pid}); {START_ANEW}"
                    raise WorkerDiedError(msg, stage_id=stage.stage_id, rank=seat.rank)
        with tracing.span("check_health"):
            await self.calls.run(self.upstream.check_health(), Deadline(HEALTH_S), "check_health")

    def status(self) -> EngineStatus:
        """See `UpstreamOmni.status`; callable from any thread."""
        seen = self._glanced()
        stages = tuple(
            stage.status(
                seen,
                in_transit=self.requests.in_transit(stage.stage_id),
                waiting_at_gate=self.gates.waiting[stage.stage_id],
            )
            for stage in self.stages
        )
        return EngineStatus(
            model=self.model,
            closed=self.closed,
            paused=any(stage.pause_state != PauseState.OPEN for stage in stages),
            uptime_s=time.monotonic() - self._started_s,
            stages=stages,
            notes=(*self.ledger.notes, self._note),
        )

    @property
    def _note(self) -> str:
        return (
            f"vllm_omni {self.version}: freed bytes are measured from outside by {self.outside.means}; it does not "
            "tell tags, host backups, weight versions, or in which stage a request is"
        )

    def _glanced(self) -> dict[int, Seen]:
        """A look at all ranks, at most `GLANCE_S` old: five dashboards do not ask the driver five times."""
        taken_s, seen = self._glance
        if self.closed:
            return {}
        if time.monotonic() - taken_s > GLANCE_S:
            seen = self.outside.glance([pid for stage in self.stages for pid in stage.pids])
            self._glance = time.monotonic(), seen
        return seen
