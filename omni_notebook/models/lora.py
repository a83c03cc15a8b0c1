"""LoRA adapters in peft's format: what a folder holds, which layers of a model take it, a rank's part of it.

Hu et al. 2021 (LoRA: W + s·B·A, s = α / r), Kalajdzievski 2023 (rank-stabilised: s = α / √r).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from omni_notebook.errors import ConfigError
from omni_notebook.models.parallel import ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Shapes = Mapping[str, tuple[int, int]]

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
_MATRIX = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
_HEAD = "lm_head"  # its scores are taken with its weight alone, the layer is not called
_DIGEST_CHARS = 16
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("peft_type", lambda value: value not in {None, "LORA"}, "is no LoRA; only 'LORA' is"),
    ("use_dora", bool, "(DoRA) is not supported"),
    ("bias", lambda value: value not in {None, "none"}, "is not supported; only 'none': biases stay the base model's"),
    ("lora_bias", bool, "is not supported: an adapter here has no bias"),
    ("modules_to_save", bool, "is not supported: an adapter here replaces no whole module"),
    ("fan_in_fan_out", bool, "is not supported: matrices are (out, in)"),
    ("alora_invocation_tokens", bool, "(activated LoRA) is not supported"),
    ("use_qalora", bool, "(QALoRA) is not supported"),
    ("layer_replication", bool, "is not supported: layers stay the base model's"),
    ("trainable_token_indices", bool, "is not supported: only linear layers are adapted"),
    ("target_parameters", bool, "is not supported: only linear layers are adapted"),
    (
        "init_lora_weights",
        lambda value: str(value).lower().startswith(_CHANGES_BASE),
        "changed the base model's weights; save the adapter converted to plain LoRA",
    ),
)
"""Keys of `adapter_config.json`: whether a value is refused, and why."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One layer's matrices, `a` (r, in) and `b` (out, r); the layer's output grows by `scale` · b · a · input."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Rows of `a`."""
        return len(self.a)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (out, in) of the weight that it fits."""
        return (self.b.shape[0], self.a.shape[1])


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a folder holds: a pair a layer; `digest` is of the bytes of its two files."""

    folder: Path
    pairs: dict[str, Pair]
    digest: str

    @property
    def rank(self) -> int:
        """The largest rank of a pair."""
        return max(pair.rank for pair in self.pairs.values())


def read_adapter(folder: str | Path) -> Adapter:
    """Read and check a whole adapter folder; its tensors are on the host, in the file's types.

    Raises:
        ConfigError: names the file and the key or tensor that is missing, broken or not supported.
    """
    path = Path(folder)
    if not path.is_dir():
        msg = f"{path}: no such adapter folder"
        raise ConfigError(msg)
    config_bytes, tensor_bytes = (_bytes(path / name) for name in (CONFIG_FILE, TENSORS_FILE))
    config = _config(path / CONFIG_FILE, config_bytes)
    halves = _halves(path / TENSORS_FILE, tensor_bytes)
    scales = _Scales(path / CONFIG_FILE, config)
    pairs = {name: _pair(path / TENSORS_FILE, name, found, scales) for name, found in halves.items()}
    digest = hashlib.sha256(config_bytes + tensor_bytes).hexdigest()[:_DIGEST_CHARS]
    return Adapter(path, pairs, digest)


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        msg = f"{file} can not be read: {error.strerror}; an adapter folder has {CONFIG_FILE} and {TENSORS_FILE}"
        raise ConfigError(msg) from None


def _config(file: Path, data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except ValueError as error:
        msg = f"{file}: cannot be read as JSON: {error}"
        raise ConfigError(msg) from None
    if not isinstance(config, dict):
        msg = f"{file}: holds no JSON object"
        raise ConfigError(msg)
    for key, is_refused, why in _REFUSED:
        if is_refused(config.get(key)):
            msg = f"{file}: {key}={config[key]!r} {why}"
            raise ConfigError(msg)
    return config


def _halves(file: Path, data: bytes) -> dict[str, dict[str, Tensor]]:
    """The matrices by layer, A and B, each checked by itself."""
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        msg = f"{file}: not a whole safetensors file: {error}"
        raise ConfigError(msg) from error
    found: dict[str, dict[str, Tensor]] = {}
    for name in sorted(tensors):
        matched = _MATRIX.fullmatch(name)
        if matched is None:
            raise ConfigError(_foreign(file, name))
        check_matrix(file, name, tensors[name])
        layer = found.setdefault(matched["path"], {})
        if matched["half"] in layer:
            msg = f"{file}: {name} is there twice, with and without the adapter's name"
            raise ConfigError(msg)
        layer[matched["half"]] = tensors[name]
    if not found:
        msg = f"{file}: holds no tensor"
        raise ConfigError(msg)
    return found


def _foreign(file: Path, name: str) -> str:
    if "lora_embedding_" in name:
        return f"{file}: {name} adapts an embedding, which is not supported; only linear layers are"
    return (
        f"{file}: {name} is no LoRA matrix of a linear layer "
        "(base_model.model.LAYER.lora_A.weight or .lora_B.weight); nothing else is supported"
    )


def check_matrix(file: Path, name: str, tensor: Tensor) -> None:
    """Raise ConfigError if an adapter's tensor is no finite matrix of floating-point numbers."""
    if tensor.ndim != 2 or not tensor.numel() or not tensor.is_floating_point():
        msg = f"{file}: {name} is {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}, not a matrix"
        raise ConfigError(msg)
    if not tensor.float().isfinite().all():
        msg = f"{file}: {name} holds NaN or infinite values"
        raise ConfigError(msg)


