"""Model folders as vLLM takes them: fetched by name, and read by rules of its own."""

from __future__ import annotations

from pathlib import Path

from omni_notebook.errors import ConfigError
from omni_notebook.models.loaders import STEM, indexed_files, opened

_MISTRAL = "consolidated"
"""How the files of Mistral's own format begin, which vLLM takes before others in the same folder."""
_SAFETENSORS = frozenset({"auto", "fastsafetensors", "hf", "mistral", "safetensors"})
"""Load formats whose files those are, where there are any."""
_OTHERS = ("*.bin", "*.pt")
"""What vLLM's "auto" and "hf" read where there is none, whatever an index says."""
_OTHER_FORMATS = frozenset({"npcache", "pt"})
"""Load formats that read no safetensors file even where there is one."""


def folder_of(model: str, *, revision: str | None = None, cache: str | None = None) -> Path:
    """The folder of a model: its own, or that of a name on the hub whose files vLLM has fetched (into `cache`).

    Raises:
        OSError: nothing was fetched.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (vLLM has it; a local folder does not need it)

    return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))


def files_that_vllm_reads(folder: Path, load_format: str = "auto") -> list[Path]:
    """A checkpoint's safetensors files: those that its index names; without an index, all that are in the folder.

    Source: vLLM's `DefaultModelLoader._prepare_weights`.

    Raises:
        ConfigError: there are none, or one is missing.
    """
    if not folder.is_dir():
        msg = f"{folder}: no such model folder"
        raise ConfigError(msg)
    mistral = sorted(folder.glob(f"{_MISTRAL}*.safetensors")) if load_format in {"auto", "mistral"} else []
    index = folder / f"{_MISTRAL if mistral else STEM}.safetensors.index.json"
    if index.is_file():
        return indexed_files(index)
    files = mistral or sorted(folder.glob("*.safetensors"))
    if not files:
        msg = f"{folder}: there is no safetensors file"
        raise ConfigError(msg)
    return files


def reads_safetensors(folder: Path, load_format: str = "auto") -> bool:
    """Whether those are what vLLM reads there, or would miss; it may take files of another kind."""
    if load_format in _OTHER_FORMATS:
        return False
    others = load_format in {"auto", "hf"} and any(any(folder.glob(pattern)) for pattern in _OTHERS)
    return any(folder.glob("*.safetensors" if others else "*.safetensors*"))


def check_whole(folder: Path, load_format: str = "auto") -> None:
    """Look at the headers of the safetensors files that vLLM would read; a folder of other files is left to vLLM.

    Raises:
        ConfigError: one is missing, or cut short.
    """
    if load_format in _SAFETENSORS and reads_safetensors(folder, load_format):
        with opened(files_that_vllm_reads(folder, load_format)):
            pass
