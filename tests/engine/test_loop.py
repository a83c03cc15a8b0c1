"""The engine's loop: whatever it was given ends, also at the very end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from typing import Any

import pytest

from omni_notebook.engine.loop import EngineLoop
from omni_notebook.errors import EngineClosedError


async def _answer() -> int:
    return 7


def test_what_is_submitted_while_the_loop_is_stopped_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given to a loop that has just ended, it would neither run nor be refused, and whoever waits would hang."""
    loop = EngineLoop("omni-test")
    stopping = threading.Thread(target=loop.stop, args=(10.0,))
    schedule = asyncio.run_coroutine_threadsafe

    def schedule_late(coroutine: Any, on: asyncio.AbstractEventLoop) -> concurrent.futures.Future[Any]:
        stopping.start()
        stopping.join(0.2)  # the loop ends in between, if it can
        return schedule(coroutine, on)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", schedule_late)
    future = loop.submit(_answer())
    monkeypatch.undo()
    with contextlib.suppress(concurrent.futures.CancelledError):  # it may end with the loop
        assert future.result(5) == 7
    stopping.join(10)
    assert not stopping.is_alive()


def test_a_loop_that_has_ended_refuses_what_it_is_given() -> None:
    loop = EngineLoop("omni-test")
    assert loop.submit(_answer()).result(5) == 7
    loop.stop(10.0)
    with pytest.raises(EngineClosedError):
        loop.submit(_answer())
    with pytest.raises(EngineClosedError):
        loop.call(lambda: None)
