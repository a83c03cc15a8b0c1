"""Faults of one rank of four, what comes of them, and the ranks' memory as another process sees it.

`test_failures.py` checks each fault, `tools/failure_table.py` prints them.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import SleepError, WakeError
from tests.engine.engine_helpers import collect, golden, rank_fault

if TYPE_CHECKING:
    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.protocol import OmniACK

REPLICAS, RANKS = 2, 2
STAGE = 1
PLACES = [(replica, rank) for replica in range(REPLICAS) for rank in range(RANKS)]
CULPRIT = (1, 1)
"""The rank that fails: (replica, rank)."""
TIMEOUT_S = 1.0
LATEST_S = TIMEOUT_S + 12.0
"""A hung rank is answered for this soon: the order's deadline, a few to finish or take back, a busy machine."""

_RANGE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")
_segments: dict[int, list[tuple[str, int, int]]] = {}


@dataclass(frozen=True)
class Fault:
    """What one rank does in one step of an order, and the state and error code that must come of it."""

    name: str
    order: str
    level: int
    method: str
    what: dict[str, Any]
    state: str
    code: str
    says: str

    @property
    def hangs(self) -> bool:
        """Whether the rank stops without ending."""
        return self.what.get("signal") == signal.SIGSTOP

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


@dataclass(frozen=True)
class Outcome:
    """What the caller and the others see."""

    acks: list[OmniACK]
    message: str
    state: str
    level: int | None
    seconds: float
    error: BaseException | None = field(default=None, compare=False)


RAISES: dict[str, Any] = {"error": "RuntimeError", "args": ["broken"]}
LATE = {**RAISES, "after": True}
KILLED = {"signal": signal.SIGKILL}
STOPPED = {"signal": signal.SIGSTOP}


def _all_faults() -> list[Fault]:
    faults = []
    for order in ("sleep", "wake"):
        back = "AWAKE" if order == "sleep" else "ASLEEP"
        for level in (1, 2):
            at = f"{order}({level})" if order == "sleep" else f"wake from level {level}"
            where = [(f"prepare_{order}", "prepare"), (f"commit_{order}", "commit")]
            known: dict[str, Any] = {"order": order, "level": level}
            for method, step in where:
                faults.append(
                    Fault(f"raises in {step} of {at}", **known, method=method, what=RAISES, state=back,
                          code="RuntimeError", says="broken")
                )  # fmt: skip
            faults.append(
                Fault(f"raises in commit of {at} after its memory moved", **known, method=f"commit_{order}", what=LATE,
                      state=back, code="RuntimeError", says="broken")
            )  # fmt: skip
            for method, step in where if level == 2 else ():
                faults.append(
                    Fault(f"SIGKILL in {step} of {at}", **known, method=method, what=KILLED, state="FAILED",
                          code="WORKER_DIED", says="killed by SIGKILL")
                )  # fmt: skip
                faults.append(
                    Fault(f"SIGSTOP in {step} of {at}", **known, method=method, what=STOPPED, state="FAILED",
                          code="DEADLINE", says="did not answer")
                )  # fmt: skip
    restore: dict[str, Any] = {
        "order": "wake",
        "what": LATE,
        "state": "ASLEEP",
        "code": "RuntimeError",
        "says": "broken",
    }
    return [
        *faults,
        Fault("raises after the copy back of level 1", level=1, method="map_restore", **restore),
        Fault("raises after the reload of level 2", level=2, method="reload", **restore),
    ]


FAULTS = _all_faults()


async def outcome(engine: AsyncOmni, order: str, level: int = 1, **known: Any) -> Outcome:
    """One order to `STAGE` that is to fail, and what came of it."""
    error: BaseException | None = None
    started = time.monotonic()
    try:
        call = engine.sleep([STAGE], level=level, **known) if order == "sleep" else engine.wake_up([STAGE], **known)
        acks = await call
    except (SleepError, WakeError) as raised:
        error, acks = raised, raised.acks
    seconds = time.monotonic() - started
    stage = engine.status().stages[STAGE]
    return Outcome(acks, str(error or ""), str(stage.state), stage.level, seconds, error)


async def happens(engine: AsyncOmni, fault: Fault) -> Outcome:
    """Let a fault happen to an engine whose stages are awake."""
    if fault.order == "wake":
        await engine.sleep([STAGE], level=fault.level)
    timeout = TIMEOUT_S if fault.hangs else None
    with rank_fault(engine, STAGE, CULPRIT, fault.method, **fault.what):
        return await outcome(engine, fault.order, fault.level, timeout=timeout)


# ------------------------------------------------------------------------------------- from outside


