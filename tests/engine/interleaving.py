"""One random interleaving of requests and orders, several in flight at once, and what must hold after it.

What everyone does is a function of the seed; when it happens is up to the machine. `test_interleavings.py` runs many.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_notebook.errors import AsleepError, OmniError, PausedError
from omni_notebook.protocol import RequestEvent, RequestState
from omni_notebook.transport.connector import CAPACITY
from tests.engine.engine_helpers import collect, golden, slow, until
from tests.engine.faulty_worker import FETCH, OUTPUT
from tests.engine.painting import PAINTER, THINKER, replicas

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.protocol import OmniRequestOutput

ORDER_S = 3.0
"""An order's own timeout, where it is not to run out."""
SLACK_S = 5.0
"""An order may outlast its timeout by this: what is begun is finished or taken back, on a busy machine."""
CANCEL_S = 3.0
"""A cancelled call returns within a second; a busy machine has three."""
END_S = 30.0
"""Once everything is open and awake again each request ends within this."""
NEAR, FAR = 1.0, 4.0
"""Grey levels, on average: one wish drawn in two batches (other sums, the same picture), and two wishes or weights."""
TERMINAL = frozenset({RequestState.FINISHED, RequestState.ABORTED, RequestState.FAILED})

WISHES: list[tuple[str, int, int]] = [
    ("a red star above a blue circle", 1, 2),
    ("two blue squares", 2, 2),
    ("a pink heart with a red star to its left", 3, 3),
    ("a green square below a yellow triangle", 4, 4),
]
"""(prompt, seed, steps)."""


Stages = list[int] | None


def _params(wish: int) -> dict[str, Any]:
    _, seed, steps = WISHES[wish]
    return {"seed": seed, "num_inference_steps": steps}


def _grey(output: OmniRequestOutput) -> Any:
    return np.asarray(output.images[0], "float32")


def _tokens(outputs: list[OmniRequestOutput]) -> list[int]:
    return list(next((o.outputs[0].token_ids for o in reversed(outputs) if o.outputs), []))


def _distance(one: Any, other: Any) -> float:
    return float(np.abs(one - other).mean())


@dataclass
class Known:
    """What each wish must come to: its text, and its picture by either checkpoint."""

    folders: dict[str, Path]
    texts: list[list[int]] = field(default_factory=list)
    pictures: dict[tuple[str, int], Any] = field(default_factory=dict)
    goldens: dict[str, tuple[list[int], bytes]] = field(default_factory=dict)

    async def learn(self, engine: AsyncOmni) -> None:
        """Let each wish be drawn by itself."""
        for name, folder in self.folders.items():
            await engine.load_weights(PAINTER, folder, name)
            drawn = [await collect(engine, WISHES[n][0], sampling_params=_params(n)) for n in range(len(WISHES))]
            self.texts = [_tokens(outputs) for outputs in drawn]
            self.pictures |= {(name, n): _grey(outputs[-1]) for n, outputs in enumerate(drawn)}
            self.goldens[name] = await golden(engine)
        pictures = list(self.pictures.values())
        assert min(_distance(a, b) for n, a in enumerate(pictures) for b in pictures[:n]) > FAR


