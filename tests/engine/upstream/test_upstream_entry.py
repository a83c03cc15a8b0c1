"""A request over an upstream engine until upstream has it: checked, at the gates, given up before its first step."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from unittest.mock import Mock

import msgspec
import pytest

from omni_notebook.errors import ArgumentError, OmniError, UpstreamError
from tests.engine.engine_helpers import collect, until
from tests.engine.upstream.upstream_helpers import calls, in_transit

WAITS = {"admission_timeout": 30.0}


async def refused(engine, kind: type[OmniError], words: str, **known) -> None:
    """It is told within its time, and no request of it is left."""
    async with asyncio.timeout(5):
        with pytest.raises(kind, match=words):
            await collect(engine, request_id="r", **known)
    assert in_transit(engine) == 0
    assert calls(engine, "generate") == []
    assert (await collect(engine, request_id="r"))[-1].finished


# ------------------------------------------------------------------------------------ checked


def test_what_upstreams_own_class_refuses_is_told_and_not_waited_for(engine):
    defaults = engine._core.upstream.default_sampling_params_list
    defaults[0] = msgspec.structs.replace(defaults[0], min_tokens=3)
    words = "min_tokens must be less than or equal to max_tokens=1, got 3"
    asyncio.run(refused(engine, ArgumentError, words, sampling_params={"max_tokens": 1}))


@pytest.mark.parametrize("asked", [{}, [], {"style": 3}], ids=str)
def test_what_is_no_adapter_is_refused_where_there_are_adapters(engine, style, asked):
    asyncio.run(engine.add_lora(style))
    asyncio.run(refused(engine, ArgumentError, "there is no LoRA adapter", lora_request=asked))


def test_an_error_that_nobody_foresaw_while_a_request_is_checked_is_its_clients(engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            "omni_notebook.engine.upstream.outputs.params_for", Mock(side_effect=LookupError("no stage table"))
        )
        with pytest.raises(UpstreamError, match="request r failed: LookupError: no stage table"):
            asyncio.run(asyncio.wait_for(collect(engine, request_id="r"), 5))
    assert asyncio.run(collect(engine, request_id="r"))[-1].finished


# --------------------------------------------------------------------------------- at the gates


async def at_a_gate(engine) -> asyncio.Task:
    task = asyncio.create_task(collect(engine, request_id="r", **WAITS))
    await until(lambda: engine.status().stages[0].waiting_at_gate == 1)
    return task


@pytest.mark.parametrize("close", ["sleep", "pause_generation"])
def test_an_abort_ends_what_waits_at_a_gate(engine, close):
    async def go():
        await getattr(engine, close)(stage_ids=[1])
        task = await at_a_gate(engine)
        assert await engine.abort("r")
        async with asyncio.timeout(5):
            (last,) = await task
        assert not await engine.abort("r")
        await engine.wake_up([1])
        await engine.resume_generation()
        assert [stage.waiting_at_gate for stage in engine.status().stages] == [0, 0]
        return last

    last = asyncio.run(go())
    assert (last.request_id, last.finished, str(last.state), last.images) == ("r", True, "aborted", [])
    assert calls(engine, "generate") == []


def test_an_abort_before_a_requests_first_step_ends_it_though_the_gates_are_open(engine):
    async def go():
        with busy(engine):
            abort = asyncio.create_task(engine.abort("r"))  # it looks for the request one turn after this
            await asyncio.sleep(0)
            task = await given(engine)
        assert await abort
        return await task

    outputs = asyncio.run(go())
    assert [str(output.state) for output in outputs] == ["aborted"]
    assert calls(engine, "generate") == []


# ------------------------------------------------------------------------- before its first step


@contextmanager
def busy(engine):
    """The engine's loop does nothing until the event is set, at the latest at the end."""
    event = threading.Event()
    engine._loop.call(lambda: event.wait(20))
    try:
        yield event
    finally:
        event.set()


async def given(engine) -> asyncio.Task:
    """A request that the engine's loop was told of."""
    task = asyncio.create_task(collect(engine, request_id="r"))
    await asyncio.sleep(0)  # it runs to its first wait
    return task


def test_a_client_that_leaves_before_its_requests_first_step_leaves_nothing(engine):
    async def go():
        with busy(engine):
            task = await given(engine)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await engine.is_paused()  # the loop has come to the request, and to its end
        await until(lambda: not engine._core.requests._clients)
        return await collect(engine, request_id="r")

    assert asyncio.run(go())[-1].finished
    assert len(calls(engine, "generate")) == 1


def test_a_client_that_leaves_at_a_gate_leaves_nothing(engine):
    async def go():
        await engine.sleep([1])
        task = await at_a_gate(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.wake_up([1])
        return await collect(engine, request_id="r")

    assert asyncio.run(go())[-1].finished
    assert len(calls(engine, "generate")) == 1
