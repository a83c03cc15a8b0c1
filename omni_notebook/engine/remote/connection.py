"""A connection to an engine on a server: its loops and threads, its short calls, its end."""

from __future__ import annotations

import concurrent.futures
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from omni_notebook.engine.events import EventHub
from omni_notebook.engine.loop import EngineLoop, awaited
from omni_notebook.engine.remote import history
from omni_notebook.engine.remote.address import SHORT_S, Address
from omni_notebook.engine.remote.closing import Closer
from omni_notebook.engine.remote.decoding import error_of
from omni_notebook.engine.remote.following import Follower
from omni_notebook.engine.remote.line import UNCHANGED, Line
from omni_notebook.engine.remote.peers import Named, Peer
from omni_notebook.engine.remote.servers import OMNI, is_here, meet
from omni_notebook.engine.scoped import Scoped
from omni_notebook.errors import EngineClosedError, ServerLostError, UnsupportedError
from omni_notebook.paths import expanded
from omni_notebook.protocol import EngineStatus, LinkEvent

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Collection, Coroutine
    from concurrent.futures import Future

    from omni_notebook.engine.events import Subscription
    from omni_notebook.engine.history import History
    from omni_notebook.engine.remote.line import Answer
    from omni_notebook.engine.remote.servers import Server

T = TypeVar("T")
_OK = 200


