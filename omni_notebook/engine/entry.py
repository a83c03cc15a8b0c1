"""A request between its client and its flow: admitted on the engine's loop, waited for on the client's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

from omni_notebook.engine.loop import Bell
from omni_notebook.errors import DeadlineError, EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_notebook.engine.core import Core
    from omni_notebook.engine.flow import Flow
    from omni_notebook.engine.loop import EngineLoop
    from omni_notebook.protocol import LoRARequest, OmniRequestOutput, OmniSamplingParams

_SOON_S = 0.001
_LONG = 10_000
"""Characters or token ids of a prompt whose reading would hold the engine's loop up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The arguments of `AsyncOmni.generate` as they came, and the bell that its client waits at.

    `payload` is what the first stage makes of the prompt, where that was done ahead.
    """

    prompt: str | dict[str, Any]
    request_id: str
    sampling_params: OmniSamplingParams | dict[str, Any] | None
    output_modalities: Sequence[str] | str | None
    admission_timeout: float
    lora_request: LoRARequest | str | int | None
    payload: Any = None
    bell: Bell = field(default_factory=Bell)


class Entry:
    """One request's admission, and what its client sees of it afterwards.

    The client's thread begins, waits and leaves; what ends in `_here` happens on the engine's loop. The client is not
    woken when its request was admitted: it waits for an output.

    Args:
        bound_s: seconds from the admission to the last output; None = no bound.
    """

    def __init__(self, core: Core, loop: EngineLoop, ask: Ask, bound_s: float | None) -> None:
        self._core = core
        self._loop = loop
        self._ask = ask
        self._bound_s = inf if bound_s is None else bound_s
        self._begun: tuple[Flow, float] | None = None
        self._error: BaseException | None = None
        self._at_gate: asyncio.Task[Flow] | None = None
        self._left = False

    async def begin(self) -> None:
        """Ask for admission, and wait as `wait` does.

        Raises:
            EngineClosedError: the engine was shut down.
            DeadlineError: as in `wait`.
            ArgumentError: a long prompt does not fit; nothing was started.
        """
        self._loop.check_open()
        if _is_long(self._ask.prompt):
            payload = await asyncio.to_thread(self._core.payload, self._ask)
            self._ask = replace(self._ask, payload=payload)
        await self._wait(lambda: self._loop.call(self._begin_here))

    def leave(self) -> None:
        """The client goes away before the end: what has begun is aborted, what waits at a gate waits no more."""
        with contextlib.suppress(EngineClosedError, RuntimeError):  # the loop has ended, and the request with it
            self._loop.call(self._leave_here)

    # ------------------------------------------------------------------------ on the engine's loop

    def _begin_here(self) -> None:
        try:
            flow = self._core.admit_now(self._ask)
        except Exception as error:  # noqa: BLE001  (it belongs to the client)
            self._end_here(error)
            return
        if flow is None:
            self._at_gate = asyncio.get_running_loop().create_task(self._core.admit(self._ask))
            self._at_gate.add_done_callback(self._passed_here)
        else:
            self._begun = flow, time.monotonic()

    def _passed_here(self, at_gate: asyncio.Task[Flow]) -> None:
        if at_gate.cancelled():
            self._end_here(self._shut_down())
            return
        error = at_gate.exception()
        if error is not None:
            self._end_here(error)
            return
        self._begun = at_gate.result(), time.monotonic()
        if self._left:
            self._leave_here()
        self._ask.bell.ring()

    def _end_here(self, error: BaseException) -> None:
        self._error = error
        self._ask.bell.ring()

    def _leave_here(self) -> None:
        self._left = True
        if self._begun is not None:
            self._core.abandon(self._begun[0])
        elif self._at_gate is not None:
            self._at_gate.cancel()

    # ------------------------------------------------------------------------- on the client's

    def ready(self) -> OmniRequestOutput | None:
        """The next output if it is there already.

        Raises:
            Exception: the request was refused, or failed.
        """
        if self._error is not None:
            raise self._error
        return None if self._begun is None else self._begun[0].ready()

    async def wait(self) -> None:
        """Return once `ready` has something.

        Raises:
            DeadlineError: there was nothing in time; the request goes on.
            EngineClosedError: there will be nothing.
        """
        await self._wait(None)

    async def _wait(self, begin: Callable[[], None] | None) -> None:
        if not await self._ask.bell.until(self._settled, self._left_s, begin):
            raise DeadlineError(self._too_long())
        if not self._has_news():
            raise self._shut_down()

    def _settled(self) -> bool:
        return self._has_news() or self._loop.closed

    def _has_news(self) -> bool:
        return self._error is not None or (self._begun is not None and self._begun[0].has_news)

    def _left_s(self) -> float:
        if self._begun is None:  # the bound counts from then; look again when it could be over
            return max(self._bound_s, _SOON_S)
        return self._begun[1] + self._bound_s - time.monotonic()

    def _too_long(self) -> str:
        stage = None if self._begun is None else self._begun[0].stage
        where = "" if stage is None else f"; it is in stage {stage.stage_id} ({stage.state}, pause {stage.pause_state})"
        return f"request {self._ask.request_id} had not ended after {self._bound_s:g} s{where}"

    def _shut_down(self) -> EngineClosedError:
        return EngineClosedError(
            f"the engine was shut down while request {self._ask.request_id} was in progress; start a new one"
        )


def _is_long(prompt: Any) -> bool:
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
    return isinstance(ids, str | list | tuple) and len(ids) > _LONG
