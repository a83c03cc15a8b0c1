"""What vLLM's processes leave behind when they are killed: one another, and shared memory with a name.

    python -m omni_notebook.worker.vllm.leftovers GROUP FOLDER

is the sentinel: a small process that cleans up when its standard input ends, that is when the host is gone, however
it went. It is in a group of its own: who ends the host's group must not end it too. A line on its input says that
vLLM has started; until then it looks itself, again and again, what shared memory there is.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where POSIX shared memory is, by name)
_LOOK_S = 0.2
_PASS_S = 0.01
_END_S = 10.0
_TRACKER_S = 2.0


class Leftovers:
    """What a group of processes will leave; made before they are.

    Args:
        group: the number of the group; vLLM starts no other groups.
        folder: a folder that goes with them.
    """

    def __init__(self, group: int, folder: Path) -> None:
        self._group = group
        self._folder = folder
        self._before = frozenset(path.name for path, _ in _named())
        self._names: set[Path] = set()

    def look(self) -> None:
        """Remember the named shared memory that the processes have mapped now.

        A file that was there before them, or that lies in a folder (a checkpoint, say), is somebody's.
        """
        mapped = {inode for pid in _members(self._group) for inode in _mapped(pid)}
        if mapped:
            self._names |= {path for path, inode in _named() if inode in mapped and path.name not in self._before}

    def clean(self) -> None:
        """End the group's other processes, and remove what they had: shared memory, the folder.

        Python's resource tracker is left: it ends with the last of them, and removes what they had registered.
        """
        self.look()
        give_up_s = time.monotonic() + _END_S  # one that the kernel holds does not end
        while (others := self._others()) and time.monotonic() < give_up_s:
            for pid in others:  # one of them may have started another meanwhile
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_PASS_S)
        for path in self._names:
            with contextlib.suppress(OSError):
                path.unlink()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _others(self) -> list[int]:
        return [pid for pid in _members(self._group) if pid != os.getpid() and not _is_tracker(pid)]


class Sentinel:
    """Starts the sentinel of this process's group."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-P", "-m", __name__, str(os.getpgrp()), str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)  # noqa: S603  (our module)

    def started(self) -> None:
        """VLLM has made all the shared memory that it will make."""
        if self._process.stdin is not None:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()


def main() -> None:
    """The sentinel's whole life."""
    left = Leftovers(int(sys.argv[1]), Path(sys.argv[2]))
    patience_s: float | None = _LOOK_S
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], patience_s)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
        left.look()
        patience_s = None if readable else _LOOK_S
    left.clean()


def stop_tracker() -> None:
    """Let this process's resource tracker remove what is registered there, and wait until it has, but not for ever.

    It ends with the last process that has its pipe, and the kernel may hold one of those that were killed.
    """
    tracker: Any = resource_tracker._resource_tracker  # noqa: SLF001  (no public way)

    def stop() -> None:
        with contextlib.suppress(ChildProcessError):
            tracker._stop()  # noqa: SLF001

    stopping = threading.Thread(target=stop, name="tracker", daemon=True)
    stopping.start()
    stopping.join(_TRACKER_S)


def _members(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == group and not _has_ended(entry):
                found.append(int(entry.name))
    return found


def _has_ended(process: Path) -> bool:
    """Whether only its parent has not heard of it yet. Source: proc_pid_stat(5)."""
    return (process / "stat").read_bytes().rpartition(b")")[2].split()[0] in {b"Z", b"X"}


def _is_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _mapped(pid: int) -> set[int]:
    """The inodes of the shared memory that a process has mapped.

    Their paths there are not their names: a semaphore is made under another one. Source: sem_open in glibc.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return {int(line.split(maxsplit=5)[4]) for line in lines if f" {_SHARED_MEMORY}/" in line}


def _named() -> list[tuple[Path, int]]:
    """What lies in the folder of shared memory, and its inodes."""
    with contextlib.suppress(OSError), os.scandir(_SHARED_MEMORY) as entries:
        return [(Path(entry.path), entry.inode()) for entry in entries if not entry.is_dir(follow_symlinks=False)]
    return []


if __name__ == "__main__":
    main()
