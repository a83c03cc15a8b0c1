"""Engines over the stand-in, and what tests look at."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil

from omni_notebook.engine.upstream.engine import UpstreamOmni

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
HELD = 24 * MIB
"""What each rank of the stand-in holds."""


def lies(engine: UpstreamOmni) -> set[str]:
    """What the stand-in is told to lie about."""
    return engine._core.upstream.lies


def calls(engine: UpstreamOmni, name: str) -> list[tuple[Any, ...]]:
    """The calls of this name that upstream got."""
    return [one for one in engine._core.upstream.calls if one[0] == name]


def in_transit(engine: UpstreamOmni) -> int:
    """Requests that are in progress."""
    return engine.status().stages[0].in_transit


class LetGo:
    """What was held goes on once this is called; `reached` is how many calls have come there."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reached = 0

    def __call__(self) -> None:
        """Let it go on."""
        self._event.set()

    async def wait(self) -> None:
        """Wait for that, on whatever loop."""
        self.reached += 1
        await asyncio.to_thread(self._event.wait)


@contextmanager
def held(engine: UpstreamOmni, name: str, *, answer: bool = False) -> Iterator[LetGo]:
    """Calls of this name wait before upstream carries them out, or with `answer` after that, until they are let go."""
    upstream, let_go = engine._core.upstream, LetGo()
    real = getattr(upstream, name)

    async def call(*args: Any, **known: Any) -> Any:
        if not answer:
            await let_go.wait()
        result = await real(*args, **known)
        if answer:
            await let_go.wait()
        return result

    call.__wrapped__ = real  # type: ignore[attr-defined]  (its signature is looked at)
    setattr(upstream, name, call)
    try:
        yield let_go
    finally:
        let_go()
        delattr(upstream, name)


@contextmanager
def started(**options: object) -> Iterator[UpstreamOmni]:
    """An engine over the stand-in; afterwards no process of it is left."""
    before = set(psutil.Process().children(recursive=True))
    engine = UpstreamOmni("some/model", **options)
    try:
        yield engine
    finally:
        engine.shutdown()
        assert left_after(before) == set()


def left_after(before: set[psutil.Process], seconds: float = 5.0) -> set[psutil.Process]:
    """Processes of this one that were not there before and do not end in time; a zombie holds nothing."""
    deadline = time.monotonic() + seconds
    while left := {one for one in set(psutil.Process().children(recursive=True)) - before if runs(one.pid)}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
