"""What every request passes: its key, and how long its body is."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from omni_notebook.server.answers import refusal

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OPEN = frozenset({"/health"})


class KeyGuard:
    """Asks for `Authorization: Bearer KEY`; `/health` is open to whoever watches."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or 401."""
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                message = "this server asks for its key: send the header 'Authorization: Bearer KEY'"
                answer = refusal(401, message, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyGuard:
    """Refuses bodies of more than so many bytes, said or sent."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said) > self._most:
            await self._refuse(scope, receive, send)
            return
        read = await self._read(receive)
        if read is None:
            await self._refuse(scope, receive, send)
            return
        await self._app(scope, _replay(read, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None if it is too long."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return b"".join(parts)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body is longer than {self._most} bytes, the most that this server reads"
        await refusal(413, message, "BODY_TOO_LONG")(scope, receive, send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then what comes after it."""
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
