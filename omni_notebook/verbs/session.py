"""The session: the engine that verbs work on, what they last answered, and how they wait.

One session a process (`session()`), because a kernel has one user and one memory; tests make their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from typing import TYPE_CHECKING, Any, TypeVar, cast

from omni_notebook.errors import ArgumentError, EngineClosedError, ServerLostError
from omni_notebook.verbs import hints
from omni_notebook.verbs.frontend import Frontend, PlainFrontend
from omni_notebook.verbs.interrupts import InterruptedVerb, interrupts_held
from omni_notebook.verbs.jobs import Jobs
from omni_notebook.verbs.waits import promptly

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from concurrent.futures import Future

    from omni_notebook.protocol import EngineStatus, OmniACK, StageStatus
    from omni_notebook.verbs.engine_api import Engine, ServedEngine
    from omni_notebook.verbs.frontend import Progress

_T = TypeVar("_T")

CANCEL_GRACE_S = 0.9
_SETTLE_POLL_S = 0.02
_NO_ENGINE = "no engine is running; %omni start starts the demo pipeline, %omni start FOLDER another model"


class Session:
    """What verbs share.

    Attributes:
        frontend: how this session shows things and waits.
        acks: the answers to the last sleep or wake, also when it failed.
        last_traceback: the full traceback of the last error or interrupt, under the line it belongs to.
        jobs: what runs behind the notebook.
    """

    def __init__(self, frontend: Frontend | None = None) -> None:
        self.frontend: Frontend = frontend or PlainFrontend()
        self.acks: list[OmniACK] = []
        self.last_traceback: str | None = None
        self.jobs = Jobs(self)
        self._engine: Engine | None = None
        self._told: set[str] = set()

    @property
    def running(self) -> Engine | None:
        """The engine, or None when none was started or the last one was shut down."""
        return self._running_status()[0]

    @property
    def attached(self) -> Engine | None:
        """The same, but an engine on a server also where that does not answer now; it is not asked."""
        served = cast("ServedEngine | None", self._engine)
        if served is None or served.url is None:
            return self.running
        self._engine = None if served.closed else served
        return self._engine

    def _running_status(self) -> tuple[Engine | None, EngineStatus | None]:
        """The engine and its status, or two Nones; one look, because a look measures all memory."""
        status = None if self._engine is None else self._engine.status()
        if status is None or status.closed:
            self._engine = None
            return None, None
        return self._engine, status

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

    def stage_ids(self, words: Sequence[Sequence[str]]) -> list[int] | None:
        """What the engine takes for stages as a line names them: None for "all"; a repeated one counts once.

        Raises:
            ArgumentError: no stage has this name; unknown ids are left to the engine to refuse.
        """
        given = [word for some in words for word in some]
        if "all" in given or not given:
            return None
        if all(word.isdecimal() for word in given):
            return sorted(set(map(int, given)))
        stages = self.engine.status().stages
        found = [[int(word)] if word.isdecimal() else [s.stage_id for s in stages if s.name == word] for word in given]
        for word, ids in zip(given, found, strict=True):
            if len(ids) != 1:
                known = ", ".join(f"{stage.stage_id} {stage.name}" for stage in stages)
                what = "names several stages, take the number" if ids else "is no stage"
                msg = f"{word!r} {what}; stages are: {known}; nothing was changed"
                raise ArgumentError(msg)
        return sorted({ids[0] for ids in found})

    def call(
        self,
        make: Callable[[Engine], Coroutine[Any, Any, _T]],
        *,
        order: str | None = None,
        stages: Sequence[int] | None = None,
        gauge: Callable[[], Progress] | None = None,
        tick: Callable[[], None] | None = None,
    ) -> _T:
        """Run an engine's coroutine and wait for it.

        `order` names what moves stages between states, so that an interrupt can say what became of it; `stages` are
        those that it reports on (None = all).

        Raises:
            EngineClosedError: there is no engine.
            InterruptedVerb: Ctrl-C; the coroutine was cancelled and had a second to come to rest.
        """
        engine, status = self._running_status()
        if engine is None or status is None:
            raise EngineClosedError(_NO_ENGINE)
        before = hints.pick(status, stages)
        future: Future[_T] | None = None
        try:
            with interrupts_held():  # a coroutine that was made is also run
                future = engine.submit(make(engine))
            return self.frontend.wait(future, gauge, tick)
        except KeyboardInterrupt:
            try:
                interrupted = promptly(engine, lambda: self._interrupted(future, order, before, stages))
            except ServerLostError as lost:
                interrupted = InterruptedVerb(f"interrupted; {lost}")
            raise interrupted from None

    def _interrupted(
        self, future: Future[_T] | None, order: str | None, before: Sequence[StageStatus], stages: Sequence[int] | None
    ) -> InterruptedVerb:
        if future is None or not future.cancel():
            result = _result(future)
            if order and result is not None:
                return self.too_late(order, stages, result)
        now = self._settled(stages)
        if not now:
            return InterruptedVerb(f"interrupted; {_NO_ENGINE}")
        calm = not any(hints.call_that_helps(stage) for stage in now)
        words = f"{hints.outcome(order, before, now)}; now {hints.describe(now)}"
        return InterruptedVerb(words + "; run the cell again to retry" * calm)

    def too_late(self, order: str, stages: Sequence[int] | None, result: object) -> InterruptedVerb:
        """What an interrupt comes to after the order has ended."""
        where = f" ({hints.LAST_ACKS} has the answers)" if isinstance(result, list) else ""
        words = f"interrupted too late: the {order} ended{where}; now {hints.describe(self._picked(stages))}"
        return InterruptedVerb(words, result)

    def _settled(self, stages: Sequence[int] | None) -> list[StageStatus]:
        """The stages once a cancelled order has come to rest, or after `CANCEL_GRACE_S`."""
        deadline = time.monotonic() + CANCEL_GRACE_S
        engine = self.running
        if engine is not None:
            with contextlib.suppress(TimeoutError, EngineClosedError):
                engine.submit(asyncio.sleep(0)).result(CANCEL_GRACE_S)  # the loop has seen the cancel
        picked = self._picked(stages)
        while any(map(hints.is_moving, picked)) and time.monotonic() < deadline:
            time.sleep(_SETTLE_POLL_S)
            picked = self._picked(stages)
        return picked

    def state_now(self) -> str:
        """Every stage's state and the call that helps, or how to start."""
        try:
            picked = promptly(self._engine, lambda: self._picked(None))
        except ServerLostError as lost:
            return str(lost)
        return f"now {hints.describe(picked)}" if picked else _NO_ENGINE

    def _picked(self, stages: Sequence[int] | None) -> list[StageStatus]:
        _, status = self._running_status()
        return [] if status is None else hints.pick(status, stages)

    def keep(self, acks: Sequence[OmniACK], out: str | None, order: str, *, interrupted: bool = False) -> list[OmniACK]:
        """Remember the answers to a "sleep" or "wake", give them to the user's variable; the list that is shown.

        Of an `interrupted` order that has none a server is not asked once more: it may be why.
        """
        here = self._engine is None or self._engine.url is None
        status = self._seen() if acks or here or not interrupted else None
        self._tell_notes(status)
        self.acks = self._dressed(acks, order, status)
        self.store(out, self.acks)
        return self.acks

    def dressed(self, acks: Sequence[OmniACK], order: str) -> list[OmniACK]:
        """The answers as this session's front end shows them, with the stages' states as they are now."""
        return self._dressed(acks, order, self._seen())

    def _dressed(self, acks: Sequence[OmniACK], order: str, status: EngineStatus | None) -> list[OmniACK]:
        stages = () if status is None else status.stages
        return self.frontend.dress(acks, order, {stage.stage_id: hints.memory_words(stage) for stage in stages})

    def _seen(self) -> EngineStatus | None:
        """The status; None where a server does not tell now, for its answers are kept all the same."""
        try:
            return promptly(self._engine, lambda: self._running_status()[1])
        except ServerLostError:
            return None

    def tell_notes(self) -> None:
        """Show what the engine wants a person to know, each line once."""
        self._tell_notes(self._running_status()[1])

    def tell_news(self) -> None:
        """Show what was heard of a server's engine meanwhile, each line once; asks nobody."""
        served = cast("ServedEngine | None", self._engine)
        if served is not None and served.url is not None:
            self._tell(served.news)

    def check_told(self, verb: str) -> None:
        """Return unless a server's engine is another one than people were told of: an order is for the one they saw.

        Raises:
            ServerLostError: it is; nothing was given to it, and the next order is for it.
            InterruptedVerb: Ctrl-C while the server was asked; it was given nothing.
        """
        served = cast("ServedEngine | None", self._engine)
        if served is None or served.url is None:
            return
        try:
            self._running_status()  # whoever answers says who it is
        except KeyboardInterrupt:
            msg = f"interrupted: the {verb} was not given yet; {self.state_now()}"
            raise InterruptedVerb(msg) from None
        new = [line for line in served.news if line not in self._told]
        if new:
            self.shown(new)
            msg = f"{new[-1]}. The {verb} was not given to this one: run the cell again if it is meant"
            raise ServerLostError(msg)

    def shown(self, lines: Sequence[str]) -> None:
        """These lines a person sees already."""
        self._told.update(lines)
        served = cast("ServedEngine | None", self._engine)
        if served is not None and served.url is not None:
            served.told(lines)

    def _tell_notes(self, status: EngineStatus | None) -> None:
        self._tell(() if status is None else status.notes)

    def _tell(self, lines: Sequence[str]) -> None:
        for line in dict.fromkeys(lines):
            if line not in self._told:
                self.frontend.write(f"{line}\n")
        self.shown(lines)

    def store(self, out: str | None, value: object) -> None:
        """Keep `value` in the user's variable `out`, if one was named."""
        if out is not None:
            self.frontend.store(out, value)

    def note_error(self, error: BaseException, line: str) -> None:
        """Keep an error's traceback as text, so that its frames (and the tensors in them) can go."""
        self.last_traceback = f"from: %omni {line.strip()}\n{''.join(traceback.format_exception(error))}"


def _result(future: Future[_T] | None) -> _T | None:
    """What a future has, if it ended well."""
    if future is None or future.cancelled() or not future.done() or future.exception() is not None:
        return None
    return future.result()


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
