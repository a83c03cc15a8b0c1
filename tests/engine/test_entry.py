"""A request's entry: refusals reach its client, its bound counts from the admission, who leaves leaves nothing."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.engine.entry import Ask, Entry
from omni_notebook.engine.loop import EngineLoop
from omni_notebook.errors import ArgumentError, DeadlineError, EngineClosedError
from tests.engine.engine_helpers import until

if TYPE_CHECKING:
    from collections.abc import Iterator

STAGE = SimpleNamespace(stage_id=0, state="AWAKE", pause_state="OPEN")


class Gate:
    """A core with nothing but a gate; it writes down whom it has given up."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waiting = 0
        self.refusal: Exception | None = None
        self.outputs: list[Any] = []
        self.abandoned: list[Any] = []
        self.flow = SimpleNamespace(stage=STAGE, has_news=False, ready=self.ready)

    def ready(self) -> Any:
        return self.outputs.pop() if self.outputs else None

    def admit_now(self, _ask: Ask) -> Any:
        if self.refusal is not None:
            raise self.refusal
        return self.flow if self.open.is_set() else None

    async def admit(self, _ask: Ask) -> Any:
        self.waiting += 1
        try:
            await self.open.wait()
        finally:
            self.waiting -= 1
        return self.flow

    def abandon(self, flow: Any) -> None:
        self.abandoned.append(flow)


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    loop = EngineLoop("test-entry")
    yield loop
    loop.stop(5)


def begun(core: Gate, loop: EngineLoop, bound_s: float | None = None) -> tuple[Entry, asyncio.Task[Any], Ask]:
    """An entry, its first output to come, what it asked."""
    ask = Ask(
        prompt="x",
        request_id="r",
        sampling_params=None,
        output_modalities=None,
        admission_timeout=60.0,
        lora_request=None,
    )
    entry = Entry(core, loop, ask, bound_s)
    return entry, asyncio.create_task(first(entry)), ask


async def first(entry: Entry) -> Any:
    """Its first output, or its error."""
    await entry.begin()
    return entry.ready()


@pytest.mark.quiet
def test_a_refusal_reaches_its_client_at_once(loop: EngineLoop) -> None:
    core = Gate()
    core.refusal = ArgumentError("no")

    async def main() -> None:
        _, output, _ = begun(core, loop)
        began_s = time.perf_counter()
        with pytest.raises(ArgumentError, match="no"):
            await output
        assert time.perf_counter() - began_s < 0.05  # well below the tick

    asyncio.run(main())


@pytest.mark.quiet
def test_the_bound_counts_from_the_admission_and_the_error_says_where_the_request_is(loop: EngineLoop) -> None:
    core = Gate()

    async def main() -> None:
        _, output, _ = begun(core, loop, bound_s=0.1)
        await asyncio.wait({output}, timeout=0.4)
        assert not output.done()
        opened_s = time.perf_counter()
        loop.call(core.open.set)
        with pytest.raises(DeadlineError, match=r"request r had not ended after 0.1 s; it is in stage 0 \(AWAKE"):
            await output
        assert 0.1 <= time.perf_counter() - opened_s < 0.5

    asyncio.run(main())


def test_a_client_is_woken_by_an_output_not_by_its_admission(loop: EngineLoop) -> None:
    core = Gate()
    core.open.set()

    async def main() -> None:
        entry, output, ask = begun(core, loop)
        await until(lambda: entry._begun is not None)
        assert not output.done()
        assert entry.ready() is None
        core.outputs.append("text")
        core.flow.has_news = True
        ask.bell.ring()
        assert await output == "text"

    asyncio.run(main())


@pytest.mark.parametrize("moment", ["at the gate", "begun", "as the gate opens"])
def test_who_leaves_waits_at_no_gate_and_leaves_no_request_behind(loop: EngineLoop, moment: str) -> None:
    core = Gate()

    async def main() -> None:
        entry, output, _ = begun(core, loop)
        await until(lambda: core.waiting == 1)
        output.cancel()
        if moment == "begun":
            loop.call(core.open.set)
            await until(lambda: entry._begun is not None)
        if moment == "as the gate opens":
            loop.call(lambda: (core.open.set(), asyncio.get_running_loop().call_soon(entry._leave_here)))
        else:
            entry.leave()
        await until(lambda: core.waiting == 0 and (moment == "at the gate" or core.abandoned))
        assert core.abandoned in ([], [core.flow])
        assert core.abandoned == [core.flow] or entry._at_gate.cancelled()

    asyncio.run(main())


def test_a_loop_that_ends_ends_the_wait(loop: EngineLoop) -> None:
    async def main() -> None:
        core = Gate()
        entry, output, _ = begun(core, loop)
        await until(lambda: core.waiting == 1)
        loop.stop(5)
        with pytest.raises(EngineClosedError, match="the engine was shut down"):
            await output
        entry.leave()  # to nobody, and raises nothing
        _, late, _ = begun(core, loop)
        with pytest.raises(EngineClosedError, match="the engine was shut down; start a new one"):
            await late

    asyncio.run(main())
