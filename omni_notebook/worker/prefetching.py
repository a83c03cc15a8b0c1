"""Asynchronous prefetch: the next batch's conditioning is moved to the device by a thread while this one runs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from omni_notebook.worker.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from concurrent.futures import Future

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Holds what was fetched, by key, until a batch takes it; any thread may call."""

    def __init__(self) -> None:
        self._lane = Lane("omni-prefetch")
        self._fetched: dict[int, Future[T]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._fetched)

    def fetch(self, key: int, load: Callable[[], T]) -> None:
        """Call `load` on the thread; a key that is there already is left alone."""
        with self._lock:
            if key not in self._fetched:
                self._fetched[key] = self._lane.submit(load)

    def keep(self, keys: Collection[int]) -> None:
        """Drop all others: nobody will take them."""
        with self._lock:
            for key in self._fetched.keys() - set(keys):
                self._fetched.pop(key).cancel()

    def take(self, key: int) -> T:
        """What was fetched under `key`, waiting for it if it is still on its way; it is not held any more.

        Raises:
            KeyError: it was never asked for, or was dropped.
            Exception: what `load` raised.
        """
        with self._lock:
            future = self._fetched.pop(key)
        return future.result()

    def join(self) -> None:
        """Return once nothing is on its way, of what was dropped meanwhile neither."""
        self._lane.join()

    def close(self) -> None:
        """Drop everything and end the thread; idempotent."""
        self.keep(())
        self._lane.close(cancel=True)
