"""Who holds what on each device: NVML where a rank is on CUDA and `nvidia-ml-py` is there, processes' memory else."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_notebook.memory.device.visible import visible_handle
from omni_notebook.memory.host import host_memory, rss_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from omni_notebook.protocol import EngineStatus, RankStatus

KERNEL = "this kernel"
OTHERS = "others"
NO_NVML = "the device's own figures need the package nvidia-ml-py; these are the ranks' pools"
HIDDEN = "process ids are hidden here, so others can not be named"

ELSEWHERE = "as the server told; its other processes, its RAM and its devices' own figures are not seen from here"


class Holder(NamedTuple):
    """Someone who holds memory; None = not told."""

    who: str
    n_bytes: int | None


class Device(NamedTuple):
    """One device's memory, bytes, and who holds it; None = not told."""

    name: str
    used_bytes: int | None
    total_bytes: int | None
    holders: tuple[Holder, ...]
    note: str = ""


class DeviceProbe:
    """Looks at the host and at every CUDA device that a rank is on; NVML is loaded when one is."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._tried = False

    def look(self, status: EngineStatus, host: str | None = None) -> tuple[Device, ...]:
        """The host first, then CUDA devices in order of their names; of another `host` what its ranks told."""
        stages = () if status.closed else status.stages
        ranks = [(stage.stage_id, rank) for stage in stages for rank in stage.ranks]
        if host is not None:
            return (_elsewhere(host, ranks),)
        names = sorted({rank.device for _, rank in ranks if rank.device.startswith("cuda")})
        cuda = [self._cuda(name, [(stage, rank) for stage, rank in ranks if rank.device == name]) for name in names]
        return (_host(ranks), *cuda)

    def _cuda(self, name: str, ranks: Sequence[tuple[int, RankStatus]]) -> Device:
        nvml = self._library()
        if nvml is None:
            pools = tuple(Holder(_rank_words(stage, rank), _resident(rank)) for stage, rank in ranks)
            return Device(name, None, None, pools, NO_NVML)
        try:
            handle = visible_handle(nvml, name)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            held = [(run.pid, run.usedGpuMemory) for run in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
            title = f"{_text(nvml.nvmlDeviceGetName(handle))} ({name})"
        except (nvml.NVMLError, ValueError) as error:
            return Device(name, None, None, (), f"NVML: {error}")
        holders, note = _cuda_holders(ranks, held, int(memory.used))
        return Device(title, int(memory.used), int(memory.total), holders, note)

    def _library(self) -> Any:
        """`pynvml`, started; None where it is not there or finds no driver."""
        if not self._tried:
            self._tried = True
            with contextlib.suppress(ImportError):
                nvml = importlib.import_module("pynvml")
                with contextlib.suppress(nvml.NVMLError):
                    nvml.nvmlInit()
                    self._nvml = nvml
        return self._nvml

    def close(self) -> None:
        """Let go of NVML."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        self._nvml, self._tried = None, False


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _cuda_holders(
    ranks: Sequence[tuple[int, RankStatus]], held: Iterable[tuple[int, int | None]], used_bytes: int
) -> tuple[tuple[Holder, ...], str]:
    owners = _owners(ranks)
    told = dict(held)
    known = owners.keys() & told.keys()
    if owners and not known:  # another namespace's ids, or none
        return tuple(Holder(_rank_words(stage, rank), _resident(rank)) for stage, rank in ranks), HIDDEN
    holders = [Holder(who, told[pid]) for pid, who in owners.items() if pid in told]
    rest = used_bytes - sum(told[pid] or 0 for pid in known)
    return (*holders, Holder(OTHERS, max(0, rest))), ""


def _host(ranks: Sequence[tuple[int, RankStatus]]) -> Device:
    room = host_memory()
    sizes = {rank.pid: rank.process_bytes for _, rank in ranks}
    owners = {pid: who for pid, who in _owners(ranks).items() if pid != os.getpid()}
    inside = _owners([(stage, rank) for stage, rank in ranks if rank.pid == os.getpid()]).get(os.getpid())
    kernel = Holder(f"{KERNEL}, with {inside}" if inside else KERNEL, rss_bytes())
    holders = (kernel, *(Holder(who, sizes[pid]) for pid, who in owners.items()))
    return Device("host RAM", room.limit_bytes - room.available_bytes, room.limit_bytes, holders)


def _elsewhere(host: str, ranks: Sequence[tuple[int, RankStatus]]) -> Device:
    """Ranks on another machine: no process id and no device of this one is theirs."""
    sizes = {rank.pid: rank.process_bytes for _, rank in ranks}
    holders = tuple(Holder(who, sizes[pid]) for pid, who in _owners(ranks).items())
    return Device(f"{host}, another machine", None, None, holders, ELSEWHERE)


def _owners(ranks: Sequence[tuple[int, RankStatus]]) -> dict[int, str]:
    """`{pid: "stage 0 rank 0, stage 1 rank 0"}` of ranks that live."""
    owners: dict[int, list[str]] = {}
    for stage, rank in ranks:
        if rank.pid is not None and rank.alive:
            owners.setdefault(rank.pid, []).append(_rank_words(stage, rank))
    return {pid: f"{_some(words)} (pid {pid})" for pid, words in owners.items()}


def _some(words: Sequence[str]) -> str:
    return ", ".join(words) if len(words) <= 3 else f"{words[0]} … {words[-1]}, {len(words)} ranks"


def _rank_words(stage_id: int, rank: RankStatus) -> str:
    replica = f" replica {rank.replica}" if rank.replica else ""
    return f"stage {stage_id}{replica} rank {rank.rank}"


def _resident(rank: RankStatus) -> int:
    return sum(tag.resident_bytes for tag in rank.tags.values())
