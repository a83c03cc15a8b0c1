"""Ending a connection: asked for, dropped, or at the interpreter's exit; once, never by blocking its own threads."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from typing import TYPE_CHECKING, Any

from omni_notebook.engine.closing import Once
from omni_notebook.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from omni_notebook.engine.events import EventHub
    from omni_notebook.engine.loop import EngineLoop

    Ends = Sequence[tuple[EngineLoop, Sequence[Callable[[], Coroutine[Any, Any, None]]]]]

CLOSING_S = 3.0


class Closer(Once):
    """Closes subscriptions, connections and loops; `ends` are the loops with what is to be awaited on each first."""

    def __init__(self, hub: EventHub, ends: Ends) -> None:
        super().__init__("omni-disconnect")
        self._hub = hub
        self._ends = ends

    @property
    def closed(self) -> bool:
        """Whether it has begun, or this is a fork of the process whose connection it is."""
        return self._thread is not None or os.getpid() != self._pid

    def close(self) -> None:
        """Close and wait for it; every caller waits, whoever came first."""
        thread = self._begin()
        if thread is not None and not any(loop.here for loop, _ in self._ends):
            thread.join(4 * CLOSING_S)

    def _end(self) -> None:
        self._hub.close()
        for loop, works in self._ends:
            for work in works:
                with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError, EngineClosedError):
                    loop.submit(work()).result(CLOSING_S)
            loop.stop(CLOSING_S)
