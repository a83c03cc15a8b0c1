"""Work that goes on while the notebook goes on: `--bg`, handles to it, and `jobs`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from omni_notebook.engine.loop import ended
from omni_notebook.errors import ArgumentError, DeadlineError, EngineClosedError, OmniError, SleepError, WakeError
from omni_notebook.verbs import hints
from omni_notebook.verbs.frontend import Progress
from omni_notebook.verbs.parsing import VerbParser, add_out
from omni_notebook.verbs.registry import verb
from omni_notebook.verbs.waits import here

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator

    from omni_notebook.protocol import Event
    from omni_notebook.verbs.engine_api import Engine
    from omni_notebook.verbs.session import Session

_T = TypeVar("_T")
KEPT = 100
"""Ended jobs that `%omni jobs` remembers; those that run are never forgotten."""


class JobState(StrEnum):
    """Where a job is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Work(Generic[_T]):
    """What a job does.

    Attributes:
        line: the verb as it was written, for people.
        future: what the work comes to.
        stop: tells the work to end; None where cancelling the future does.
        gauge: how far it is; None where nobody knows.
        dress: what `result()` gives for what the work came to; called once, by whoever asks first.
        explain: adds to an error what helps, before it is raised.
    """

    line: str
    future: Future[_T]
    stop: Callable[[], None] | None = None
    gauge: Callable[[], Progress] | None = None
    dress: Callable[[_T], _T] | None = None
    explain: Callable[[OmniError], None] | None = None