def both_halves(file: Path, path: str, found: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A layer's lora_A and lora_B; raise ConfigError if one is missing."""
    for half in "AB":
        if half not in found:
            msg = f"{file}: {path} has no lora_{half}, but its other half"
            raise ConfigError(msg)
    return found["A"], found["B"]


def _pair(file: Path, path: str, found: Mapping[str, Tensor], scales: _Scales) -> Pair:
    a, b = both_halves(file, path, found)
    rank, scale = scales.of(path)
    if len(a) != b.shape[1] or len(a) != rank:
        msg = (
            f"{file}: {path} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}, which is no pair of the rank "
            f"{rank} that {CONFIG_FILE} says"
        )
        raise ConfigError(msg)
    return Pair(a, b, scale)


class _Scales:
    """A layer's rank and factor, as the config and its patterns say."""

    def __init__(self, file: Path, config: Mapping[str, Any]) -> None:
        self._file = file
        self._rank = self._number("r", config.get("r"))
        self._alpha = self._number("lora_alpha", config.get("lora_alpha"))
        self._stabilised = bool(config.get("use_rslora"))
        self._ranks = self._patterns("rank_pattern", config)
        self._alphas = self._patterns("alpha_pattern", config)

    def of(self, path: str) -> tuple[float, float]:
        rank = next((value for pattern, value in self._ranks if pattern.fullmatch(path)), self._rank)
        alpha = next((value for pattern, value in self._alphas if pattern.fullmatch(path)), self._alpha)
        return rank, alpha / (math.sqrt(rank) if self._stabilised else rank)

    def _patterns(self, key: str, config: Mapping[str, Any]) -> list[tuple[re.Pattern[str], float]]:
        table = config.get(key) or {}
        if not isinstance(table, dict):
            msg = f"{self._file}: {key}={table!r} is no table of patterns"
            raise ConfigError(msg)
        return [(self._compiled(key, text), self._number(f"{key}[{text!r}]", value)) for text, value in table.items()]

    def _compiled(self, key: str, text: str) -> re.Pattern[str]:
        """A pattern stands for the end of a layer's name, from the start of a word of it: peft's rule."""
        try:
            return re.compile(rf"(?:.*\.)?(?:{text})")
        except re.error as error:
            msg = f"{self._file}: {key}: {text!r} is no pattern: {error}"
            raise ConfigError(msg) from None

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            msg = f"{self._file}: {key} must be a number above 0, not {value!r}"
            raise ConfigError(msg)
        return value


# ------------------------------------------------------------------------------------- in a model


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer that an adapter can change.

    `whole`: the shape (out, in) of its weight over all ranks. `part`: the rows of B and the columns of A that this rank
    holds. `summed`: this rank sees a part of the input, so that the product with A is a sum over the ranks.
    """

    layer: nn.Linear
    whole: tuple[int, int]
    part: tuple[slice, slice]
    summed: bool

    def share(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """This rank's matrices in the layer's type: (r, in) and (r, out), the second turned and scaled."""
        dtype = self.layer.weight.dtype
        a = pair.a[:, self.part[1]].to(dtype, copy=True)
        b = (pair.b[self.part[0]].float() * pair.scale).T.to(dtype).contiguous()
        return a, b


def targets(model: nn.Module) -> dict[str, Target]:
    """The layers of a model that an adapter can change, by their names in a checkpoint."""
    return {
        path: _target(layer) for path, layer in model.named_modules() if isinstance(layer, nn.Linear) and path != _HEAD
    }


def _target(layer: nn.Linear) -> Target:
    if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        shard = layer.shards()["weight"]
        out, into = shard.whole
        rows, columns = shard.part
        return Target(layer, (out, into), (rows, columns), isinstance(layer, RowParallelLinear))
    return Target(layer, (layer.out_features, layer.in_features), (slice(None), slice(None)), summed=False)


def shapes(make: Callable[[], nn.Module]) -> dict[str, tuple[int, int]]:
    """The shapes (out, in) of the weights that an adapter can change, from a model that gets no memory."""
    with torch.device("meta"):
        return {path: target.whole for path, target in targets(make()).items()}


def misfit(adapter: Adapter, known: Shapes) -> str | None:
    """Why a model with these layers can not take the adapter, naming the first that does not fit; None: it can."""
    for path, pair in adapter.pairs.items():
        if path not in known:
            return f"the model has no layer {path} that an adapter can change"
        if pair.shape != known[path]:
            out, into = known[path]
            shapes = f"lora_A {tuple(pair.a.shape)} and lora_B {tuple(pair.b.shape)}"
            return f"{path} has {shapes}, the layer needs (r, {into}) and ({out}, r)"
    return None


def check_fits(adapter: Adapter, known: Shapes) -> None:
    """Raise ConfigError, naming the first layer for which the model has no place or another shape."""
    why = misfit(adapter, known)
    if why is not None:
        msg = f"{adapter.folder}: {why}"
        raise ConfigError(msg)


def check_rank(adapter: Adapter, max_rank: int) -> None:
    """Raise ConfigError, naming the option, if a pair's rank is above `max_rank`."""
    for path, pair in adapter.pairs.items():
        if pair.rank > max_rank:
            msg = (
                f"{adapter.folder}: {path} has rank {pair.rank}, more than max_lora_rank={max_rank}; start the engine "
                f"with max_lora_rank={adapter.rank} or more"
            )
            raise ConfigError(msg)
