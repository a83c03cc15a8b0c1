"""Adapters through the engine: what they change, that they survive sleep and restart, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import (
    ArgumentError,
    AsleepError,
    ConfigError,
    DeadlineError,
    LoRAError,
    PauseError,
    StageBusyError,
)
from omni_notebook.protocol import LoRARequest, StateEvent
from tests import adapters
from tests.engine.engine_helpers import collect, fault, golden, held, reset, slow, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Make = Callable[..., LoRARequest]

PROMPTS = ("a red star above a blue circle", "two blue squares", "a pink heart with a red star to its left")


async def clear(engine: AsyncOmni) -> None:
    """All awake and open, and no adapter."""
    await reset(engine)
    for lora_id in await engine.list_loras():
        await engine.remove_lora(lora_id)


@pytest.fixture
def engine(engine: AsyncOmni) -> Iterator[AsyncOmni]:
    yield engine
    asyncio.run(clear(engine))


def maker(engine: AsyncOmni, folder: Path) -> Make:
    def make(lora_id: int, stage_id: int = 0, *, layers: Any = None, **known: Any) -> LoRARequest:
        shapes = engine._core.stages[stage_id].model.adaptable if layers is None else layers
        tensors = adapters.matrices(shapes, seed=lora_id, size=2.0, rank=known.pop("rank", adapters.RANK))
        path = adapters.write(folder / f"style-{lora_id}", tensors, **known)
        return LoRARequest(f"style-{lora_id}", lora_id, str(path))

    return make


@pytest.fixture
def make(engine: AsyncOmni, tmp_path: Path) -> Make:
    """Writes an adapter for a stage; what asks for it."""
    return maker(engine, tmp_path)


def tags(engine: AsyncOmni, stage_id: int = 0) -> set[str]:
    """The stage's tags, as its rank's memory shows them and as the stage counts them awake."""
    stage = engine.status().stages[stage_id]
    assert set(stage.awake_tags) == set(engine._core.stages[stage_id].tags)
    return set(stage.awake_tags)


def names(engine: AsyncOmni, stage_id: int = 0) -> list[tuple[str, bool]]:
    return [(lora.lora_name, lora.pinned) for lora in engine.status().stages[stage_id].loras]


async def text(engine: AsyncOmni, prompt: str = PROMPTS[0], **known: Any) -> list[int]:
    outputs = await collect(engine, prompt, output_modalities="text", **known)
    return outputs[-1].outputs[0].token_ids


# ----------------------------------------------------------------------------------- what they do


@pytest.mark.parametrize("stage_id", [0, 1])
def test_an_adapter_changes_requests_that_name_it_and_no_other(engine: AsyncOmni, make: Make, stage_id: int) -> None:
    async def run() -> None:
        base = await golden(engine)
        assert "lora" not in tags(engine, stage_id)
        request = make(3, stage_id)
        assert await engine.add_lora(request) is True
        assert await engine.list_loras() == [3]
        assert (names(engine, stage_id), names(engine, 1 - stage_id)) == ([("style-3", False)], [])
        assert "lora" in tags(engine, stage_id)
        assert "lora" not in tags(engine, 1 - stage_id)
        changed = await golden(engine, lora_request=request)
        assert changed[1] != base[1]
        assert (changed[0] == base[0]) == (stage_id == 1)
        assert await golden(engine, lora_request="style-3") == await golden(engine, lora_request=3) == changed
        assert await golden(engine) == base
        assert await engine.remove_lora(3) is True
        assert await engine.list_loras() == []
        assert "lora" not in tags(engine, stage_id)
        assert await golden(engine) == base

    asyncio.run(run())


def test_outputs_name_the_adapter_that_had_a_part_in_them(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        for stage_id in (0, 1):
            await engine.add_lora(make(stage_id + 1, stage_id))
        for lora, without in ((None, {0, 1}), ("style-1", set()), ("style-2", {0})):
            outputs = await collect(engine, lora_request=lora)
            named = {(output.stage_id, output.metrics.get("lora")) for output in outputs if output.metrics}
            assert named == {(stage_id, None if stage_id in without else lora) for stage_id in (0, 1)}

    asyncio.run(run())


def recorded(engine: AsyncOmni, stage_id: int = 0) -> list[list[int]]:
    """The adapters of every batch that a stage schedules from now on."""
    scheduler: Any = engine._core.stages[stage_id].replicas[0].scheduler
    schedule, seen = scheduler.schedule, []

    def spied() -> Any:
        batch = schedule()
        if batch is not None:
            payload = batch.payload
            seen.append([row.lora_id for row in (payload.sequences if stage_id == 0 else payload.images)])
        return batch

    scheduler.schedule = spied
    return seen


def test_sequences_with_two_adapters_and_with_none_share_steps_and_write_what_each_writes_alone(
    engine: AsyncOmni, make: Make
) -> None:
    async def run() -> None:
        for lora_id in (1, 2):
            await engine.add_lora(make(lora_id))
        asked = [(prompt, lora) for prompt in PROMPTS[:2] for lora in (None, "style-1", "style-2")]
        alone = [await text(engine, prompt, lora_request=lora) for prompt, lora in asked]
        assert len({tuple(tokens) for tokens in alone}) == len(asked)
        seen = recorded(engine)
        with slow(engine, 0, 0.01):
            together = await asyncio.gather(*(text(engine, prompt, lora_request=lora) for prompt, lora in asked))
        assert together == alone
        assert any(set(step) == {0, 1, 2} for step in seen)

    asyncio.run(run())


def test_images_with_different_adapters_are_batches_of_their_own(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        for lora_id in (1, 2):
            await engine.add_lora(make(lora_id, 1))
        asked = (None, 1, 2)
        alone = [await golden(engine, lora_request=lora) for lora in asked]
        assert len({picture for _tokens, picture in alone}) == len(asked)
        seen = recorded(engine, 1)
        with slow(engine, 1, 0.05):
            together = await asyncio.gather(*(golden(engine, lora_request=lora) for lora in asked * 2))
        # A batch of two rounds elsewhere than one image alone; an adapter that is not the asked one is far off.
        assert all(apart(mixed, wanted) <= 3 for mixed, wanted in zip(together, alone * 2, strict=True))
        assert min(apart(alone[one], alone[other]) for one, other in ((0, 1), (0, 2), (1, 2))) > 100
        assert {tuple(set(batch)) for batch in seen} == {(0,), (1,), (2,)}

    asyncio.run(run())


def apart(one: tuple[list[int], bytes], other: tuple[list[int], bytes]) -> int:
    """The largest difference of two pictures' values."""
    pictures = [np.frombuffer(picture, np.uint8).astype(int) for _tokens, picture in (one, other)]
    return int(np.abs(pictures[0] - pictures[1]).max())


