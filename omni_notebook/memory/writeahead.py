"""One background copy at a time, in a daemon thread that can be told to stop between two chunks."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from omni_notebook.errors import OmniError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class WriteAhead:
    """Runs `copy(stop)`; a failure (a full disk) is logged, and the sleep that needs the backup meets it again."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self, copy: Callable[[Callable[[], bool]], object]) -> None:
        """Start; a copy before it must have been stopped."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(copy, self._stop), daemon=True, name="omni-write-ahead")
        self._thread.start()

    @staticmethod
    def _run(copy: Callable[[Callable[[], bool]], object], stop: threading.Event) -> None:
        try:
            copy(stop.is_set)
        except (OmniError, OSError, RuntimeError) as error:  # no thread can be started any more: the process ends
            _log.warning("the backup ahead of a sleep was not made: %s", error)

    def stop(self) -> None:
        """Stop at the next chunk and wait for the thread's end; without one it does nothing."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def wait(self, timeout_s: float) -> bool:
        """Whether no copy runs, after waiting at most `timeout_s`."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()
