"""What every request passes: the name it calls this server by, its key, and its body."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from omni_notebook.engine.remote.peers import NAME_HEADER, ORDER_HEADER, OTHER_ENGINE
from omni_notebook.server.answers import PYTHON_WORDS, RETRY_S, event, refusal

if TYPE_CHECKING:
    from collections import Counter

    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_API, _NAME, _ORDER = "/v1/", NAME_HEADER.lower().encode(), ORDER_HEADER.lower().encode()
_OPEN = frozenset({"/health"})
_BODIES_AT_ONCE = 16
"""So many bodies of the greatest length may be on their way at once."""
_CLOSE = {"Connection": "close"}


class EndGuard:
    """What the server's end cancels is answered: with 503, or where events have begun to come with a last one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        begun: Message | None = None

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = begun or message
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            told = refusal(503, "the server ended before this request had; it was ended too", "ENDED", _CLOSE)
            if begun is None:
                await told(scope, receive, send)
            elif _header(begun, b"content-type").startswith(b"text/event-stream"):
                body = event("error", bytes(told.body))
                await send({"type": "http.response.body", "body": body, "more_body": False})


class NameGuard:
    """Every answer of the API names the engine that gave it, and an order that names one goes to no other.

    A client may meet another engine where it left the first.
    """

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app = app
        self._name = name.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or 409."""
        if scope["type"] != "http" or not scope["path"].startswith(_API):
            await self._app(scope, receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_NAME, self._name)]
            await send(message)

        meant = _header(scope, _NAME)
        if meant and meant != self._name and scope["method"] != "GET":
            told = f"this was meant for the engine {meant.decode('latin-1')}; {self._name.decode()} answers here now"
            await refusal(409, f"{told}. Nothing was changed", OTHER_ENGINE)(scope, receive, named)
            return
        await self._app(scope, receive, named)


class OrdersGuard:
    """Knows which orders are under way, by their header `X-Omni-Order`: `in_hand` holds them.

    A client whose connection went silent can so find out, on another one, that its answer will not come.
    """

    def __init__(self, app: ASGIApp, in_hand: Counter[bytes]) -> None:
        self._app = app
        self._in_hand = in_hand

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; whoever looks gives no order."""
        name = _header(scope, _ORDER) if scope["type"] == "http" and scope["method"] != "GET" else b""
        if not name:
            await self._app(scope, receive, send)
            return
        self._in_hand[name] += 1  # a name may come twice: a proxy sends a request again, or two clients chose the same
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_hand[name] -= 1
            if not self._in_hand[name]:
                del self._in_hand[name]


class WordsGuard:
    """With the header `X-Omni-Words: python` messages stay in words of Python calls, for a client that makes them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; a request is a task of its own, so what is set here is its alone."""
        if scope["type"] == "http":
            PYTHON_WORDS.set(_header(scope, b"x-omni-words").lower() == b"python")
        await self._app(scope, receive, send)


class LeaveGuard:
    """With the header `X-Omni-Leave: cancel` an order is called off when its client leaves, as a cancelled call is.

    Without it an order that was taken goes on: a client of one line of curl may be gone before it is done.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and watch the client of an order once its body was read."""
        asked = _header(scope, b"x-omni-leave").lower() == b"cancel" if scope["type"] == "http" else False
        if not asked or scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        stay = _Stay(receive, send)
        work = asyncio.ensure_future(self._app(scope, stay.receive, stay.send))
        watching = asyncio.ensure_future(stay.gone())
        try:
            await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
        if not work.cancelled():
            work.result()


