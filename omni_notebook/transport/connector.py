"""The bounded place between two stages where results wait for a stage that is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

CAPACITY = 64


class Connector:
    """Counts requests on their way to a stage, so that a closed stage holds back the one that feeds it.

    While the downstream stage is open nothing is held back. While it is closed, at most `capacity` requests wait in
    host memory or are being computed for it; further ones are not started upstream.
    """

    def __init__(self, *, is_open: Callable[[], bool], parked: Callable[[], int], capacity: int = CAPACITY) -> None:
        self._is_open = is_open
        self._parked = parked
        self._capacity = capacity
        self._started: set[str] = set()

    def may_start(self, request_id: str) -> bool:
        """Whether the upstream stage may begin this request."""
        if request_id in self._started or self._is_open():
            return True
        return self._parked() + len(self._started) < self._capacity

    def started(self, request_id: str) -> None:
        """The upstream stage began it; it holds a place until `arrived`."""
        self._started.add(request_id)

    def arrived(self, request_id: str) -> None:
        """It is parked downstream, or ended."""
        self._started.discard(request_id)
