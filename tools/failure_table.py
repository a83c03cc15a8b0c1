"""Let every fault happen once to a real engine of 2 stages × 2 replicas × 2 ranks, and print what came of it.

`python tools/failure_table.py > table.md`: a Markdown table fault → state → ACKs → what the user reads → seconds, and
the processes and shared-memory files before and after. The patience is the product's own, the faults are the tests'.
"""

from __future__ import annotations

import asyncio
import functools
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from omni_notebook.config import DEMO_FOLDER  # noqa: E402  (after the path)
from omni_notebook.engine.async_omni import AsyncOmni  # noqa: E402
from omni_notebook.executors.mp import executor as mp_executor  # noqa: E402
from omni_notebook.protocol import MIB  # noqa: E402
from tests.engine import faults  # noqa: E402
from tests.engine.engine_helpers import collect, golden, rank_fault, reset, tell, until  # noqa: E402
from tests.engine.faults import CULPRIT, RAISES, STAGE, STOPPED, Outcome  # noqa: E402
from tests.engine.faulty_worker import FAULTY  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SHIPPED = DEMO_FOLDER / "dit"
FILE = "model.safetensors"
TOLD = 400


async def _killed_awake(engine: AsyncOmni) -> Outcome:
    started = time.monotonic()
    os.kill(faults.pid_of(engine), signal.SIGKILL)
    await until(lambda: faults.state_of(engine) == "FAILED")
    seconds = time.monotonic() - started
    stage = engine.status().stages[STAGE]
    return Outcome([], str(stage.last_error), str(stage.state), stage.level, seconds)


async def _killed_asleep(engine: AsyncOmni) -> Outcome:
    await engine.sleep([STAGE], level=2)
    return await _killed_awake(engine)


async def _hung_before(engine: AsyncOmni) -> Outcome:
    pid = faults.pid_of(engine)
    os.kill(pid, signal.SIGSTOP)
    try:
        return await faults.outcome(engine, "sleep", timeout=faults.TIMEOUT_S)
    finally:
        os.kill(pid, signal.SIGCONT)


async def _hung_in_a_batch(engine: AsyncOmni) -> Outcome:
    for replica in range(faults.REPLICAS):  # whichever takes it
        tell(engine, STAGE, (replica, 1), "execute", **STOPPED)
    return await _of_a_call(engine, collect(engine))


async def _one_could_not_load(engine: AsyncOmni) -> Outcome:
    with rank_fault(engine, STAGE, CULPRIT, "load_weights", **RAISES):
        return await _of_a_call(engine, engine.load_weights(STAGE, SHIPPED))


async def _of_a_call(engine: AsyncOmni, call: Awaitable[object]) -> Outcome:
    started, message = time.monotonic(), ""
    try:
        await call
    except Exception as error:  # noqa: BLE001  (whatever the user would read)
        message = f"{type(error).__name__}: {error}"
    stage = engine.status().stages[STAGE]
    return Outcome([], message, str(stage.state), stage.level, time.monotonic() - started)


