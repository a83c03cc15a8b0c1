"""Adapters over an upstream engine: on all ranks or on none, and never beside requests."""

from __future__ import annotations

import asyncio

import pytest

from omni_notebook.errors import (
    ArgumentError,
    DeadlineError,
    LoRAError,
    PauseError,
    StageBusyError,
    StageFailedError,
    UnsupportedError,
)
from omni_notebook.protocol import LoRARequest
from tests.engine.engine_helpers import collect, until
from tests.engine.upstream.upstream_helpers import calls, held, in_transit, lies


def there(engine) -> list[set[int]]:
    """The ids on each stage's ranks, as upstream has them."""
    return list(engine._core.upstream._adapters.values())


def test_an_adapter_is_added_named_by_a_request_pinned_and_removed(engine, style):
    async def go():
        assert await engine.add_lora(style)
        assert not await engine.add_lora(style)
        await collect(engine, lora_request="style")
        assert await engine.pin_lora(3)
        return await engine.list_loras(), [stage.loras[0].pinned for stage in engine.status().stages]

    assert asyncio.run(go()) == ([3], [True, True])
    assert calls(engine, "generate")[0][2].lora_int_id == 3
    assert asyncio.run(engine.remove_lora(3))
    assert not asyncio.run(engine.remove_lora(3))


def test_an_adapter_that_one_stage_answers_an_error_to_is_an_error_and_on_no_stage(engine, style):
    lies(engine).add("lora:1")
    assert asyncio.run(engine._core.upstream.add_lora(style)) is True  # what upstream's own call makes of it
    with pytest.raises(LoRAError, match="rank 64 is above"):
        asyncio.run(engine.add_lora(style))
    assert asyncio.run(engine.list_loras()) == []
    assert engine._core.upstream._adapters[0] == set()


def test_a_stage_without_adapters_is_left_out_and_an_engine_without_refuses(engine, style):
    lies(engine).add("todo:1")
    assert asyncio.run(engine.add_lora(style))
    assert [len(stage.loras) for stage in engine.status().stages] == [1, 0]
    lies(engine).add("todo:0")
    with pytest.raises(UnsupportedError, match="takes LoRA adapters"):
        asyncio.run(engine.add_lora(LoRARequest("other", 4, "/adapters/other")))


def test_an_adapter_that_one_rank_can_not_take_is_on_no_rank(engine, style):
    lies(engine).add("lora_rank:1")
    with pytest.raises(LoRAError, match="out of slots; it is on no stage"):
        asyncio.run(engine.add_lora(style))
    assert there(engine) == [set(), set()]
    assert asyncio.run(engine.list_loras()) == []


def test_an_adapter_whose_answer_comes_too_late_is_taken_off_again(engine, style):
    async def go():
        with held(engine, "collective_rpc", answer=True) as let_go:
            add = asyncio.create_task(engine.add_lora(style, timeout=0.3))
            await until(lambda: let_go.reached == 2)
            let_go()
            with pytest.raises(LoRAError, match="it is on no stage") as raised:
                await add
        return raised.value

    assert isinstance(asyncio.run(go()).__cause__, DeadlineError)
    assert [one[0] for one in engine._core.upstream.calls] == ["add_lora", "remove_lora"]
    assert there(engine) == [set(), set()]


def test_a_stage_that_does_not_let_go_of_an_adapter_is_named(engine, style):
    lies(engine).update({"lora:1", "no_remove:0"})
    with pytest.raises(LoRAError, match=r"rank 64 is above.*may still be on stage 0: .*the rank is busy") as raised:
        asyncio.run(engine.add_lora(style))
    assert "on no stage" not in str(raised.value)


async def frozen(engine, **known) -> asyncio.Task:
    """A request in progress."""
    engine._core.upstream.token_s = 0.05
    task = asyncio.create_task(collect(engine, request_id="r", sampling_params={"max_tokens": 200}, **known))
    await until(lambda: in_transit(engine) == 1 and calls(engine, "generate"))
    return task


CHANGES = {
    "add": lambda engine: engine.add_lora(LoRARequest("other", 4, "/adapters/other")),
    "remove": lambda engine: engine.remove_lora(3),
    "pin": lambda engine: engine.pin_lora(3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_of_a_stage_with_requests_do_not_change(engine, style, change):
    async def go():
        await engine.add_lora(style)
        task = await frozen(engine)
        before = list(engine._core.upstream.calls)
        with pytest.raises(StageBusyError, match="a change of LoRA adapters is refused"):
            await CHANGES[change](engine)
        assert not await engine.add_lora(style)  # nothing to do
        assert engine._core.upstream.calls == before
        await engine.abort("r")
        await task
        assert await CHANGES[change](engine)

    asyncio.run(go())


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_of_a_stage_that_has_failed_do_not_change_and_the_way_out_is_named(engine, style, change):
    async def go():
        await engine.add_lora(style)
        lies(engine).add("error_ack")
        await engine.sleep([1], raise_on_error=False)
        with pytest.raises(StageFailedError, match="start the engine anew"):
            await CHANGES[change](engine)

    asyncio.run(go())


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_do_not_change_while_a_pause_does_not_hold(engine, style, change):
    async def go():
        await engine.add_lora(style)
        lies(engine).add("raise:pause")
        with pytest.raises(PauseError):
            await engine.pause_generation(mode="keep", stage_ids=[1])
        with pytest.raises(PauseError, match=r"pause_generation\(mode='keep', stage_ids=\[1\]\) again"):
            await CHANGES[change](engine)
        await engine.resume_generation()
        assert await CHANGES[change](engine)

    asyncio.run(go())


def test_an_adapter_that_a_request_names_is_not_removed(engine, style):
    async def go():
        await engine.add_lora(style)
        task = await frozen(engine, lora_request="style")
        await engine.pause_generation(mode="keep")  # a stage at rest changes its adapters
        assert await engine.add_lora(LoRARequest("other", 4, "/adapters/other"))
        assert await engine.remove_lora(4)
        with pytest.raises(StageBusyError, match=r"adapter 'style' \(id 3\) is named by requests that are here \(r\)"):
            await engine.remove_lora(3)
        await engine.resume_generation()
        await engine.abort("r")
        await task
        assert await engine.remove_lora(3)

    asyncio.run(go())


def test_a_request_whose_adapter_went_while_it_waited_at_a_gate_is_refused(engine, style):
    async def go():
        await engine.add_lora(style)
        await engine.pause_generation(mode="keep")
        task = asyncio.create_task(collect(engine, lora_request="style", admission_timeout=30.0))
        await until(lambda: engine.status().stages[0].waiting_at_gate == 1)
        await engine.remove_lora(3)
        await engine.resume_generation()
        with pytest.raises(ArgumentError, match="there is no LoRA adapter 'style'"):
            await task

    asyncio.run(go())
    assert calls(engine, "generate") == []
