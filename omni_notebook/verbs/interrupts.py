"""Ctrl-C at moments when it would tear something apart: it waits for the end of a few lines."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class InterruptedVerb(KeyboardInterrupt):
    """Ctrl-C while a verb ran; the message says what state things are in now and what to call.

    Attributes:
        result: what the order returned, where it had ended before the interrupt; else None.
    """

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class Held:
    """Interrupts that have arrived and were not raised yet."""

    def __init__(self) -> None:
        self._arrived = False

    def note(self, *_signal: object) -> None:
        """One arrives; a signal handler."""
        self._arrived = True

    def raise_arrived(self) -> None:
        """Raise what has arrived, at a place where it tears nothing apart.

        Raises:
            KeyboardInterrupt: one has arrived.
        """
        if self._arrived:
            self._arrived = False
            raise KeyboardInterrupt


@contextmanager
def interrupts_held() -> Iterator[Held]:
    """A SIGINT that arrives in here is raised at the end, or where the code in here asks for it.

    Raises:
        KeyboardInterrupt: one arrived.
    """
    held = Held()
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield held  # None: set outside Python, and not ours to put back
        return
    signal.signal(signal.SIGINT, held.note)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, handler)
    held.raise_arrived()
