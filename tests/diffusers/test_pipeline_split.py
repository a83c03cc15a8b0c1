"""A Stable Diffusion 3 whose transformer is split over two ranks: the same picture, an answer a rank, one fate."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import ArgumentError, ConfigError, OmniError, UnsupportedError
from omni_notebook.protocol import LoRARequest
from tests.diffusers.drawing import outputs, picture, plain, reset, running
from tests.diffusers.pipelines import lora, stable_diffusion_3
from tests.engine.engine_helpers import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARTS = ("text_encoder", "text_encoder_2", "transformer", "vae")


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stable_diffusion_3(tmp_path_factory.mktemp("third") / "first", seed=1)


@pytest.fixture(scope="module")
def other_third(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stable_diffusion_3(tmp_path_factory.mktemp("third") / "other", seed=2)


@pytest.fixture(scope="module")
def shared_two(third: Path) -> Iterator[AsyncOmni]:
    with AsyncOmni(str(third), tensor_parallel_size=2) as engine:
        yield engine


@pytest.fixture
def two(shared_two: AsyncOmni, third: Path) -> Iterator[AsyncOmni]:
    yield shared_two
    asyncio.run(reset(shared_two, third))


def difference(one: bytes, other: bytes) -> int:
    """The largest difference of a colour, in 256ths."""
    first, second = (np.frombuffer(pixels, np.uint8).astype(int) for pixels in (one, other))
    return int(np.abs(first - second).max())


def test_two_ranks_draw_what_one_does_but_for_rounding(two: AsyncOmni, third: Path) -> None:
    drawn = asyncio.run(picture(two))
    assert difference(drawn, plain(third)) <= 1  # a sum over ranks is rounded once more
    assert difference(drawn, asyncio.run(picture(two, params={"seed": 6}))) > 30


@pytest.mark.parametrize("level", [1, 2])
def test_each_rank_answers_for_its_own_part(two: AsyncOmni, third: Path, level: int) -> None:
    golden = asyncio.run(picture(two))
    acks = asyncio.run(two.sleep([0], level=level))
    assert [(ack.status, ack.rank, set(ack.metadata["tags"])) for ack in acks] == [
        ("SUCCESS", rank, set(PARTS)) for rank in (0, 1)
    ]
    assert len({ack.metadata["pid"] for ack in acks}) == 2
    whole = (third / "transformer/diffusion_pytorch_model.safetensors").stat().st_size
    for ack in acks:
        assert ack.freed_bytes == ack.metadata["expected_bytes"] == ack.metadata["observed_bytes"]
        held = ack.metadata["tags"]["transformer"]["freed"]
        assert whole / 2 < held < 0.8 * whole  # modulation is whole on every rank
    for tag in ("vae", "transformer", "text_encoder_2", "text_encoder"):
        woken = asyncio.run(two.wake_up([0], tags=[tag]))
        assert [ack.status for ack in woken] == ["SUCCESS", "SUCCESS"]
    assert asyncio.run(picture(two)) == golden


def test_twenty_mixed_cycles_leave_the_same_picture(two: AsyncOmni) -> None:
    golden = asyncio.run(picture(two))
    for cycle in range(20):
        asyncio.run(two.sleep([0], level=1 + cycle % 2))
        asyncio.run(two.wake_up([0]))
    assert asyncio.run(picture(two)) == golden


def test_new_weights_reach_both_ranks_and_what_does_not_fit_reaches_none(
    two: AsyncOmni, other_third: Path, folder: Path
) -> None:
    golden = asyncio.run(picture(two))
    with pytest.raises(ConfigError, match="nothing changed, stage 0 is AWAKE"):
        asyncio.run(two.load_weights(0, str(folder)))
    assert asyncio.run(picture(two)) == golden
    asyncio.run(two.load_weights(0, str(other_third), version="later"))
    assert difference(asyncio.run(picture(two)), plain(other_third)) <= 1
    asyncio.run(two.sleep([0], level=2))
    asyncio.run(two.wake_up([0]))
    assert difference(asyncio.run(picture(two)), plain(other_third)) <= 1
    assert two.status().stages[0].weight_version == "later"


def test_an_abort_and_a_refused_request_leave_the_ranks_together(two: AsyncOmni) -> None:
    async def run() -> str:
        task = await running(two, request_id="long")
        await two.abort("long")
        ended = (await task)[-1].state
        with pytest.raises(ArgumentError, match="StableDiffusion3Pipeline refused the request"):
            await outputs(two, params={"width": 13, "height": 16})
        return ended

    golden = asyncio.run(picture(two))
    assert asyncio.run(run()) == "aborted"
    assert (two.status().stages[0].state, asyncio.run(picture(two))) == ("AWAKE", golden)


def test_a_rank_that_is_killed_fails_the_stage_and_restart_revives_both(two: AsyncOmni) -> None:
    async def run() -> None:
        task = await running(two)
        os.kill(two.status().stages[0].ranks[1].pid, signal.SIGKILL)
        with pytest.raises(OmniError, match="rank 1"):
            await task
        await until(lambda: two.status().stages[0].state == "FAILED")
        await two.restart(0)

    golden = asyncio.run(picture(two))
    asyncio.run(run())
    assert asyncio.run(picture(two)) == golden


def test_adapters_of_a_split_pipeline_are_refused_with_the_reason(two: AsyncOmni, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapters of a pipeline that is split over ranks are not in this release"):
        asyncio.run(two.add_lora(LoRARequest("ink", 1, str(lora(tmp_path / "ink", seed=1)))))


def test_heads_that_can_not_be_split_evenly_are_refused_before_anything_starts(third: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_attention_heads \(4\) can not be split over tensor_parallel_size=3"):
        AsyncOmni(str(third), tensor_parallel_size=3)


def test_another_family_is_refused_by_name_before_anything_starts(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"a StableDiffusionPipeline \(.*UNet2DCondition.*\) can not be split"):
        AsyncOmni(str(folder), tensor_parallel_size=2)
