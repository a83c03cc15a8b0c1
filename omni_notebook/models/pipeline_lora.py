"""LoRA adapters in diffusers' format: one safetensors file, layers named component.layer. No diffusers here."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load

from omni_notebook.errors import ConfigError
from omni_notebook.models.lora import Adapter, Pair, both_halves, check_matrix, read_adapter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

LORA_FILE = "pytorch_lora_weights.safetensors"
ADAPTED = ("unet", "transformer")
"""Components that an adapter may change."""
_MATRIX = re.compile(r"(?P<path>(?P<component>\w+)\.[\w.]+)\.lora_(?P<half>[AB])\.weight")
_DIGEST_CHARS = 16


def read_any_adapter(folder: str | Path) -> Adapter:
    """An adapter in diffusers' format where the folder has such a file, else in peft's.

    Raises:
        ConfigError: names the file and what is missing, broken or not supported.
    """
    path = Path(folder)
    return read_pipeline_adapter(path) if (path / LORA_FILE).is_file() else read_adapter(path)


def read_pipeline_adapter(folder: Path) -> Adapter:
    """Read and check what `save_lora_weights` of a pipeline wrote; diffusers itself applies it, scale and all.

    Raises:
        ConfigError: the file is broken, or holds more than matrices of linear layers of the denoiser.
    """
    file = folder / LORA_FILE
    try:
        data = file.read_bytes()
        tensors = load(data)
    except OSError as error:
        msg = f"{file} can not be read: {error.strerror}"
        raise ConfigError(msg) from None
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        msg = f"{file}: not a whole safetensors file: {error}"
        raise ConfigError(msg) from error
    halves: dict[str, dict[str, Tensor]] = {}
    for name in sorted(tensors):
        matched = _MATRIX.fullmatch(name)
        if matched is None or matched["component"] not in ADAPTED:
            raise ConfigError(_foreign(file, name))
        check_matrix(file, name, tensors[name])
        halves.setdefault(matched["path"], {})[matched["half"]] = tensors[name]
    if not halves:
        msg = f"{file}: holds no tensor"
        raise ConfigError(msg)
    pairs = {path: _pair(file, path, found) for path, found in halves.items()}
    return Adapter(folder, pairs, hashlib.sha256(data).hexdigest()[:_DIGEST_CHARS])


def _foreign(file: Path, name: str) -> str:
    return (
        f"{file}: {name} is no LoRA matrix of a linear layer of {' or '.join(ADAPTED)} (COMPONENT.LAYER.lora_A.weight "
        "or .lora_B.weight), nothing else is supported; files in other formats: load them with diffusers and "
        "save_lora_weights(folder)"
    )


def _pair(file: Path, path: str, found: Mapping[str, Tensor]) -> Pair:
    a, b = both_halves(file, path, found)
    if len(a) != b.shape[1]:
        msg = f"{file}: {path} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}, which is no pair"
        raise ConfigError(msg)
    return Pair(a, b, 1.0)
