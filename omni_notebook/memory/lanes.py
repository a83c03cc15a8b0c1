"""Work on many chunks at once: one lane a copy thread, each lane's chunks in order, idle lanes help the others.

One core can not fill the memory bus; and a file takes one writer at a time, so each lane has a spill file of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from omni_notebook.memory.host import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from omni_notebook.memory.arena import Chunk

MAX_LANES = 2
_ALONE = 4  # so few chunks are done sooner than a thread starts


def default_lanes() -> int:
    """How many threads a copy uses."""
    return max(1, min(MAX_LANES, usable_cpus()))


def never() -> bool:
    """A `stop` that does not."""
    return False


class _Run:
    def __init__(self, chunks: Iterable[Chunk], work: Callable[[Chunk], None], lanes: int) -> None:
        self.queues: list[deque[Chunk]] = [deque() for _ in range(lanes)]
        for chunk in chunks:
            self.queues[chunk.index % lanes].append(chunk)
        self.work = work
        self.halt = threading.Event()
        self.error: BaseException | None = None

    def drain(self, lane: int, stop: Callable[[], bool]) -> None:
        """Do the lane's chunks, then what is left of the others'."""
        for queue in (*self.queues[lane:], *self.queues[:lane]):
            while not self.halt.is_set():
                if stop():
                    self.halt.set()
                    return
                try:
                    chunk = queue.popleft()
                except IndexError:
                    break
                self.work(chunk)

    def help(self, lane: int) -> None:
        """`drain` in a helper thread: what goes wrong is kept for the caller."""
        try:
            self.drain(lane, never)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.error = self.error or error
            self.halt.set()


def run_lanes(
    chunks: Iterable[Chunk], work: Callable[[Chunk], None], *, lanes: int, stop: Callable[[], bool] = never
) -> bool:
    """Do `work` on each chunk, on `lanes` threads (the caller's is one); False if `stop()` ended it early.

    `stop` is asked between chunks, by the caller's thread only. No thread is left when this returns or raises; what
    `work` raised in any lane is raised here.
    """
    run = _Run(chunks, work, lanes)
    count = sum(map(len, run.queues))
    helpers = [] if count < _ALONE else [threading.Thread(target=run.help, args=(n,)) for n in range(1, lanes)]
    started = []
    try:
        for helper in helpers:
            helper.daemon = True
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
