"""Carries an audit out, step by step; whatever happens, what it put to sleep is woken, or its error says why not.

Plain synchronous code, because a person waits for it: each step runs on the engine's loop and is waited for.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import omni_notebook
from omni_notebook import units
from omni_notebook.errors import EngineClosedError, OmniError, StageBusyError
from omni_notebook.protocol import MemoryState
from omni_notebook.verbs import hints
from omni_notebook.verbs.auditing import judging, lines, outputs
from omni_notebook.verbs.auditing.keeping import pictures, put_on_record
from omni_notebook.verbs.auditing.outside import Outside
from omni_notebook.verbs.auditing.plan import is_awake, why
from omni_notebook.verbs.auditing.probe import Probe
from omni_notebook.verbs.auditing.record import MEANING, Cycle, Finding, Record, Source, Verdict
from omni_notebook.verbs.auditing.result import AuditResult
from omni_notebook.verbs.frontend import Progress
from omni_notebook.verbs.interrupts import InterruptedVerb
from omni_notebook.verbs.session import CANCEL_GRACE_S
from omni_notebook.verbs.waits import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from omni_notebook.protocol import EngineStatus, OmniACK, StageStatus
    from omni_notebook.verbs.auditing.outputs import Made, Route
    from omni_notebook.verbs.auditing.outside import Seat
    from omni_notebook.verbs.auditing.plan import Plan
    from omni_notebook.verbs.auditing.record import OutputLine, ProbeLine
    from omni_notebook.verbs.engine_api import Engine
    from omni_notebook.verbs.waits import Wait

_T = TypeVar("_T")
TRIES = 3
"""Generations after a wake, at most, until one had the stages to itself."""


class Auditor:
    """One audit of one engine; `wait` is how its steps are waited for.

    Raises, from `run`:
        ArgumentError, AsleepError, PausedError, StageBusyError: refused; nothing was changed.
        EngineClosedError: the engine was stopped meanwhile.
        StageBusyError: another order moved a stage meanwhile, so that there is no verdict.
        OmniError: there is no golden output, or the first sleep was refused; nothing was changed.
        InterruptedVerb: Ctrl-C, or told to stop; says what state the stages are in.
    """

    def __init__(self, engine: Engine, plan: Plan, wait: Wait) -> None:
        self._engine = engine
        self._plan = plan
        self._wait = wait
        self._status: EngineStatus = engine.status()
        self._stages: list[StageStatus] = []
        self._seats: list[Seat] = []
        self._route: Route | None = None
        self._golden: Made | None = None
        self._last: Made | None = None
        self._findings: list[Finding] = []
        self._cycles: list[Cycle] = []
        self._step_words = "before the first cycle"

    @property
    def _ids(self) -> list[int]:
        return [stage.stage_id for stage in self._stages]

    def run(self) -> AuditResult:
        """Carry it out."""
        self._stages = self._plan.stages(self._status)
        self._seats = lines.seats(self._stages)
        began, started_s = datetime.now(UTC), time.perf_counter()
        try:
            with Outside() as outside:
                self._make_golden()
                self._run_cycles(outside)
        except KeyboardInterrupt:
            msg = f"interrupted: the audit ended early; {self._leave()}"
            raise InterruptedVerb(msg) from None
        except EngineClosedError:
            raise
        except Exception as error:
            self._check_open()
            self._add_state(error)
            raise
        self._findings += judging.judge_growth(self._cycles)
        result = AuditResult(self._record(began, time.perf_counter() - started_s), pictures(self._golden, self._last))
        put_on_record(self._engine, result)
        return result

    # ---------------------------------------------------------------------------------- golden

    def _make_golden(self) -> None:
        """Generate twice: the first run warms the pipeline up, the second shows whether it repeats itself."""
        self._route = outputs.route_for(self._status)
        covered = () if self._route is None else self._route.stages
        self._findings += [
            lines.warning(f"stage {number}'s output was not compared: no prompt can reach it, another stage sleeps")
            for number in self._ids
            if number not in covered
        ]
        if self._route is None:
            return
        first, self._golden = self._generate("warming up"), self._generate("output before the sleep")
        if not outputs.same(outputs.compared(first, self._golden, self._route)):
            self._golden = None
            text = "outputs were not compared: two runs before the sleep did not give the same either"
            self._findings.append(Finding(severity=Verdict.WARN, text=text, sources=(Source.OUTPUT,)))

    def progress(self) -> Progress:
        """Which step of which cycle."""
        share = len(self._cycles) / self._plan.cycles
        return Progress(
            f"cycle {min(len(self._cycles) + 1, self._plan.cycles)} of {self._plan.cycles}: {self._step_words}", share
        )

    def _generate(self, words: str) -> Made:
        assert self._route is not None  # noqa: S101  (callers look)
        work = outputs.generate(self._engine, self._plan.prompt, self._plan.params, self._route)
        return self._step(work, words)

    # ---------------------------------------------------------------------------------- cycles

    def _run_cycles(self, outside: Outside) -> None:
        gc.collect()  # a rank may live in this process: its garbage, gone half-way, would hide what the rank keeps
        for number in range(1, self._plan.cycles + 1):
            try:
                cycle = self._cycle(number, outside)
            except OmniError as error:
                self._check_open()
                if number == 1 or isinstance(error, EngineClosedError):
                    raise
                self._findings.append(lines.warning(f"cycle {number} was not run: {why(error)}"))
                return
            self._check_open()
            self._cycles.append(cycle)
            found = judging.judge_cycle(cycle)
            self._findings += found
            if self._stays_down(number) or judging.verdict_of(found) is Verdict.FAIL:
                return

    def _cycle(self, number: int, outside: Outside) -> Cycle:
        before = outside.look(self._seats)
        slept, sleep_ms = self._order(
            lambda engine: engine.sleep(self._ids, self._plan.level, discard=False, raise_on_error=False), falling=True
        )
        asleep = outside.look(self._seats)
        probe = self._probe() if self._plan.probe_bytes and all(ack.ok for ack in slept) else None
        woken, wake_ms = self._wake()
        awake = outside.look(self._seats)
        self._check_undisturbed(slept, woken)
        return Cycle(
            number=number,
            ranks=lines.rank_lines(self._stages, slept, woken),
            processes=lines.process_lines(self._stages, (before, asleep, awake), slept, woken),
            probe=probe,
            output=self._output(),
            sleep_ms=sleep_ms,
            wake_ms=wake_ms,
        )

    def _check_undisturbed(self, slept: list[OmniACK], woken: list[OmniACK]) -> None:
        """An order with nothing to do came after another one: what was seen meanwhile says nothing about the sleep.

        Raises:
            StageBusyError: another order moved a stage that this audit was measuring.
        """
        refused = {ack.stage_id for ack in slept if not ack.ok}  # did not sleep: there is nothing to wake
        idle = {ack.stage_id for ack in (*slept, *woken) if ack.ok and ack.metadata.get("noop")}
        moved = sorted(idle - refused)
        if moved:
            msg = (
                f"another order put stage {', '.join(map(str, moved))} to sleep or woke it during the audit, which has "
                "no verdict; audit again"
            )
            raise StageBusyError(msg, stage_id=moved[0], running=0, queued=0, in_transit=0)

    def _wake(self) -> tuple[list[OmniACK], float]:
        """Wake what can be; a stage that has failed refuses, and its state is a finding at the end of the cycle."""
        ids = self._wakeable()
        if not ids:
            return [], 0.0
        try:
            return self._order(lambda engine: engine.wake_up(ids, raise_on_error=False), falling=False)
        except EngineClosedError:
            raise
        except OmniError as error:
            text = f"the wake was refused: {why(error)}"
            self._findings.append(Finding(severity=Verdict.FAIL, text=text, sources=(Source.STATUS,)))
            return [], 0.0

    def _check_open(self) -> None:
        """An engine that was stopped answers in many ways; none of them is a finding.

        Raises:
            EngineClosedError: it was.
        """
        if self._engine.status().closed:
            msg = "the engine was stopped during the audit, which has no verdict; start a new one"
            raise EngineClosedError(msg)

    def _wakeable(self) -> list[int]:
        now = hints.pick(self._engine.status(), self._ids)
        return [stage.stage_id for stage in now if stage.state is not MemoryState.FAILED]

    def _stays_down(self, number: int) -> bool:
        """Whether a stage is not awake after its cycle; a finding says which and what helps."""
        now = hints.pick(self._engine.status(), self._ids)
        down = [stage for stage in now if not is_awake([stage])]
        if down:
            text = f"not awake after the audit: {hints.describe(down)}"
            self._findings.append(Finding(severity=Verdict.FAIL, text=text, sources=(Source.STATUS,), cycle=number))
        return bool(down)

    def _output(self) -> OutputLine | None:
        """What the pipeline gives now beside the golden output; a difference is looked at again if others ran."""
        if self._golden is None or self._route is None or not is_awake(hints.pick(self._engine.status(), self._ids)):
            return None
        try:
            return self._compare(self._golden, self._route)
        except EngineClosedError:
            raise
        except OmniError as error:
            text = f"no output after the wake: {why(error)}"
            self._findings.append(Finding(severity=Verdict.FAIL, text=text, sources=(Source.OUTPUT,)))
            return None

    def _compare(self, golden: Made, route: Route, tries: int = TRIES) -> OutputLine:
        self._last = self._generate("output after the wake")
        line = outputs.compared(self._last, golden, route)
        if outputs.same(line) or not self._last.others or tries == 1:
            return line
        return self._compare(golden, route, tries - 1)

    def _probe(self) -> ProbeLine:
        stop = threading.Event()
        probe = Probe(self._plan.probe_bytes, stop)
        self._step_words = f"taking {units.size(self._plan.probe_bytes)} as a trainer would"
        future = in_thread(probe.take, "omni-audit-probe")
        try:
            return self._wait(future, self.progress)
        except KeyboardInterrupt:
            stop.set()
            concurrent.futures.wait([future], timeout=CANCEL_GRACE_S)
            raise

    # ----------------------------------------------------------------------------------- steps

    def _step(self, work: Coroutine[Any, Any, _T], words: str, *, must_end: bool = False) -> _T:
        """One of the engine's coroutines; one that nobody waits for any more is called off, unless it must end."""
        self._step_words = words
        future = self._engine.submit(work)
        try:
            return self._wait(future, self.progress)
        except KeyboardInterrupt:
            if not must_end:
                future.cancel()
            raise

    def _order(
        self, make: Callable[[Engine], Coroutine[Any, Any, list[OmniACK]]], *, falling: bool
    ) -> tuple[list[OmniACK], float]:
        """A sleep or a wake and the milliseconds that the call took."""
        started_s = time.perf_counter()
        acks = self._step(make(self._engine), "falling asleep" if falling else "waking", must_end=not falling)
        return acks, (time.perf_counter() - started_s) * 1000

    def _leave(self) -> str:
        """Wake what this audit put to sleep, without making anyone wait for long; the states now."""
        with contextlib.suppress(EngineClosedError):
            if not is_awake(hints.pick(self._engine.status(), self._ids)):
                waking = self._engine.submit(self._engine.wake_up(self._wakeable(), raise_on_error=False))
                concurrent.futures.wait([waking], timeout=CANCEL_GRACE_S)
        now = hints.pick(self._engine.status(), self._ids)
        awake = "the stages are awake as before; " if is_awake(now) else ""
        return f"{awake}now {hints.describe(now)}"

    def _add_state(self, error: Exception) -> None:
        """After an error: wake, and let the error say in what state the stages are, unless all is as before."""
        with contextlib.suppress(OmniError, concurrent.futures.CancelledError):
            if not is_awake(hints.pick(self._engine.status(), self._ids)):
                self._engine.submit(self._engine.wake_up(self._wakeable(), raise_on_error=False)).result()
        now = hints.pick(self._engine.status(), self._ids)
        if not is_awake(now) and error.args:
            error.args = (f"{error.args[0]}; now {hints.describe(now)}", *error.args[1:])

    # ---------------------------------------------------------------------------------- result

    def _record(self, began: datetime, elapsed_s: float) -> Record:
        plan = self._plan
        return Record(
            verdict=judging.verdict_of(self._findings),
            model=self._status.model,
            stages=tuple(map(lines.stage_line, self._stages)),
            level=plan.level,
            prompt=plan.prompt,
            seed=plan.seed,
            sampling_params=plan.params,
            cycles_asked=plan.cycles,
            started=began.isoformat(timespec="seconds"),
            elapsed_s=elapsed_s,
            version=omni_notebook.__version__,
            golden=None if self._golden is None or self._route is None else self._golden.line(self._route),
            cycles=tuple(self._cycles),
            findings=tuple(self._findings),
            sources={str(source): meaning for source, meaning in MEANING.items()},
            rules=judging.RULES,
        )
