"""Connections that neither send nor take, or are too many: they are closed, so that they hold nothing for ever."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import sys
import termios
from typing import TYPE_CHECKING, ClassVar, cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from omni_notebook.server.answers import RETRY_S, refusal

if TYPE_CHECKING:
    import asyncio

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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first head, where there is room."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._head, self._unread = (_Patience(self.loop, self.transport, self.patience_s) for _ in range(2))
        if len(self.connections) > self.most + REFUSED_AT_ONCE:
            self.transport.abort()
            return
        if len(self.connections) > self.most:
            self.app = self._no_room
        self._head.start()

    async def _no_room(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = f"{self.most} connections are open, the most that this server holds; nothing was begun, send it again"
        await refusal(503, told, "BUSY", {"Connection": "close", "Retry-After": str(RETRY_S)})(scope, receive, send)

    def data_received(self, data: bytes) -> None:
        """Whatever comes; only a whole head stops the clock."""
        super().data_received(data)
        if self._in_request:
            self._head.stop()

    def on_response_complete(self) -> None:
        """Wait for the next head."""
        super().on_response_complete()
        self._head.stop()
        if not self._in_request:
            self._head.start()

    def pause_writing(self) -> None:
        """The client has stopped taking what is sent."""
        super().pause_writing()
        self._unread.start()

    def resume_writing(self) -> None:
        """It takes again."""
        super().resume_writing()
        self._unread.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Watch no longer; for the client it ends now."""
        self._head.stop()
        self._unread.stop()
        with contextlib.suppress(OSError):  # the client was first
            self.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # a fork of this process has it too
        super().connection_lost(exc)

    @property
    def _in_request(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # uvicorn writes None there too
        return cycle is not None and not cycle.response_complete


class _Patience:
    """Ends a connection after so many seconds in which nothing was taken of what is to be sent, if anything is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, patience_s: float) -> None:
        self._loop, self._transport, self._patience_s = loop, transport, patience_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Be patient from now on."""
        self._timer = self._loop.call_later(self._patience_s, self._look, self._untaken())

    def stop(self) -> None:
        """End nothing."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, before: int) -> None:
        if self._untaken() < before:  # slow, but it takes
            self.start()
        else:
            self._transport.abort()  # what is not taken by now never is

    def _untaken(self) -> int:
        """Bytes that the client's machine has not acknowledged, while some of them are in this process still.

        The kernel alone has room for megabytes, and asks for more only when a third of that is free.
        """
        here = self._transport.get_write_buffer_size()
        if not here:
            return 0
        answer = fcntl.ioctl(self._transport.get_extra_info("socket"), termios.TIOCOUTQ, bytes(4))
        return here + int.from_bytes(answer, sys.byteorder)
