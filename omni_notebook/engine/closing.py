"""Ending an engine: asked for, dropped, or at the interpreter's exit; once, and never by blocking its own threads."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from omni_notebook.engine.loop import EngineLoop

SHUTDOWN_S = 10.0


class Ending(Protocol):
    """What can be ended."""

    async def shutdown(self) -> None:
        """End it; idempotent."""


class Once(ABC):
    """Ends something on a thread of its own, once, so that a Ctrl-C in the caller does not stop it half way.

    Args:
        title: the thread's name.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    @abstractmethod
    def close(self) -> None:
        """End it and wait for it; every caller waits, whoever came first."""

    @abstractmethod
    def _end(self) -> None: ...

    def collected(self) -> None:
        """It was dropped, or the interpreter exits: the main thread waits, others must not be held up."""
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:
            self._begin()

    def _begin(self) -> threading.Thread | None:
        if os.getpid() != self._pid:  # a forked child has nothing to end: its threads stayed in the parent
            return None
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._end, name=self._title, daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # too late in the interpreter's exit for a new thread
                    self._end()
                    return None
            return self._thread


class Closer(Once):
    """Ends one engine.

    Args:
        core: what is ended, on the loop.
        loop: the engine's loop, ended afterwards.
        seconds: what ending the core may take.
    """

    def __init__(self, core: Ending, loop: EngineLoop, seconds: float = SHUTDOWN_S) -> None:
        super().__init__("omni-shutdown")
        self._core = core
        self._seconds = seconds
        self._loop = loop

    def close(self) -> None:
        """End the engine and wait for it; every caller waits, whoever came first."""
        thread = self._begin()
        if thread is not None and not self._loop.here:
            thread.join(self._seconds + SHUTDOWN_S)

    def _end(self) -> None:
        with contextlib.suppress(TimeoutError):
            self._loop.submit(self._core.shutdown()).result(self._seconds)
        self._loop.stop(SHUTDOWN_S)
