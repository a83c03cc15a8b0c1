"""The engine's own event loop, on its own daemon thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from concurrent.futures import Future
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from omni_notebook.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")
TICK_S = 0.1
"""How often a loop that awaits the engine turns by itself: a kernel hears of an interrupt only when its loop turns."""


class EngineLoop:
    """Runs coroutines for any thread; cancelling the future of one cancels the coroutine (edge-triggered)."""

    def __init__(self, name: str) -> None:
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()
        self._closed = False
        self._ending = threading.RLock()  # what is given to the loop is given before its end, or refused
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        self.loop = self._started.result()

    def _main(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._started.set_result(asyncio.get_running_loop())
        await self._stop.wait()

    @property
    def closed(self) -> bool:
        """Whether it was stopped."""
        return self._closed

    @property
    def here(self) -> bool:
        """Whether the caller is on this loop's thread."""
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on this loop.

        Raises:
            EngineClosedError: the loop has ended.
        """
        with self._ending:
            try:
                self.check_open()
            except EngineClosedError:
                coroutine.close()
                raise
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, act: Callable[[], object]) -> None:
        """Call on this loop, on its next turn; nobody hears what it gives or raises.

        Raises:
            EngineClosedError: the loop has ended.
        """
        with self._ending:
            self.check_open()
            self.loop.call_soon_threadsafe(act)

    def check_open(self) -> None:
        """Raise EngineClosedError if the loop has ended, or belongs to the process that this one is a fork of."""
        if self._closed or os.getpid() != self._pid:
            what = "was shut down" if self._closed else f"belongs to process {self._pid}, this is a fork of it"
            msg = f"the engine {what}; start a new one"
            raise EngineClosedError(msg)

    def stop(self, timeout_s: float) -> None:
        """End the loop and its thread; idempotent, not from the loop's own thread."""
        with self._ending:
            if self._closed:
                return
            self._closed = True
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)


class Bell:
    """Wakes the one who waits at it, on whatever loop that is; anybody may ring, on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Something changed. Costs next to nothing while nobody waits."""
        waiter = self.waiter()
        if waiter is not None:
            with contextlib.suppress(RuntimeError):  # the loop that waited has ended
                waiter.get_loop().call_soon_threadsafe(_set, waiter)

    def waiter(self) -> asyncio.Future[None] | None:
        """Take the one who waits out of the line, if one does; whoever takes it wakes it, on its own loop."""
        with self._lock:
            waiter, self._waiter = self._waiter, None
        return waiter

    async def until(
        self, predicate: Callable[[], bool], seconds: Callable[[], float], begin: Callable[[], object] | None = None
    ) -> bool:
        """Whether `predicate` became true while `seconds()` were left; each ring and every `TICK_S` is a look.

        `begin` is called as the last thing before the first wait: what another thread is woken for finds this one out
        of its way.
        """
        loop = asyncio.get_running_loop()
        while not predicate():
            waiter = loop.create_future()
            with self._lock:
                self._waiter = waiter
            if predicate():  # between the look and the place in line
                return True
            left_s = seconds()
            if left_s <= 0.0:
                return False
            turn = loop.call_later(min(left_s, TICK_S), _set, waiter)
            try:
                if begin is not None:
                    begin()
                    begin = None
                await waiter
            finally:
                turn.cancel()
        return True


def _set(*waiters: asyncio.Future[None]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


class Chime:
    """Rings bells at the end of a loop's turn, or when told, all together: another loop is woken once for all there.

    Everything here belongs to one loop.
    """

    def __init__(self) -> None:
        self._bells: list[Bell] = []

    def ring(self, bell: Bell) -> None:
        """Ring it after what is happening now."""
        self._bells.append(bell)
        if len(self._bells) == 1:
            asyncio.get_running_loop().call_soon(self.ring_now)

    def ring_now(self) -> None:
        """Ring those that are to ring at the end of this turn: nothing more will come in it."""
        bells, self._bells = self._bells, []
        waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for bell in bells:
            waiter = bell.waiter()
            if waiter is not None:
                waiting.setdefault(waiter.get_loop(), []).append(waiter)
        for loop, waiters in waiting.items():
            with contextlib.suppress(RuntimeError):  # the loop that waited has ended
                loop.call_soon_threadsafe(_set, *waiters)


async def ended(work: Future[Any]) -> None:
    """Return when work on another thread or loop has ended; whoever cancels the caller cancels nothing else.

    The caller's loop turns every `TICK_S`: a kernel's interrupt cancels the cell that awaits, not waking it.
    """
    bell = Bell()
    work.add_done_callback(lambda _work: bell.ring())
    await bell.until(work.done, lambda: inf)


async def awaited(work: Future[T]) -> T:
    """The result of work on another loop; cancelling the caller cancels the work.

    Raises:
        EngineClosedError: that loop ended before the work did.
    """
    try:
        await ended(work)
    except asyncio.CancelledError:
        work.cancel()
        raise
    if work.cancelled():
        msg = "the engine was shut down while this call was in progress; start a new one"
        raise EngineClosedError(msg)
    return work.result()
