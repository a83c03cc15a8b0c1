"""The control path: 64 real child processes without torch over real sockets, and 1 024 simulated ranks.

Every figure is from one run: the floor of the orders is a bare round trip over the same kind of socket, with nothing
but an echo at the other end.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from benchmarks import Figure
from omni_notebook.config import StageConfig
from omni_notebook.executors.mp.executor import MpExecutor
from omni_notebook.executors.simulated import Behaviour, SimulatedExecutor
from omni_notebook.executors.simulated_worker import SimulatedWorker
from omni_notebook.protocol import RankId, SleepTask
from omni_notebook.worker.reports import WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RANKS = 64
SIMULATED = 1024
ROUNDS = 400
WORKER = "omni_notebook.executors.simulated_worker:SimulatedWorker"
WAIT_S, WAIT_RANKS = 0.5, 8
STATUS_MS, ORDER_MS, WAIT_BAR_S = 2.0, 20.0, 0.7


class Waiter(SimulatedWorker):
    """A rank that takes its time to prepare."""

    def prepare_sleep(self, task: SleepTask) -> None:
        """Wait, then as any other."""
        time.sleep(WAIT_S)
        super().prepare_sleep(task)


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


def _specs(n_ranks: int) -> tuple[WorkerSpec, ...]:
    config = StageConfig(kind="ar", model="none", executor="mp")
    return tuple(WorkerSpec(where=RankId(0, 0, rank), config=config) for rank in range(n_ranks))


def _bare_round_trips_ms() -> list[float]:
    """One echo over a socket pair between two threads: what the kernel alone takes for one rank."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def echo() -> None:
        while data := far.recv(4096):
            far.send(data)

    thread = threading.Thread(target=echo)
    thread.start()
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        near.send(b"x" * 40)
        near.recv(4096)
        times.append((time.perf_counter() - started) * 1e3)
    near.close()
    thread.join()
    far.close()
    return times


def _bare_processes_ms(n_ranks: int, rounds: int) -> list[float]:
    """The same to `n_ranks` forked processes at once: write to all, then read from all."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(n_ranks)]
    children = [_fork_echo(place, pairs) for place in range(n_ranks)]
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        for near, _far in pairs:
            near.send(b"x" * 40)
        for near, _far in pairs:
            near.recv(4096)
        times.append((time.perf_counter() - started) * 1e3)
    for near, far in pairs:
        near.close()
        far.close()
    for pid in children:
        os.waitpid(pid, 0)
    return times


def _fork_echo(place: int, pairs: Sequence[tuple[socket.socket, socket.socket]]) -> int:
    pid = os.fork()
    if pid:
        return pid
    for other, (near, far) in enumerate(pairs):
        near.close()
        if other != place:
            far.close()
    mine = pairs[place][1]
    while data := mine.recv(4096):
        mine.send(data)
    os._exit(0)


async def _times_ms(rounds: int, act: Callable[[], Any]) -> list[float]:
    """Milliseconds of each call; other callbacks of the loop get their turn between."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        result = act()
        if asyncio.iscoroutine(result):
            await result
        times.append((time.perf_counter() - started) * 1e3)
        await asyncio.sleep(0)
    return times


