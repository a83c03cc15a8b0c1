"""Connections that neither send nor take, or are too many: they are closed, so that they hold nothing for ever."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, ClassVar, cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from omni_notebook.server.answers import RETRY_S, refusal

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

REFUSED_AT_ONCE = 64
"""So many connections above the bound are told why; those above that are closed unheard."""


def watched_protocol(patience_s: float, most: int) -> type[H11Protocol]:
    """A protocol whose clients have so many seconds for a request's head, and for the next bytes of an answer.

    Requests that come by a connection above the first `most` are 503.
    """
    return cast("type[H11Protocol]", type("WatchedProtocol", (_Watched,), {"patience_s": patience_s, "most": most}))


class _Watched(H11Protocol):
    patience_s: ClassVar[float]
    most: ClassVar[int]
    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first head, where there is room."""
        super().connection_made(cast("asyncio.Transport", transport))
        if len(self.connections) > self.most + REFUSED_AT_ONCE:
            self.transport.abort()
            return
        if len(self.connections) > self.most:
            self.app = self._no_room
        self._head = self._later()

    async def _no_room(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = f"{self.most} connections are open, the most that this server holds; nothing was begun, send it again"
        await refusal(503, told, "BUSY", {"Connection": "close", "Retry-After": str(RETRY_S)})(scope, receive, send)

    def data_received(self, data: bytes) -> None:
        """Whatever comes; only a whole head stops the clock."""
        super().data_received(data)
        if self._in_request:
            _stop(self._head)

    def on_response_complete(self) -> None:
        """Wait for the next head."""
        super().on_response_complete()
        _stop(self._head)
        if not self._in_request:
            self._head = self._later()

    def pause_writing(self) -> None:
        """The client has stopped taking what is sent."""
        super().pause_writing()
        self._unread = self._later()

    def resume_writing(self) -> None:
        """It takes again."""
        super().resume_writing()
        _stop(self._unread)

    def connection_lost(self, exc: Exception | None) -> None:
        """Watch no longer; for the client it ends now."""
        _stop(self._head)
        _stop(self._unread)
        with contextlib.suppress(OSError):  # the client was first
            self.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # a fork of this process has it too
        super().connection_lost(exc)

    @property
    def _in_request(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # uvicorn writes None there too
        return cycle is not None and not cycle.response_complete

    def _later(self) -> asyncio.TimerHandle:
        abort: Callable[[], None] = self.transport.abort  # what is not taken by now never is
        return self.loop.call_later(self.patience_s, abort)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