# ---------------------------------------------------------------------------------- sleep and wake


@pytest.mark.parametrize("level", [1, 2])
def test_ten_sleeps_leave_adapters_in_place_and_their_memory_is_given_back_and_acknowledged(
    engine: AsyncOmni, make: Make, level: int
) -> None:
    async def run() -> None:
        base = await golden(engine)
        for stage_id in (0, 1):
            await engine.add_lora(make(stage_id + 1, stage_id))
        changed = [await golden(engine, lora_request=lora_id) for lora_id in (1, 2)]
        assert len({base[1], changed[0][1], changed[1][1]}) == 3
        for _ in range(10):
            acks = await engine.sleep(level=level)
            for ack in acks:
                assert ack.ok
                span = engine._core.stages[ack.stage_id].tags["lora"]
                assert ack.metadata["tags"]["lora"] == {"freed": span, "backup": "spill"}
                assert ack.freed_bytes == ack.metadata["expected_bytes"]
                held = engine.status().stages[ack.stage_id].ranks[0].tags["lora"]
                assert (held.mapped_bytes, held.resident_bytes) == (span, 0)
            assert await engine.list_loras() == [1, 2]
            assert all(ack.ok for ack in await engine.wake_up())
            assert [await golden(engine, lora_request=lora_id) for lora_id in (1, 2)] == changed
        assert await golden(engine) == base

    asyncio.run(run())