async def _processes() -> dict[str, Any]:
    started = time.perf_counter()
    executor = MpExecutor(_specs(RANKS), worker=WORKER)
    answers = await executor.call("ping")
    found: dict[str, Any] = {"start_s": time.perf_counter() - started}
    if len({answer.unwrap() for answer in answers}) != RANKS:
        msg = "not every rank is a process of its own"
        raise RuntimeError(msg)
    await _times_ms(20, lambda: executor.call("noop", "warm"))
    found["noop"] = await _times_ms(ROUNDS, lambda: executor.call("noop", "task"))
    order = asyncio.ensure_future(_times_ms(ROUNDS // 4, lambda: executor.call("noop", "task")))
    found["status"] = await _times_ms(ROUNDS, executor.memory)
    await order
    found["measure"] = await _times_ms(ROUNDS // 4, lambda: executor.measure(60.0))
    found["sleep"] = await _times_ms(20, lambda: _sleep(executor))
    executor.shutdown()
    while not executor.ended:  # noqa: ASYNC110  (its end is not signalled)
        await asyncio.sleep(0.005)
    return found


async def _sleep(executor: Any) -> None:
    """A whole two-step sleep and the wake after it."""
    for method, argument in (
        ("prepare_sleep", SleepTask(task_id="t", level=1)),
        ("commit_sleep", "t"),
        ("commit_wake", "t"),
    ):
        for answer in await executor.call(method, argument):
            answer.unwrap()


async def _waits_s() -> float:
    """Seconds of one order that takes `WAIT_S` on each of `WAIT_RANKS` real ranks."""
    executor = MpExecutor(_specs(WAIT_RANKS), worker="benchmarks.bench_control_path:Waiter")
    await executor.call("ping")
    started = time.perf_counter()
    for method, argument in (("prepare_sleep", SleepTask(task_id="t", level=1)), ("commit_sleep", "t")):
        for answer in await executor.call(method, argument):
            answer.unwrap()
    seconds = time.perf_counter() - started
    executor.shutdown()
    while not executor.ended:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    return seconds


async def _simulated_ms() -> tuple[list[float], float]:
    executor = SimulatedExecutor(_specs(SIMULATED))
    times = await _times_ms(50, lambda: executor.call("noop", "task"))
    slow = SimulatedExecutor(_specs(SIMULATED), behave=lambda _where, _method: Behaviour(delay_s=WAIT_S))
    (wait,) = await _times_ms(1, lambda: slow.call("noop", "task"))
    executor.shutdown()
    slow.shutdown()
    await asyncio.sleep(0.01)
    return times, wait / 1e3


def measure() -> list[Figure]:
    """Status, orders, waits."""
    one = _bare_round_trips_ms()
    many = _bare_processes_ms(RANKS, ROUNDS)
    found = asyncio.run(_processes())
    wait_s = asyncio.run(_waits_s())
    simulated, simulated_wait_s = asyncio.run(_simulated_ms())
    floor = f"{RANKS} bare echo processes, p95"
    return [
        Figure(
            what=f"status of {RANKS} ranks while they work, p95",
            value=_p95(found["status"]),
            unit="ms",
            floor=_p95(one),
            floor_is="one bare round trip, p95",
            bar=f"≤ {STATUS_MS:g} ms",
            met=_p95(found["status"]) <= STATUS_MS,
            note="answered from what the ranks sent last: asks nobody",
        ),
        Figure(
            what=f"no-op order to {RANKS} ranks, gathered, p95",
            value=_p95(found["noop"]),
            unit="ms",
            floor=_p95(many),
            floor_is=floor,
            bar=f"≤ {ORDER_MS:g} ms",
            met=_p95(found["noop"]) <= ORDER_MS,
            note=f"median {_p50(found['noop']):.2f} ms against {_p50(many):.2f} ms",
        ),
        Figure(
            what=f"memory asked of {RANKS} ranks now (what status does not do), p95",
            value=_p95(found["measure"]),
            unit="ms",
            floor=_p95(many),
            floor_is=floor,
        ),
        Figure(
            what=f"three orders in a row (sleep, wake) to {RANKS} ranks, p95",
            value=_p95(found["sleep"]),
            unit="ms",
            floor=3 * _p95(many),
            floor_is=f"3 × {floor}",
        ),
        Figure(
            what=f"sleep with {WAIT_S:g} s injected on each of {WAIT_RANKS} ranks",
            value=wait_s,
            unit="s",
            floor=WAIT_S,
            floor_is="the wait",
            bar=f"≤ {WAIT_BAR_S:g} s",
            met=wait_s <= WAIT_BAR_S,
        ),
        Figure(
            what=f"start of {RANKS} processes to the first answer of all",
            value=found["start_s"],
            unit="s",
            floor=RANKS * _bare_interpreter_s() / len(os.sched_getaffinity(0)),
            floor_is=f"{RANKS} × `python -c pass` over the cores",
        ),
        Figure(what=f"no-op order to {SIMULATED} simulated ranks, p95", value=_p95(simulated), unit="ms"),
        Figure(
            what=f"order with {WAIT_S:g} s injected on each of {SIMULATED} simulated ranks",
            value=simulated_wait_s,
            unit="s",
            floor=WAIT_S,
            floor_is="the wait",
        ),
    ]


def _p50(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _bare_interpreter_s() -> float:
    """Seconds of an interpreter that does nothing, best of 5."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        os.waitpid(os.posix_spawn(sys.executable, [sys.executable, "-c", "pass"], os.environ), 0)
        times.append(time.perf_counter() - started)
    return min(times)
