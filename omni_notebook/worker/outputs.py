"""Asynchronous output: a finished batch is copied and encoded on a thread of its own while the next one runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_notebook.errors import ArgumentError
from omni_notebook.worker.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future


class Outputs:
    """What is on its way out, by batch; one worker thread puts and takes, first come, first served."""

    def __init__(self) -> None:
        self._lane = Lane("omni-output")
        self._leaving: dict[str, Future[Any]] = {}

    def put(self, batch_id: str, finish: Callable[[], Any]) -> None:
        """Call `finish` on the output thread, after those before it."""
        self._leaving[batch_id] = self._lane.submit(finish)

    def take(self, batch_id: str) -> Future[Any]:
        """What `finish` gives, once.

        Raises:
            ArgumentError: there is no such batch (it failed, or was taken before).
        """
        future = self._leaving.pop(batch_id, None)
        if future is None:
            msg = f"batch {batch_id} has no output here: it failed or was collected before"
            raise ArgumentError(msg)
        return future

    def join(self) -> None:
        """Return once everything that was put is done; what failed is told to who takes it."""
        self._lane.join()

    def close(self) -> None:
        """Finish what was put, then end the thread; idempotent."""
        self._lane.close()
