"""Sub-models that are not as usual: tied weights, weights from no file, shared ones, half types, odd pictures."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from omni_notebook.config import DEMO_FOLDER, PipelineConfig, StageConfig
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import ConfigError, UnsupportedError
from omni_notebook.memory.cpu import CpuPool
from omni_notebook.models.pipeline_folder import Component
from omni_notebook.worker.batches import PipelineBatch, PromptImage, RequestRefusedError
from omni_notebook.worker.diffusers.library import load_model
from omni_notebook.worker.diffusers.parts import Part, check_apart
from omni_notebook.worker.diffusers.runner import check_images
from tests.diffusers.drawing import outputs, picture, plain, running
from tests.diffusers.pipelines import TEXT_FILE, pixart
from tests.engine.engine_helpers import until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pool() -> Iterator[CpuPool]:
    pool = CpuPool()
    yield pool
    pool.close()


def component(folder: Path, kind: str) -> Component:
    return Component("encoder", kind, folder, {}, tuple(sorted(folder.glob("*.safetensors"))))


@pytest.mark.parametrize("shards", [None, "100KB"])
def test_tied_weights_are_one_tensor_and_come_back_from_one_or_several_files(
    pool: CpuPool, tmp_path: Path, shards: str | None
) -> None:
    from transformers import T5Config, T5EncoderModel

    shape = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    T5EncoderModel(shape).save_pretrained(tmp_path, **({} if shards is None else {"max_shard_size": shards}))
    found = component(tmp_path, "T5EncoderModel")
    model = load_model(T5EncoderModel, found, torch.float32)
    part = Part(model, "encoder", torch.float32, {})
    part.adopt(found, pool)
    assert model.shared.weight.data_ptr() == model.encoder.embed_tokens.weight.data_ptr()
    digest = pool.record_checksum("encoder")
    pool.keep("encoder", part.kept)
    pool.prepare_sleep(2)
    pool.commit_sleep()
    pool.map_restore()
    assert float(model.shared.weight.abs().sum()) == 0.0
    part.load(found)
    pool.commit_wake()
    assert pool.record_checksum("encoder") == digest


def test_weights_that_come_from_no_file_are_refused(folder: Path, tmp_path: Path) -> None:
    spoiled = Path(shutil.copytree(folder, tmp_path / "spoiled"))
    tensors = load_file(spoiled / TEXT_FILE)
    tensors.pop(next(name for name in tensors if name.endswith("q_proj.weight")))  # the library makes it up
    save_file(tensors, spoiled / TEXT_FILE, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"text_encoder: loaded twice it gives different weights"):
        AsyncOmni(str(spoiled), executor="uni")


def test_components_that_share_a_tensor_are_refused_by_name() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    with pytest.raises(ConfigError, match="the components 'text_encoder' and 'unet' share a tensor"):
        check_apart({"text_encoder": first, "unet": second})
    check_apart({"text_encoder": nn.Linear(4, 4), "unet": nn.Linear(4, 4)})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_come_back_from_files_of_the_whole_type(folder: Path, dtype: Any) -> None:
    with AsyncOmni(str(folder), executor="uni", dtype=dtype) as engine:
        golden = asyncio.run(picture(engine))
        spans = sum(held.mapped_bytes for held in engine.status().stages[0].ranks[0].tags.values())
        assert spans == 6 * 2**20  # two bytes a weight: every component fits into one chunk
        for level in (1, 2):
            asyncio.run(engine.sleep([0], level=level))
            asyncio.run(engine.wake_up([0]))
            assert asyncio.run(picture(engine)) == golden


def test_pictures_of_another_size_or_kind_than_asked_for_are_refused() -> None:
    image = PromptImage(prompt="a", negative_prompt=None, seed=1)
    batch = PipelineBatch(batch_id="b", images=(image,), num_inference_steps=1, guidance_scale=1.0, width=24, height=16)
    check_images(torch.zeros(1, 3, 16, 24), batch)
    with pytest.raises(RequestRefusedError, match="drew 32 × 16 pixels instead of 24 × 16; ask for that"):
        check_images(torch.zeros(1, 3, 16, 32), batch)
    with pytest.raises(UnsupportedError, match=r"gave \(1, 3, 5, 16, 24\), not a picture"):
        check_images(torch.zeros(1, 3, 5, 16, 24), batch)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of diffusers' own
def test_a_pipeline_with_callbacks_of_the_old_kind_sleeps_tells_its_progress_and_stops(tmp_path: Path) -> None:
    async def run(engine: AsyncOmni) -> None:
        golden = await picture(engine)
        for level in (1, 2):
            await engine.sleep([0], level=level)
            await engine.wake_up([0], tags=["transformer"])
            await engine.wake_up([0])
            assert await picture(engine) == golden
        task = await running(engine, request_id="long")
        await engine.abort("long")
        await task
        await until(lambda: engine.status().stages[0].running == 0, 5.0)
        assert await picture(engine) == golden

    folder = pixart(tmp_path / "pixart", seed=1)
    with AsyncOmni(str(folder), executor="uni") as engine:
        assert set(engine.status().stages[0].awake_tags) == {"text_encoder", "transformer", "vae"}
        asyncio.run(run(engine))
        assert asyncio.run(picture(engine)) == plain(folder)


def test_a_thinkers_text_is_the_prompt(folder: Path) -> None:
    stages = (
        StageConfig(kind="ar", model=str(DEMO_FOLDER / "thinker"), executor="uni"),
        StageConfig(kind="diffusion", model=str(folder), executor="uni"),
    )

    async def run(engine: AsyncOmni) -> tuple[str, bytes]:
        made = await outputs(engine, "a red star above a blue circle")
        text = next(out.text for out in reversed(made) if out.text)
        (ack,) = await engine.sleep([0], level=2)  # the painter goes on alone once the text is there
        assert (ack.status, [str(stage.state) for stage in engine.status().stages]) == ("SUCCESS", ["ASLEEP", "AWAKE"])
        return text, made[-1].images[0].tobytes()

    with AsyncOmni(pipeline=PipelineConfig(stages=stages)) as engine:
        text, drawn = asyncio.run(run(engine))
    assert drawn == plain(folder, text)
