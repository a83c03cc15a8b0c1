"""What vLLM's processes leave behind when they are killed: one another, and shared memory with a name.

    python -m omni_notebook.worker.vllm.leftovers GROUP FOLDER

is the sentinel: a small process that cleans up when its standard input ends, that is when the host is gone, however
it went. Names of shared memory come by that way, one a line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

_SHARED_MEMORY = "/dev/shm/"  # noqa: S108  (where POSIX shared memory is, by name)


def shared_memory(group: int) -> set[str]:
    """The named shared memory that the processes of a group have mapped."""
    found: set[str] = set()
    for pid in _members(group):
        found |= _mapped(pid)
    return found


def clean(group: int, names: set[str], folder: Path) -> None:
    """End a group's other processes, and remove what has these names, what else they had mapped, and a folder.

    Python's resource tracker is left: it ends with the last of them, and removes what they had registered.
    """
    names = names | shared_memory(group)
    for pid in _members(group):
        if pid != os.getpid() and not _is_tracker(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for name in names:
        with contextlib.suppress(OSError):
            Path(name).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def stop_tracker() -> None:
    """Let this process's resource tracker remove what is registered there, and wait until it has."""
    tracker: Any = resource_tracker._resource_tracker  # noqa: SLF001  (no public way)
    with contextlib.suppress(ChildProcessError):
        tracker._stop()  # noqa: SLF001


def _members(group: int) -> list[int]:
    """The processes of a group; vLLM starts no other groups."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                found.append(int(entry.name))
    return found


class Sentinel:
    """Starts the sentinel of this process's group, and tells it names."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-P", "-m", __name__, str(os.getpgrp()), str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)  # noqa: S603  (our own module)

    def tell(self, names: set[str]) -> None:
        """Name shared memory that is to be removed."""
        if self._process.stdin is not None:
            self._process.stdin.writelines(f"{name}\n" for name in names)
            self._process.stdin.flush()


def main() -> None:
    """The sentinel's whole life."""
    group, folder = int(sys.argv[1]), Path(sys.argv[2])
    clean(group, {line.strip() for line in sys.stdin}, folder)


def _is_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _mapped(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[-1] for line in lines if _SHARED_MEMORY in line}
    return {path for path in paths if path.startswith(_SHARED_MEMORY) and Path(path).exists()}


if __name__ == "__main__":
    main()