class Connection(Scoped):
    """What every call of `RemoteOmni` goes through; see there."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = SHORT_S) -> None:
        self._address = Address(url, api_key, timeout)
        self.url: str = self._address.url
        self._last: EngineStatus | None = None
        self._hub = EventHub()
        self._loop = EngineLoop("omni-remote")
        self._peer = Peer(self.url, self._came)
        self._line = Line(self._address, self._peer)
        self._follower = Follower(self._line, self._hub)
        self._looking = EngineLoop("omni-remote-status")  # a status must not wait for what runs on the other loop
        self._look = Line(self._address, self._peer)
        ends = ((self._loop, (self._follower.end, self._line.close)), (self._looking, (self._look.close,)))
        self._closer = Closer(self._hub, ends)
        weakref.finalize(self, self._closer.collected)
        try:
            self._server: Server = self._looked(meet(self._look), tries=4)
            self.host: str | None = self._machine()
            self.status()
        except BaseException:
            self.shutdown()
            raise

    def status(self) -> EngineStatus:
        """A snapshot, memory measured there now; waits no longer than the `timeout` of this connection.

        Raises:
            ServerLostError: the server does not answer; nothing was changed there.
        """
        if self._closer.closed:
            return _ended(self._last, self.url)
        status = self._looked(self._server.status(self._look))
        self._last = status = msgspec.structs.replace(status, notes=(*status.notes, *self.news))
        return status

    @property
    def news(self) -> tuple[str, ...]:
        """What a person should know of the engine there, as far as this side has heard; nobody is asked."""
        return () if self._peer.note is None else (self._peer.note,)

    def told(self, lines: Collection[str]) -> None:
        """A person has seen these lines of `news`: orders are for the engine that is there now."""
        self._peer.said(lines)

    def _came(self, name: str, told: str) -> None:
        """Another engine answers: it is this connection's from now on."""
        found = Named.read(name)
        self._server.pid, self._server.host = found.pid, found.host or None
        self.host = self._machine()
        self._hub.push(LinkEvent(time.time(), connected=True, reason=told, other=True))

    def _machine(self) -> str | None:
        """The name of the server's machine, None if that is this one."""
        return None if is_here(self._server, self._line) else self._server.host or self.url

    def logs(self, stage_id: int, rank: int = 0, replica: int = 0) -> list[str]:
        """The last lines that a rank's process wrote, newest last. Waits no longer than `status`.

        Raises:
            ArgumentError: unknown stage, replica or rank.
        """
        self._check_open()
        self._server.has("logs")
        answer = self._looked(self._look.get(f"{OMNI}/logs", stage_id=stage_id, rank=rank, replica=replica))
        return [str(line) for line in answer.body.get("lines") or ()]

    def history(
        self,
        stage: int | None = None,
        rank: int | None = None,
        since: str | dt.date | dt.timedelta | float | None = None,
        session: int | Literal["this"] | None = None,
        errors: bool = False,
        limit: int | None = None,
    ) -> History:
        """Past ACKs in the server's own ledger; as `omni_notebook.history`, with "this" for the server's process.

        Of more than 10,000 the newest. Waits no longer than `status`.

        Raises:
            ArgumentError: an argument is wrong.
            LedgerError: no history is kept there, or it can not be read.
            ServerLostError: the server does not answer.
            UnsupportedError: it is one that tells none.
        """
        self._check_open()
        self._server.has("history")
        wanted = history.checked(stage, rank, since, session, errors, limit)
        return self._looked(history.asked(self._look, **wanted))

    def subscribe(self) -> Subscription:
        """An async iterator of events from now on; a `LinkEvent` where the connection breaks and is there again.

        What a server does not tell is not in it: of a plain vLLM-Omni server there are no events.
        """
        subscription = self._hub.subscribe()
        if not self._closer.closed and self._has_events:
            self._loop.call(self._follower.begin)
        return subscription

    @property
    def _has_events(self) -> bool:
        try:
            self._server.has("events")
        except UnsupportedError:
            return False
        return True

    @property
    def closed(self) -> bool:
        """Whether this connection was shut down; the server is not asked."""
        return self._closer.closed

    @property
    def in_this_process(self) -> bool:
        """Whether the server is a thread of this very process."""
        return self.host is None and self._server.pid == os.getpid()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run one of this engine's coroutines from a plain thread; cancelling the future cancels the call.

        Raises:
            EngineClosedError: the connection was closed.
        """
        if self._closer.closed:
            coroutine.close()
            raise self._closed()
        return self._loop.submit(coroutine)

    def shutdown(self) -> None:
        """Close the connection; the engine on the server runs on. Idempotent, from any thread."""
        self._closer.close()

    # ------------------------------------------------------------------------------------- parts

    async def _order(self, what: str, path: str, body: dict[str, Any] | None, method: str = "POST") -> Answer:
        """An order's answer.

        Raises:
            OmniError: it was refused there, or failed.
        """
        timeout = None if body is None else body.get("timeout")
        answer = await self._line.order(what, f"{OMNI}{path}", body, timeout, method)
        if answer.status != _OK:
            raise error_of(answer.status, answer.content, f"{method} {self.url}{OMNI}{path}")
        return answer

    def _place(self, path: str | os.PathLike[str]) -> str:
        """A folder as the server must name it: absolute if the machine is this one, else as it was named."""
        return os.fspath(path) if self.host is not None else str(expanded(path).resolve())

    def _looked(self, look: Coroutine[Any, Any, T], tries: int = 1) -> T:
        """What a short call gives, on a loop where nothing else runs."""
        bound_s = tries * self._address.short_s + 1.0
        future = self._looking.submit(look)
        try:
            return future.result(bound_s)
        except concurrent.futures.CancelledError:
            raise self._closed() from None
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            msg = f"{self.url} did not answer within {bound_s:g} s; {UNCHANGED}"
            raise ServerLostError(msg) from None

    async def _run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._check_open()

        async def run() -> T:
            await self._follower.listening()
            return await make()

        if self._loop.here:
            return await run()
        try:
            return await awaited(self._loop.submit(run()))
        except EngineClosedError:
            if self._closer.closed:
                raise self._closed() from None
            raise

    def _check_open(self) -> None:
        if self._closer.closed:
            raise self._closed()

    def _closed(self) -> EngineClosedError:
        return EngineClosedError(
            f"this connection was closed; the engine at {self.url} was left as it is: "
            f"RemoteOmni({self.url!r}) (%omni connect "
            f"{self.url}) connects again"
        )

    def __repr__(self) -> str:
        """Where it is connected to."""
        where = f" on {self.host}" if self.host else ""
        return f"<RemoteOmni {self.url}{where}{', closed' if self._closer.closed else ''}>"


def _ended(last: EngineStatus | None, url: str) -> EngineStatus:
    """The status of a connection that was closed: nothing is known of the engine from then on."""
    return EngineStatus(
        model=url if last is None else last.model,
        closed=True,
        paused=False,
        uptime_s=0.0 if last is None else last.uptime_s,
        stages=(),
        notes=(f"disconnected from {url}; the engine there was left as it is",),
        left_at=url,
    )
