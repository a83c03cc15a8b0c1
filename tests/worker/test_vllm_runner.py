"""What our books need of a vLLM worker, where vLLM is not as we know it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.errors import ConfigError, UnsupportedError
from omni_notebook.worker.vllm import runner

if TYPE_CHECKING:
    from pathlib import Path

RUNS = {"hidden_size": 8, "eos_token_id": 2, "tied": True, "text": {"layers": 3}, "torch_dtype": "float32"}


def test_a_vllm_in_which_a_broken_load_could_not_be_undone_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UnsupportedError, match=r"has no get_layerwise_info, .*; tested are .*Nothing was started"):
        runner._layer_books()


@pytest.mark.parametrize(
    "said",
    [RUNS, {}, {"eos_token_id": 7, "tied": False, "torch_dtype": "float16", "another": 5}, {"text": {"heads": 4}}],
)
def test_a_checkpoint_of_a_model_of_the_same_sizes_may_be_loaded_where_none_was(said: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(said))
    runner._check_sizes(tmp_path, RUNS)


@pytest.mark.parametrize(
    ("said", "named"),
    [({"hidden_size": 16}, "its hidden_size is 16, not 8"), ({"text": {"layers": 2}}, "its layers is 2, not 3")],
)
def test_one_of_other_sizes_may_not(said: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json: no such file"):
        runner._check_sizes(tmp_path, RUNS)
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=named):
        runner._check_sizes(tmp_path, RUNS)
