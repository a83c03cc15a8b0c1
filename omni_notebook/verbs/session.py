"""The session: the engine that verbs work on, what they last answered, and how they wait.

One session a process (`session()`), because a kernel has one user and one memory; tests make their own.
"""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

from omni_notebook.errors import EngineClosedError
from omni_notebook.verbs import hints
from omni_notebook.verbs.frontend import Frontend, PlainFrontend

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from concurrent.futures import Future

    from omni_notebook.protocol import OmniACK, StageStatus
    from omni_notebook.verbs.engine_api import Engine
    from omni_notebook.verbs.frontend import Progress

_T = TypeVar("_T")

CANCEL_GRACE_S = 0.9
_SETTLE_POLL_S = 0.02
_NO_ENGINE = "no engine is running; %omni start starts the demo pipeline, %omni start FOLDER another model"


class InterruptedVerb(KeyboardInterrupt):
    """Ctrl-C while a verb waited; the message says what state things are in now and what to call."""


class Session:
    """What verbs share.

    Attributes:
        frontend: how this session shows things and waits.
        acks: the answers to the last sleep or wake, also when it failed.
        last_traceback: the full traceback of the last error, for `%omni traceback`.
    """

    def __init__(self, frontend: Frontend | None = None) -> None:
        self.frontend: Frontend = frontend or PlainFrontend()
        self.acks: list[OmniACK] = []
        self.last_traceback: str | None = None
        self._engine: Engine | None = None

    @property
    def running(self) -> Engine | None:
        """The engine, or None when none was started or the last one was shut down."""
        if self._engine is not None and self._engine.status().closed:
            self._engine = None
        return self._engine

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            EngineClosedError: there is none.
        """
        engine = self.running
        if engine is None:
            raise EngineClosedError(_NO_ENGINE)
        return engine

    def use(self, engine: Engine | None) -> None:
        """Make `engine` the one that verbs work on; None forgets the present one without stopping it."""
        self._engine = engine

    def call(
        self,
        coroutine: Coroutine[Any, Any, _T],
        *,
        stages: Sequence[int] | None = None,
        gauge: Callable[[], Progress] | None = None,
        tick: Callable[[], None] | None = None,
    ) -> _T:
        """Run an engine's coroutine and wait for it; `stages` are those that an interrupt reports on (None = all).

        Raises:
            EngineClosedError: there is no engine.
            InterruptedVerb: Ctrl-C; the coroutine was cancelled and had a second to come to rest.
        """
        engine = self.running
        if engine is None:
            coroutine.close()
            raise EngineClosedError(_NO_ENGINE)
        future: Future[_T] | None = None
        try:
            future = engine.submit(coroutine)
            return self.frontend.wait(future, gauge, tick)
        except KeyboardInterrupt:
            if future is not None:
                future.cancel()
            raise InterruptedVerb(self._after_cancel(stages)) from None

    def _after_cancel(self, stages: Sequence[int] | None) -> str:
        deadline = time.monotonic() + CANCEL_GRACE_S
        picked = self._picked(stages)
        while any(map(hints.is_moving, picked)) and time.monotonic() < deadline:
            time.sleep(_SETTLE_POLL_S)
            picked = self._picked(stages)
        if not picked:
            return f"interrupted; {_NO_ENGINE}"
        calm = not any(hints.call_that_helps(stage) for stage in picked)
        return f"interrupted and cancelled; now {hints.describe(picked)}" + ("; run the cell again to retry" * calm)

    def _picked(self, stages: Sequence[int] | None) -> list[StageStatus]:
        engine = self.running
        return [] if engine is None else hints.pick(engine.status(), stages)

    def keep(self, acks: Sequence[OmniACK], out: str | None) -> list[OmniACK]:
        """Remember the answers and give them to the user's variable; the list that the front end shows."""
        self.acks = self.frontend.dress(acks)
        self.store(out, self.acks)
        return self.acks

    def store(self, out: str | None, value: object) -> None:
        """Keep `value` in the user's variable `out`, if one was named."""
        if out is not None:
            self.frontend.store(out, value)

    def note_error(self, error: BaseException) -> None:
        """Keep an error's traceback as text, so that its frames (and the tensors in them) can go."""
        self.last_traceback = "".join(traceback.format_exception(error))


_SESSION = Session()


def session() -> Session:
    """This process's session."""
    return _SESSION


def current() -> Engine:
    """The engine that `%omni start` started.

    Raises:
        EngineClosedError: there is none.
    """
    return _SESSION.engine


def last_acks() -> list[OmniACK]:
    """Every rank's answer to the last sleep or wake, also when it failed; empty before the first."""
    return _SESSION.acks