class _Stay:
    """A client that is there until it leaves or has its answer; one reader at a time asks for its messages."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._whole, self._gone = asyncio.Event(), asyncio.Event()
        self._answered = False

    async def receive(self) -> Message:
        """The body; after it nothing until the client leaves."""
        if self._whole.is_set():
            await self._gone.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if not message.get("more_body", False):
            self._whole.set()
        return message

    async def send(self, message: Message) -> None:
        """Pass on."""
        self._answered |= message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def gone(self) -> None:
        """Return when the client has left before its answer was complete."""
        await self._whole.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()
        if self._answered:
            await asyncio.Event().wait()


class HostGuard:
    """Answers only requests that call this server by one of its names: a page of someone else's must not reach it.

    Nor may it give an order that it need not hear the answer of; a browser names the page's `Origin` with those.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or 400, 403."""
        if scope["type"] == "http":
            origin = _header(scope, b"origin").decode("latin-1")
            if origin and scope["method"] != "GET" and _name_of(origin.rpartition("://")[2]) not in self._hosts:
                message = f"a page of {origin} gives no orders here; nothing was changed"
                await refusal(403, message, "FOREIGN_PAGE")(scope, receive, send)
                return
            said = _header(scope, b"host").decode("latin-1")
            if _name_of(said) not in self._hosts:
                message = (
                    f"the Host {said!r} is not a name of this server; call it localhost, or start it with "
                    "--allowed-host NAME or with a key"
                )
                await refusal(400, message, "UNKNOWN_HOST")(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _header(head: Scope | Message, name: bytes) -> bytes:
    return bytes(dict(head["headers"]).get(name, b""))


def _name_of(host: str) -> str:
    """A `Host` without its port: `[::1]:8000` is `[::1]`."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isascii() and port.isdigit() else host).lower()


class KeyGuard:
    """Asks for `Authorization: Bearer KEY`; `/health` is open to whoever watches."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or 401."""
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            scheme, _, given = _header(scope, b"authorization").partition(b" ")
            if scheme.lower() != b"bearer" or not secrets.compare_digest(given.strip(), self._expected):
                message = "this server asks for its key: send the header 'Authorization: Bearer KEY'"
                answer = refusal(401, message, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyGuard:
    """Passes whole bodies on, and nothing of a half: not too long, not too late, not too many at once."""

    def __init__(self, app: ASGIApp, most: int, patience_s: float) -> None:
        self._app = app
        self._most = most
        self._patience_s = patience_s
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or 408, 413, 415, 503; a client that left half-way is not answered, its request not begun."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found = self._refused(scope) or await self._read(receive)
        if isinstance(found, bytes):
            await self._app(scope, _replay(found, receive), send)
        elif found is not None:
            await found(scope, receive, send)

    def _refused(self, scope: Scope) -> Response | None:
        """What the head says already."""
        coding = _header(scope, b"content-encoding").decode("latin-1").lower()
        if coding not in {"", "identity"}:
            return refusal(415, f"this server reads bodies as they are, not Content-Encoding {coding}", "CODED_BODY")
        said = _header(scope, b"content-length")
        return self._too_long() if said.isdigit() and int(said) > self._most else None

    async def _read(self, receive: Receive) -> bytes | Response | None:
        """The whole body, or what is wrong with it; None: the client left."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._patience_s):
                while (message := await receive())["type"] == "http.request":
                    part = message.get("body", b"")
                    body += part
                    self._held += len(part)
                    if len(body) > self._most:
                        return self._too_long()
                    if not message.get("more_body", False):
                        return bytes(body)
                    if self._held > self._most * _BODIES_AT_ONCE:
                        told = "too many long bodies are on their way at once; nothing was begun, send this one again"
                        return refusal(503, told, "BUSY", {**_CLOSE, "Retry-After": str(RETRY_S)})
                return None
        except TimeoutError:
            told = f"the body had not come whole within {self._patience_s:g} s; nothing was begun"
            return refusal(408, told, "BODY_TOO_LATE", _CLOSE)
        finally:
            self._held -= len(body)

    def _too_long(self) -> Response:
        return refusal(
            413, f"the body is longer than {self._most} bytes, the most that this server reads", "BODY_TOO_LONG"
        )


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
