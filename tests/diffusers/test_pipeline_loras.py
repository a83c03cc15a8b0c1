"""Adapters of a pipeline, put into its layers by diffusers and peft: add, use, remove, and both levels of sleep."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_notebook.errors import ArgumentError, ConfigError
from omni_notebook.protocol import MIB, LoRARequest
from tests.diffusers.drawing import outputs, picture, plain, running
from tests.diffusers.pipelines import COMPONENTS, lora
from tests.engine.engine_helpers import until

if TYPE_CHECKING:
    from omni_notebook.engine.async_omni import AsyncOmni

FILE = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoRARequest, LoRARequest]:
    """Two adapters of different ranks."""
    base = tmp_path_factory.mktemp("adapters")
    first, second = lora(base / "ink", seed=11), lora(base / "oil", seed=12, rank=2, alpha=1.0)
    return LoRARequest("ink", 1, str(first)), LoRARequest("oil", 2, str(second))


def tags(engine: AsyncOmni) -> set[str]:
    return set(engine.status().stages[0].ranks[0].tags)


def test_an_adapter_draws_what_plain_diffusers_draws_with_it_and_nothing_without(
    engine: AsyncOmni, folder: Path, styles: tuple[LoRARequest, LoRARequest]
) -> None:
    golden = asyncio.run(picture(engine))
    for request in styles:
        assert asyncio.run(engine.add_lora(request))
    assert asyncio.run(engine.list_loras()) == [1, 2]
    assert [(one.lora_name, one.rank) for one in engine.status().stages[0].loras] == [("ink", 4), ("oil", 2)]
    assert tags(engine) == {*COMPONENTS, "lora"}
    drawn = [asyncio.run(picture(engine, lora_request=request)) for request in (*styles, None)]
    assert drawn == [*(plain(folder, adapter=Path(request.lora_path)) for request in styles), golden]
    assert len(set(drawn)) == 3
    assert asyncio.run(outputs(engine, lora_request="ink"))[-1].metrics["lora"] == "ink"


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_survive_both_levels_and_a_wake_by_tags(
    engine: AsyncOmni, styles: tuple[LoRARequest, LoRARequest], level: int
) -> None:
    asked = (*styles, None)
    for request in styles:
        asyncio.run(engine.add_lora(request))
    before = [asyncio.run(picture(engine, lora_request=request)) for request in asked]
    for order in (None, ["lora"], ["unet"]):
        (ack,) = asyncio.run(engine.sleep([0], level=level))
        assert ack.metadata["tags"]["lora"] == {"freed": 4 * MIB, "backup": "spill"}
        if order is not None:
            asyncio.run(engine.wake_up([0], tags=order))
            assert engine.status().stages[0].state == "PARTLY_AWAKE"
        asyncio.run(engine.wake_up([0]))
        assert [asyncio.run(picture(engine, lora_request=request)) for request in asked] == before


def test_removing_gives_the_memory_back_and_leaves_the_others_and_the_base_as_they_were(
    engine: AsyncOmni, styles: tuple[LoRARequest, LoRARequest]
) -> None:
    golden = asyncio.run(picture(engine))
    for request in styles:
        asyncio.run(engine.add_lora(request))
    oil = asyncio.run(picture(engine, lora_request="oil"))
    both = engine.status().stages[0].ranks[0].tags["lora"].mapped_bytes
    assert asyncio.run(engine.remove_lora(1))
    assert engine.status().stages[0].ranks[0].tags["lora"].mapped_bytes == both // 2
    assert (asyncio.run(picture(engine, lora_request="oil")), asyncio.run(picture(engine))) == (oil, golden)
    with pytest.raises(ArgumentError, match="no adapter 'ink'"):
        asyncio.run(outputs(engine, lora_request="ink"))
    asyncio.run(engine.sleep([0], level=2))
    asyncio.run(engine.wake_up([0]))
    assert asyncio.run(picture(engine, lora_request="oil")) == oil
    assert asyncio.run(engine.remove_lora(2))
    assert (tags(engine), asyncio.run(picture(engine))) == (set(COMPONENTS), golden)


def test_requests_with_different_adapters_take_turns(
    engine: AsyncOmni, styles: tuple[LoRARequest, LoRARequest]
) -> None:
    for request in styles:
        asyncio.run(engine.add_lora(request))
    alone = {name: asyncio.run(picture(engine, lora_request=name)) for name in ("ink", "oil", None)}

    async def run() -> list[Any]:
        first = await running(engine, request_id="first")
        tasks = [asyncio.create_task(outputs(engine, lora_request=name)) for name in alone]
        await until(lambda: engine.status().stages[0].queued == len(tasks))
        await engine.abort("first")
        await first
        return [(await task)[-1] for task in tasks]

    ended = asyncio.run(run())
    assert [one.metrics["batch_size"] for one in ended] == [1, 1, 1]
    assert [one.images[0].tobytes() for one in ended] == list(alone.values())


def test_new_weights_under_an_adapter_are_the_new_base(
    engine: AsyncOmni, other: Path, styles: tuple[LoRARequest, LoRARequest]
) -> None:
    asyncio.run(engine.add_lora(styles[0]))
    asyncio.run(engine.load_weights(0, str(other)))
    assert asyncio.run(picture(engine)) == plain(other)
    assert asyncio.run(picture(engine, lora_request="ink")) == plain(other, adapter=Path(styles[0].lora_path))


def test_a_restart_brings_adapters_back(in_process: AsyncOmni, styles: tuple[LoRARequest, LoRARequest]) -> None:
    asyncio.run(in_process.add_lora(styles[0]))
    asyncio.run(in_process.pin_lora(1))
    before = asyncio.run(picture(in_process, lora_request="ink"))
    asyncio.run(in_process.restart(0))
    assert asyncio.run(picture(in_process, lora_request="ink")) == before
    assert [one.pinned for one in in_process.status().stages[0].loras] == [True]


def _odd(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = next(iter(tensors))
    changed = {
        "of the text encoder": {first.replace("unet.", "text_encoder."): tensors[first]},
        "another format": {"lora_unet_down_blocks_0.lora_down.weight": tensors[first]},
        "a convolution": {"unet.conv_in.lora_A.weight": torch.zeros(4, 4, 3, 3)},
        "another shape": {first: torch.zeros(4, 7)},
        "an unknown layer": {first.replace("unet.", "unet.more."): tensors[first]},
        "not a number": {first: torch.full_like(tensors[first], float("nan"))},
    }[name]
    return {**tensors, **{key: tensor.clone() for key, tensor in changed.items()}}


ODD = {
    "of the text encoder": "is no LoRA matrix of a linear layer of unet or transformer",
    "another format": "files in other formats: load them with diffusers and save_lora_weights",
    "a convolution": "not a matrix",
    "another shape": "the layer needs",
    "an unknown layer": "has no lora_B|has no lora_A|no layer",
    "not a number": "NaN or infinite",
}


@pytest.mark.parametrize("trouble", ODD)
def test_an_adapter_that_can_not_be_exact_is_refused_by_name(
    engine: AsyncOmni, styles: tuple[LoRARequest, LoRARequest], tmp_path: Path, trouble: str
) -> None:
    tensors = _odd(trouble, load_file(Path(styles[0].lora_path) / FILE))
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=ODD[trouble]) as caught:
        asyncio.run(engine.add_lora(LoRARequest("odd", 9, str(tmp_path))))
    assert "\n" not in str(caught.value)
    assert (asyncio.run(engine.list_loras()), tags(engine)) == ([], set(COMPONENTS))


def test_an_adapter_of_too_high_a_rank_names_the_option(engine: AsyncOmni, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="start the engine with max_lora_rank=32 or more"):
        asyncio.run(engine.add_lora(LoRARequest("big", 9, str(lora(tmp_path / "big", seed=1, rank=32)))))


def test_an_adapter_whose_file_changes_while_it_is_taken_leaves_nothing_behind(
    in_process: AsyncOmni, styles: tuple[LoRARequest, LoRARequest], tmp_path: Path
) -> None:
    golden = asyncio.run(picture(in_process))
    asyncio.run(in_process.add_lora(styles[0]))
    ink = asyncio.run(picture(in_process, lora_request="ink"))
    worker: Any = in_process._core.stages[0].replicas[0].executor._worker
    request = LoRARequest("changing", 7, str(lora(tmp_path / "changing", seed=3)))
    worker.prepare_lora(request)
    lora(tmp_path / "changing", seed=4)
    with pytest.raises(ConfigError, match="was changed while it was read"):
        worker.commit_lora(7)
    worker.remove_lora(7)  # as the engine does on every rank
    worker.remove_lora(8)  # one that was never there
    assert asyncio.run(picture(in_process)) == golden
    assert asyncio.run(picture(in_process, lora_request="ink")) == ink
