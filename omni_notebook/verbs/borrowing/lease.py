"""`omni.borrowed`: stages sleep while a block of code runs, and wake after it whatever it raised."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omni_notebook import units
from omni_notebook.engine.loop import ended
from omni_notebook.errors import (
    ArgumentError,
    AsleepError,
    EngineClosedError,
    OmniError,
    ServerLostError,
    SleepError,
    StageFailedError,
    WakeError,
)
from omni_notebook.protocol import MemoryState
from omni_notebook.verbs import hints
from omni_notebook.verbs.auditing.plan import pick_known
from omni_notebook.verbs.borrowing import holders, tidying
from omni_notebook.verbs.borrowing.peak import Peak, PeakWatch
from omni_notebook.verbs.frontend import drop_frames, said
from omni_notebook.verbs.gauges import MemoryGauge
from omni_notebook.verbs.interrupts import InterruptedVerb, interrupts_held
from omni_notebook.verbs.session import CANCEL_GRACE_S, session
from omni_notebook.verbs.waits import Foreground, promptly

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from omni_notebook.protocol import OmniACK, StageStatus
    from omni_notebook.verbs.engine_api import Engine
    from omni_notebook.verbs.session import Session
    from omni_notebook.verbs.waits import Wait

_WENT = "what was borrowed went with it: that memory was not yours to the end. Nothing was woken here"
NO_ROOM = frozenset({"OUT_OF_MEMORY", "MemoryError"})


@dataclass(slots=True)
class Lease:
    """What was borrowed, for how long, and what came of it.

    Attributes:
        stage_ids: the stages that sleep because of this; those that slept before are not among them.
        level: of their sleep.
        acks, woken: every rank's answer to the sleep and to the wake.
        sleep_ms, wake_ms: what the two calls took, as the caller waited for them.
        run_s: seconds between them.
        peak: the most that this process held meanwhile; None until the end.
        host: the machine of the ranks, where it is another one: its memory is not the code's to take.
    """

    stage_ids: list[int]
    level: int
    acks: list[OmniACK] = field(default_factory=list)
    woken: list[OmniACK] = field(default_factory=list)
    sleep_ms: float | None = None
    wake_ms: float | None = None
    run_s: float | None = None
    peak: Peak | None = None
    host: str | None = None

    @property
    def freed_bytes(self) -> int:
        """Device memory that the stages gave back, as their ranks measured."""
        return sum(ack.freed_bytes for ack in self.acks)

    def __repr__(self) -> str:
        """What was borrowed, the peak, and the latency both ways, in one line."""
        stages = ", ".join(map(str, self.stage_ids))
        what = f"{units.size(self.freed_bytes)} of stage {stages}" if stages else "nothing (all asleep already)"
        parts = [f"borrowed {what}" if self.host is None else f"borrowed {what}, all of it on {self.host}, not here"]
        if self.sleep_ms is not None:
            parts.append(f"asleep in {units.milliseconds(self.sleep_ms)}")
        if self.peak is not None:
            over = self.peak.own_bytes - self.freed_bytes
            more = f", {units.size(over)} MORE than was borrowed" if over > 0 and self.host is None else ""
            here = "" if self.host is None else " here"
            parts.append(f"the code's own peak{here} {units.size(self.peak.own_bytes)} ({self.peak.how}){more}")
        if self.wake_ms is not None:
            parts.append(f"awake again in {units.milliseconds(self.wake_ms)}")
        return " · ".join(parts)


class Borrowed:
    """A context, also an asynchronous one, in which stages sleep: `with omni.borrowed([0, 1], level=1) as lease:`.

    Requests that are there are held (mode "keep": the running batch ends, the rest waits for the wake). A stage that
    was asleep stays so, one that was paused stays paused. Before the wake this process collects garbage and lets the
    frames of the last error go, so that what the code took is free again.

    Args:
        stage_ids: None = all.
        level: 1 keeps a host copy, 2 none; weights that could not be had again are never given up.
        mode: what to do first with requests that are there: "keep", "wait" or "abort".
        engine: None = the one that `%omni start` started.
        timeout: seconds for the sleep, and for the wake.

    Raises, on entering:
        ArgumentError, StageBusyError, PauseError, …: refused; nothing was changed.
        AsleepError: a stage is on its way to another state.
        SleepError: a rank could not; what slept was woken.
    Raises, on leaving:
        WakeError: a rank could not; where memory is lacking the message says who holds it, and the line that wakes.
        StageFailedError: a stage failed while it slept; the others are awake.
        ServerLostError: the server of a remote engine went away; what was borrowed may be asleep there.
        InterruptedVerb: Ctrl-C; the wake goes on.
    """

    def __init__(
        self,
        stage_ids: Sequence[int] | int | None = None,
        level: int = 1,
        mode: str = "keep",
        *,
        engine: Any = None,
        timeout: float | None = None,
        of: Session | None = None,
    ) -> None:
        self._wanted = [stage_ids] if isinstance(stage_ids, int) else stage_ids
        self._mode = mode
        self._timeout = timeout
        self._session = session() if of is None else of
        self._given: Engine | None = engine
        self._before: list[StageStatus] = []
        self._told: tuple[str, ...] = ()
        self._watch: PeakWatch | None = None
        self._began_s = 0.0
        self._used = False
        self.lease = Lease([], level)

    @property
    def _engine(self) -> Engine:
        if self._given is None:
            self._session.check_told("borrow")
            self._given = self._session.engine
        return self._given

    @property
    def _news(self) -> tuple[str, ...]:
        return tuple(getattr(self._engine, "news", ()))  # one in this process has none

    # ----------------------------------------------------------------------------- the two ways

    def __enter__(self) -> Lease:
        try:
            with interrupts_held() as held:
                self._plan()
                started_s = time.perf_counter()
                if self.lease.stage_ids:
                    self._slept(self._run(Foreground(self._session.frontend, held), self._sleep, falling=True))
                self._begin(started_s)
        except KeyboardInterrupt:
            msg = f"interrupted: nothing was borrowed; {self._left()}"
            raise InterruptedVerb(msg) from None
        except SleepError as error:
            self._take_back(error)
            raise
        return self.lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with interrupts_held() as held:
                self._end(error)
                started_s = time.perf_counter()
                for order in self._wakes():
                    self._woken(self._run(Foreground(self._session.frontend, held), order, falling=False))
                self._gave_back(started_s)
        except KeyboardInterrupt:
            msg = f"interrupted: {self._left()}{_also(error)}"
            raise InterruptedVerb(msg) from error
        except WakeError as failed:
            raise self._no_room(failed, error) from error
        except ServerLostError as lost:
            raise _unsure(lost, self.lease.stage_ids, error) from error

    async def __aenter__(self) -> Lease:
        self._plan()
        started_s = time.perf_counter()
        try:
            if self.lease.stage_ids:
                self._slept(await self._await(self._sleep()))
            self._begin(started_s)
        except asyncio.CancelledError:
            await asyncio.to_thread(self._leave)
            raise
        except SleepError as error:
            await asyncio.to_thread(self._take_back, error)
            raise
        return self.lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)
        started_s = time.perf_counter()
        try:
            for order in self._wakes():
                self._woken(await self._await(order(), must_end=True))
        except WakeError as failed:
            raise self._no_room(failed, error) from error
        except ServerLostError as lost:
            raise _unsure(lost, self.lease.stage_ids, error) from error
        self._gave_back(started_s)

    # --------------------------------------------------------------------------------- sleeping

    def _plan(self) -> None:
        """Which of the stages are to sleep: those that do not already.

        Raises:
            ArgumentError: there is no such stage, or this context was entered before.
            AsleepError: another order moves one of them.
        """
        if self._used:
            msg = "one omni.borrowed(...) is for one block: call it again for another; nothing was changed"
            raise ArgumentError(msg)
        self._before, self.lease.host = pick_known(self._engine.status(), self._wanted), self._engine.host
        moving = [stage for stage in self._before if stage.state in hints.MOVING]
        if moving:
            msg = f"another order is on its way: {hints.describe(moving)}; nothing was changed"
            raise AsleepError(msg)
        self._told = self._news
        self._before = [stage for stage in self._before if stage.state is not MemoryState.ASLEEP]
        self.lease.stage_ids = [stage.stage_id for stage in self._before]

    def _sleep(self) -> Coroutine[Any, Any, list[OmniACK]]:
        return self._engine.sleep(self.lease.stage_ids, self.lease.level, self._mode, self._timeout, discard=False)

    def _slept(self, acks: list[OmniACK]) -> None:
        self.lease.acks = self._session.keep(acks, None, "sleep")

    def _begin(self, started_s: float) -> None:
        self.lease.sleep_ms = (time.perf_counter() - started_s) * 1000 if self.lease.stage_ids else None
        self._used = True
        self._watch = PeakWatch()
        self._began_s = time.perf_counter()

    def _take_back(self, error: SleepError) -> None:
        """A sleep of several stages failed for some: wake the others, and say how things are now."""
        self._session.keep(error.acks, None, "sleep")
        with contextlib.suppress(OmniError):
            for order in self._wakes():
                self._engine.submit(order()).result()
        now = hints.pick(self._engine.status(), self.lease.stage_ids)
        error.args = (f"nothing was borrowed: {error.args[0].partition('. Now: ')[0]}; now {hints.describe(now)}",)

    # ----------------------------------------------------------------------------------- waking

    def _end(self, error: BaseException | None) -> None:
        """The code has ended: what it took is counted, and then let go."""
        self.lease.run_s = time.perf_counter() - self._began_s
        if self._watch is not None:
            self.lease.peak, self._watch = self._watch.end(), None
        drop_frames(error)
        self._session.frontend.forget_error()
        tidying.tidy()

    def _wakes(self) -> list[Callable[[], Coroutine[Any, Any, list[OmniACK]]]]:
        """The orders that bring every stage back to what it was, one for all that were awake; not those that failed.

        Raises:
            ServerLostError: another engine answers by now, whose stages did not sleep for this.
        """
        failed = {stage.stage_id for stage in self._failed()}
        news = self._news
        if self.lease.stage_ids and news != self._told:
            self._session.shown(news)
            msg = f"{news[-1]}; {_WENT}"
            raise ServerLostError(msg)
        back = [stage for stage in self._before if stage.stage_id not in failed]
        awake = [stage.stage_id for stage in back if stage.state is MemoryState.AWAKE]
        orders = [self._wake(awake)] if awake else []
        for stage in back:
            if stage.state is MemoryState.PARTLY_AWAKE:
                orders.append(self._wake([stage.stage_id], tags=list(stage.awake_tags)))
            elif stage.state is MemoryState.NEEDS_WEIGHTS:
                orders.append(self._wake([stage.stage_id], reload=False))
        return orders

    def _failed(self) -> list[StageStatus]:
        now = hints.pick(self._engine.status(), self.lease.stage_ids)
        return [stage for stage in now if stage.state is MemoryState.FAILED]

    def _gave_back(self, started_s: float) -> None:
        """All that can wake is awake.

        Raises:
            StageFailedError: a stage failed while it slept.
        """
        self.lease.wake_ms = (time.perf_counter() - started_s) * 1000
        failed = self._failed()
        if failed:
            msg = f"stage {failed[0].stage_id} failed meanwhile: {failed[0].last_error}; now {hints.describe(failed)}"
            raise StageFailedError(msg)

    def _wake(
        self, stage_ids: list[int], *, tags: list[str] | None = None, reload: bool = True
    ) -> Callable[[], Coroutine[Any, Any, list[OmniACK]]]:
        return lambda: self._engine.wake_up(stage_ids, tags, reload, self._timeout)

    def _woken(self, acks: list[OmniACK]) -> None:
        self.lease.woken += self._session.keep(acks, None, "wake")

    def _no_room(self, failed: WakeError, error: BaseException | None) -> WakeError:
        """The error of a wake that did not come about, with who holds the memory where that is why."""
        self._session.keep(failed.acks, None, "wake")
        now = hints.pick(self._engine.status(), self.lease.stage_ids)
        text = str(failed.args[0]).partition(". Now: ")[0]
        if any(ack.metadata.get("error_code") in NO_ROOM for ack in failed.acks):
            text += f"; {self._who_holds()}"
        told = WakeError(f"{text}; now {hints.describe(now)}{_also(error)}", failed.acks)
        self._session.frontend.shorten(told)
        return told

    def _who_holds(self) -> str:
        if self.lease.host is not None:
            return f"it lacks on {self.lease.host}; who holds memory there can not be seen from here"
        return f"{holders.told(self._session.frontend.namespace())}; free some"

    # ------------------------------------------------------------------------------------ waits

    def _run(
        self, wait: Wait, order: Callable[[], Coroutine[Any, Any, list[OmniACK]]], *, falling: bool
    ) -> list[OmniACK]:
        """An order, with progress in the cell; a sleep that nobody waits for is called off, a wake goes on."""
        gauge = MemoryGauge(self.lease.stage_ids, falling=falling)
        gauge.engine = self._engine
        future = self._engine.submit(order())
        try:
            return wait(future, gauge)
        except KeyboardInterrupt:
            if falling:
                future.cancel()
            raise

    async def _await(self, work: Coroutine[Any, Any, list[OmniACK]], *, must_end: bool = False) -> list[OmniACK]:
        """The same on any event loop."""
        future: Future[list[OmniACK]] = self._engine.submit(work)
        try:
            await ended(future)
        except asyncio.CancelledError:
            if not must_end:
                future.cancel()
            raise
        return future.result()

    def _left(self) -> str:
        try:
            return promptly(self._engine, self._leave)
        except ServerLostError as lost:
            return str(_unsure(lost, self.lease.stage_ids))

    def _leave(self) -> str:
        """Have all woken that slept because of this, without making anyone wait for long; the states now."""
        if self._watch is not None:
            self._watch.end()
        with contextlib.suppress(EngineClosedError):
            futures = [self._engine.submit(order()) for order in self._wakes()]
            concurrent.futures.wait(futures, timeout=CANCEL_GRACE_S)
        return f"now {hints.describe(hints.pick(self._engine.status(), self.lease.stage_ids))}"


def _unsure(lost: ServerLostError, stage_ids: Sequence[int], error: BaseException | None = None) -> ServerLostError:
    """With what may be true there, and the line that helps."""
    ids = " ".join(map(str, stage_ids))
    asleep = ids and _WENT not in str(lost)
    slept = f"; what was borrowed may be asleep there: once it answers, %omni wake {ids} wakes it" if asleep else ""
    return ServerLostError(f"{lost}{slept}{_also(error)}")


def _also(error: BaseException | None) -> str:
    """What the code raised, where another error takes its place."""
    return "" if error is None else f"; the code itself raised {type(error).__name__}: {said(error)}".removesuffix(": ")


def borrowed(
    stage_ids: Sequence[int] | int | None = None, level: int = 1, mode: str = "keep", **known: Any
) -> Borrowed:
    """A context in which stages sleep while your code runs; see `Borrowed`."""
    return Borrowed(stage_ids, level, mode, **known)