class Job(Generic[_T]):
    """A verb that runs behind the notebook: `job.result()`, `await job`, `job.cancel()`.

    Nothing is printed for it; show the job, or `%omni jobs`, to see how far it is.
    """

    def __init__(self, number: int, work: Work[_T], session: Session) -> None:
        self.number = number
        self.line = work.line
        self._work = work
        self._session = session
        self._lock = threading.Lock()
        self._dressed: list[_T] = []
        self._told = False
        self._cancelled = False
        self._began_s = time.monotonic()
        self._ended_s: float | None = None
        self._over: Future[None] = Future()  # after every callback of the work's future: what they note is there then
        work.future.add_done_callback(self._note_end)

    def _note_end(self, _future: Future[_T]) -> None:
        self._ended_s = time.monotonic()
        self._over.set_result(None)

    # ------------------------------------------------------------------------------------ look

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._over.done()

    @property
    def state(self) -> JobState:
        """Where it is."""
        if not self.done:
            return JobState.RUNNING
        error = self._error()
        if error is None:
            return JobState.DONE
        return JobState.CANCELLED if isinstance(error, concurrent.futures.CancelledError) else JobState.FAILED

    @property
    def elapsed_s(self) -> float:
        """Seconds that it has run, or ran."""
        return (time.monotonic() if self._ended_s is None else self._ended_s) - self._began_s

    @property
    def progress(self) -> Progress:
        """How far it is: a word for people and a share of the whole, None where it is not known."""
        if self.done:
            return Progress(str(self.state), 1.0 if self.state is JobState.DONE else None)
        return self._work.gauge() if self._work.gauge is not None else Progress("running")

    @property
    def error(self) -> BaseException | None:
        """Why it failed or was cancelled; None while it runs and when it went well."""
        return self._error() if self.done else None

    def words(self) -> str:
        """How it stands, in one line: its progress, its error, or that it is done."""
        if not self.done:
            progress = self.progress
            share = f" · {progress.fraction:.0%}" if progress.fraction else ""
            return f"{progress.label}{share}"
        error = self._error()
        if error is None or self.state is JobState.CANCELLED:
            return "job.result() has it" if error is None else "cancelled; %omni status shows what it left"
        return f"{type(error).__name__}: {' '.join(hints.in_verbs(str(error)).split())}"

    def __repr__(self) -> str:
        """Number, line, state and how it stands."""
        return f"<Job {self.number}: %omni {self.line} · {self.state} · {self.elapsed_s:.1f} s · {self.words()}>"

    # ------------------------------------------------------------------------------------- wait

    def result(self, timeout: float | None = None) -> _T:
        """What the verb gives, when it is there; Ctrl-C ends the waiting, not the job.

        Raises:
            DeadlineError: it had not ended after `timeout` seconds; it goes on.
            CancelledError (of `concurrent.futures`): it was cancelled.
            EngineClosedError: the engine was stopped before it ended.
            OmniError: what the verb raises.
        """
        deadline = None if timeout is None else time.monotonic() + timeout

        def check() -> None:
            if deadline is not None and time.monotonic() >= deadline and not self.done:
                msg = f"job {self.number} had not ended after {timeout:g} s; it goes on: {self.words()}"
                raise DeadlineError(msg)

        here(self._session.frontend).wait(self._over, lambda: self.progress, check)
        return self._value()

    def __await__(self) -> Generator[Any, None, _T]:
        """`await job`: as `result()`; who cancels the waiting does not cancel the job."""
        return self._awaited().__await__()

    async def _awaited(self) -> _T:
        await ended(self._over)
        return self._value()

    def cancel(self) -> bool:
        """Ask it to end: an order rolls back or completes, an audit wakes its stages; whether it still ran."""
        if self.done:
            return False
        self._cancelled = True
        if self._work.stop is not None:
            self._work.stop()
        else:
            self._work.future.cancel()
        return True

    def _value(self) -> _T:
        """The result, dressed once.

        Raises:
            BaseException: why there is none.
        """
        error = self._error()
        if error is not None:
            self._tell(error)
            raise error.with_traceback(None)
        with self._lock:
            if not self._dressed:
                value = self._work.future.result()
                self._dressed.append(value if self._work.dress is None else self._work.dress(value))
        return self._dressed[0]

    def _error(self) -> BaseException | None:
        """Why an ended job has no result; one that nobody cancelled lost its engine."""
        future = self._work.future
        error = None if future.cancelled() else future.exception()
        if self._cancelled and (future.cancelled() or isinstance(error, KeyboardInterrupt)):
            return concurrent.futures.CancelledError(f"job {self.number} (%omni {self.line}) was cancelled")
        if future.cancelled():
            return self._lost()
        return error

    def _lost(self) -> EngineClosedError:
        return EngineClosedError(
            f"the engine was stopped before job {self.number} (%omni {self.line}) ended; %omni start starts a new one"
        )

    def _tell(self, error: BaseException) -> None:
        """Let an error name verbs, and keep its traceback for `%omni traceback`."""
        if self._told:
            return
        self._told = True
        self._session.note_error(error, self.line)
        if isinstance(error, OmniError):
            if self._work.explain is not None:
                self._work.explain(error)
            hints.reword(error)
        if isinstance(error, OmniError | KeyboardInterrupt | concurrent.futures.CancelledError):
            self._session.frontend.shorten(error)


class JobList(Sequence[Job[Any]]):
    """Jobs, oldest first, as a cell shows them; `jobs[3]` is the one whose number is 3, `jobs[-1]` the newest."""

    def __init__(
        self, jobs: Iterable[Job[Any]] = (), shorten: Callable[[BaseException], None] = lambda _error: None
    ) -> None:
        self._jobs = tuple(jobs)
        self._shorten = shorten

    @overload
    def __getitem__(self, number: int) -> Job[Any]: ...

    @overload
    def __getitem__(self, number: slice) -> JobList: ...

    def __getitem__(self, number: int | slice) -> Job[Any] | JobList:
        """The job of this number; below 0, counted from the newest.

        Raises:
            ArgumentError: there is none; names those that there are.
        """
        if isinstance(number, slice):
            return JobList(self._jobs[number], self._shorten)
        if -len(self._jobs) <= number < 0:
            return self._jobs[number]
        found = next((job for job in self._jobs if job.number == number), None)
        if found is None:
            known = ", ".join(str(job.number) for job in self._jobs) or "none, %omni generate --bg starts one"
            error = ArgumentError(f"there is no job {number}; jobs are: {known}")
            self._shorten(error)
            raise error
        return found

    def __iter__(self) -> Iterator[Job[Any]]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def __repr__(self) -> str:
        """One line a job."""
        return "\n".join(map(repr, self)) or "no jobs; %omni generate --bg starts one"


