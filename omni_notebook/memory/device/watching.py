"""A look at the host now and then, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from omni_notebook.errors import OmniError

if TYPE_CHECKING:
    from collections.abc import Callable

WATCH_S = 0.5
"""How often. A look takes a fifth of a millisecond."""
_log = logging.getLogger(__name__)


class Watch:
    """Calls `look` every `period_s` from `start` to `stop`; what it raises is logged, once for the same words."""

    def __init__(self, look: Callable[[], None], period_s: float) -> None:
        self._look, self._period_s = look, period_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="omni-host-watch")
            self._thread.start()

    def _run(self) -> None:
        said = ""
        while not self._ended.wait(self._period_s):
            try:
                self._look()
            except (OmniError, OSError, RuntimeError) as error:
                if str(error) != said:
                    said = str(error)
                    _log.warning("the host's memory could not be looked after: %s", error)

    def stop(self) -> None:
        """End, and wait until it has; idempotent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
