"""Events of a server, to whoever subscribed here; a way that breaks is told, and found again with growing waits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import msgspec
from httpx_sse import EventSource, SSEError

from omni_notebook.engine.remote.decoding import error_of
from omni_notebook.engine.remote.servers import OMNI
from omni_notebook.errors import EngineClosedError, OmniError, ServerLostError
from omni_notebook.protocol import EngineStatus, Event, LinkEvent, StateEvent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from httpx_sse import ServerSentEvent

    from omni_notebook.engine.events import EventHub
    from omni_notebook.engine.remote.line import Line
    from omni_notebook.protocol import MemoryState, PauseState

FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 15.0
STEADY_S = 30.0
"""A stream that lasted this long was one: the next wait is the first again."""
AGAIN = "the connection is there again; what happened meanwhile was not heard"
FOUND = "found so when the connection was there again"
_OK = 200
_EVENTS = ("ack", "state", "memory", "request", "link")


class Follower:
    """Follows one server's events while anyone listens to the hub; its methods belong to the line's loop."""

    def __init__(self, line: Line, hub: EventHub) -> None:
        self._line = line
        self._hub = hub
        self._following: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._places: dict[int, tuple[MemoryState, int | None, PauseState]] = {}
        self._wait_s, self._broken = FIRST_WAIT_S, False

    def begin(self) -> None:
        """Follow, if nothing does yet."""
        if self._following is None or self._following.done():
            self._tried.clear()
            self._wait_s, self._broken = FIRST_WAIT_S, False
            self._following = asyncio.create_task(self._follow(), name="omni-remote-events")

    async def listening(self) -> None:
        """Return once events are heard, or can not be: an order that comes after a subscription is heard by it."""
        if self._following is not None and not self._following.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._line.address.short_s):
                    await self._tried.wait()

    async def end(self) -> None:
        """Follow no more."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})

    async def _follow(self) -> None:
        """Until nobody listens; between two tries twice as long as before."""
        try:
            while self._hub.heard:
                began_s = time.monotonic()
                try:
                    why = await self._listen()
                except EngineClosedError:
                    return
                except OmniError as error:
                    why = str(error)
                if time.monotonic() - began_s > STEADY_S:
                    self._wait_s = FIRST_WAIT_S
                if why is not None:
                    self._broke(why)
                    await asyncio.sleep(self._wait_s)
                    self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
        finally:
            self._tried.set()

    async def _listen(self) -> str | None:
        """Hand on what comes; why no more does, None: nobody listens."""
        async with contextlib.aclosing(self._stream()) as stream:
            async for found in stream:
                self._take(found)
                if not self._hub.heard:
                    return None
        return "the server ended the stream of events"

    async def _stream(self) -> AsyncGenerator[ServerSentEvent, None]:
        path = f"{OMNI}/events"
        async with self._line.stream("stream of events", path) as response:
            if response.status_code != _OK:
                raise error_of(response.status_code, await response.aread(), f"GET {self._line.address.url}{path}")
            try:
                async for found in EventSource(response).aiter_sse():
                    yield found
            except SSEError as error:
                raise ServerLostError(str(error)) from None

    def _broke(self, why: str) -> None:
        """Tell it once."""
        if not self._broken:
            self._hub.push(LinkEvent(time.time(), connected=False, reason=why))
        self._broken = True
        self._tried.set()

    def _take(self, found: ServerSentEvent) -> None:
        """The snapshot at the beginning, or an event; one that only a later version has is passed over."""
        with contextlib.suppress(msgspec.DecodeError):
            if found.event == "status":
                self._began(msgspec.json.decode(found.data, type=EngineStatus))
            elif found.event in _EVENTS:
                event: Event = msgspec.json.decode(found.data, type=Event)
                if isinstance(event, StateEvent):
                    self._places[event.stage_id] = event.state, event.level, event.pause_state
                self._hub.push(event)

    def _began(self, status: EngineStatus) -> None:
        """A stream begins; after a break, tell which stages are elsewhere than they were last seen."""
        before, self._places = self._places, {s.stage_id: (s.state, s.level, s.pause_state) for s in status.stages}
        if self._broken:
            self._hub.push(LinkEvent(time.time(), connected=True, reason=AGAIN))
            for stage_id, place in self._places.items():
                if before.get(stage_id) != place:
                    self._hub.push(StateEvent(time.time(), stage_id, *place, reason=FOUND))
        self._broken = False
        self._tried.set()