def test_adapters_survive_level_1_then_2_a_wake_by_tags_and_new_weights(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        await engine.add_lora(make(1))
        changed = await golden(engine, lora_request=1)
        await engine.sleep([0], level=1)
        await engine.sleep([0], level=2)
        await engine.wake_up([0], tags=["lora", "kv_cache"])
        assert engine.status().stages[0].state == "PARTLY_AWAKE"
        await engine.wake_up([0])
        assert await golden(engine, lora_request=1) == changed
        await engine.load_weights(0, engine.status().stages[0].model)
        assert await golden(engine, lora_request=1) == changed
        await engine.sleep([0], level=2)
        await engine.wake_up([0], reload=False)
        await engine.load_weights(0, engine.status().stages[0].model)
        assert await golden(engine, lora_request=1) == changed

    asyncio.run(run())


def test_a_frozen_sequence_goes_on_with_its_adapter_after_a_sleep(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        await engine.add_lora(make(1))
        wanted = await text(engine, lora_request=1)
        with slow(engine, 0, 0.02):
            going = asyncio.create_task(text(engine, lora_request=1))
            await until(lambda: engine.status().stages[0].running == 1)
            await engine.pause_generation("keep", [0])
            assert not going.done()
            await engine.sleep([0], level=2)
            await engine.wake_up([0])
            await engine.resume_generation()
            assert await going == wanted

    asyncio.run(run())


# -------------------------------------------------------------------------------------- slots, pins


@pytest.fixture(scope="module", params=["uni", "mp"])
def shared_small(request: pytest.FixtureRequest) -> Iterator[AsyncOmni]:
    with AsyncOmni("demo", executor=request.param, max_loras=2) as engine:
        yield engine


@pytest.fixture
def small(shared_small: AsyncOmni) -> Iterator[AsyncOmni]:
    """An engine with room for two adapters a stage."""
    yield shared_small
    asyncio.run(clear(shared_small))


def test_more_adapters_than_slots_run_one_after_the_other_and_a_pinned_one_stays(
    small: AsyncOmni, tmp_path: Path
) -> None:
    make = maker(small, tmp_path)

    async def run() -> None:
        for lora_id in (1, 2, 3, 4):
            await small.add_lora(make(lora_id))
        alone = {lora_id: await text(small, lora_request=lora_id) for lora_id in (1, 2, 3, 4)}
        assert len({tuple(tokens) for tokens in alone.values()}) == 4
        assert await small.pin_lora(2) is True
        assert await small.pin_lora(2) is True
        assert names(small)[1] == ("style-2", True)
        seen = recorded(small)
        asked = [4, 3, 2, 1, 4, 2, 3, 1]
        with slow(small, 0, 0.005):
            together = await asyncio.gather(*(text(small, lora_request=lora_id) for lora_id in asked))
        assert together == [alone[lora_id] for lora_id in asked]
        assert all(len(set(step) - {2}) <= 1 for step in seen)
        assert any(len(set(step)) == 2 for step in seen)
        for level in (1, 2):
            await small.sleep([0], level=level)
            await small.wake_up([0])
            assert {lora_id: await text(small, lora_request=lora_id) for lora_id in alone} == alone

    asyncio.run(run())


def test_an_adapter_that_waits_for_a_slot_is_not_passed_by_later_ones_for_ever(
    small: AsyncOmni, tmp_path: Path
) -> None:
    make = maker(small, tmp_path)

    async def run() -> None:
        for lora_id in (1, 2, 3):
            await small.add_lora(make(lora_id))
        await small.pin_lora(3)
        ended: list[str] = []

        async def ask(name: str, lora_id: int | None) -> None:
            await text(small, request_id=name, lora_request=lora_id)
            ended.append(name)

        seen = recorded(small)
        with slow(small, 0, 0.02):
            first = asyncio.create_task(ask("first", 1))
            await until(lambda: small.status().stages[0].running == 1)
            order = {"other": 2, "same as first": 1, "none": None, "pinned": 3}
            rest = [asyncio.create_task(ask(name, lora_id)) for name, lora_id in order.items()]
            await until(lambda: small.status().stages[0].running + small.status().stages[0].queued == 5)
            await asyncio.gather(first, *rest)
        assert any(set(step) == {0, 1, 3} for step in seen)
        assert not any({1, 2} <= set(step) for step in seen)
        assert ended.index("other") < ended.index("same as first")

    asyncio.run(run())


def test_pins_beyond_the_slots_are_refused_and_an_adapter_without_a_slot_says_so(
    small: AsyncOmni, tmp_path: Path
) -> None:
    make = maker(small, tmp_path)

    async def run() -> None:
        for lora_id in (1, 2, 3):
            await small.add_lora(make(lora_id))
        await small.pin_lora(1)
        await small.pin_lora(2)
        with pytest.raises(LoRAError, match=r"hold all 2 slots of stage 0 \('style-1'.*start with max_loras=3"):
            await small.pin_lora(3)
        with pytest.raises(LoRAError, match=r"'style-3' \(id 3\) finds no slot.*remove_lora"):
            await text(small, lora_request=3)
        await small.remove_lora(1)
        assert await text(small, lora_request=3)
        with pytest.raises(ArgumentError, match="there is no adapter 1; adapters are: 'style-2'"):
            await small.pin_lora(1)

    asyncio.run(run())


def test_a_pin_leaves_requests_that_are_held_back_their_slots(small: AsyncOmni, tmp_path: Path) -> None:
    make = maker(small, tmp_path)

    async def run() -> None:
        for lora_id in (1, 2, 3):
            await small.add_lora(make(lora_id))
        with slow(small, 0, 0.02):
            going = [asyncio.create_task(text(small, lora_request=lora_id)) for lora_id in (1, 2)]
            await until(lambda: small.status().stages[0].running == 2)
            await small.pause_generation("keep", [0])
            with pytest.raises(StageBusyError, match=r"name adapters 1, 2, for which 1 slots are left.*abort"):
                await small.pin_lora(3)
            await small.pin_lora(1)
            await small.resume_generation()
            assert all(await asyncio.gather(*going))

    asyncio.run(run())


# ----------------------------------------------------------------------------------------- restart


def test_a_restart_brings_adapters_and_pins_back(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        for lora_id in (1, 2):
            await engine.add_lora(make(lora_id))
        await engine.pin_lora(2)
        changed = [await golden(engine, lora_request=lora_id) for lora_id in (1, 2)]
        with slow(engine, 0, 0.02):
            going = asyncio.create_task(text(engine, lora_request=1, admission_timeout=5))
            await until(lambda: engine.status().stages[0].running == 1)
            await engine.restart(0)
        assert await going == changed[0][0]
        assert names(engine) == [("style-1", False), ("style-2", True)]
        assert "lora" in tags(engine)
        assert [await golden(engine, lora_request=lora_id) for lora_id in (1, 2)] == changed
        await engine.sleep([0], level=2)
        await engine.restart(0)
        assert [await golden(engine, lora_request=lora_id) for lora_id in (1, 2)] == changed

    asyncio.run(run())


@pytest.mark.parametrize("how", ["gone", "changed"])
def test_a_restart_without_an_adapters_files_succeeds_without_it_and_says_so(
    engine: AsyncOmni, make: Make, how: str
) -> None:
    async def run() -> None:
        requests = [make(lora_id) for lora_id in (1, 2)]
        for request in requests:
            await engine.add_lora(request)
        kept = await golden(engine, lora_request=1)
        events = engine.subscribe()
        with slow(engine, 0, 0.02):
            tasks = [asyncio.create_task(text(engine, lora_request=lora_id)) for lora_id in (1, 2, None)]
            await until(lambda: engine.status().stages[0].running == 3)
            await engine.pause_generation("keep", [0])
            if how == "gone":
                shutil.rmtree(requests[1].lora_path)
            else:
                make(2, lora_alpha=3)
            await engine.restart(0)
        why = "no such adapter folder" if how == "gone" else "are not those that were added"
        with pytest.raises(LoRAError, match=rf"'style-2' \(id 2\) is not on stage 0 any more: .*{why}.*add_lora"):
            await tasks[1]
        assert await engine.list_loras() == [1]
        assert why in str(engine.status().stages[0].last_error)
        await engine.resume_generation()
        assert await tasks[0] == kept[0]
        assert await tasks[2]
        assert await golden(engine, lora_request=1) == kept
        with pytest.raises(ArgumentError, match=r"no adapter 'style-2'; adapters are: 'style-1' \(id 1\)"):
            await text(engine, lora_request="style-2")
        reasons = []
        async with asyncio.timeout(10):
            while not any(why in reason for reason in reasons):
                event = await anext(events)
                reasons += [event.reason] if isinstance(event, StateEvent) else []
        events.close()

    asyncio.run(run())


# ------------------------------------------------------------------------------------ refused orders


def test_changes_are_refused_while_requests_run_and_allowed_while_a_pause_holds_them(
    engine: AsyncOmni, make: Make
) -> None:
    async def run() -> None:
        first, second = make(1), make(2)
        await engine.add_lora(first)
        with slow(engine, 0, 0.03):
            going = asyncio.create_task(text(engine, lora_request=1))
            await until(lambda: engine.status().stages[0].running == 1)
            for call in (engine.add_lora(second), engine.remove_lora(1), engine.pin_lora(1)):
                with pytest.raises(StageBusyError, match=r"1 running.*pause_generation\(mode='keep'"):
                    await call
            assert await engine.list_loras() == [1]
            await engine.pause_generation("keep", [0])
            assert await engine.add_lora(second)
            assert await engine.pin_lora(1)
            assert await engine.remove_lora(2)
            await engine.resume_generation()
            assert await going

    asyncio.run(run())


def test_an_adapter_that_a_held_request_names_is_not_removed(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        await engine.add_lora(make(1, 1))
        wanted = await golden(engine, lora_request=1)
        await engine.pause_generation("keep", [1])
        await engine.resume_generation()
        with slow(engine, 0, 0.02):
            going = asyncio.create_task(collect(engine, request_id="held", lora_request=1))
            await until(lambda: engine.status().stages[1].in_transit == 1)
            await engine.pause_generation("keep", [1])
            with pytest.raises(StageBusyError, match=r"adapter 'style-1' \(id 1\) is named by requests .*\(held\)"):
                await engine.remove_lora(1)
            await until(lambda: engine.status().stages[1].queued == 1)
            with pytest.raises(StageBusyError, match=r"\(held\)"):
                await engine.remove_lora(1)
        assert await engine.list_loras() == [1]
        await engine.resume_generation()
        outputs = await going
        assert outputs[-1].images[0].tobytes() == wanted[1]

    asyncio.run(run())


def test_a_request_that_has_left_a_stage_does_not_hold_its_adapter_there(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        await engine.add_lora(make(1))
        wanted = await golden(engine, lora_request=1)
        with slow(engine, 1, 0.4):
            going = asyncio.create_task(golden(engine, lora_request=1))
            await until(lambda: engine.status().stages[1].running == 1)
            assert await engine.remove_lora(1)
            assert not going.done()
        assert await going == wanted

    asyncio.run(run())


def test_a_failed_pause_refuses_every_change_and_listing_works(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        await engine.add_lora(make(1))
        with slow(engine, 0, 0.3):
            going = asyncio.create_task(text(engine))
            await until(lambda: engine.status().stages[0].running)
            with pytest.raises(DeadlineError, match="did not complete"):
                await engine.pause_generation("keep", [0], timeout=0.05)
            for call in (engine.add_lora(make(2)), engine.remove_lora(1), engine.pin_lora(1)):
                with pytest.raises(PauseError, match=r"PAUSE_FAILED.*resume_generation"):
                    await call
        assert await engine.list_loras() == [1]
        await engine.resume_generation()
        assert await going

    asyncio.run(run())


def test_a_sleeping_stage_refuses_every_change_and_listing_works(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        await engine.add_lora(make(1))
        await engine.sleep([0])
        for call in (engine.add_lora(make(2)), engine.remove_lora(1), engine.pin_lora(1)):
            with pytest.raises(AsleepError, match=r"ASLEEP \(level 1\).*wake_up"):
                await call
        assert await engine.list_loras() == [1]
        assert await engine.add_lora(make(5, 1))  # stage 1 is awake

    asyncio.run(run())


# --------------------------------------------------------------------------------- refused adapters


def test_an_adapter_goes_to_the_stages_that_it_fits_and_named_ones_must_all_fit(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        request = make(1, 1)
        with pytest.raises(ConfigError, match=r"stage 0 \(thinker\): the model has no layer blocks\.0\.fc1"):
            await engine.add_lora(request, stage_ids=[0, 1])
        assert await engine.list_loras() == []
        assert await engine.add_lora(request, stage_ids=1)
        assert names(engine, 1) == [("style-1", False)]

    asyncio.run(run())


def test_an_adapter_that_fits_no_stage_names_the_first_layer_that_does_not_fit(engine: AsyncOmni, make: Make) -> None:
    layer = "model.layers.0.self_attn.q_proj"

    async def run() -> None:
        before = tags(engine), tags(engine, 1)
        says = (
            rf"stage 0 \(thinker\): {layer} has lora_A \(4, 8\).*; stage 1 \(painter\): the model has no layer {layer}"
        )
        with pytest.raises(ConfigError, match=says):
            await engine.add_lora(make(1, layers={layer: (8, 8)}))
        assert (tags(engine), tags(engine, 1)) == before

    asyncio.run(run())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rank": 17, "r": 17}, r"rank 17, more than max_lora_rank=16"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
    ],
    ids=str,
)
def test_a_broken_adapter_is_refused_in_one_line_and_nothing_changes(
    engine: AsyncOmni, make: Make, changes: dict[str, Any], says: str
) -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match=says) as caught:
            await engine.add_lora(make(1, **changes))
        assert "\n" not in str(caught.value)
        assert await engine.list_loras() == []
        assert "lora" not in tags(engine)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (("", 1, "/x"), "lora_name='' is not a non-empty string"),
        (("a", 0, "/x"), "lora_int_id=0 is not a whole number of 1 or more"),
        (("a", True, "/x"), "lora_int_id=True"),
        (("a", 1, ""), "lora_path='' is not"),
    ],
    ids=str,
)
def test_a_request_that_can_not_be_is_refused_where_it_is_made(bad: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        LoRARequest(*bad)


def test_what_has_the_three_fields_will_do_and_what_has_not_is_refused(engine: AsyncOmni, make: Make) -> None:
    class Theirs:
        lora_name, lora_int_id = "style-1", 1
        lora_path = make(1).lora_path

    async def run() -> None:
        assert await engine.add_lora(Theirs())  # type: ignore[arg-type]
        assert await text(engine, lora_request=Theirs())
        for bad in ("style-1", 1, None):
            with pytest.raises(ArgumentError, match="is no LoRARequest"):
                await engine.add_lora(bad)  # type: ignore[arg-type]
        for call in (engine.remove_lora, engine.pin_lora):
            with pytest.raises(ArgumentError, match="'style-1' is not a whole number"):
                await call("style-1")  # type: ignore[arg-type]

    asyncio.run(run())


def test_the_same_adapter_again_is_no_change_and_another_needs_its_own_name_and_number(
    engine: AsyncOmni, make: Make, tmp_path: Path
) -> None:
    async def run() -> None:
        request = make(1)
        assert await engine.add_lora(request) is True
        assert await engine.add_lora(request) is False
        other = shutil.copytree(request.lora_path, tmp_path / "copy")
        with pytest.raises(ArgumentError, match=r"lora_int_id 1 belongs to adapter 'style-1'.*remove_lora\(1\)"):
            await engine.add_lora(LoRARequest("other", 1, str(other)))
        with pytest.raises(ArgumentError, match=r"lora_name 'style-1' belongs to adapter 'style-1' \(id 1\)"):
            await engine.add_lora(LoRARequest("style-1", 2, str(other)))
        make(1, lora_alpha=3)
        with pytest.raises(ArgumentError, match=r"was added with other files than .* remove_lora\(1\) first"):
            await engine.add_lora(request)
        assert await engine.list_loras() == [1]
        assert await engine.remove_lora(1) is True
        assert await engine.remove_lora(1) is False

    asyncio.run(run())


def test_a_request_for_an_adapter_that_is_not_there_starts_nothing(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        with pytest.raises(ArgumentError, match=r"no adapter 'style-1'; adapters are: none; call add_lora"):
            await text(engine, lora_request="style-1")
        request = make(1, 1)
        await engine.add_lora(request)
        unlike = LoRARequest("style-1", 1, "/somewhere/else")
        for unknown in (2, "style", True, unlike, LoRARequest("style-2", 2, request.lora_path)):
            with pytest.raises(
                ArgumentError, match=r"adapters are: 'style-1' \(id 1\)\. Nothing was started|no LoRAReq"
            ):
                await collect(engine, lora_request=unknown)
        with pytest.raises(ArgumentError, match=r"is on stage 1, which this request does not reach\. Nothing was st"):
            await text(engine, lora_request=1)
        stages = engine.status().stages
        assert [(stage.running, stage.queued) for stage in stages] == [(0, 0), (0, 0)]

    asyncio.run(run())


# -------------------------------------------------------------------------------------- faulty ranks


@pytest.mark.parametrize("after", [False, True], ids=["before it took it", "after it took it"])
def test_a_rank_that_raises_in_commit_leaves_the_adapter_nowhere(engine: AsyncOmni, make: Make, after: bool) -> None:
    async def run() -> None:
        base = await golden(engine)
        request = make(1)
        broken = RuntimeError("out of luck")
        with (
            fault(engine, 0, "commit_lora", broken, after=after),
            pytest.raises(LoRAError, match=r"rank 0 of stage 0 could not take adapter 'style-1'.*out of luck.*removed"),
        ):
            await engine.add_lora(request)
        assert engine.status().stages[0].state == "AWAKE"
        assert await engine.list_loras() == []
        assert "lora" not in tags(engine)
        assert "lora" not in engine.status().stages[0].ranks[0].tags
        assert await golden(engine) == base
        assert await engine.add_lora(request)

    asyncio.run(run())


def test_a_rank_that_raises_in_prepare_leaves_everything_as_it_was(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        request = make(1)
        with (
            fault(engine, 0, "prepare_lora", RuntimeError("no disk")),
            pytest.raises(LoRAError, match=r"rank 0 of stage 0 .*RuntimeError: no disk; nothing changed"),
        ):
            await engine.add_lora(request)
        assert await engine.list_loras() == []
        assert await engine.add_lora(request)

    asyncio.run(run())


def test_files_that_change_while_ranks_read_them_are_refused(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        request = make(1)
        real = engine._core.stages[0].call_all

        async def late(method: str, *args: Any, **known: Any) -> Any:
            if method == "prepare_lora":
                make(1, lora_alpha=3)
            return await real(method, *args, **known)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._core.stages[0], "call_all", late)
            with pytest.raises(ConfigError, match=r"changed while they were read; nothing changed"):
                await engine.add_lora(request)
        assert await engine.list_loras() == []

    asyncio.run(run())


def test_a_rank_that_can_not_pin_pins_nowhere(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        await engine.add_lora(make(1))
        with (
            fault(engine, 0, "pin_lora", RuntimeError("broken")),
            pytest.raises(LoRAError, match=r"rank 0 of stage 0 could not pin adapter 1: broken; it is pinned nowhere"),
        ):
            await engine.pin_lora(1)
        assert names(engine) == [("style-1", False)]
        assert await engine.pin_lora(1)

    asyncio.run(run())


def test_a_pin_that_can_not_be_taken_back_fails_the_stage_for_the_reason_that_it_had(
    engine: AsyncOmni, make: Make
) -> None:
    async def run() -> None:
        await engine.add_lora(make(1))
        with (
            fault(engine, 0, "pin_lora", RuntimeError("broken")),
            fault(engine, 0, "unpin_lora", RuntimeError("can not")),
            pytest.raises(LoRAError, match=r"could not pin adapter 1: broken; stage 0 has FAILED, call restart\(0\)$"),
        ):
            await engine.pin_lora(1)
        failed = engine.status().stages[0]
        assert (failed.state, "broken" in str(failed.last_error)) == ("FAILED", True)
        await engine.restart(0)
        assert names(engine) == [("style-1", False)]

    asyncio.run(run())


def test_a_rank_that_does_not_let_go_of_an_adapter_fails_the_stage_and_a_restart_comes_up_without_it(
    engine: AsyncOmni, make: Make
) -> None:
    async def run() -> None:
        base = await golden(engine)
        await engine.add_lora(make(1))
        with (
            fault(engine, 0, "remove_lora", RuntimeError("stuck")),
            pytest.raises(LoRAError, match=r"not removed from every rank of stage 0: stuck.*restart\(0\)"),
        ):
            await engine.remove_lora(1)
        assert engine.status().stages[0].state == "FAILED"
        await engine.restart(0)
        assert await engine.list_loras() == []
        assert await golden(engine) == base

    asyncio.run(run())


def test_an_add_whose_caller_goes_away_leaves_nothing_behind(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        request = make(1)
        with slow(engine, 0, 0.4, "prepare_lora"):
            adding = asyncio.create_task(engine.add_lora(request))
            await asyncio.sleep(0.1)
            adding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await adding
        assert await engine.list_loras() == []
        assert await engine.add_lora(request) is True

    asyncio.run(run())


def test_two_adds_of_one_name_at_once_are_one(engine: AsyncOmni, make: Make, tmp_path: Path) -> None:
    async def run() -> None:
        request = make(1)
        other = LoRARequest("style-1", 2, str(shutil.copytree(request.lora_path, tmp_path / "copy")))
        results = await asyncio.gather(engine.add_lora(request), engine.add_lora(other), return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["ArgumentError", "bool"]
        assert len(await engine.list_loras()) == 1

    asyncio.run(run())


def test_of_the_same_changes_at_once_one_is_made_and_the_others_find_it_so(engine: AsyncOmni, make: Make) -> None:
    async def at_once(*calls: Any) -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)

    async def run() -> None:
        request = make(1)
        assert sorted(await at_once(*(engine.add_lora(request) for _ in range(3)))) == [False, False, True]
        assert sorted(await at_once(*(engine.remove_lora(1) for _ in range(3)))) == [False, False, True]
        await engine.add_lora(request)
        removed, pinned = await at_once(engine.remove_lora(1), engine.pin_lora(1))
        assert removed is True
        assert isinstance(pinned, ArgumentError)
        assert (names(engine), await engine.list_loras()) == ([], [])

    asyncio.run(run())


def test_an_add_that_waited_for_another_keeps_its_pin_and_sees_that_its_files_are_others(
    engine: AsyncOmni, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, called = engine._core.stages[0], []
    call_all = stage.call_all

    def noted(method: str, *args: Any, **known: Any) -> Any:
        called.append(method)
        return call_all(method, *args, **known)

    monkeypatch.setattr(stage, "call_all", noted)

    async def run() -> None:
        request = make(1)
        with held(engine, 0, "commit_lora"):
            first = asyncio.create_task(engine.add_lora(request))
            await until(lambda: "commit_lora" in called)  # the ranks have read it
            same = asyncio.create_task(engine.add_lora(request))
            pin = asyncio.create_task(_pinned(engine, 1, first))
            await until(lambda: engine._core.stages[0].order_lock._waiters)
            assert (same.done(), first.done()) == (False, False)
            adapters.write(request.lora_path, adapters.matrices(engine._core.stages[0].model.adaptable, seed=7))
            other = asyncio.create_task(engine.add_lora(request))
            await until(lambda: len(engine._core.stages[0].order_lock._waiters) == 2)
        assert await first is True
        assert await same is False
        with pytest.raises(ArgumentError, match="was added with other files"):
            await other
        await pin
        assert names(engine) == [("style-1", True)]

    asyncio.run(run())


async def _pinned(engine: AsyncOmni, lora_id: int, first: asyncio.Task[bool]) -> None:
    await first
    await engine.pin_lora(lora_id)


def test_a_request_that_comes_while_its_adapter_goes_fails_alone(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        await engine.add_lora(make(1))
        alone = await text(engine)
        with held(engine, 0, "remove_lora"):
            removing = asyncio.create_task(engine.remove_lora(1))
            await until(lambda: not engine._core.stages[0].open)
            asked = [asyncio.create_task(text(engine, lora_request=name)) for name in (None, 1, None)]
            await until(lambda: engine.status().stages[0].queued == len(asked))
        assert await removing is True
        plain, gone, other = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)
        assert isinstance(gone, LoRAError)
        assert plain == other == alone

    asyncio.run(run())


def test_files_are_read_when_the_adapter_is_added_and_may_go_afterwards(engine: AsyncOmni, make: Make) -> None:
    async def run() -> None:
        request = make(1)
        await engine.add_lora(request)
        changed = await golden(engine, lora_request=1)
        shutil.rmtree(request.lora_path)
        await engine.sleep([0], level=2)
        await engine.wake_up([0])
        assert await golden(engine, lora_request=1) == changed

    asyncio.run(run())
