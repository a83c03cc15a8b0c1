"""Ending a connection: asked for, dropped, or at the interpreter's exit; once, never by blocking its own threads."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from omni_notebook.engine.events import EventHub
    from omni_notebook.engine.loop import EngineLoop

    Ends = Sequence[tuple[EngineLoop, Sequence[Callable[[], Coroutine[Any, Any, None]]]]]

CLOSING_S = 3.0


class Closer:
    """Closes subscriptions, connections and loops; `ends` are the loops with what is to be awaited on each first."""

    def __init__(self, hub: EventHub, ends: Ends) -> None:
        self._hub = hub
        self._ends = ends
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    @property
    def closed(self) -> bool:
        """Whether it has begun, or this is a fork of the process whose connection it is."""
        return self._thread is not None or os.getpid() != self._pid

    def close(self) -> None:
        """Close and wait for it; every caller waits, whoever came first."""
        thread = self._begin()
        if thread is not None and not any(loop.here for loop, _ in self._ends):
            thread.join(4 * CLOSING_S)

    def collected(self) -> None:
        """The connection was dropped, or the interpreter exits: the main thread waits, others must not be held up."""
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:
            self._begin()

    def _begin(self) -> threading.Thread | None:
        if os.getpid() != self._pid:
            return None
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._end, name="omni-disconnect", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # too late in the interpreter's exit for a new thread
                    self._end()
                    return None
            return self._thread

    def _end(self) -> None:
        self._hub.close()
        for loop, works in self._ends:
            for work in works:
                with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError, EngineClosedError):
                    loop.submit(work()).result(CLOSING_S)
            loop.stop(CLOSING_S)
