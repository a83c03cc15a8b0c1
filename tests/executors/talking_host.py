"""Hosts for tests of `HostedExecutor`: one that only talks, and the real one around an engine that is none."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from multiprocessing import resource_tracker
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from omni_notebook.worker.vllm import engine
from omni_notebook.worker.vllm.host import VllmHost
from omni_notebook.worker.vllm.wire import RankReply, packed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from concurrent.futures import Future

    from omni_notebook.executors.mp.child import Line
    from omni_notebook.worker.vllm.wire import TextRequest

TALKING = "tests.executors.talking_host:TalkingHost"
HANGING = "tests.executors.talking_host:HangingHost"
HELD = "tests.executors.talking_host:HeldHost"
BARE = "tests.executors.talking_host:BareHost"
FORGETFUL = "tests.executors.talking_host:ForgetfulHost"


class TalkingHost:
    """Has a loop, notes what it is told and on which thread, says what it is asked to say."""

    def __init__(self, _spec: Any) -> None:
        self._noted: list[Any] = []
        self._kept = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="talking", daemon=True).start()

    def speak_on(self, line: Line) -> None:
        self._line = line

    def start(self) -> Future[None]:
        """Slow, so that orders come meanwhile; then frames are to be read on the loop."""
        return asyncio.run_coroutine_threadsafe(self._start(), self._loop)

    async def _start(self) -> None:
        await asyncio.sleep(0.1)
        self._line.read_on(self._loop)

    def note(self, value: int, seconds: float = 0.0) -> None:
        time.sleep(seconds)
        self._noted.append([value, threading.current_thread().name])

    def mark(self, value: int) -> None:
        """Note it, and what the loop turns to next."""
        self._noted.append(value)
        self._loop.call_soon(self._noted.append, "next turn")

    def noted(self) -> list[Any]:
        return self._noted

    def keep(self, _value: str) -> None:
        self._kept += 1

    def kept(self) -> int:
        return self._kept

    def say(self, values: list[Any]) -> None:
        for value in values:
            self._line.say(value)

    def memory(self) -> tuple[()]:
        return ()

    def shutdown(self) -> None:
        """It has nothing to give back."""


class HangingHost(TalkingHost):
    """Does not come up."""

    async def _start(self) -> None:
        await asyncio.sleep(3600)


class BareHost(VllmHost):
    """The real host; its engine gives each request its tokens one after the other, as soon as it can."""

    async def _start(self) -> None:
        engine.make = _make  # type: ignore[assignment]
        engine.makes_weights_up = lambda _llm: True
        engine.generate = _tokens
        await super()._start()

    def running(self) -> int:
        return len(self._tasks)

    def own(self, method: str) -> Future[None]:
        """Call what the engine itself has, behind the host's back."""
        return self._go(getattr(self._llm, method)())


class HeldHost(BareHost):
    """Has a process that holds its resource tracker's pipe and that it can not end, as one that the kernel holds."""

    def hold(self) -> int:
        """Start it; its process id."""
        pipe = resource_tracker.getfd()
        sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
        return subprocess.Popen(sleeping, pass_fds=[pipe], start_new_session=True).pid

    def fall(self) -> None:
        """A rank of this host's ends by itself, after the answer."""
        self._loop.call_later(0.05, self._ended_with, 1, "rank 0")


class ForgetfulHost(BareHost):
    """The real host; its one rank does as it is told, and its engine clears its caches, or says that it did not."""

    async def _start(self) -> None:
        await super()._start()
        self._clears = True
        self._llm.collective_rpc = self._do
        self._llm.reset_prefix_cache = self._clear
        for name in ("reset_mm_cache", "reset_encoder_cache"):
            setattr(self._llm, name, self._llm.pause_generation)

    async def _do(self, _method: str, args: tuple[int, str, bytes]) -> None:
        self._heard(RankReply(args[0], 0, packed(None), None))

    async def _clear(self, **_known: Any) -> bool:
        return self._clears

    def clears(self, value: bool) -> None:
        self._clears = value


class _Nothing:
    """Where an `AsyncLLM` would be."""

    errored = False

    async def collective_rpc(self, *_args: Any, **_known: Any) -> None:
        """No rank is there."""

    @property
    def engine_core(self) -> _Nothing:
        return self

    async def pause_generation(self, **_known: Any) -> None:
        """What has begun goes on; the tests do not freeze while tokens come."""

    pause_scheduler_async = resume_generation = pause_generation


async def _make(*_args: Any) -> _Nothing:
    return _Nothing()


async def _tokens(_llm: Any, request: TextRequest) -> AsyncIterator[Any]:
    for number in range(request.max_tokens):
        await asyncio.sleep(0.001)
        ends = number + 1 == request.max_tokens
        one = SimpleNamespace(
            token_ids=[number], text=f"{number} ", finish_reason="length" if ends else None, stop_reason=None
        )
        yield SimpleNamespace(outputs=[one], prompt_token_ids=[1], num_cached_tokens=0)