class Log:
    """What was done when, for the person who reads of a failure."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lines: list[str] = []
        self._began = time.monotonic()

    def note(self, what: str, came: str, started: float) -> None:
        """One line: when it began, how long it took, what came of it."""
        self.counts[f"{what.split('(', maxsplit=1)[0]} {came.split(':', maxsplit=1)[0]}"] += 1
        self.lines.append(f"{started - self._began:7.3f} +{time.monotonic() - started:6.3f}  {what}: {came[:150]}")


class Operator:
    """Gives orders, one after the other; is refused, has no patience, goes away."""

    def __init__(self, engine: AsyncOmni, known: Known, log: Log, seed: str) -> None:
        self._engine = engine
        self._known = known
        self._log = log
        self._seed = seed
        self._random = random.Random(seed)
        self._loads = 0

    async def run(self) -> None:
        """A few orders; now and then it opens everything, so that requests come in for the next."""
        orders: list[Callable[[], Awaitable[None]]] = [
            self._pause, self._sleep, self._load, self._update, self._resume, self._wake
        ]  # fmt: skip
        for _ in range(self._random.randint(3, 5)):
            await self._moment(self._random.uniform(0, 0.15), for_a_queue=self._random.random() < 0.6)
            await self._random.choices(orders, [3, 3, 1, 2, 1, 1])[0]()
            if self._random.random() < 0.5:
                await self._wake(None)
                await self._resume(None)

    async def _moment(self, seconds: float, *, for_a_queue: bool) -> None:
        """Some time later; mostly one at which an order does harm, if it comes soon."""
        await asyncio.sleep(seconds)
        if for_a_queue:
            with contextlib.suppress(TimeoutError):
                await until(lambda: self._engine.status().stages[PAINTER].queued, 0.5)

    def _stages(self) -> Stages:
        return self._random.choice([None, [THINKER], [PAINTER], [PAINTER]])

    async def _update(self) -> None:
        """The specification's order, as far as the others let it."""
        await self._pause("keep")
        if self._random.random() < 0.3:
            await self._sleep()
            await self._wake(None)
        await self._load()
        await self._resume(None)

    async def _pause(self, *modes: str) -> None:
        mode, stages = self._random.choice(modes or ("keep", "keep", "wait", "abort")), self._stages()
        timeout, clear = self._random.choice([ORDER_S, ORDER_S, 0.03]), self._random.random() < 0.5
        call = self._engine.pause_generation(mode, stages, clear_cache=clear, timeout=timeout)
        await self._order(f"pause({mode}, {stages}, {timeout})", call, timeout)

    async def _resume(self, *which: Stages) -> None:
        stages = which[0] if which else self._stages()
        await self._order(f"resume({stages})", self._engine.resume_generation(stages), 0.0)

    async def _sleep(self) -> None:
        level, mode = self._random.choice([1, 2]), self._random.choice([None, "keep", "keep", "wait", "abort"])
        stages, timeout = self._stages(), self._random.choice([ORDER_S, 0.5])
        call = self._engine.sleep(stages, level, mode, timeout)
        await self._order(f"sleep({level}, {mode}, {stages}, {timeout})", call, timeout)

    async def _wake(self, *which: Stages) -> None:
        stages = which[0] if which else self._stages()
        await self._order(f"wake({stages})", self._engine.wake_up(stages, timeout=ORDER_S), ORDER_S)

    async def _load(self) -> None:
        self._loads += 1
        name = self._random.choice(list(self._known.folders))
        version = f"{name} {self._seed} {self._loads}"
        call = self._engine.load_weights(PAINTER, self._known.folders[name], version, timeout=ORDER_S)
        await self._order(f"load({version})", call, ORDER_S)

    async def _order(self, what: str, call: Any, timeout: float) -> None:
        """Carried out, refused or too late, but in its time; of one whose caller goes away nobody hears more."""
        leaves = self._random.random() < 0.1
        painter = self._engine.status().stages[PAINTER]
        self._log.counts[f"orders that met {'a batch' if painter.running else 'none'}, {_some(painter.queued)}"] += 1
        started, task = time.monotonic(), asyncio.ensure_future(call)
        if leaves:
            await asyncio.wait({task}, timeout=self._random.uniform(0, 0.1))
            task.cancel()
        done, _ = await asyncio.wait({task}, timeout=timeout + SLACK_S + (CANCEL_S if leaves else 0.0))
        assert done, f"{what} had not returned after {time.monotonic() - started:.1f} s"
        if task.cancelled():
            self._log.note(what, "left", started)
            return
        error = task.exception()
        assert error is None or isinstance(error, OmniError), f"{what}: {error!r}"
        self._log.note(what, f"{type(error).__name__}: {error}" if error else "done", started)


class Client:
    """Wants one thing after the other, and takes note of every output."""

    def __init__(self, engine: AsyncOmni, known: Known, log: Log, seed: str) -> None:
        self._engine = engine
        self._known = known
        self._log = log
        self._random = random.Random(seed)
        self._name = seed

    async def run(self) -> None:
        """A few requests, one after the other; the last ones run when the operators have gone."""
        for n in range(self._random.randint(1, 3)):
            await asyncio.sleep(self._random.uniform(0, 0.1))
            await self._ask(f"{self._name}, {n}")

    async def _ask(self, request_id: str) -> None:
        """A request that ends, is refused, is aborted, or whose client goes away."""
        pick = self._random
        wish, text, patience = pick.randrange(len(WISHES)), pick.random() < 0.1, pick.choice([0, END_S, END_S, END_S])
        fate, after = pick.choices(["stays", "aborts", "leaves"], [5, 3, 1])[0], pick.uniform(0, 0.4)
        started = time.monotonic()
        outputs: list[OmniRequestOutput] = []

        async def listen() -> None:
            known: dict[str, Any] = {"output_modalities": "text"} if text else {}
            known |= {"request_id": request_id, "admission_timeout": patience, "sampling_params": _params(wish)}
            async for output in self._engine.generate(WISHES[wish][0], **known):
                outputs.append(output)  # noqa: PERF401  (what came before an error counts too)

        task = asyncio.ensure_future(listen())
        if fate != "stays":
            await asyncio.wait({task}, timeout=after)
            await (self._engine.abort(request_id) if fate == "aborts" else _cancel(task))
        await asyncio.wait({task})
        came = "left" if task.cancelled() else self._judge(wish, outputs, task.exception(), text=text)
        self._log.note(f"generate({wish}, text={text}, {fate}, patience {patience})", came, started)

    def _judge(self, wish: int, outputs: list[OmniRequestOutput], error: BaseException | None, *, text: bool) -> str:
        """One end, and only one; the text is a part of what the wish writes, the picture is by one weight version."""
        if error is not None:
            assert isinstance(error, PausedError | AsleepError), repr(error)
            assert not outputs, "it was admitted and then refused"
            return f"{type(error).__name__}: {error}"
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        last, written = outputs[-1], _tokens(outputs)
        assert written == self._known.texts[wish][: len(written)]
        assert last.state == "finished" or (last.state, last.images) == ("aborted", [])
        if last.state == "finished":
            assert written == self._known.texts[wish]
        if last.state == "finished" and not text:
            assert last.metrics["step_weight_versions"] == [[last.weight_version, WISHES[wish][2]]]
            name = str(last.weight_version).split()[0]
            assert _distance(_grey(last), self._known.pictures[name, wish]) < NEAR, f"not wish {wish} by {name}"
        return f"{last.state}: {last.weight_version}"


