"""New weights as tensors: every kind of source, versions, and what a sleep or a restart makes of them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import (
    ArgumentError,
    ConfigError,
    EngineClosedError,
    NeedsWeightsError,
    SleepError,
    StageBusyError,
    WakeError,
)
from omni_notebook.stages import tensor_source
from tests.engine.engine_helpers import collect, golden, slow, until
from tests.engine.weights_helpers import FOLDERS, others, restored, saved, shipped, state, stream, version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARAMS = {"seed": 3, "num_inference_steps": 8}
KIB = 1024


@pytest.fixture
def engine(engine: AsyncOmni) -> Iterator[AsyncOmni]:
    yield engine
    asyncio.run(engine.resume_generation())
    asyncio.run(restored(engine))


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(others(), tmp_path_factory.mktemp("weights") / "other")


def as_module(tensors: dict[str, torch.Tensor]) -> Any:
    """A module of a trainer's whose parameters have these names."""
    import torch

    root = torch.nn.Module()
    for name, value in tensors.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, torch.nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(last, torch.nn.Parameter(value))
    return root


SOURCES = {
    "a mapping": others,
    "its items": lambda: others().items(),
    "a list of pairs": lambda: list(others().items()),
    "an iterator": lambda: stream(others()),
    "a model's named_parameters": lambda: as_module(others()).named_parameters(),
    "a model's state_dict": lambda: as_module(others()).state_dict(),
    "float32": lambda: stream({name: value.float() for name, value in others().items()}),
    "float64, another order": lambda: stream({name: others()[name].double() for name in reversed(others())}),
    "numpy arrays": lambda: stream({name: value.numpy() for name, value in others().items()}),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
@pytest.mark.parametrize("chunk_bytes", [None, 64 * KIB], ids=["one chunk", "many chunks"])
def test_tensors_of_any_source_are_the_weights_that_a_folder_of_them_would_be(
    engine: AsyncOmni, other_folder: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int | None, source: Any
) -> None:
    if chunk_bytes is not None:
        monkeypatch.setattr(tensor_source, "CHUNK_BYTES", chunk_bytes)

    async def run() -> None:
        before = await golden(engine)
        await engine.load_weights(1, other_folder)
        by_path = version(engine), await golden(engine)
        assert by_path[1] != before
        await engine.load_weights(1, FOLDERS[1])
        assert await golden(engine) == before
        await engine.load_weights(1, source())
        assert (version(engine), await golden(engine)) == by_path  # the version is a checksum of all bytes

    asyncio.run(run())


def test_bfloat16_is_taken_as_it_is(engine: AsyncOmni, tmp_path: Path) -> None:
    import torch

    halved = {name: value.to(torch.bfloat16) for name, value in others().items()}

    async def run() -> None:
        await engine.load_weights(1, saved(halved, tmp_path / "bfloat16"))
        by_path = version(engine), await golden(engine)
        await engine.load_weights(1, FOLDERS[1])
        await engine.load_weights(1, stream(halved))
        assert (version(engine), await golden(engine)) == by_path

    asyncio.run(run())


def test_a_text_stage_takes_tensors_too_and_passes_over_what_it_ignores(engine: AsyncOmni) -> None:
    import torch

    async def text() -> list[int]:
        return list((await collect(engine, output_modalities="text"))[-1].outputs[0].token_ids)

    async def run() -> None:
        before = await text(), version(engine, 0)
        await engine.load_weights(0, {**others(0), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
        assert version(engine, 0) != before[1]
        assert await text() != before[0]
        await engine.load_weights(0, stream({**shipped(0), "lm_head.weight": torch.zeros(3)}))  # tied, not needed
        assert (await text(), version(engine, 0)) == before

    asyncio.run(run())


def test_an_iterator_is_never_more_than_three_chunks_ahead_of_a_slow_rank(
    engine: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays: list[weakref.ref[Any]] = []
    most_bytes = 0
    real = tensor_source.host_bytes

    def noted(rows: Any) -> Any:
        nonlocal most_bytes
        data = real(rows)
        arrays.append(weakref.ref(data))
        most_bytes = max(most_bytes, sum(array.nbytes for ref in arrays if (array := ref()) is not None))
        return data

    monkeypatch.setattr(tensor_source, "host_bytes", noted)
    monkeypatch.setattr(tensor_source, "CHUNK_BYTES", 64 * KIB)
    with slow(engine, 1, 0.01, "load_tensors"):
        asyncio.run(engine.load_weights(1, stream(others())))
    assert len(arrays) > 81
    assert 64 * KIB < most_bytes <= 3 * 64 * KIB


# ----------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize("wrong", ["", "  ", 3, b"v2", ["v2"], "v\ud800"], ids=ascii)
def test_a_version_that_is_no_name_is_refused_and_nothing_is_read(engine: AsyncOmni, wrong: Any) -> None:
    source = stream(others())
    with pytest.raises(ArgumentError, match=r"is not a non-empty string of Unicode text\. Nothing changed"):
        asyncio.run(engine.load_weights(1, source, version=wrong))
    assert next(source)[0] == next(iter(others()))


@pytest.mark.parametrize("shape", [list, iter], ids=["known", "coming"])
def test_a_tensor_whose_name_can_not_be_sent_changes_nothing(engine: AsyncOmni, shape: Any) -> None:
    before = version(engine)
    tensors = [*others().items(), ("\ud800", torch.zeros(1))]
    with pytest.raises(
        ConfigError, match=r"the name of item 82, '\\ud800', is not Unicode text; nothing changed, stage 1 is AWAKE$"
    ):
        asyncio.run(engine.load_weights(1, shape(tensors)))
    assert (version(engine), str(engine.status().stages[1].state)) == (before, "AWAKE")


def test_endless_tensors_without_a_place_are_refused_at_once(engine: AsyncOmni) -> None:
    endless = ((f"nowhere.{number}", torch.empty(0)) for number in itertools.count())
    with pytest.raises(ConfigError, match=r"no place for nowhere\.0; nothing changed, stage 1 is AWAKE$"):
        asyncio.run(engine.load_weights(1, endless, timeout=20))


def test_a_load_that_a_shutdown_ends_says_so() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def stuck() -> Any:
        entered.set()
        go_on.wait(60)
        yield from others().items()

    async def run(engine: AsyncOmni) -> None:
        loading = asyncio.create_task(engine.load_weights(1, stuck()))
        await asyncio.to_thread(entered.wait, 20)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineClosedError, match="shut down"):
            await asyncio.wait_for(loading, 20)

    try:
        asyncio.run(run(AsyncOmni("demo")))
    finally:
        go_on.set()


def test_a_version_is_in_status_acks_and_outputs(engine: AsyncOmni) -> None:
    async def run() -> None:
        for source, name in ((stream(others()), "step 7 – ä"), (FOLDERS[1], "v1"), (others(), "v2")):
            await engine.load_weights(1, source, version=name)
            assert version(engine) == name
            assert (await collect(engine))[-1].weight_version == name
            acks = [*await engine.sleep([1]), *await engine.wake_up([1])]
            assert {ack.metadata["weight_version"] for ack in acks} == {name}
            assert (await collect(engine))[-1].weight_version == name

    asyncio.run(run())


@pytest.mark.parametrize("wrong", [3, None, b"bytes", "tensor", "array", "model", "async"], ids=str)
def test_what_can_be_no_source_is_refused_in_one_line(engine: AsyncOmni, wrong: Any) -> None:
    import torch

    async def later() -> Any:
        yield "a", torch.zeros(1)

    made = {"tensor": torch.zeros(3), "array": torch.zeros(3).numpy(), "model": torch.nn.Linear(1, 1), "async": later()}
    with pytest.raises(ArgumentError, match=r"state_dict\(\)" if wrong == "model" else "a folder, a mapping") as caught:
        asyncio.run(engine.load_weights(1, made.get(wrong, wrong) if isinstance(wrong, str) else wrong))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("Nothing changed")


# ------------------------------------------------------------------------------- sleep and restart


def test_level_1_keeps_weights_that_no_path_has(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.load_weights(1, stream(others()))
        before = await golden(engine)
        for _ in range(2):
            acks = await engine.sleep([1], level=1)
            assert [(ack.ok, ack.metadata["recoverable"]) for ack in acks] == [(True, True)]
            await engine.wake_up([1])
            assert (state(engine), await golden(engine)) == ("AWAKE", before)
        assert engine.status().stages[1].recoverable is False  # a level 2 would lose them, and the status says so

    asyncio.run(run())


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_a_checkpoint_is_no_backup_of_weights_that_did_not_come_from_it(executor: str) -> None:
    async def run(engine: AsyncOmni) -> None:
        first = await golden(engine)
        acks = await engine.sleep([1], level=1)
        assert acks[0].metadata["tags"]["weights"]["backup"] == "checkpoint"
        await engine.wake_up([1])
        await engine.load_weights(1, stream(others()))
        second = await golden(engine)
        acks = await engine.sleep([1], level=1)
        assert acks[0].metadata["tags"]["weights"]["backup"] == "spill"
        await engine.wake_up([1])
        assert await golden(engine) == second
        await engine.load_weights(1, FOLDERS[1])
        acks = await engine.sleep([1], level=1)
        assert acks[0].metadata["tags"]["weights"]["backup"] == "checkpoint"
        await engine.wake_up([1])
        assert await golden(engine) == first

    with AsyncOmni("demo", executor=executor, backup="checkpoint") as engine:
        asyncio.run(run(engine))


@pytest.mark.parametrize("by_way_of_level_1", [False, True])
def test_level_2_of_weights_that_no_path_has_says_so_and_leads_to_needs_weights(
    engine: AsyncOmni, by_way_of_level_1: bool
) -> None:
    async def run() -> None:
        await engine.load_weights(1, stream(others()), version="mine")
        mine = await golden(engine)
        if by_way_of_level_1:
            await engine.sleep([1], level=1)
        with pytest.raises(SleepError, match="no checkpoint path") as caught:
            await engine.sleep([1], level=2, discard=False)
        assert caught.value.acks[0].metadata["error_code"] == "UNRECOVERABLE"
        assert (state(engine), engine.status().stages[1].level) == (
            ("ASLEEP", 1) if by_way_of_level_1 else ("AWAKE", None)
        )
        acks = await engine.sleep([1], level=2)
        assert [(ack.ok, ack.metadata["recoverable"]) for ack in acks] == [(True, False)]
        assert engine.status().stages[1].recoverable is False
        acks = await engine.wake_up([1])
        assert state(engine) == "NEEDS_WEIGHTS"
        assert "load_weights" in str(acks[0].metadata["note"])
        assert "wake_up" not in str(acks[0].metadata["note"])  # it would not help
        with pytest.raises(WakeError, match="no checkpoint path reproduces these weights; call load_weights"):
            await engine.wake_up([1])
        with pytest.raises(NeedsWeightsError, match=r"load_weights\(1, path\)\. ") as refused:
            await collect(engine, admission_timeout=0)
        assert "wake_up" not in str(refused.value)
        assert state(engine) == "NEEDS_WEIGHTS"
        acks = await engine.sleep([1], level=2)  # nothing is lost by it any more, and nothing comes back
        assert [(ack.ok, ack.metadata["recoverable"]) for ack in acks] == [(True, False)]
        await engine.wake_up([1])
        assert state(engine) == "NEEDS_WEIGHTS"
        await engine.load_weights(1, stream(others()))
        assert (state(engine), await golden(engine)) == ("AWAKE", mine)

    asyncio.run(run())


async def lost(engine: AsyncOmni) -> None:
    """A restart that finds no path to the weights, and the way out."""
    mine = await golden(engine)
    await engine.restart(1)
    stage = engine.status().stages[1]
    assert (stage.state, stage.weight_version, stage.recoverable) == ("NEEDS_WEIGHTS", None, False)
    with pytest.raises(NeedsWeightsError, match="load_weights"):
        await collect(engine, admission_timeout=0)
    assert (await collect(engine, output_modalities="text"))[-1].text
    await engine.load_weights(1, stream(others()), version="mine again")
    assert (state(engine), version(engine), await golden(engine)) == ("AWAKE", "mine again", mine)


def test_a_restart_never_brings_old_weights_back_silently(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.load_weights(1, stream(others()), version="mine")
        await lost(engine)
        await engine.load_weights(1, FOLDERS[1])
        await engine.restart(1)
        assert state(engine) == "AWAKE"  # a path reproduces these

    asyncio.run(run())


def test_a_restart_after_a_rank_was_killed_does_not_either_and_not_the_second_time() -> None:
    async def killed(engine: AsyncOmni) -> None:
        os.kill(int(engine.status().stages[1].ranks[0].pid or 0), signal.SIGKILL)
        await until(lambda: state(engine) == "FAILED")

    async def run(engine: AsyncOmni) -> None:
        await engine.load_weights(1, stream(others()), version="mine")
        mine = await golden(engine)
        for _ in range(2):
            await killed(engine)
            await engine.restart(1)
            assert (state(engine), version(engine)) == ("NEEDS_WEIGHTS", None)
        await engine.load_weights(1, others(), version="mine again")
        assert (state(engine), version(engine), await golden(engine)) == ("AWAKE", "mine again", mine)
        await engine.sleep([1], level=1)
        await killed(engine)
        await engine.restart(1)
        assert (state(engine), version(engine)) == ("NEEDS_WEIGHTS", None)

    with AsyncOmni("demo", executor="mp") as engine:
        asyncio.run(run(engine))


def test_requests_that_waited_at_a_restart_run_on_the_weights_that_come_next(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.load_weights(1, stream(others()), version="mine")
        with slow(engine, 1, 0.3):
            requests = [asyncio.create_task(collect(engine, sampling_params=PARAMS)) for _ in range(6)]
            await until(lambda: engine.status().stages[1].queued)
            await engine.pause_generation(mode="keep", stage_ids=[1])
        await until(lambda: engine.status().stages[1].in_transit == 0)
        held = engine.status().stages[1].queued
        assert held
        await engine.restart(1)
        await engine.resume_generation()
        assert (state(engine), engine.status().stages[1].queued) == ("NEEDS_WEIGHTS", held)
        await engine.pause_generation(mode="keep", stage_ids=[1])
        await engine.load_weights(1, stream(shipped()), version="next")
        await engine.resume_generation()
        versions = [(await request)[-1].weight_version for request in requests]
        assert sorted(map(str, versions)) == ["mine"] * (6 - held) + ["next"] * held

    asyncio.run(run())


# ---------------------------------------------------------------------------------- busy and paused


@pytest.mark.parametrize("stage_id", [0, 1], ids=["text stage", "diffusion stage"])
def test_a_busy_stage_is_refused_and_the_iterator_is_not_touched(engine: AsyncOmni, stage_id: int) -> None:
    source = stream(others(stage_id))

    async def run() -> None:
        before = version(engine, stage_id)
        with slow(engine, stage_id, 0.2):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[stage_id].running)
            with pytest.raises(StageBusyError, match=r"1 running, .*pause_generation"):
                await engine.load_weights(stage_id, source)
        await request
        assert version(engine, stage_id) == before

    asyncio.run(run())
    assert len(list(source)) == len(others(stage_id))


def test_what_a_keep_pause_holds_on_a_diffusion_stage_runs_on_the_new_weights(engine: AsyncOmni) -> None:
    async def run() -> None:
        old, old_picture = version(engine), (await golden(engine, sampling_params=PARAMS))[1]
        with slow(engine, 1, 0.2):
            requests = [asyncio.create_task(collect(engine, sampling_params=PARAMS)) for _ in range(7)]
            await until(lambda: engine.status().stages[1].running and engine.status().stages[1].queued)
            await engine.pause_generation(mode="keep", stage_ids=[1], clear_cache=False)
        await until(lambda: engine.status().stages[1].in_transit == 0)
        held = engine.status().stages[1].queued
        await engine.load_weights(1, stream(others()), version="new")
        assert (await engine.is_paused(), engine.status().stages[1].queued) == (True, held)
        await engine.resume_generation()
        ends = [(await request)[-1] for request in requests]
        assert sorted(str(end.weight_version) for end in ends) == sorted([str(old)] * (7 - held) + ["new"] * held)
        new_picture = (await golden(engine, sampling_params=PARAMS))[1]
        assert new_picture != old_picture
        for end in ends:  # a batch's pictures differ from a single one's in rounding only
            assert _nearer(end.images[0].tobytes(), new_picture, old_picture) is (end.weight_version == "new")

    asyncio.run(run())


def _nearer(picture: bytes, one: bytes, other: bytes) -> bool:
    """Whether a picture is more like one than like the other."""
    import numpy as np

    given, first, second = (np.frombuffer(data, np.uint8).astype(int) for data in (picture, one, other))
    return bool(np.abs(given - first).sum() < np.abs(given - second).sum())


def test_what_a_keep_pause_freezes_on_a_text_stage_goes_on_and_says_on_which_weights(engine: AsyncOmni) -> None:
    async def run() -> None:
        old = str(version(engine, 0))
        with slow(engine, 0, 0.05):
            requests = [asyncio.create_task(collect(engine, output_modalities="text")) for _ in range(10)]
            await until(lambda: engine.status().stages[0].running and engine.status().stages[0].queued)
            await engine.pause_generation(mode="keep", stage_ids=[0], clear_cache=False)
        frozen = engine.status().stages[0]
        assert frozen.running
        assert frozen.queued
        await engine.load_weights(0, stream(shipped(0)), version="new")
        await engine.resume_generation()
        ends = [(await request)[-1] for request in requests]
        assert {end.weight_version for end in ends} == {"new"}
        mixed = [[version for version, _ in end.metrics["token_weight_versions"]] for end in ends]
        assert mixed.count(["new"]) == frozen.queued  # those that had not begun
        assert mixed.count([old, "new"]) == frozen.running

    asyncio.run(run())
