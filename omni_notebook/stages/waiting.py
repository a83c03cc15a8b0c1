"""Bounded waiting on one event loop: deadlines, a level-triggered signal, a token that cancels an order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Deadline:
    """A point in time that an order must not pass."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end_s = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end_s - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether nothing is left."""
        return self.left_s() == 0.0


class OrderCancelled(Exception):  # noqa: N818  (a control-flow signal inside stages/ and engine/, like CancelledError)
    """The caller went away before the order committed."""


class CancelToken:
    """Set once by the caller that goes away; whoever waits for the order's sake looks at it."""

    def __init__(self) -> None:
        self.cancelled = False
        self._callbacks: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Cancel; calls what was registered."""
        if not self.cancelled:
            self.cancelled = True
            for callback in self._callbacks:
                callback()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` when cancelled (now, if it is already)."""
        self._callbacks.append(callback)
        if self.cancelled:
            callback()

    def check(self) -> None:
        """Raise OrderCancelled if cancelled."""
        if self.cancelled:
            raise OrderCancelled


class Signal:
    """Wakes coroutines of one loop whenever something changed; they look for themselves whether it concerns them."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}  # in order of arrival: first come, first served

    def notify(self) -> None:
        """Something changed."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, predicate: Callable[[], bool], deadline: Deadline, token: CancelToken | None = None) -> bool:
        """Whether `predicate` became true before the deadline.

        Raises:
            OrderCancelled: `token` was cancelled first.
        """
        if token is not None:
            token.on_cancel(self.notify)
        if token is not None:
            token.check()
        while not predicate():
            left_s = deadline.left_s()
            if left_s == 0.0:
                return False
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            await asyncio.wait({waiter}, timeout=left_s)
            self._waiters.pop(waiter, None)
            if token is not None:
                token.check()
        return True


async def acquire(lock: asyncio.Lock, deadline: Deadline, token: CancelToken) -> bool:
    """Whether the lock was taken before the deadline.

    Raises:
        OrderCancelled: `token` was cancelled while it waited; the lock is not held.
    """
    try:
        async with asyncio.timeout(deadline.left_s()) as bound:
            token.on_cancel(lambda: _end_now(bound))
            await lock.acquire()
    except TimeoutError:
        token.check()
        return False
    if token.cancelled:
        lock.release()
        raise OrderCancelled
    return True


def _end_now(bound: asyncio.Timeout) -> None:
    with contextlib.suppress(RuntimeError):  # it has ended already
        bound.reschedule(0.0)
