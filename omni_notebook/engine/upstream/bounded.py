"""Calls into upstream that end in time: what it swallows or lets hang becomes an error of ours."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from omni_notebook.engine.upstream.package import first_line
from omni_notebook.errors import DeadlineError, OmniError, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from omni_notebook.stages.waiting import Deadline

T = TypeVar("T")


class DaemonPool(concurrent.futures.ThreadPoolExecutor):
    """A loop's default executor whose threads do not hold the interpreter's exit: upstream waits there, maybe for ever.

    A thread a call; calls are few.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        """Run it on a daemon thread of its own."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        threading.Thread(target=_carry, args=(future, fn, args, kwargs), name="upstream-call", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing is waited for: what still runs has been given up."""
        del wait, cancel_futures


def _carry(future: concurrent.futures.Future[Any], fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        value = fn(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001  (it belongs to whoever waits)
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            future.set_exception(error)
    else:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            future.set_result(value)


class Calls:
    """Runs upstream's coroutines on the engine's loop; one that does not end in time goes on without its caller."""

    def __init__(self) -> None:
        self._left: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, T], deadline: Deadline, what: str) -> T:
        """Its result.

        Raises:
            DeadlineError: it did not end in time, and goes on.
            UpstreamError: it raised; its own words, `__cause__`.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._left.add(task)
        task.add_done_callback(self._forget)
        await asyncio.wait({task}, timeout=deadline.left_s())
        if not task.done():
            msg = f"{what} had not ended after {deadline.seconds:g} s; vllm_omni goes on with it"
            raise DeadlineError(msg)
        if task.cancelled():
            msg = f"{what} was cancelled by vllm_omni"
            raise UpstreamError(msg)
        error = task.exception()
        if isinstance(error, OmniError):
            raise error
        if error is not None:
            msg = f"{what} failed: {first_line(error)}"
            raise UpstreamError(msg) from error
        return task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # seen: a caller that has given up does not read it

    def cancel(self) -> None:
        """Let go of what nobody waits for any more."""
        for task in list(self._left):
            task.cancel()
