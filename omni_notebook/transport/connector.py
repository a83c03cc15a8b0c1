"""The bounded place between two stages where results wait for the stage that takes them.

A result itself (token ids, hidden states) stays in host memory; in mp it lies in the shared memory frame in which the
rank that made it sent it, and goes on to the next rank in another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

CAPACITY = 64


class Connector:
    """Counts requests on their way to a stage, so that a slow or closed stage holds back the one that feeds it.

    At most `capacity` requests are parked in front of the stage or being computed for it; further ones are not started
    upstream, until it takes some.
    """

    def __init__(self, *, parked: Callable[[], int], capacity: int = CAPACITY) -> None:
        self._parked = parked
        self._capacity = capacity
        self._started: set[str] = set()

    def may_start(self, request_id: str) -> bool:
        """Whether the upstream stage may begin this request."""
        if request_id in self._started:
            return True
        return self._parked() + len(self._started) < self._capacity

    def started(self, request_id: str) -> None:
        """The upstream stage began it; it holds a place until `arrived`."""
        self._started.add(request_id)

    def arrived(self, request_id: str) -> None:
        """It is parked downstream, or ended."""
        self._started.discard(request_id)
