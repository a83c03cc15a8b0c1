"""Work on many items at once: one lane a thread, each lane's items in order, idle lanes help the others.

One core can not fill the memory bus; and a file takes one writer at a time, so each lane has a spill file of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from omni_notebook.memory.host import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

T = TypeVar("T")

MAX_LANES = 2
FEW = 4  # so few chunks are done sooner than a thread starts


def default_lanes() -> int:
    """How many threads a copy uses."""
    return max(1, min(MAX_LANES, usable_cpus()))


def never() -> bool:
    """A `stop` that does not."""
    return False


class _Run(Generic[T]):
    def __init__(self, queues: Sequence[deque[T]], work: Callable[[T], object]) -> None:
        self.queues = queues
        self.work = work
        self.halt = threading.Event()
        self.error: BaseException | None = None

    def drain(self, lane: int, stop: Callable[[], bool]) -> None:
        """Do the lane's items, then what is left of the others'."""
        for queue in (*self.queues[lane:], *self.queues[:lane]):
            while not self.halt.is_set():
                if stop():
                    self.halt.set()
                    return
                try:
                    item = queue.popleft()
                except IndexError:
                    break
                self.work(item)

    def help(self, lane: int) -> None:
        """`drain` in a helper thread: what goes wrong is kept for the caller."""
        try:
            self.drain(lane, never)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.error = self.error or error
            self.halt.set()


def run_lanes(
    items: Iterable[T],
    work: Callable[[T], object],
    *,
    lanes: int,
    stop: Callable[[], bool] = never,
    lane_of: Callable[[T], int] | None = None,
    alone_under: int = FEW,
) -> bool:
    """Do `work` on each item, on `lanes` threads (the caller's is one); False if `stop()` ended it early.

    `lane_of` modulo `lanes` is an item's lane, without it they take turns; fewer items than `alone_under` get no
    helpers. `stop` is asked between items, by the caller's thread only. No thread is left when this returns or
    raises; what `work` raised in any lane is raised here.
    """
    queues: list[deque[T]] = [deque() for _ in range(lanes)]
    for place, item in enumerate(items):
        queues[(place if lane_of is None else lane_of(item)) % lanes].append(item)
    run = _Run(queues, work)
    alone = sum(map(len, queues)) < alone_under
    helpers = [threading.Thread(target=run.help, args=(lane,), daemon=True) for lane in range(1, 1 if alone else lanes)]
    started = []
    try:
        for helper in helpers:
            helper.start()
            started.append(helper)
        run.drain(0, stop)
    except BaseException:
        run.halt.set()
        raise
    finally:
        for helper in started:
            helper.join()
    if run.error is not None:
        raise run.error
    return not run.halt.is_set()
