"""Requests over upstream's `generate`: two gates before it, its outputs in this package's form after it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from omni_notebook.engine import arguments, tracing
from omni_notebook.engine.upstream import outputs
from omni_notebook.engine.upstream.package import first_line, lora_request
from omni_notebook.errors import (
    ArgumentError,
    DeadlineError,
    EngineClosedError,
    OmniError,
    UpstreamError,
)
from omni_notebook.protocol import OmniRequestOutput, RequestEvent, RequestState, is_unicode, sampling_params_from
from omni_notebook.stages.waiting import CancelToken, Deadline, OrderCancelled, Signal

if TYPE_CHECKING:
    from omni_notebook.engine.entry import Ask
    from omni_notebook.engine.upstream.core import UpCore

LOOK_S = 1.0
"""How often a request that waits for an output looks whether upstream is still there."""
ABORT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Checked:
    """What was asked for, checked."""

    call: dict[str, Any]
    route: tuple[int, ...]
    wait_s: float
    final_type: str


class Client:
    """One request and what its client reads of it; the client waits on its own loop, the rest is on the engine's."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.route: tuple[int, ...] = ()
        self.at_gate = CancelToken()
        self.admitted_s: float | None = None
        self.lora_id: int | None = None
        self.task: asyncio.Task[None] | None = None
        self._outputs: deque[OmniRequestOutput | BaseException] = deque()

    def put(self, item: OmniRequestOutput | BaseException) -> None:
        """An output, or the error that ends it."""
        self._outputs.append(item)
        self.ask.bell.ring()

    async def next(self, bound_s: float, closed: Any) -> OmniRequestOutput:
        """The next output.

        Raises:
            DeadlineError: there was none in `bound_s` seconds after admission.
            EngineClosedError: there will be none.
            OmniError: the request failed.
        """

        def left_s() -> float:
            return inf if self.admitted_s is None else self.admitted_s + bound_s - time.monotonic()

        if not await self.ask.bell.until(lambda: bool(self._outputs) or closed(), left_s):
            msg = f"request {self.ask.request_id} had not ended after {bound_s:g} s; it was aborted"
            raise DeadlineError(msg)
        if not self._outputs:
            msg = f"the engine was shut down while request {self.ask.request_id} was in progress; start a new one"
            raise EngineClosedError(msg)
        item = self._outputs.popleft()
        if isinstance(item, BaseException):
            raise item
        return item


def _ours(request_id: str, error: Exception) -> OmniError:
    if isinstance(error, OmniError):
        return error
    ours = UpstreamError(f"request {request_id} failed: {first_line(error)}")
    ours.__cause__ = error
    return ours


def _turned_away(client: Client, checked: _Checked) -> OmniRequestOutput:
    """The only output of a request that was aborted before upstream heard of it."""
    return OmniRequestOutput(
        request_id=client.ask.request_id,
        stage_id=checked.route[0],
        finished=True,
        final_output_type=checked.final_type,
        state=RequestState.ABORTED,
    )


