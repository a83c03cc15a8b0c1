"""One background thread of a rank: jobs in order, and a way to wait for all that were given."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Lane:
    """First come, first served; any thread may call."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Call `job` after those before it."""
        return self._thread.submit(job)

    def join(self) -> None:
        """Return once every job given so far is done, one that nobody holds any more too."""
        wait([self._thread.submit(_nothing)])

    def close(self, *, cancel: bool = False) -> None:
        """Finish what was given (`cancel`: only what runs), then end the thread; idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=cancel)


def _nothing() -> None:
    """The last in the queue: when it is done all before it are."""