class Jobs:
    """A session's jobs: all that run, and the last that have ended."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._count = 0
        self._jobs: list[Job[Any]] = []

    def start(self, work: Work[_T]) -> Job[_T]:
        """Keep a job for work that has begun."""
        with self._lock:
            self._count += 1
            job = Job(self._count, work, self._session)
            self._jobs.append(job)
            self._forget()
        return job

    def _forget(self) -> None:
        """Of those that have ended, all but the last `KEPT`."""
        over = [one for one in self._jobs if one.done]
        gone = set(over[: max(0, len(over) - KEPT)])
        self._jobs = [one for one in self._jobs if one not in gone]

    def list(self) -> JobList:
        """Those that are known, oldest first."""
        with self._lock:
            self._forget()
            return JobList(self._jobs, self._session.frontend.shorten)


_SHOWN_CHARS = 40
START_S = 0.5
"""So long a cell waits for its job to begin, or to be refused."""


def begin(engine: Engine, work: Coroutine[Any, Any, _T], is_sign: Callable[[Event], bool]) -> Future[_T]:
    """Give the engine work that goes on behind the notebook; back once it has begun, which `is_sign` of an event tells.

    Work that waits for another order to end is given `START_S`.

    Raises:
        OmniError: it was refused before it began.
    """
    events, over, begun = engine.subscribe(), threading.Event(), False

    async def hear() -> None:
        nonlocal begun
        async for event in events:
            if is_sign(event):
                begun = True
                break
        over.set()

    try:
        future = engine.submit(work)
        future.add_done_callback(lambda _future: over.set())
        with contextlib.suppress(EngineClosedError):
            engine.submit(hear())
        over.wait(START_S)
    finally:
        events.close()
    error = future.exception() if future.done() and not future.cancelled() else None
    if not begun and isinstance(error, OmniError) and not isinstance(error, SleepError | WakeError):
        raise error.with_traceback(None)
    return future


def written(name: str, args: argparse.Namespace, prompt: str = "") -> str:
    """The line of a job: the verb and what was asked of it, without --bg; a prompt in short at the end."""
    words = [word for word in args.words if word != "--bg"]
    for word in args.prompt if prompt else ():
        words.remove(word)
    said = [f'"{word}"' if " " in word else word for word in words]
    return " ".join([name, *said, prompt if len(prompt) <= _SHOWN_CHARS else f"{prompt[:_SHOWN_CHARS]}…"]).strip()


def add_background(parser: VerbParser) -> None:
    """The group of verbs that can run behind the notebook."""
    parser.add_argument(
        "--bg", action="store_true", help="return a job at once: job.result(), await job, job.cancel(), %%omni jobs"
    )


@verb
class ListJobs:
    """List what was started with --bg: how far it is, how it ended.

    The last 100 that ended are kept. With jobs = %omni jobs the number of a job is its place: jobs[3].result() is what
    job 3 gave, jobs[-1] is the newest. Example: %omni jobs --cancel 3
    """

    name = "jobs"
    python = "job.result(), await job"

    def prepare_parser(self, parser: VerbParser) -> None:
        """A job to end, and a variable for the list."""
        parser.add_argument("--cancel", type=int, metavar="N", help="ask job N to end, as jobs[N].cancel() does")
        add_out(parser)

    def run(self, session: Session, args: argparse.Namespace) -> JobList:
        """The jobs, oldest first.

        Raises:
            ArgumentError: --cancel names none of them.
        """
        jobs = session.jobs.list()
        if args.cancel is not None:
            job = jobs[args.cancel]
            asked = job.cancel()
            session.frontend.write(f"job {job.number} {'was told to end' if asked else f'had ended: {job.state}'}\n")
        session.store(args.out, jobs)
        return jobs
