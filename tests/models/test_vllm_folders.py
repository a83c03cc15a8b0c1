"""Which files of a folder vLLM reads, and where the files of a model lie that is given by name."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from omni_notebook.errors import ConfigError
from omni_notebook.models.vllm_folders import check_whole, files_that_vllm_reads, folder_of, reads_safetensors

if TYPE_CHECKING:
    from pathlib import Path

SHARDS = ["model-1.safetensors", "model-2.safetensors"]


def write(folder: Path, files: list[str], indexed: dict[str, list[str]] | None = None) -> Path:
    """Empty files, and indices that name some."""
    for name in files:
        (folder / name).touch()
    for stem, names in (indexed or {}).items():
        table = {"weight_map": {str(place): name for place, name in enumerate(names)}}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(table))
    return folder


@pytest.mark.parametrize(
    ("files", "indexed", "load_format", "read"),
    [
        (["model.safetensors"], {}, "auto", ["model.safetensors"]),
        (["model.safetensors", "a.safetensors", "b.bin"], {}, "auto", ["a.safetensors", "model.safetensors"]),
        (["other.safetensors"], {}, "safetensors", ["other.safetensors"]),
        ([*SHARDS, "model.safetensors", "a.safetensors"], {"model": SHARDS}, "auto", SHARDS),
        ([*SHARDS, "consolidated.safetensors"], {"model": SHARDS}, "auto", ["consolidated.safetensors"]),
        ([*SHARDS, "consolidated.safetensors"], {"model": SHARDS}, "hf", SHARDS),
        (
            ["consolidated-1.safetensors", "consolidated-2.safetensors"],
            {"consolidated": ["consolidated-1.safetensors"]},
            "mistral",
            ["consolidated-1.safetensors"],
        ),
    ],
)
def test_an_index_says_what_is_read_and_without_one_all_is(
    files: list[str], indexed: dict[str, list[str]], load_format: str, read: list[str], tmp_path: Path
) -> None:
    write(tmp_path, files, indexed)
    assert [path.name for path in files_that_vllm_reads(tmp_path, load_format)] == read


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "dummy", "bitsandbytes"])
def test_a_file_that_was_cut_short_is_named_where_it_would_be_read(load_format: str, tmp_path: Path) -> None:
    for name in SHARDS:
        save_file({name: torch.zeros(64)}, tmp_path / name)
    check_whole(tmp_path, load_format)
    os.truncate(tmp_path / SHARDS[1], 200)
    if load_format in {"dummy", "bitsandbytes"}:
        check_whole(tmp_path, load_format)
        return
    with pytest.raises(ConfigError, match=r"model-2\.safetensors: not a whole safetensors file"):
        check_whole(tmp_path, load_format)
    (tmp_path / SHARDS[1]).unlink()
    check_whole(write(tmp_path, [], {"model": SHARDS[:1]}), load_format)
    with pytest.raises(ConfigError, match=r"model-2\.safetensors: no such file"):
        check_whole(write(tmp_path, [], {"model": SHARDS}), load_format)


@pytest.mark.parametrize(
    ("files", "indexed", "load_format", "reads"),
    [
        (["model.safetensors", "pytorch_model.bin"], {}, "auto", True),
        (["model.safetensors", "model.pt"], {}, "pt", False),
        (["model.safetensors", "pytorch_model.bin"], {}, "npcache", False),
        (["pytorch_model.bin"], {}, "auto", False),
        (["pytorch_model.bin"], {"model": SHARDS}, "hf", False),
        (["pytorch_model.bin"], {"model": SHARDS}, "safetensors", True),
        ([], {"model": SHARDS}, "auto", True),
    ],
)
def test_whether_safetensors_are_what_is_read(
    files: list[str], indexed: dict[str, list[str]], load_format: str, reads: bool, tmp_path: Path
) -> None:
    assert reads_safetensors(write(tmp_path, files, indexed), load_format) is reads


def test_a_folder_without_safetensors_is_vllms_to_judge(tmp_path: Path) -> None:
    check_whole(write(tmp_path, ["pytorch_model.bin"]))
    check_whole(write(tmp_path, [], {"model": SHARDS}))
    with pytest.raises(ConfigError, match=r"model-1\.safetensors: no such file"):
        check_whole(tmp_path, "safetensors")
    check_whole(tmp_path / "a name on the hub")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such model folder"):
        files_that_vllm_reads(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="there is no safetensors file"):
        files_that_vllm_reads(write(tmp_path, ["model.bin"]))
    with pytest.raises(ConfigError, match=r"model-2.safetensors: no such file, but model.safetensors.index.json"):
        files_that_vllm_reads(write(tmp_path, SHARDS[:1], {"model": SHARDS}))


def test_a_folder_is_its_own_and_a_name_s_is_what_was_fetched_of_the_revision(tmp_path: Path) -> None:
    assert folder_of(str(tmp_path)) == tmp_path
    fetched = fetch(tmp_path, "organisation/model", {"main": "1" * 40, "other": "2" * 40})
    assert folder_of("organisation/model", cache=str(tmp_path)) == fetched["main"]
    assert folder_of("organisation/model", revision="other", cache=str(tmp_path)) == fetched["other"]
    with pytest.raises(OSError, match=r"(?i)cannot find|not.*found|no such"):
        folder_of("organisation/another", cache=str(tmp_path))


def fetch(cache: Path, name: str, revisions: dict[str, str]) -> dict[str, Path]:
    """What a download from the hub leaves, by revision."""
    model = cache / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    for revision, commit in revisions.items():
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "refs" / revision).write_text(commit)
    return {revision: model / "snapshots" / commit for revision, commit in revisions.items()}
