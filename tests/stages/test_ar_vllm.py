"""What a vLLM stage knows of its model before vLLM runs."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.config import DEMO_FOLDER, StageConfig
from omni_notebook.stages.ar_vllm import ArVllmModel
from tests.models.test_vllm_folders import fetch

if TYPE_CHECKING:
    from pathlib import Path

THINKER = DEMO_FOLDER / "thinker"


@pytest.fixture(autouse=True)
def vllm_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_notebook.config.has_vllm", lambda: True)


def adaptable(model: str, **arguments: Any) -> dict[str, tuple[int, int]]:
    config = StageConfig(kind="ar", model=model, runtime="vllm", engine_args={"enable_lora": True, **arguments})
    return ArVllmModel(config).adaptable


def test_a_model_given_by_name_takes_the_adapters_that_its_folder_does(tmp_path: Path) -> None:
    folder = fetch(tmp_path, "organisation/thinker", {"main": "1" * 40})["main"]
    shutil.copytree(THINKER, folder, dirs_exist_ok=True)
    expected = adaptable(str(THINKER))
    assert "model.layers.0.self_attn.q_proj" in expected
    assert adaptable("organisation/thinker", download_dir=str(tmp_path)) == expected


def test_without_enable_lora_no_file_is_looked_for() -> None:
    assert adaptable("organisation/nowhere", enable_lora=False) == {}
