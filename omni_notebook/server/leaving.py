"""Clients that go away: what they asked for ends with them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.requests import Request

T = TypeVar("T")


class ClientGone(Exception):  # noqa: N818  (nobody is there to be told of an error)
    """The client closed its connection before the answer was ready."""


async def while_connected(request: Request, work: Coroutine[None, None, T]) -> T:
    """The result of `work`; a client that closes its connection cancels it. Call it after the body was read.

    Raises:
        ClientGone: it did.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({working, leaving})


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