async def _checkpoint(engine: AsyncOmni, harm: Callable[[Path], object]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "dit"
        shutil.copytree(SHIPPED, copy)
        await engine.load_weights(STAGE, copy)
        await engine.sleep([STAGE], level=2)
        harm(copy / FILE)
        seen = await faults.outcome(engine, "wake")
        shutil.copy(SHIPPED / FILE, copy / FILE)
        await engine.wake_up([STAGE])
        await engine.load_weights(STAGE, SHIPPED)
    return seen


async def _gone(engine: AsyncOmni) -> Outcome:
    return await _checkpoint(engine, Path.unlink)


async def _changed(engine: AsyncOmni) -> Outcome:
    return await _checkpoint(engine, lambda file: file.write_bytes(file.read_bytes()[:-4096] + bytes(4096)))


async def _disk_full(engine: AsyncOmni) -> Outcome:
    pid = faults.pid_of(engine)
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
    await engine.load_weights(STAGE, SHIPPED)
    seen = await faults.outcome(engine, "sleep", 1)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    return seen


async def _no_room(engine: AsyncOmni) -> Outcome:
    await engine.sleep([STAGE], level=1)
    group = faults.Cgroup(faults.pid_of(engine), 5 * MIB)
    seen = await faults.outcome(engine, "wake")
    group.set(1024 * MIB)
    await engine.wake_up([STAGE])
    group.remove()
    return seen


OTHERS: dict[str, Callable[[AsyncOmni], Awaitable[Outcome]]] = {
    "SIGKILL while awake": _killed_awake,
    "SIGKILL while asleep": _killed_asleep,
    "SIGSTOP before a sleep": _hung_before,
    "SIGSTOP in a batch": _hung_in_a_batch,
    "raises in load_weights": _one_could_not_load,
    "checkpoint gone between sleep(2) and wake": _gone,
    "checkpoint changed between sleep(2) and wake": _changed,
    "no room for the spill (RLIMIT_FSIZE of one rank)": _disk_full,
    "no memory to map (memory cgroup around one rank)": _no_room,
}


def _row(name: str, seen: Outcome, restarted: str) -> str:
    state = f"{seen.state}({seen.level})" if seen.state == "ASLEEP" else seen.state
    counts = Counter((ack.status, ack.metadata["error_code"]) for ack in seen.acks)
    acks = "<br>".join(f"{n} × {status} {code or ''}" for (status, code), n in counts.items()) or "–"
    told = seen.message.replace("|", "\\|").replace("\n", " ")
    told = told if len(told) <= TOLD else told[:TOLD] + " …"
    return f"| {name} | {state} | {acks} | {told} | {seen.seconds:.2f} | {restarted} |"


async def _table(engine: AsyncOmni) -> None:
    print("| one rank of four | stage then | ACKs | what the user reads | s to answer | way out |")
    print("|---|---|---|---|---|---|")
    before = await golden(engine)
    cases: dict[str, Callable[[], Awaitable[Outcome]]] = {
        fault.name: functools.partial(faults.happens, engine, fault) for fault in faults.FAULTS
    }
    cases |= {name: functools.partial(case, engine) for name, case in OTHERS.items()}
    for name, case in cases.items():
        await reset(engine)
        await faults.learn(engine)
        try:
            seen = await case()
        except OSError as error:
            print(f"| {name} | – | – | not done here: {error} | – | – |")
            continue
        out = await _way_out(engine)
        print(_row(name, seen, out), flush=True)
        assert await golden(engine) == before


async def _way_out(engine: AsyncOmni) -> str:
    """The call that brings the stage back, and how long it takes."""
    assert (await collect(engine, output_modalities="text"))[-1].text
    state, started = faults.state_of(engine), time.monotonic()
    if state == "AWAKE":
        return "none needed"
    await (engine.restart(STAGE) if state == "FAILED" else engine.wake_up([STAGE]))
    call = "restart" if state == "FAILED" else "wake_up"
    return f"`{call}`, {time.monotonic() - started:.1f} s"


def _listing(when: str) -> None:
    children = [f"{p.pid} {' '.join(p.cmdline()[:4])}" for p in psutil.Process().children(recursive=True)]
    shared = sorted(path.name for path in Path("/dev/shm").iterdir())
    files = sorted(entry.readlink().name for entry in Path("/proc/self/fd").iterdir() if entry.exists())
    print(f"\n{when}: {len(children)} children {children}; /dev/shm {shared}; {len(files)} open files")


def main() -> None:
    """Everything once."""
    _listing("before")
    mp_executor.WORKER = FAULTY
    print()
    with AsyncOmni("demo", tensor_parallel_size=2, num_replicas=2) as engine:
        asyncio.run(_table(engine))
    _listing("after")


if __name__ == "__main__":
    main()
