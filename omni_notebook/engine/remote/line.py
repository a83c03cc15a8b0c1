"""Requests to one server, on one event loop: every wait is bounded or watched, and no order is sent twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import msgspec

from omni_notebook.engine.remote import forking
from omni_notebook.engine.remote.decoding import error_of, object_of
from omni_notebook.engine.remote.peers import NAME_HEADER, ORDER_HEADER, OTHER_ENGINE
from omni_notebook.errors import ArgumentError, DeadlineError, EngineClosedError, ServerLostError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from omni_notebook.engine.remote.address import Address
    from omni_notebook.engine.remote.peers import Peer

MARGIN_S = 30.0
"""So much later than an order's own deadline its answer may come: ranks that fail are given a while to go back."""
PROBE_S = 5.0
MISSES = 3
"""A server that leaves so many probes in a row without an answer is not waited for any more."""
SILENT_S = 45.0
"""A stream of events that brings nothing for so long is lost: servers send something every 15 s."""
_KEPT_S = 2.0
"""Idle connections are kept for less than servers keep them (5 s), so that none is used that is being closed."""
_KEEPALIVE = (("SO_KEEPALIVE", 1), ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
_GOES_ON = """\
it may go on there, and was not sent again. engine.status() (%omni status) shows what came of it once it \
answers"""
_CLOSED = ("Server disconnected", "peer closed connection")
_EVENTS = {"Accept": "text/event-stream"}
_ENDED = "it has ended there, or never arrived, and was not sent again"
_ENDS = "it ends there with its client, and was not sent again"
_OTHER = "another engine answers there now"
_NOT_THERE = "the server answers, and does not have it under way"
_KNOWN = {
    _OTHER: "what came of it is not known, and it was not sent again",
    _NOT_THERE: "it has ended, or never arrived, and was not sent again. engine.status() (%omni status) shows which",
}
VERSION = "/v1/omni/version"
UNCHANGED = "nothing was changed there. Once it answers again this connection goes on; %omni stop leaves it"


class Answer(NamedTuple):
    """What came back."""

    status: int
    content: bytes

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that it is; empty if it is none."""
        return object_of(self.content)


@dataclass(slots=True)
class Waiting:
    """An order, or a stream, that is waited for.

    Attributes:
        what: for people.
        timeout: its own bound, seconds.
        meant: the engine that it is for; where another one answers, that one does not have it.
        streamed: its answer comes in pieces, and ends with its client.
        name: by which the server knows it.
        response: once its head is there.
        looks: it is no order.
    """

    what: str
    timeout: float | None = None
    meant: str | None = None
    streamed: bool = False
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    response: httpx.Response | None = None
    looks: bool = False

    @property
    def received(self) -> int:
        """Bytes of the answer so far."""
        return 0 if self.response is None else self.response.num_bytes_downloaded


def _not_given(told: str, what: str) -> str:
    return f"{told}. The {what} was not given to this one: call again if it is meant"


class Line:
    """One client of a server; everything but the constructor belongs to one event loop.

    It connects directly: proxies that the environment names are not used.
    """

    def __init__(self, address: Address, peer: Peer) -> None:
        self._address = address
        self._peer = peer
        self._client: httpx.AsyncClient | None = None
        self._busy: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def address(self) -> Address:
        """Whom it asks."""
        return self._address

    async def get(self, path: str, **params: Any) -> Answer:
        """What waits for nobody, within `Address.short_s`.

        Raises:
            ServerLostError: nobody answers.
            OmniError: what the server refuses it with.
        """
        answer = await self.ask("GET", path, params)
        if answer.status != httpx.codes.OK:
            raise error_of(answer.status, answer.content, f"GET {self._address.url}{path}")
        return answer

    async def ask(
        self, method: str, path: str, params: dict[str, Any] | None = None, *, now: str = UNCHANGED, late: str = ""
    ) -> Answer:
        """The answer, whatever its status, within `Address.short_s`; `now` says what is true where there is none.

        `late`: the same where somebody listens and does not answer.

        Raises:
            ServerLostError: there is none.
        """
        bound_s = self._address.short_s
        try:
            async with asyncio.timeout(bound_s):
                with self._working():
                    response = await self._http().request(method, path, params=params)
        except TimeoutError:
            msg = f"{self._address.url} did not answer within {bound_s:g} s; {late or now}"
            raise ServerLostError(msg) from None
        except httpx.HTTPError as error:
            msg = f"{self._address.url} does not answer ({_why(error)}); {now}"
            raise ServerLostError(msg) from None
        return Answer(response.status_code, response.content)

    async def order(
        self, what: str, path: str, body: dict[str, Any] | None, timeout: float | None, method: str = "POST"
    ) -> Answer:
        """The answer to an order, which is sent once.

        Args:
            what: the order, for people.
            path: of the endpoint.
            body: its JSON object; fields that are None are left out.
            timeout: the order's own bound, seconds; None: as long as the server is there.
            method: of HTTP.

        Raises:
            ArgumentError: the body can be no JSON; nothing was sent.
            ServerLostError: nobody listens, or the server went away; says whether the order may go on.
            DeadlineError: the server is there and has not answered by its own bound and `MARGIN_S`.
        """
        content = None if body is None else as_json(body)
        self._check_told(what)
        wait = Waiting(what, timeout, self._peer.name)
        try:
            async with (
                self.watched(wait),
                self._http().stream(method, path, content=content, headers=_head(content, wait)) as response,
            ):
                wait.response = response
                answer = Answer(response.status_code, await response.aread())
        except httpx.HTTPError as error:
            raise self.lost(wait, error) from None
        self._check_given(what, answer)
        return answer

    def _check_told(self, what: str) -> None:
        """Return unless another engine answers than people know of: the order is for the one before.

        Raises:
            ServerLostError: it does; the next order is for it.
        """
        unsaid = self._peer.unsaid()
        if unsaid is not None:
            raise ServerLostError(_not_given(unsaid, what))

    def _check_given(self, what: str, answer: Answer) -> None:
        """Return if the order reached the engine that it was meant for.

        Raises:
            ServerLostError: another one answered, and did nothing.
        """
        refused = answer.body.get("error") if answer.status == httpx.codes.CONFLICT else None
        if isinstance(refused, dict) and refused.get("code") == OTHER_ENGINE:
            raise ServerLostError(_not_given(self._peer.unsaid() or self._peer.note or _OTHER, what))

    @contextlib.asynccontextmanager
    async def stream(
        self, what: str, path: str, body: dict[str, Any] | None = None, timeout: float | None = None
    ) -> AsyncIterator[httpx.Response]:
        """An answer that comes in pieces: a GET, or with a body a POST. Raises what `order` raises, also within.

        Of a GET, a stream of events, something comes every 15 s: its silence is its end.
        """
        method, content = ("GET", None) if body is None else ("POST", as_json(body))
        looks = body is None
        if not looks:
            self._check_told(what)
        wait = Waiting(what, timeout, None if looks else self._peer.name, streamed=True, looks=looks)
        quiet = httpx.Timeout(None, connect=self._address.short_s, read=SILENT_S if looks else None)
        head = ({} if looks else _head(content, wait)) | _EVENTS
        try:
            async with (
                self.watched(wait),
                self._http().stream(method, path, content=content, headers=head, timeout=quiet) as response,
            ):
                wait.response = response
                if response.status_code == httpx.codes.CONFLICT:
                    self._check_given(what, Answer(response.status_code, await response.aread()))
                yield response
        except httpx.ReadTimeout:
            raise self.lost(wait, TimeoutError(f"nothing came for {SILENT_S:g} s")) from None
        except httpx.HTTPError as error:
            raise self.lost(wait, error) from None

    def lost(self, wait: Waiting, error: Exception) -> ServerLostError:
        """Whether it was sent, and what may be true now."""
        url = self._address.url
        if isinstance(error, _NOT_SENT):
            return ServerLostError(f"nobody answers at {url} ({_why(error)}): the {wait.what} was not sent")
        told = str(error)
        if wait.streamed:  # a status tells nothing of a request
            goes = _ENDED if told == _NOT_THERE else _KNOWN.get(told, _ENDS)
        else:
            goes = _KNOWN.get(told, _GOES_ON)
        return ServerLostError(f"the connection to {url} was lost during the {wait.what} ({_why(error)}): {goes}")

    # --------------------------------------------------------------------------------- watching

    @contextlib.asynccontextmanager
    async def watched(self, wait: Waiting) -> AsyncIterator[None]:
        """A wait that ends when nothing can come of it any more, or `MARGIN_S` after the order's own bound."""
        task, why, timeout = asyncio.current_task(), "", wait.timeout
        bound = asyncio.timeout(None if timeout is None else timeout + MARGIN_S)
        assert task is not None  # noqa: S101  (coroutines run in tasks)

        async def watch() -> None:
            nonlocal why
            why = await self._in_vain(wait)
            task.cancel()

        watching = asyncio.create_task(watch(), name="omni-remote-watch")
        try:
            with self._working():
                async with bound:
                    yield
        except asyncio.CancelledError:
            if why and task.uncancel() <= 0:
                raise self.lost(wait, TimeoutError(why)) from None
            raise
        except TimeoutError:
            if timeout is None or not bound.expired():
                raise
            raise DeadlineError(self._too_long(wait.what, timeout)) from None
        finally:
            watching.cancel()

    async def _in_vain(self, wait: Waiting) -> str:
        """Why nothing can come any more, as soon as that is so."""
        misses = gone = 0
        received = -1
        while not (wait.meant and self._peer.name != wait.meant):
            await asyncio.sleep(PROBE_S)
            there = await self._probed(wait)
            misses = misses + 1 if there is None else 0
            gone = gone + 1 if there is False and wait.received == received else 0
            received = wait.received
            if misses >= MISSES:
                return f"no answer to {MISSES} probes"
            if gone >= MISSES:
                return _NOT_THERE
        return _OTHER

    def _too_long(self, what: str, timeout: float) -> str:
        return (
            f"{self._address.url} did not answer the {what} within its {timeout:g} s and {MARGIN_S:g} s more: it "
            "may go on there. engine.status() (%omni status) shows what came of it"
        )

    async def _probed(self, wait: Waiting) -> bool | None:
        """Whether the order is under way there, as far as the server tells; None: it does not answer."""
        try:
            async with asyncio.timeout(PROBE_S):
                answer = await self._http().get(VERSION, headers={} if wait.looks else {ORDER_HEADER: wait.name})
        except (TimeoutError, httpx.HTTPError):
            return None
        return object_of(answer.content).get("order") is not False

    # ------------------------------------------------------------------------------- the client

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """The task is known to `close` for as long as it waits for the server."""
        task = asyncio.current_task()
        if task is None or task in self._busy:
            yield
            return
        self._busy.add(task)
        try:
            yield
        finally:
            self._busy.discard(task)

    def _http(self) -> httpx.AsyncClient:
        if self._closed:
            msg = f"the connection to {self._address.url} was closed; the engine there was left as it is"
            raise EngineClosedError(msg)
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self._address.url,
                headers=self._address.headers,
                timeout=httpx.Timeout(None, connect=self._address.short_s),
                transport=_transport(),
                event_hooks={"request": [_traced], "response": [self._heard]},
            )
        return self._client

    async def _heard(self, response: httpx.Response) -> None:
        self._peer.heard(response.headers)

    async def close(self) -> None:
        """Call off what waits, and close every connection."""
        self._closed = True
        waiting = self._busy - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting, timeout=1.0)
        if self._client is not None:
            await self._client.aclose()


