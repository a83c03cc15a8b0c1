"""Outputs from the connection's loop to the loop of whoever asked for them."""

from __future__ import annotations

import contextlib
from collections import deque
from math import inf
from typing import TYPE_CHECKING, TypeVar

from omni_notebook.engine.loop import Bell

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from omni_notebook.engine.loop import EngineLoop

T = TypeVar("T")


async def pumped(loop: EngineLoop, source: Callable[[], AsyncIterator[T]]) -> AsyncGenerator[T, None]:
    """What `source` gives on `loop`, wherever this is iterated; whoever leaves ends the source.

    Raises:
        concurrent.futures.CancelledError: the connection was closed meanwhile.
        Exception: what the source raises, after what it gave.
    """
    items: deque[T] = deque()
    bell = Bell()

    async def pump() -> None:
        async for item in source():
            items.append(item)
            bell.ring()

    pumping = loop.submit(pump())
    pumping.add_done_callback(lambda _pumping: bell.ring())
    try:
        while True:
            while items:
                yield items.popleft()
            if pumping.done() and not items:
                pumping.result()
                return
            await bell.until(lambda: bool(items) or pumping.done(), lambda: inf)
    finally:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the source with it
            pumping.cancel()
