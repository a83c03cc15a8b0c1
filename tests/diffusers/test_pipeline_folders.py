"""Which folders are pipelines, what is refused before anything starts, and that nothing heavy is imported for it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook import config
from omni_notebook.config import PipelineConfig, StageConfig, load_pipeline
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import ConfigError, UnsupportedError, WakeError
from tests.diffusers.drawing import picture, plain
from tests.diffusers.pipelines import UNET_FILE, edit_json

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def spoiled(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "spoiled"))


def test_a_folder_with_a_model_index_is_one_diffusion_stage(folder: Path) -> None:
    (stage,) = load_pipeline(str(folder)).stages
    assert (stage.kind, stage.runtime_name, stage.model) == ("diffusion", "diffusers", str(folder))
    assert StageConfig(kind="diffusion", model=str(folder)).runtime_name == "diffusers"


def test_a_hub_name_is_a_pipeline_where_it_is_said_to_be() -> None:
    (stage,) = load_pipeline("someone/some-pipeline", overrides={"runtime": "diffusers"}).stages
    assert (stage.kind, stage.runtime_name, stage.model) == ("diffusion", "diffusers", "someone/some-pipeline")


def test_a_pipeline_file_names_a_diffusers_folder_beside_it(folder: Path) -> None:
    file = folder.parent / "pipeline.yaml"
    file.write_text(f"stages:\n  - model: {folder.name}\n    name: painter\n", encoding="utf-8")
    (stage,) = load_pipeline(str(file)).stages
    assert (stage.title, stage.runtime_name) == ("painter", "diffusers")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing component": (
        lambda path: shutil.rmtree(path / "vae"),
        r"vae: no such folder, but model_index.json names the component 'vae' \(AutoencoderKL\)",
    ),
    "no weights": (lambda path: (path / UNET_FILE).unlink(), "unet: neither diffusion_pytorch_model.safetensors nor"),
    "pickled weights": (
        lambda path: (path / UNET_FILE).rename(path / "unet/diffusion_pytorch_model.bin"),
        "pickled weights and variants are not read",
    ),
    "truncated file": (
        lambda path: (path / UNET_FILE).write_bytes((path / UNET_FILE).read_bytes()[:5000]),
        "diffusion_pytorch_model.safetensors: not a whole safetensors file",
    ),
    "no config": (lambda path: (path / "unet/config.json").unlink(), "unet/config.json: no such file"),
    "no pipeline class": (
        lambda path: edit_json(path / "model_index.json", _class_name=None),
        "model_index.json names no pipeline",
    ),
    "broken index": (lambda path: (path / "model_index.json").write_text("{"), "cannot be read as JSON"),
    "unknown pipeline": (
        lambda path: edit_json(path / "model_index.json", _class_name="NoSuchPipeline"),
        "can not be loaded by diffusers: .*NoSuchPipeline",
    ),
    "unknown component": (
        lambda path: edit_json(path / "model_index.json", unet=["diffusers", "NoSuchModel"]),
        "can not be loaded by diffusers: .*NoSuchModel",
    ),
    "broken tokenizer": (
        lambda path: (path / "tokenizer/tokenizer.json").write_text("{"),
        "can not be loaded by diffusers",
    ),
    "wrong shape": (
        lambda path: edit_json(path / "unet/config.json", cross_attention_dim=48),
        "can not be loaded by diffusers",
    ),
    "a name of ours": (
        lambda path: ((path / "vae").rename(path / "weights"), _rename(path / "model_index.json", "vae", "weights")),
        "a component can not be called 'weights'",
    ),
}


def _rename(file: Path, old: str, new: str) -> None:
    data = json.loads(file.read_text(encoding="utf-8"))
    edit_json(file, **{old: None, new: data[old]})


@pytest.mark.parametrize("trouble", BROKEN)
def test_a_folder_that_is_no_whole_pipeline_is_one_clear_line(spoiled: Path, trouble: str) -> None:
    spoil, message = BROKEN[trouble]
    spoil(spoiled)
    with pytest.raises(ConfigError, match=message) as caught:
        AsyncOmni(str(spoiled), executor="uni")
    assert "\n" not in str(caught.value)


def test_without_a_model_index_a_folder_is_not_taken_for_a_pipeline(spoiled: Path) -> None:
    (spoiled / "model_index.json").unlink()
    with pytest.raises(ConfigError, match=r"is not a model folder: config.json can not be read"):
        AsyncOmni(str(spoiled))
    with pytest.raises(ConfigError, match="nowhere: no such pipeline folder"):
        AsyncOmni(pipeline=_one(spoiled / "nowhere"))
    with pytest.raises(ConfigError, match=r"model_index.json: no such file"):
        AsyncOmni(pipeline=_one(spoiled))


def _one(folder: Path) -> PipelineConfig:
    return PipelineConfig(stages=(StageConfig(kind="diffusion", runtime="diffusers", model=str(folder)),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_execution": True}, "a diffusers pipeline runs its own loop over the steps"),
        ({"engine_args": {"a": 1}}, "engine_args are for runtime='vllm'"),
        ({"kind": "ar"}, "runtime='diffusers' runs 'diffusion' stages"),
        ({"device": "xpu"}, "device='xpu'"),
        ({"executor": "ray"}, "executor='ray' is not in this release"),
    ],
)
def test_what_is_not_built_is_refused_with_the_reason(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        StageConfig(**{"kind": "diffusion", "runtime": "diffusers", "model": str(folder), **changes})


def test_without_diffusers_the_package_to_install_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "has_diffusers", lambda: False)
    with pytest.raises(UnsupportedError, match=r"pip install 'omni-notebook\[diffusers\]'; nothing was started"):
        AsyncOmni(str(folder))


def test_a_rank_in_a_process_of_its_own_leaves_the_notebook_without_diffusers(folder: Path) -> None:
    code = f"""
import sys
from omni_notebook import AsyncOmni
with AsyncOmni({str(folder)!r}, executor="mp") as engine:
    engine.status()
print(sorted(name for name in ("diffusers", "transformers", "peft", "accelerate") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.fixture
def cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hugging Face hub with one pipeline in it, for children that may not ask the hub."""
    made = tmp_path / "hub" / "models--someone--painter"
    shutil.copytree(folder, made / "snapshots" / "0123abcd")
    (made / "refs").mkdir()
    (made / "refs" / "main").write_text("0123abcd", encoding="ascii")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return made / "snapshots" / "0123abcd"


def test_a_pipeline_from_the_hubs_cache_draws_and_wakes_from_its_files(cache: Path, folder: Path) -> None:
    with AsyncOmni("someone/painter", runtime="diffusers", executor="mp") as engine:
        assert asyncio.run(picture(engine)) == plain(folder)
        asyncio.run(engine.sleep([0], level=2))
        asyncio.run(engine.wake_up([0]))
        assert asyncio.run(picture(engine)) == plain(folder)
        asyncio.run(engine.sleep([0], level=2))
        shutil.rmtree(cache / "unet")
        with pytest.raises(WakeError, match="unet: no such folder"):
            asyncio.run(engine.wake_up([0]))


@pytest.mark.usefixtures("cache")
def test_a_name_that_the_hub_does_not_give_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match="someone/other can not be loaded by diffusers: ") as caught:
        AsyncOmni("someone/other", runtime="diffusers", executor="mp")
    assert "\n" not in str(caught.value)
