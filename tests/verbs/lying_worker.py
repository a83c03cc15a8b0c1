"""A worker that can be told to lie, to leak, to change weights and to have no room: what an audit must find out.

Told by words on the channel that `cancel` uses, in a process of its own or in this one.
"""

from __future__ import annotations

import contextlib
import json
import mmap
from typing import TYPE_CHECKING, Any

from omni_notebook.memory.base import HostMemory
from tests.engine.faulty_worker import FaultyWorker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_notebook.engine.async_omni import AsyncOmni

LYING = "tests.verbs.lying_worker:LyingWorker"
PREFIX = "audit:"
_FORGET = {"lie_bytes": 0, "leak_bytes": 0, "wake_leak_bytes": 0, "scribble": False, "room_bytes": None}


class LyingWorker(FaultyWorker):
    """`lie_bytes`: added to what a sleep's ACK says was freed. `leak_bytes`, `wake_leak_bytes`: kept for good at each
    batch, at each wake.

    `scribble`: a weight is changed after each wake. `room_bytes`: what the host is said to have, None = the truth.
    """

    def __init__(self, spec: Any) -> None:
        self._told = dict(_FORGET)
        self._leaked: list[mmap.mmap] = []
        super().__init__(spec)
        core: Any = self._pool._core
        self._true_room = core.room
        core.room = self._room

    def _room(self) -> HostMemory:
        n_bytes = self._told["room_bytes"]
        return self._true_room() if n_bytes is None else HostMemory(limit_bytes=1 << 40, available_bytes=n_bytes)

    def cancel(self, task_id: str) -> None:
        if task_id.startswith(PREFIX):
            self._told.update(json.loads(task_id.removeprefix(PREFIX)))
        else:
            super().cancel(task_id)

    def execute(self, batch: Any) -> Any:
        self._leak(self._told["leak_bytes"])
        return super().execute(batch)

    def _leak(self, n_bytes: int) -> None:
        if n_bytes:  # not by malloc: it may give what this process has held all the while
            kept = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            kept.write(b"x" * n_bytes)
            self._leaked.append(kept)

    def commit_sleep(self, task_id: str) -> Any:
        ack = super().commit_sleep(task_id)
        ack.freed_bytes += self._told["lie_bytes"]
        return ack

    def commit_wake(self, task_id: str) -> Any:
        ack = super().commit_wake(task_id)
        self._leak(self._told["wake_leak_bytes"])
        if self._told["scribble"]:
            self._change_a_weight()
        return ack

    def _change_a_weight(self) -> None:
        runner: Any = self._runner
        next(p for p in runner._model.parameters() if p.ndim == 2).data.mul_(1.5)


@contextlib.contextmanager
def told(engine: AsyncOmni, stage_id: int, **words: Any) -> Iterator[None]:
    """What the ranks of a stage do from now on, and not any more after."""
    replicas = engine._core.stages[stage_id].replicas
    for replica in replicas:
        replica.executor.cancel(PREFIX + json.dumps(words))
    try:
        yield
    finally:
        for replica in replicas:
            replica.executor.cancel(PREFIX + json.dumps(_FORGET))