async def learn(engine: AsyncOmni) -> None:
    """Ask ranks that were not asked before where their memory lies; it stays there for a rank's life."""
    for stage in engine._core.stages:
        for replica in stage.replicas:
            pids = [rank.pid for rank in replica.executor.memory()]
            if all(pid in _segments for pid in pids):
                continue
            asked = replica.executor.call("segments", timeout_s=20.0)
            for pid, answer in zip(pids, await asyncio.wrap_future(engine.submit(asked)), strict=True):
                assert pid is not None
                _segments[pid] = [(tag, start, start + n_bytes) for tag, start, n_bytes in answer.unwrap()]


def resident_outside(pid: int) -> int:
    """Bytes of a rank's tagged memory that are physically there, as /proc/PID/smaps tells another process."""
    ranges = _segments[pid]
    n_bytes, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        found = _RANGE.match(line)
        if found is not None:
            start, end = (int(word, 16) for word in found.groups())
            inside = any(low <= start and end <= high for _tag, low, high in ranges)
        elif inside and line.startswith("Rss:"):
            n_bytes += int(line.split()[1]) * 1024
    return n_bytes


def mapped(pid: int, tags: tuple[str, ...] | None = None) -> int:
    """What a rank's tagged memory spans, or that of some tags."""
    return sum(high - low for tag, low, high in _segments[pid] if tags is None or tag in tags)


def living(engine: AsyncOmni, stage_id: int = STAGE) -> list[int]:
    """The processes of a stage's ranks."""
    return [rank.pid for rank in engine.status().stages[stage_id].ranks if rank.alive and rank.pid is not None]


def residents(engine: AsyncOmni, stage_id: int = STAGE) -> list[int]:
    """Every living rank's resident bytes, measured from outside."""
    return [resident_outside(pid) for pid in living(engine, stage_id)]


def spans(engine: AsyncOmni, stage_id: int = STAGE, tags: tuple[str, ...] | None = None) -> list[int]:
    """Every living rank's bytes when all of it, or some tags, are awake."""
    return [mapped(pid, tags) for pid in living(engine, stage_id)]


def places(acks: list[OmniACK]) -> list[tuple[int, int]]:
    """(replica, rank) of each ACK."""
    return [(ack.metadata["replica"], ack.rank) for ack in acks]


def culprits_ack(acks: list[OmniACK]) -> OmniACK:
    """The ACK of the rank that failed."""
    return next(ack for ack in acks if (ack.metadata["replica"], ack.rank) == CULPRIT)


class Cgroup:
    """A memory cgroup of version 1 or 2 that a process is moved into.

    Raises:
        OSError: no right to make one here.
    """

    def __init__(self, pid: int, limit_bytes: int) -> None:
        root = Path("/sys/fs/cgroup")
        old = (root / "memory" / "memory.limit_in_bytes").exists()
        self._parent = root / "memory" if old else root
        self._folder = self._parent / f"omni-test-{pid}"
        self._limit = self._folder / ("memory.limit_in_bytes" if old else "memory.max")
        self._folder.mkdir()
        self.set(limit_bytes)
        (self._folder / "cgroup.procs").write_text(str(pid))

    def set(self, limit_bytes: int) -> None:
        """Another limit."""
        self._limit.write_text(str(limit_bytes))

    def remove(self) -> None:
        """Move the process back, and end the group."""
        for pid in (self._folder / "cgroup.procs").read_text().split():
            (self._parent / "cgroup.procs").write_text(pid)
        self._folder.rmdir()


# ------------------------------------------------------------------------------------ what must hold

goldens: dict[int, tuple[list[int], bytes]] = {}
"""The output of each engine, by its id, from before anything happened to it."""


def state_of(engine: AsyncOmni, stage_id: int = STAGE) -> str:
    """A stage's memory state."""
    return str(engine.status().stages[stage_id].state)


def pid_of(engine: AsyncOmni, place: tuple[int, int] = CULPRIT, stage_id: int = STAGE) -> int:
    """A rank's process."""
    pid = engine.status().stages[stage_id].ranks[PLACES.index(place)].pid
    assert pid is not None
    return pid


async def serves(engine: AsyncOmni) -> None:
    """The other stage answers."""
    assert (await asyncio.wait_for(collect(engine, output_modalities="text"), 20))[-1].text


async def brought_back(engine: AsyncOmni, stage_id: int = STAGE) -> None:
    """`restart` gives the stage back with the output from before."""
    await engine.restart(stage_id)
    await learn(engine)
    assert state_of(engine, stage_id) == "AWAKE"
    assert residents(engine, stage_id) == spans(engine, stage_id)
    assert await golden(engine) == goldens[id(engine)]
