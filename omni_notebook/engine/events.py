"""Events to subscribers on any loop; a slow one loses its oldest samples, never an ACK or a state change."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Self

from omni_notebook.engine.loop import Bell
from omni_notebook.protocol import AckEvent, Event, LinkEvent, StateEvent

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

SAMPLES_KEPT = 1024


class Subscription:
    """An async iterator of events from the moment it was made until it or the engine is closed.

    One consumer at a time, on any event loop.
    """

    def __init__(self, hub: EventHub) -> None:
        self._hub = hub
        self._lock = threading.Lock()
        self._facts: deque[tuple[int, Event]] = deque()
        self._samples: deque[tuple[int, Event]] = deque(maxlen=SAMPLES_KEPT)
        self._count = 0
        self._closed = False
        self._bell = Bell()

    def push(self, event: Event) -> None:
        """Take an event, from any thread."""
        with self._lock:
            queue = self._facts if isinstance(event, AckEvent | StateEvent | LinkEvent) else self._samples
            queue.append((self._count, event))
            self._count += 1
        self._bell.ring()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while True:
            with self._lock:
                event = self._pop()
                if event is not None:
                    return event
                if self._closed:
                    raise StopAsyncIteration
            await self._bell.until(self._has_news, lambda: inf)

    def _has_news(self) -> bool:
        return bool(self._facts or self._samples or self._closed)

    def _pop(self) -> Event | None:
        queues = [queue for queue in (self._facts, self._samples) if queue]
        if not queues:
            return None
        return min(queues, key=lambda queue: queue[0][0]).popleft()[1]

    def close(self) -> None:
        """End the iteration, after what is queued; idempotent, from any thread."""
        self._hub.remove(self)
        with self._lock:
            self._closed = True
        self._bell.ring()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EventHub:
    """Everyone who listens; forgets those that were dropped. `record` gets every event first, and may not wait."""

    def __init__(self, record: Callable[[Event], None] | None = None) -> None:
        self._record = record
        self._lock = threading.Lock()
        self._refs: tuple[weakref.ref[Subscription], ...] = ()
        self._closed = False

    def subscribe(self) -> Subscription:
        """A new subscription; already at its end if the engine is closed."""
        subscription = Subscription(self)
        with self._lock:
            closed = self._closed
            self._refs = (*self._alive_but(None), weakref.ref(subscription))
        if closed:
            subscription.close()
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Forget one."""
        with self._lock:
            self._refs = self._alive_but(subscription)

    def _alive_but(self, gone: Subscription | None) -> tuple[weakref.ref[Subscription], ...]:
        return tuple(one for one in self._refs if one() not in {None, gone})

    def push(self, event: Event) -> None:
        """Tell everyone."""
        if self._record is not None:
            self._record(event)
        for subscription in self._everyone():
            subscription.push(event)

    @property
    def heard(self) -> bool:
        """Whether anyone listens."""
        return bool(self._everyone())

    def close(self) -> None:
        """End every subscription."""
        with self._lock:
            self._closed = True
        for subscription in self._everyone():
            subscription.close()

    def _everyone(self) -> list[Subscription]:
        return [subscription for one in self._refs if (subscription := one()) is not None]