class Requests:
    """All requests that are here; every method but `in_transit` belongs to the engine's loop."""

    def __init__(self, core: UpCore) -> None:
        self._core = core
        self._clients: dict[str, Client] = {}
        self._changed = Signal()

    def in_transit(self, stage_id: int) -> int:
        """Requests that were admitted with this stage on their route and have not ended."""
        return sum(stage_id in c.route and c.admitted_s is not None for c in list(self._clients.values()))

    def naming(self, lora_id: int) -> list[str]:
        """The ids of requests that were admitted, have not ended and name this adapter."""
        return [name for name, c in self._clients.items() if c.admitted_s is not None and c.lora_id == lora_id]

    # ------------------------------------------------------------------------------- beginning

    def begin(self, client: Client) -> None:
        """Check a request and send it on its way; what refuses it is what its client reads."""
        try:
            checked = self._checked(client.ask)
        except Exception as error:  # noqa: BLE001  (it belongs to the client, who would wait for ever)
            client.put(_ours(client.ask.request_id, error))
            return
        client.route = checked.route
        self._clients[client.ask.request_id] = client
        client.task = asyncio.get_running_loop().create_task(self._carry(client, checked))

    def _checked(self, ask: Ask) -> _Checked:
        self._core.check_open()
        self._check_id(ask.request_id)
        given = ask.sampling_params
        sampling_params_from(given)
        prompt = outputs.checked_prompt(ask.prompt)
        route, wanted = self._route(ask.output_modalities)
        wait_s = arguments.check_timeout(ask.admission_timeout, "admission_timeout")
        call = {
            "prompt": prompt,
            "request_id": ask.request_id,
            "sampling_params_list": outputs.params_for(self._core.upstream.default_sampling_params_list, given),
            "output_modalities": None if ask.output_modalities is None else wanted,
            "lora_request": self._adapter(ask.lora_request),
        }
        return _Checked(call, route, wait_s or 0.0, wanted[-1])

    def _check_id(self, request_id: Any) -> None:
        if not isinstance(request_id, str) or not request_id or not is_unicode(request_id):
            msg = f"request_id={request_id!r} is not a non-empty string of Unicode text; nothing was started"
            raise ArgumentError(msg)
        if request_id in self._clients:
            msg = f"request_id {request_id!r} is already in progress; nothing was started"
            raise ArgumentError(msg)

    def _route(self, modalities: Any) -> tuple[tuple[int, ...], list[str]]:
        """All stages that must be awake, and what is wanted, the last of it last.

        Upstream refuses every request while any stage sleeps, so that the route is the whole pipeline.
        """
        stages = self._core.stages
        kinds = [stage.config.output_type for stage in stages]
        wanted = kinds[-1:] if modalities is None else arguments.listed("output_modalities", modalities)
        wrong = next((one for one in wanted if one not in kinds), None)
        if not wanted or wrong is not None:
            msg = f"output_modalities={modalities!r}: this pipeline gives {', '.join(kinds)}. Nothing was started"
            raise ArgumentError(msg)
        return tuple(stage.stage_id for stage in stages), sorted(wanted, key=kinds.index)

    def _adapter(self, asked: Any) -> Any:
        if asked is None:
            return None
        known = {one.lora_int_id: one for stage in self._core.stages for one in stage.loras.values()}
        number = getattr(asked, "lora_int_id", asked)
        # a tuple: what was asked for may have no hash
        found = next((one for one in known.values() if number in (one.lora_int_id, one.lora_name)), None)
        if found is None:
            names = ", ".join(f"{one.lora_name!r} (id {one.lora_int_id})" for one in known.values()) or "none"
            msg = (
                f"there is no LoRA adapter {number!r}; there are: {names}. Nothing was started; add_lora(request) adds"
            )
            raise ArgumentError(msg)
        return lora_request(found.lora_name, found.lora_int_id, found.lora_path)

    # ---------------------------------------------------------------------------------- on its way

    async def _carry(self, client: Client, checked: _Checked) -> None:
        request_id = client.ask.request_id
        span = tracing.begun("request", request_id=request_id, stage_ids=list(checked.route))
        last: OmniRequestOutput | OmniError
        try:
            self._tell(client, RequestState.WAITING)
            await self._core.gates.admit(checked.route, checked.wait_s, client.at_gate)
            client.at_gate.check()  # it may have been given up before its first step
            adapter = self._adapter(client.ask.lora_request)  # it may have gone while the request waited
            client.lora_id = None if adapter is None else adapter.lora_int_id
            client.admitted_s = time.monotonic()
            last = await self._pump(client, checked)
        except OrderCancelled:
            last = _turned_away(client, checked)
            self._end(client, last, RequestState.ABORTED, span)
        except asyncio.CancelledError:
            last = EngineClosedError(f"request {request_id} was ended, its client left or the engine was shut down")
            self._end(client, last, RequestState.ABORTED, span)
            raise
        except Exception as error:  # noqa: BLE001  (upstream's own classes: engine dead, a stage's error, a refusal)
            last = _ours(request_id, error)
            span.failed(last)
            self._end(client, last, RequestState.FAILED, span)
        else:
            self._end(client, last, RequestState(last.state), span)

    def _end(
        self, client: Client, last: OmniRequestOutput | OmniError, state: RequestState, span: tracing.Span
    ) -> None:
        """Off the books first, then told, then given to its client, who may look at the status at once."""
        self._clients.pop(client.ask.request_id, None)
        self._tell(client, state)
        span.note(request_state=str(state))
        span.end()
        self._changed.notify()
        client.put(last)

    async def _pump(self, client: Client, checked: _Checked) -> OmniRequestOutput:
        """Pass outputs on, but for the last, which is the result: every stage's last one says that it is finished.

        Raises:
            UpstreamError: the stream ended without a finished output, or is silent because upstream has ended.
        """
        held: OmniRequestOutput | None = None
        stream = self._core.upstream.generate(**checked.call)
        try:
            while (output := await self._next(stream)) is not None:
                if held is not None:
                    client.put(held)
                made = await outputs.converted(output, client.ask.request_id, checked.final_type)
                held = made if getattr(output, "finished", False) else None
                self._tell(client, RequestState.RUNNING)
                if held is None:
                    client.put(made)
        finally:
            with contextlib.suppress(RuntimeError):  # it is still running: it was cancelled, and does not end
                await stream.aclose()
        if held is None:
            msg = f"request {client.ask.request_id}: vllm_omni ended the stream without a finished output"
            raise UpstreamError(msg)
        held.finished = True
        held.state = RequestState.ABORTED if outputs.was_aborted(held) else RequestState.FINISHED
        return held

    async def _next(self, stream: Any) -> Any:
        """The next output; None at the end. Looks now and then whether upstream is there."""
        task = asyncio.ensure_future(anext(stream, None))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
                if not task.done() and getattr(self._core.upstream, "errored", False):
                    msg = "vllm_omni has ended; call shutdown() and start the engine anew"
                    raise UpstreamError(msg)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=ABORT_S)

    def _tell(self, client: Client, state: RequestState) -> None:
        stage = client.route[0] if client.route else 0
        self._core.hub.push(RequestEvent(time.time(), client.ask.request_id, stage, state))

    # --------------------------------------------------------------------------------------- ending

    def leave(self, client: Client) -> None:
        """Its client went away: upstream aborts what is cancelled, what waits at a gate waits no more."""
        if client.admitted_s is None:
            client.at_gate.cancel()
        elif client.task is not None:
            client.task.cancel()

    async def abort(self, request_id: str) -> bool:
        """End a request with a terminal output; whether it was in progress, or waited at a gate.

        Raises:
            DeadlineError, UpstreamError: upstream did not.
        """
        client = self._clients.get(request_id)
        if client is None:
            return False
        if client.admitted_s is None:
            client.at_gate.cancel()
            return True
        await self._core.calls.run(self._core.upstream.abort(request_id), Deadline(ABORT_S), "abort")
        return True

    async def abort_all(self, deadline: Deadline) -> None:
        """End every request that was admitted."""
        for request_id, client in list(self._clients.items()):
            if client.admitted_s is not None:
                await self._core.calls.run(self._core.upstream.abort(request_id), deadline, "abort")

    async def ended(self, deadline: Deadline, token: CancelToken) -> bool:
        """Whether every request that was admitted ended before the deadline."""

        def none_left() -> bool:
            return not any(client.admitted_s is not None for client in self._clients.values())

        return await self._changed.until(none_left, deadline, token)

    async def end_all(self, grace_s: float) -> None:
        """End every request, waiting at most `grace_s` for upstream to let go of them."""
        tasks = [client.task for client in self._clients.values() if client.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
