"""With `-n 2` two modules run at a time, in processes that take turns: a `quiet` test has the machine to itself."""

from __future__ import annotations

import contextlib
import fcntl
from typing import TYPE_CHECKING

from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from xdist.workermanage import WorkerController

ONE_AT_A_TIME = ("tests/vllm", "tests/gpu")
"""Folders whose modules share something of the machine: one process runs all of a folder."""
LONG = (
    *ONE_AT_A_TIME,
    "tests/test_binder.py",
    "tests/engine/test_interleavings.py",
    "tests/engine/test_state_machine.py",
)
"""What takes minutes: begun first, so that no process has it to itself at the end."""


class Turns:
    """Held by as many processes as like to, or by one `quiet` one; whoever comes first is served first."""

    def __init__(self, folder: Path) -> None:
        self._door = (folder / "door").open("w")  # held while waiting for the room, so that nobody overtakes
        self._room = (folder / "room").open("w")

    @contextlib.contextmanager
    def turn(self, *, quiet: bool) -> Iterator[None]:
        fcntl.flock(self._door, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX if quiet else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)


class ByModule(LoadFileScheduling):
    """A module's tests share engines, so one process runs them."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::", 1)[0]
        return next((folder for folder in ONE_AT_A_TIME if path.startswith(folder)), path)

    def _assign_work_unit(self, node: WorkerController) -> None:
        for scope in LONG:
            if scope in self.workqueue:
                self.workqueue.move_to_end(scope, last=False)
                break
        super()._assign_work_unit(node)
