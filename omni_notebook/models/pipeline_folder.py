"""A diffusers pipeline's folder: its components, and the files of those that hold weights. No diffusers here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_notebook.config import MODEL_INDEX
from omni_notebook.errors import ConfigError, UnsupportedError
from omni_notebook.models.loaders import STEM, checkpoint_files, read_object, shapes_of
from omni_notebook.models.parallel import check_split
from omni_notebook.models.places import some

if TYPE_CHECKING:
    from collections.abc import Mapping

    Shapes = Mapping[str, tuple[int, ...]]

DIFFUSERS_STEM = "diffusion_pytorch_model"
_WITHOUT_WEIGHTS = ("Tokenizer", "TokenizerFast", "Processor", "ProcessorFast", "FeatureExtractor", "Scheduler")
_NOT_THE_MODEL = frozenset({"dtype", "torch_dtype", "transformers_version"})
"""Keys of a component's config that do not say what the model computes; those that begin with "_" neither."""
SPLIT_KINDS = frozenset({"SD3Transformer2DModel"})
"""Denoisers that can be split over ranks."""
_RESERVED = frozenset({"ballast", "lora", "kv_cache", "weights"})


@dataclass(frozen=True, slots=True)
class Component:
    """A sub-model: its name in the pipeline, its class, its folder, its config and its safetensors files."""

    name: str
    kind: str
    folder: Path
    config: dict[str, Any]
    files: tuple[Path, ...]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Each tensor's shape, from the headers alone; raise ConfigError for a file that is not whole."""
        return {name: shape for name, (_, shape) in shapes_of(self.files).items()}


@dataclass(frozen=True, slots=True)
class PipelineFolder:
    """A pipeline: its class, its components that hold weights, by name, and those that it does without."""

    folder: Path
    kind: str
    components: dict[str, Component]
    absent: tuple[str, ...]

    def files(self) -> list[Path]:
        """Every file that holds weights."""
        return [file for component in self.components.values() for file in component.files]

    def shapes(self) -> dict[str, Shapes]:
        """Each component's tensors and their shapes; raise ConfigError for a file that is not whole."""
        return {name: component.shapes() for name, component in self.components.items()}


def check_parallel(pipeline: PipelineFolder, size: int) -> None:
    """Raise UnsupportedError, naming the pipeline, unless its denoiser can be split over `size` ranks."""
    if size == 1:
        return
    denoiser = pipeline.components.get("transformer")
    if denoiser is None or denoiser.kind not in SPLIT_KINDS:
        kinds = ", ".join(component.kind for component in pipeline.components.values())
        msg = (
            f"tensor_parallel_size={size}: a {pipeline.kind} ({kinds}) can not be split over ranks, only pipelines on "
            f"{', '.join(sorted(SPLIT_KINDS))} can; use num_replicas for more throughput. Nothing was started"
        )
        raise UnsupportedError(msg)
    check_split(size, "num_attention_heads", int(denoiser.config["num_attention_heads"]))


def read_pipeline(folder: str | Path) -> PipelineFolder:
    """Read what a pipeline consists of; no tensor is read.

    Raises:
        ConfigError: the folder, its model_index.json, a component or a file of weights is missing or broken.
    """
    path = Path(folder)
    if not path.is_dir():
        msg = f"{path}: no such pipeline folder"
        raise ConfigError(msg)
    index = read_object(path / MODEL_INDEX)
    kind = index.get("_class_name")
    if not isinstance(kind, str):
        msg = f"{path / MODEL_INDEX} names no pipeline (_class_name)"
        raise ConfigError(msg)
    named = {name: str(value[1]) for name, value in index.items() if _is_component(name, value)}
    found = {name: _component(path / name, name, cls) for name, cls in named.items()}
    components = {name: component for name, component in found.items() if component is not None}
    if not components:
        msg = f"{path}: none of the components in {MODEL_INDEX} holds weights"
        raise ConfigError(msg)
    absent = tuple(name for name, value in index.items() if value == [None, None])
    return PipelineFolder(path, kind, components, absent)


def _is_component(name: str, value: Any) -> bool:
    return not name.startswith("_") and isinstance(value, list) and len(value) == 2 and value[1] is not None


def _component(folder: Path, name: str, kind: str) -> Component | None:
    """A sub-model's files; None: a part without weights (tokenizer, scheduler, …)."""
    if not folder.is_dir():
        msg = f"{folder}: no such folder, but {MODEL_INDEX} names the component {name!r} ({kind})"
        raise ConfigError(msg)
    if kind.endswith(_WITHOUT_WEIGHTS) or not ((folder / "config.json").is_file() or any(folder.glob("*.safetensors"))):
        return None
    if name in _RESERVED:
        msg = f"{folder}: a component can not be called {name!r}: that is a tag of this package's own"
        raise ConfigError(msg)
    config = read_object(folder / "config.json")
    return Component(name, kind, folder, config, tuple(_files(folder)))


def _files(folder: Path) -> list[Path]:
    for stem in (DIFFUSERS_STEM, STEM):
        if any((folder / f"{stem}.safetensors{end}").is_file() for end in ("", ".index.json")):
            return checkpoint_files(folder, stem)
    msg = (
        f"{folder}: neither {DIFFUSERS_STEM}.safetensors nor {STEM}.safetensors is there, nor an index of shards "
        "(pickled weights and variants are not read)"
    )
    raise ConfigError(msg)


def check_same(loaded: PipelineFolder, shapes: Mapping[str, Shapes], other: PipelineFolder) -> None:
    """Raise ConfigError, naming the first difference, unless `other` has weights for the pipeline that was loaded.

    shapes: of what was loaded. Its components must be of the same classes and configs, with the same tensors.
    """
    if odd := loaded.components.keys() ^ other.components.keys():
        lacks = "lacks" if odd & loaded.components.keys() else "has"
        there = "" if lacks == "lacks" else ", which the pipeline that was loaded lacks"
        msg = f"{other.folder} {lacks} the component {some(odd)}{there}"
        raise ConfigError(msg)
    for name, component in loaded.components.items():
        _check_component(component, shapes[name], other.components[name])


def _check_component(loaded: Component, shapes: Shapes, other: Component) -> None:
    if loaded.kind != other.kind:
        msg = f"{other.folder}: the component is a {other.kind}, the pipeline has a {loaded.kind}"
        raise ConfigError(msg)
    found = other.shapes()
    names = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
    if names:
        name = names[0]
        msg = (
            f"{other.folder}: {name} has shape {_text(found.get(name))}, the model needs {_text(shapes.get(name))} "
            f"({len(names)} such tensors)"
        )
        raise ConfigError(msg)
    mine, its = _what_it_computes(loaded.config), _what_it_computes(other.config)
    keys = sorted(key for key in mine.keys() | its.keys() if mine.get(key) != its.get(key))
    if keys:
        key = keys[0]
        msg = f"{other.folder}/config.json: {key}={its.get(key)!r}, the model that was loaded has {mine.get(key)!r}"
        raise ConfigError(msg)


def _what_it_computes(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith("_") and key not in _NOT_THE_MODEL}


def _text(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else str(shape)
