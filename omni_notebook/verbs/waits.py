"""How work of several steps waits for each of them: in the cell that runs, or on a thread of its own."""

from __future__ import annotations

import concurrent.futures
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, TypeVar

from omni_notebook.errors import EngineClosedError, ServerLostError
from omni_notebook.verbs.frontend import POLL_S, PlainFrontend, Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.verbs.engine_api import Engine
    from omni_notebook.verbs.frontend import Frontend
    from omni_notebook.verbs.interrupts import Held

_T = TypeVar("_T")
LOOK_S = 1.8
"""So long whoever was interrupted waits for what can be said about it; an order that was cancelled has half of it."""


class Wait(Protocol):
    """Waits for one step; whoever is asked to stop raises KeyboardInterrupt, and the step goes on."""

    def __call__(self, future: Future[_T], gauge: Callable[[], Progress] | None = None) -> _T:
        """The step's result."""


def here(frontend: Frontend) -> Frontend:
    """The front end for waits on this thread: only the main one may show anything."""
    return frontend if threading.current_thread() is threading.main_thread() else PlainFrontend()


def promptly(engine: Engine | None, look: Callable[[], _T]) -> _T:
    """What `look` finds out about an engine after an interrupt.

    Raises:
        ServerLostError: its server does not tell within `LOOK_S`.
    """
    if engine is None or engine.url is None:
        return look()
    try:
        return in_thread(look, "omni-look").result(LOOK_S)
    except TimeoutError:
        msg = f"{engine.url} does not answer at the moment; %omni status asks it again"
        raise ServerLostError(msg) from None


class Foreground:
    """Waits in the cell that runs, and shows progress there; `held` are the interrupts that came between steps."""

    def __init__(self, frontend: Frontend, held: Held) -> None:
        self._frontend = here(frontend)
        self._held = held

    def __call__(self, future: Future[_T], gauge: Callable[[], Progress] | None = None) -> _T:
        """The step's result.

        Raises:
            KeyboardInterrupt: Ctrl-C.
            EngineClosedError: the engine was stopped meanwhile.
        """
        self._held.raise_arrived()
        return _ended(lambda: self._frontend.wait(future, gauge, self._held.raise_arrived))


class Background:
    """Waits on a thread of its own until `stop` is set; prints nothing, `progress` tells how far the step is."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._gauge: Callable[[], Progress] | None = None

    @property
    def begun(self) -> bool:
        """Whether there was a step that tells how far it is."""
        return self._gauge is not None

    def progress(self) -> Progress:
        """How far the present step is."""
        return Progress("running") if self._gauge is None else self._gauge()

    def __call__(self, future: Future[_T], gauge: Callable[[], Progress] | None = None) -> _T:
        """The step's result.

        Raises:
            KeyboardInterrupt: `stop` was set.
            EngineClosedError: the engine was stopped meanwhile.
        """
        self._gauge = gauge or self._gauge
        while not self.stop.is_set():
            if concurrent.futures.wait([future], timeout=POLL_S).done:
                return _ended(future.result)
        raise KeyboardInterrupt


def _ended(result: Callable[[], _T]) -> _T:
    try:
        return result()
    except concurrent.futures.CancelledError:  # nobody here cancels and then waits: the engine's loop has ended
        msg = "the engine was stopped meanwhile; start a new one"
        raise EngineClosedError(msg) from None


def in_thread(work: Callable[[], _T], name: str) -> Future[_T]:
    """Work in a daemon thread, so that the caller can show progress and be interrupted."""
    future: Future[_T] = Future()

    def target() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (handed to whoever waits)
            future.set_exception(error)

    threading.Thread(target=target, name=name, daemon=True).start()
    return future
