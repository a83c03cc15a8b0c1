"""Orders that go on when their callers go away."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from omni_notebook.stages.waiting import CancelToken

T = TypeVar("T")
CANCEL_GRACE_S = 0.8
"""A cancelled call returns within a second; the engine completes what it must."""


class Supervisor:
    """Awaits orders for their callers; every method belongs to the engine's loop.

    `written` returns once what the hub was told is on disk; a caller sees no order end before.
    """

    def __init__(self, written: Callable[[], Awaitable[None]]) -> None:
        self._written = written
        self._background: set[asyncio.Task[Any]] = set()

    async def supervise(self, work: Coroutine[Any, Any, T], token: CancelToken) -> T:
        """Await `work`; if the caller goes away, cancel the order, not the work: it rolls back or finishes."""
        task = asyncio.get_running_loop().create_task(self._on_record(work))
        self._background.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            token.cancel()
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
            raise

    async def _on_record(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        finally:
            await self._written()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # seen: a caller that went away does not read it

    async def settle(self, timeout_s: float) -> None:
        """Wait for orders whose callers went away."""
        if self._background:
            await asyncio.wait(set(self._background), timeout=timeout_s)
