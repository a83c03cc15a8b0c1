"""Which processes are a stage's ranks: asked of upstream's own process handles, and of /proc for their children."""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Collection

    from omni_notebook.engine.upstream.outside import Outside

_WORKER = re.compile(r"Worker")
_NUMBERS = re.compile(r"(?:Worker[-_]?|_[A-Z]+)(\d+)")
_REPLICA = re.compile(r"_replica(\d+)")
_POLL_S = 0.02
_HELPERS = ("resource_tracker", "forkserver")


class Seat(NamedTuple):
    """A rank's place and its process, None where that is not known; `started_s` tells it from a later one."""

    replica: int
    rank: int
    pid: int | None
    started_s: float | None = None

    @property
    def alive(self) -> bool:
        """Whether the very process is there."""
        if self.pid is None:
            return False
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.started_s and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def find(upstream: Any, stage_id: int, outside: Outside) -> tuple[Seat, ...]:
    """The ranks of a stage; one without a process for a replica of which no process is known."""
    found: list[Seat] = []
    for replica, client in enumerate(_clients(upstream, stage_id)):
        ranks = _ranks(_family(client), outside)
        found += [Seat(replica, rank, one.pid, _started_s(one)) for rank, one in enumerate(ranks)] or [
            Seat(replica, 0, None)
        ]
    return tuple(found) or (Seat(0, 0, None),)


def family(upstream: Any, stages: int) -> list[psutil.Process]:
    """Every process that upstream started for its stages, and theirs; never this one."""
    clients = [client for stage_id in range(stages) for client in _clients(upstream, stage_id)]
    return [one for client in clients for one in _family(client) if one.pid != os.getpid()]


def new_since(before: Collection[int]) -> list[psutil.Process]:
    """Processes that come from this one and were not there before; none that Python keeps for itself."""
    return [one for one in descendants() if one.pid not in before and not _is_helper(one)]


def descendants() -> list[psutil.Process]:
    """Every process that comes from this one."""
    return psutil.Process().children(recursive=True)


def end(processes: Collection[psutil.Process], grace_s: float) -> list[int]:
    """Kill those that do not end by themselves within `grace_s`; whom that concerned."""
    left = _left(processes, grace_s)
    for one in left:
        with contextlib.suppress(psutil.Error):
            one.kill()
    _left(left, grace_s)
    return [one.pid for one in left]


def _left(processes: Collection[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that run after so long; a zombie holds nothing, and may not be ours to wait for."""
    deadline_s = time.monotonic() + seconds
    while (left := [one for one in processes if _runs(one)]) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _clients(upstream: Any, stage_id: int) -> list[Any]:
    """One client a replica. Source: `StagePool.clients` (vllm_omni/engine/stage_pool.py, 0.30)."""
    pools = getattr(getattr(upstream, "engine", None), "stage_pools", None) or []
    return [client for client in pools[stage_id].clients if client is not None] if stage_id < len(pools) else []


def _family(client: Any) -> list[psutil.Process]:
    """A replica's processes: those that its client names and their children; this one where it runs here."""
    roots = _roots(client)
    if not roots and getattr(client, "_engine", None) is not None:
        return [psutil.Process()]
    found: dict[int, psutil.Process] = {}
    for pid in roots:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            found |= {one.pid: one for one in (root, *root.children(recursive=True))}
    return [one for one in found.values() if not _is_helper(one)]


def _is_helper(process: psutil.Process) -> bool:
    title = _title(process)
    return any(word in title for word in _HELPERS)


def _roots(client: Any) -> list[int]:
    """Process ids that a client names.

    Source, all of 0.30: a diffusion client's process manager (diffusion/stage_diffusion_client.py), the engine cores'
    manager of vLLM's clients, which may have those of all replicas (engine/stage_engine_core_proc_manager.py), the
    executor of an engine in this process (diffusion/executor/multiproc_executor.py).
    """
    places = (
        ("_proc_manager", "proc"),
        ("resources", "engine_manager", "processes"),
        ("_engine", "executor", "_processes"),
    )
    pids: list[int] = []
    for path in places:
        value: Any = client
        for name in path:
            value = getattr(value, name, None)
        handles = value if isinstance(value, list | tuple) else [value]
        pids += [one.pid for one in handles if isinstance(getattr(one, "pid", None), int) and _is_of(one, client)]
    return pids


def _is_of(handle: Any, client: Any) -> bool:
    """Whether a process belongs to the client's own replica, as far as its name says."""
    replica = _REPLICA.search(str(getattr(handle, "name", "")))
    return replica is None or int(replica[1]) == getattr(client, "replica_id", int(replica[1]))


def _ranks(family: list[psutil.Process], outside: Outside) -> list[psutil.Process]:
    """Those that upstream calls workers; where none is, those that hold memory on a GPU, else the first."""
    ranks = [one for one in family if _WORKER.search(_title(one))]
    if not ranks:
        holders = outside.holders([one.pid for one in family])
        ranks = [one for one in family if one.pid in holders]
    return sorted(ranks, key=_order) or family[:1]


def _order(process: psutil.Process) -> tuple[tuple[int, ...], float, int]:
    """Its places in the groups that its title names ("DiffusionWorker_CFG1_TP0"), then its age."""
    return tuple(map(int, _NUMBERS.findall(_title(process)))), _started_s(process) or 0.0, process.pid


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _started_s(process: psutil.Process) -> float | None:
    try:
        return process.create_time()
    except psutil.Error:
        return None
