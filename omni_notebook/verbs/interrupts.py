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


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A SIGINT that arrives in here is raised at the end.

    Raises:
        KeyboardInterrupt: one arrived.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield  # None: set outside Python, and not ours to put back
        return
    arrived: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if arrived:
        raise KeyboardInterrupt
