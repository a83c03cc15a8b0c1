"""Ctrl-C in the middle of what a test does: once something is seen, not after a time that suits one machine only."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def ctrl_c_once(seen: Callable[[], object]) -> Iterator[None]:
    """Interrupt this process as soon as `seen()` is true while the block runs."""
    over, deciding, raised = threading.Event(), threading.Lock(), []

    def press() -> None:
        while not over.wait(0.001):
            try:
                if not seen():
                    continue
            except Exception as error:  # noqa: BLE001  (it belongs to the test)
                raised.append(error)
            with deciding:
                if not over.is_set():
                    os.kill(os.getpid(), signal.SIGINT)
            return

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        with deciding:
            over.set()
        thread.join()
        for error in raised:
            raise error