async def _traced(request: httpx.Request) -> None:
    request.extensions["trace"] = forking.note


def _head(content: bytes | None, wait: Waiting) -> dict[str, str]:
    """What an order says of its body, of itself, and of the engine that it is for."""
    kind = {} if content is None else {"Content-Type": "application/json"}
    meant = {} if wait.meant is None else {NAME_HEADER: wait.meant}
    return {**kind, **meant, ORDER_HEADER: wait.name}


def _transport() -> httpx.AsyncHTTPTransport:
    """A transport that notices by itself when the other machine is gone."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=_KEPT_S)
    options = [
        (socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in _KEEPALIVE
        if hasattr(socket, name)
    ]
    return httpx.AsyncHTTPTransport(limits=limits, socket_options=options)


def as_json(body: dict[str, Any]) -> bytes:
    """A body without its empty fields.

    Raises:
        ArgumentError: JSON can not carry it.
    """
    given = {key: value for key, value in body.items() if value is not None}
    try:
        return msgspec.json.encode(given, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        msg = f"this can not be sent to a server: {error}; nothing was sent"
        raise ArgumentError(msg) from None


def _plain(value: Any) -> Any:
    """A numpy scalar as the Python number that it stands for."""
    item: Callable[[], Any] | None = getattr(value, "item", None)
    if item is None or getattr(value, "ndim", None) != 0:
        msg = f"a {type(value).__name__} has no form in JSON"
        raise TypeError(msg)
    return item()


def _why(error: BaseException) -> str:
    """What the operating system says of it; else what the exception says, or its name."""
    if isinstance(error, httpx.RemoteProtocolError) and str(error).startswith(_CLOSED):
        return "it was closed there" if "without sending a" in str(error) else "it was closed there, half-way"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):  # its number is of another list than the system's
            return f"TLS: {getattr(cause, 'verify_message', '') or cause.reason or cause}"
        if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:  # below 0: of getaddrinfo
            return os.strerror(cause.errno)
        cause = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause.__cause__ or cause.__context__
    return " ".join(str(error).split()) or type(error).__name__
