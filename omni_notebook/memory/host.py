"""What the host has and what a process holds: RAM within cgroup limits, process memory, disk room, the CPU's name."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from omni_notebook.memory.base import HostMemory, ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_RAM_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})


def process_memory(pid: int | None = None) -> ProcessMemory:
    """A process's memory, bytes: resident, and of that in pages that no other process maps.

    Raises:
        ProcessLookupError: there is no such process. Source: proc_pid_smaps(5), smaps_rollup.
    """
    try:
        text = Path(f"/proc/{pid or 'self'}/smaps_rollup").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        msg = f"no process {pid}"
        raise ProcessLookupError(msg) from None
    except PermissionError:
        return _process_memory_by_statm(pid)
    fields = {key: int(value.split()[0]) * 1024 for key, _, value in _pairs(text) if value.strip().endswith("kB")}
    private = ("Private_Clean", "Private_Dirty", "Private_Hugetlb")
    return ProcessMemory(rss_bytes=fields["Rss"], private_bytes=sum(fields.get(key, 0) for key in private))


def rss_bytes() -> int:
    """This process's resident memory in microseconds, off by a few hundred KiB at most; `process_memory` is exact."""
    file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(file, 256).split()[1]) * _PAGE
    finally:
        os.close(file)


def _pairs(text: str) -> Iterator[tuple[str, str, str]]:
    return (line.partition(":") for line in text.splitlines())


def _process_memory_by_statm(pid: int | None) -> ProcessMemory:
    try:
        info = psutil.Process(pid).memory_info()
    except psutil.NoSuchProcess:
        msg = f"no process {pid}"
        raise ProcessLookupError(msg) from None
    return ProcessMemory(rss_bytes=info.rss, private_bytes=info.rss - info.shared)


def host_memory() -> HostMemory:
    """Host RAM that this process may still take: the least room of the machine's and of every cgroup above it."""
    machine = psutil.virtual_memory()
    limit, available = machine.total, machine.available
    for group_limit, used in _cgroup_limits():
        limit = min(limit, group_limit)
        available = min(available, max(0, group_limit - used))
    return HostMemory(limit_bytes=limit, available_bytes=available)


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that reclaim can not give back) of each memory cgroup of this process, v2 and v1."""
    for kind, path in _cgroup_paths():
        root = _CGROUP_ROOT if kind == 2 else _CGROUP_ROOT / "memory"
        if kind == 2 and not (root / "cgroup.controllers").exists():
            root = _CGROUP_ROOT / "unified"
        names = ("memory.max", "memory.current") if kind == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        folder = root / path.lstrip("/")
        while folder == root or root in folder.parents:
            yield from _cgroup_limit(folder, *names)
            folder = folder.parent


def _cgroup_paths() -> list[tuple[int, str]]:
    """(cgroup version, path) of this process. Source: cgroups(7), /proc/PID/cgroup."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found.append((2, path))
        elif "memory" in controllers.split(","):
            found.append((1, path))
    return found


def _cgroup_limit(folder: Path, limit_name: str, used_name: str) -> Iterator[tuple[int, int]]:
    try:
        limit = (folder / limit_name).read_text(encoding="ascii").strip()
        used = int((folder / used_name).read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):
        return
    if limit == "max":
        return
    fields = dict(line.split(" ", 1) for line in stat.splitlines() if " " in line)
    # Clean file pages go away on demand; tmpfs pages are in `active_file` of neither version.
    cache = int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
    yield int(limit), max(0, used - cache)


def disk_free_bytes(folder: str) -> int:
    """Bytes that this user may still write in `folder`'s file system, and, where that is RAM, that RAM has room for.

    Raises:
        OSError: `folder` does not exist.
    """
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    return min(free, host_memory().available_bytes) if is_in_ram(folder) else free


def is_in_ram(folder: str) -> bool:
    """Whether files in `folder` are memory (tmpfs, ramfs)."""
    return filesystem_of(folder) in _RAM_FILESYSTEMS


def filesystem_of(folder: str) -> str | None:
    """The kind of file system that `folder` lies in, "ext4"; None where it is not told. Source: proc_pid_mountinfo(5).

    Raises:
        OSError: `folder` does not exist.
    """
    device = Path(folder).stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return None


def cpu_name() -> str:
    """The processor's name, as in an ACK's `source` ("AMD EPYC 9555"); the machine's kind where none is told."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for key, _, value in _pairs(text):
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine() or "CPU"


def usable_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
