"""The contract of an executor: it carries calls to the ranks of one replica and gathers every rank's answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from omni_notebook.errors import DeadlineError, EngineClosedError, OmniError, UnsupportedError

if TYPE_CHECKING:
    import asyncio

    from omni_notebook.errors import WorkerDiedError
    from omni_notebook.protocol import RankId, RankStatus
    from omni_notebook.worker.reports import WorkerSpec


class RankAnswer(NamedTuple):
    """What one rank said: a value, or the error that it raised or that stands for its silence."""

    where: RankId
    value: Any
    error: BaseException | None

    def unwrap(self) -> Any:
        """The value; raises the rank's error."""
        if self.error is not None:
            raise self.error
        return self.value


OnDeath = Callable[["RankId", "WorkerDiedError"], None]
"""Called on the engine's loop when a rank ends that was not asked to."""


class Executor(Protocol):
    """The ranks of one replica. Calls reach each rank in the order in which they were made.

    A worker's method may return a `concurrent.futures.Future`: the rank goes on with its next order, and this one is
    answered when the future is done; EngineClosedError if the worker's `shutdown` leaves it open.
    """

    ranks: tuple[RankId, ...]

    async def call(
        self, method: str, *args: Any, timeout_s: float | None = None, settle_s: float | None = None
    ) -> list[RankAnswer]:
        """Call `method` on every rank and gather the answers, in rank order; never raises for a rank.

        A rank that has not answered after `timeout_s` answers DeadlineError (its call goes on); so does one that has
        not after `settle_s` since the first of the others answered with an error. A rank that is gone answers
        WorkerDiedError at once; a method that the worker does not have answers UnsupportedError.
        """
        ...

    def cancel(self, task_id: str) -> None:
        """Tell every rank that an order should stop if it has not committed; returns at once."""
        ...

    def tell(self, method: str, *args: Any) -> None:
        """Call one of `TOLD` on every rank, past the orders in progress; returns at once, nobody answers."""
        ...

    def memory(self) -> list[RankStatus]:
        """Every rank's memory without waiting for its orders."""
        ...

    def log_tail(self, rank: int) -> list[str]:
        """The last lines that a rank's process wrote; none where it has no process of its own."""
        ...

    def shutdown(self) -> None:
        """Begin to end the ranks, after the calls made before; idempotent, returns at once, from any thread."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the ranks are gone and have given everything back."""
        ...


class ExecutorFactory(Protocol):
    """Makes an executor for one replica; returns at once, the first call waits for the workers."""

    def __call__(self, specs: tuple[WorkerSpec, ...], on_death: OnDeath | None = None, /) -> Executor:
        """One spec a rank; `on_death` is called on the loop when a rank ends by itself."""
        ...


_log = logging.getLogger(__name__)
TOLD = frozenset({"cancel", "prefetch"})
"""The worker methods that any thread may call at any time and that never wait."""


def told(method: str) -> None:
    """Raise UnsupportedError unless `method` is one of `TOLD`."""
    if method not in TOLD:
        msg = f"{method!r} can not overtake orders; only {', '.join(sorted(TOLD))} can. Nothing was called"
        raise UnsupportedError(msg)


def follow(worker: Any, method: str, args: tuple[Any, ...]) -> None:
    """Call what a rank was told; nobody waits for it, so an error goes to the log."""
    try:
        method_of(worker, method)(*args)
    except Exception:  # noqa: BLE001  (it must not disturb whoever told)
        _log.exception("%s(...) could not be followed", method)


def on_loop(
    loop: asyncio.AbstractEventLoop, thread: int, act: Callable[[], object], alone: Callable[[], object]
) -> None:
    """Do `act` on the loop (which runs on `thread`) that an executor belongs to, from any thread.

    `alone` is done here instead where that loop has ended, and nobody can hear the ranks any more.
    """
    if threading.get_ident() == thread and loop.is_running():
        act()
        return
    try:
        loop.call_soon_threadsafe(act)
    except RuntimeError:
        alone()


def silent(where: RankId, method: str, waited_s: float) -> RankAnswer:
    """The answer that stands for a rank that has not answered in time."""
    message = f"{where.title} of stage {where.stage_id} did not answer {method!r} within {round(waited_s, 1):g} s"
    return RankAnswer(where, None, DeadlineError(message))


def shut_down(where: RankId) -> EngineClosedError:
    """The answer to calls that a shutdown leaves open, and to those after it."""
    return EngineClosedError(f"stage {where.stage_id} was shut down")


def called_off(where: RankId, method: str) -> OmniError:
    """The answer that stands for a worker's future that was cancelled."""
    return OmniError(f"{where.title} of stage {where.stage_id} called its answer to {method!r} off")


def method_of(worker: Any, name: str) -> Callable[..., Any]:
    """A worker's public method.

    Raises:
        UnsupportedError: it has none of this name.
    """
    method = None if name.startswith("_") else getattr(worker, name, None)
    if not callable(method):
        msg = f"{type(worker).__name__} has no method {name!r}; nothing was called"
        raise UnsupportedError(msg)
    found: Callable[..., Any] = method
    return found