def _some(queued: int) -> str:
    return "a queue" if queued else "no queue"


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()


class Interleaving:
    """Clients and operators of one engine, by seed."""

    def __init__(self, engine: AsyncOmni, known: Known, seed: int) -> None:
        pick = random.Random(seed)
        self.log = Log()
        self._engine = engine
        self._known = known
        parts = engine, known, self.log
        self._clients = [Client(*parts, f"{seed} client {n}") for n in range(pick.randint(5, 10))]
        self._operators = [Operator(*parts, f"{seed} operator {n}") for n in range(pick.randint(2, 3))]
        self._capacity = pick.choice([1, 3, CAPACITY])
        self._slow = [(PAINTER, job, pick.choice([0.0, 0.03, 0.1])) for job in ("execute", OUTPUT, FETCH)]
        self._slow.append((THINKER, "execute", pick.choice([0.0, 0.005])))

    async def run(self) -> None:
        """Everything at once; then all is opened and woken, and is as if nothing had happened."""
        connector: Any = self._engine._core.stages[THINKER].connector
        with contextlib.ExitStack() as stack:
            connector._capacity = self._capacity
            stack.callback(setattr, connector, "_capacity", CAPACITY)
            for stage_id, job, seconds in self._slow:
                stack.enter_context(slow(self._engine, stage_id, seconds, job))
            await self._run()
        await self._nothing_is_left()

    async def _run(self) -> None:
        events = self._engine.subscribe()
        clients = [asyncio.ensure_future(client.run()) for client in self._clients]
        await asyncio.gather(*(operator.run() for operator in self._operators))
        await self._open_everything()
        await asyncio.wait_for(asyncio.gather(*clients), END_S)
        events.close()
        ends = Counter([e.request_id async for e in events if isinstance(e, RequestEvent) and e.state in TERMINAL])
        assert {name for name, n in ends.items() if n > 1} == set(), "they ended twice"

    async def _open_everything(self) -> None:
        """The way out of whatever the operators have left: orders whose callers went away end, then resume, wake."""
        core = self._engine._core
        await until(lambda: not core.orders._background, ORDER_S + SLACK_S)
        await self._engine.resume_generation()
        await asyncio.wait_for(self._engine.wake_up(), ORDER_S + SLACK_S)
        assert [(s.state, s.pause_state) for s in self._engine.status().stages] == [("AWAKE", "OPEN")] * 2
        assert not await self._engine.is_paused()

    async def _nothing_is_left(self) -> None:
        """No request, no place at the connector, no closed scheduler, no conditioning; the golden run is equal."""
        core = self._engine._core
        await until(lambda: not core._flows and all(s.running == 0 for s in self._engine.status().stages), 10)
        for stage in self._engine.status().stages:
            assert (stage.queued, stage.in_transit, stage.waiting_at_gate) == (0, 0, 0)
        connector: Any = core.stages[THINKER].connector
        assert (connector._started, connector._parked()) == (set(), 0)
        for stage_id in (THINKER, PAINTER):
            for replica in replicas(self._engine, stage_id):
                assert (replica.closed_by, replica._leaving, list(replica.scheduler.request_ids())) == (
                    set(),
                    set(),
                    [],
                )
        version = str(self._engine.status().stages[PAINTER].weight_version)
        assert await golden(self._engine) == self._known.goldens[version.split(maxsplit=1)[0]]
        fetched = await asyncio.wrap_future(
            self._engine.submit(replicas(self._engine)[0].executor.call("fetched", timeout_s=10.0))
        )
        assert [answer.unwrap() for answer in fetched] == [0] * len(fetched)
