"""What executor tests share: specs, waiting, looking at the machine from outside."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from omni_notebook.config import StageConfig
from omni_notebook.protocol import RankId
from omni_notebook.worker.reports import WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

CHILD = "omni_notebook.executors.mp.child"


def make_specs(n_ranks: int, *, version: str | None = None, **config: Any) -> tuple[WorkerSpec, ...]:
    """Specs of one replica of stage 7."""
    stage = StageConfig(kind="ar", model="none", executor="mp", **config)
    return tuple(WorkerSpec(where=RankId(7, 0, rank), config=stage, version=version) for rank in range(n_ranks))


async def until(predicate: Any, seconds: float = 20.0) -> None:
    """Wait until a predicate holds, at most `seconds`."""
    async with asyncio.timeout(seconds):
        while not predicate():  # noqa: ASYNC110 (nothing signals a process's end here)
            await asyncio.sleep(0.002)


def wait_until(predicate: Any, seconds: float = 20.0) -> None:
    """The same without a loop."""
    end = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: Sequence[int]) -> bool:
    """Whether none of them runs."""
    return not any(runs(pid) for pid in pids)


def workers_of(pid: int) -> list[int]:
    """The rank processes among a process's children."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if CHILD in child.cmdline():
                found.append(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def zombies() -> list[int]:
    """Dead children of this process that nobody has waited for."""
    return [p.pid for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE]


def fds() -> set[str]:
    """This process's open files, as what they are."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(f"{entry.name} {entry.readlink()}")
        except FileNotFoundError:
            continue
    return {name for name in found if "/proc/" not in name}


def shared_files() -> set[str]:
    """What lies in shared memory and in the temporary folder; others on the machine may put things into the first."""
    return {str(path) for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).iterdir()}


def frame_maps(pid: int | str = "self") -> int:
    """Frames that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text(encoding="ascii").count("omni-frame")


def alive(executor: Any) -> list[int]:
    """The process ids of an executor's ranks."""
    return [status.pid for status in executor.memory() if status.alive and status.pid != os.getpid()]
