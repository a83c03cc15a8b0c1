"""What our weight books and orders need of a vLLM worker."""

from __future__ import annotations

import contextlib
import copy
import importlib
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from omni_notebook.errors import ConfigError, LoRAError, UnsupportedError
from omni_notebook.memory.base import WEIGHTS
from omni_notebook.models.loaders import read_object, shapes_of
from omni_notebook.models.places import some
from omni_notebook.models.vllm_folders import files_that_vllm_reads, reads_safetensors
from omni_notebook.worker.graphs import NO_GRAPHS
from omni_notebook.worker.vllm.versions import TESTED, vllm_version

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from omni_notebook.protocol import LoRARequest
    from omni_notebook.worker.graphs import Recall


class VllmRunner:
    """One vLLM worker's model.

    Attributes:
        worker: vLLM's own.
        loaded: the checkpoint folder that vLLM has loaded; None where there is none, or it can not be loaded again.

    Raises:
        UnsupportedError: this vLLM has not what undoes a reload that breaks off.
    """

    weight_tags = (WEIGHTS,)

    def __init__(self, worker: Any, loaded: Path | None) -> None:
        self.worker = worker
        self.loaded = loaded if loaded is not None and _loads_again(worker, loaded) else None
        self._books_of = _layer_books()
        self._shapes: dict[str, tuple[int, ...]] | None = None

    @property
    def model(self) -> nn.Module:
        """The model."""
        model: nn.Module = self.worker.model_runner.get_model()
        return model

    def modules(self) -> Iterator[nn.Module]:
        """The model, and the draft model where one speculates."""
        yield self.model
        drafter = getattr(self.worker.model_runner, "drafter", None)
        draft = getattr(drafter, "model", None)
        if draft is not None:
            yield draft

    def add_adapter(self, request: LoRARequest) -> None:
        """Have vLLM take an adapter.

        Raises:
            Exception: what vLLM raised.
            LoRAError: it did not take it, and did not say why.
        """
        from vllm.lora.request import LoRARequest as VllmLoRARequest  # noqa: PLC0415  (where adapters are asked for)

        if not self.worker.add_lora(VllmLoRARequest(request.lora_name, request.lora_int_id, request.lora_path)):
            msg = "vLLM did not take it"
            raise LoRAError(msg)

    def remove_adapter(self, lora_int_id: int) -> None:
        """Have vLLM forget an adapter; one that it does not have is no error."""
        self.worker.remove_lora(lora_int_id)

    def pin_adapter(self, lora_int_id: int) -> None:
        """Have vLLM keep an adapter in a slot for good; it has no way back.

        Raises:
            Exception: what vLLM raised.
        """
        self.worker.pin_lora(lora_int_id)

    @staticmethod
    def make_ready() -> None:
        """Import what vLLM's second model runner imports at its first reload, so that no first wake waits for it."""
        with contextlib.suppress(ImportError):
            importlib.import_module("vllm.v1.worker.gpu_model_runner")

    def check_weights(self, folder: Path) -> None:
        """Whether a checkpoint has the tensors of the one that was loaded first, names and shapes.

        Where none was yet, whether it is of a model of the same sizes; that it is whole shows when it is loaded.

        Raises:
            ConfigError: it has not, or it is not there.
        """
        shapes = self._shapes_in(folder)
        if self._shapes is None and folder == self.loaded:
            self._shapes = shapes
        if self._shapes is None:
            _check_sizes(folder, self.worker.vllm_config.model_config.hf_config.to_dict())
            return
        if shapes == self._shapes:
            return
        odd = sorted(name for name in shapes.keys() | self._shapes if shapes.get(name) != self._shapes.get(name))
        name = odd[0]
        msg = (
            f"{folder} does not fit the model that vLLM runs: {name} has shape {_text(shapes.get(name))} there, "
            f"{_text(self._shapes.get(name))} in the checkpoint that was loaded ({len(odd)} such tensors). "
            "Nothing changed"
        )
        raise ConfigError(msg)

    def _shapes_in(self, folder: Path) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (_, shape) in shapes_of(self.weight_files(folder)).items()}

    def weight_files(self, folder: Path) -> Sequence[Path]:
        """The checkpoint's files that vLLM reads."""
        load_format = "auto" if self.loaded is None else str(self.worker.vllm_config.load_config.load_format)
        return files_that_vllm_reads(folder, load_format)

    def load_weights(
        self,
        folder: Path,
        between: Callable[[], None] | None = None,
        tags: Collection[str] | None = None,  # noqa: ARG002  (there is one tag)
    ) -> None:
        """Reload all weights in place, by vLLM's own loader; one that breaks off leaves the model fit for another.

        Raises:
            ConfigError: it is missing, broken or does not fit, and nothing was touched; or vLLM could not load it.
        """
        self.check_weights(folder)
        if between is not None:
            between()
        try:
            with _without_adapters(self.worker, self.model), _put_back(self.model, self._books_of):
                self._reload(folder)
        except (OSError, ValueError, KeyError) as error:
            msg = f"vLLM could not load {folder}: {error}"
            raise ConfigError(msg) from error
        if self._shapes is None:
            self._shapes = self._shapes_in(folder)

    def _reload(self, folder: Path) -> None:
        """Have vLLM load a folder: by the loader of its start, or where that can not, by the one for folders."""
        unproven = (
            self._shapes is None and self.worker.vllm_config.model_config.quantization is None
        )  # else names are others
        with _complete(self.model, self._books_of) if unproven else contextlib.nullcontext():
            if self.loaded is not None:
                self.worker.reload_weights(weights_path=str(folder))
            else:
                self.worker.reload_weights(
                    weights_iterator=_tensors_in(folder, self.worker.vllm_config.model_config, self.model)
                )

    def places(self) -> NoReturn:
        """VLLM's loaders take checkpoints."""
        msg = (
            "a vLLM stage takes weights from a checkpoint folder: save the tensors with safetensors and give the path. "
            "Nothing changed"
        )
        raise UnsupportedError(msg)

    def kept_tensors(self) -> Sequence[torch.Tensor]:
        """What the model's checkpoint does not have: buffers, and a draft model, which has one of its own."""
        buffers = [buffer for module in self.modules() for buffer in module.buffers()]
        own = {id(parameter) for parameter in self.model.parameters()}
        draft = [one for module in self.modules() for one in module.parameters() if id(one) not in own]
        return [tensor for tensor in (*buffers, *draft) if tensor.numel()]

    def drop_graphs(self) -> None:
        """See `Runner.drop_graphs`: vLLM keeps its own."""

    def recall_graphs(self) -> Recall:
        """See `Runner.recall_graphs`: vLLM keeps its own, which the residual shows."""
        return NO_GRAPHS

    def synchronize(self) -> None:
        """Wait until the device has done all that was started."""
        if self.worker.device.type != "cpu":
            torch.accelerator.synchronize(self.worker.device)


@contextlib.contextmanager
def _without_adapters(worker: Any, model: nn.Module) -> Iterator[None]:
    """The model without what vLLM wraps its layers in for adapters: checkpoints name the layers themselves.

    The adapters stay where they are, pinned ones too: vLLM would drop them all, and read them again from files that
    may be others by then.
    """
    if worker.vllm_config.lora_config is None:
        yield
        return
    from vllm.lora.layers import BaseLayerWithLoRA  # noqa: PLC0415  (where adapters are asked for)

    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    manager = worker.model_runner.lora_manager
    manager.remove_all_adapters = lambda: None
    try:
        yield
    finally:
        del manager.remove_all_adapters
        for parent, name, child in wrapped:
            setattr(parent, name, child)


def _loads_again(worker: Any, folder: Path) -> bool:
    """Whether what vLLM has loaded can be checked and loaded again: safetensors files, by a loader that can.

    Some loaders work at the start only: they lack what `reload_weights` asks for.
    """
    from vllm.model_executor.model_loader import get_model_loader  # noqa: PLC0415  (in a worker only)

    config = worker.vllm_config.load_config
    return reads_safetensors(folder, str(config.load_format)) and hasattr(get_model_loader(config), "get_all_weights")


def _layer_books() -> Callable[[nn.Module], Any]:
    """Where vLLM has its books about a layer that is reloaded: which tensors are the layer's own, and what has come.

    Raises:
        UnsupportedError: not where they are known to be.
    """
    try:
        from vllm.model_executor.model_loader.reload.layerwise import (  # noqa: PLC0415  (in a worker only)
            get_layerwise_info,
        )
    except ImportError as error:
        msg = (
            f"vLLM {vllm_version()} has no get_layerwise_info, without which a load of weights that breaks off could "
            f"not be undone; {TESTED}. Nothing was started"
        )
        raise UnsupportedError(msg) from error
    books: Callable[[nn.Module], Any] = get_layerwise_info
    return books


@contextlib.contextmanager
def _put_back(model: Any, books_of: Callable[[nn.Module], Any]) -> Iterator[None]:
    """Where a reload breaks off, give the model its own tensors back, and let vLLM's books begin anew.

    vLLM has others in their places while it loads, and would go on with its counts of what has come.
    """
    own = [(layer, [(held, held.copy()) for held in _held_by(layer)]) for layer in model.modules()]
    try:
        yield
    except BaseException:
        for layer, before in own:
            for held, names in before:
                held.clear()
                held.update(names)
            books_of(layer).reset()
        model._do_torchao_reload = getattr(model, "_original_do_torchao_reload", False)  # noqa: SLF001  (vLLM's)
        raise


def _check_sizes(folder: Path, runs: Mapping[str, Any]) -> None:
    """Whether a folder's config.json has the numbers of the model that runs: vLLM cuts larger tensors to its sizes.

    Raises:
        ConfigError: it has others, or is not there.
    """
    for key, said, is_so in _other_numbers(read_object(folder / "config.json"), runs):
        msg = f"{folder} does not fit the model that vLLM runs: its {key} is {said}, not {is_so}. Nothing changed"
        raise ConfigError(msg)


def _other_numbers(said: Mapping[str, Any], runs: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    for key in said.keys() & runs:
        if isinstance(said[key], dict) and isinstance(runs[key], dict):
            yield from _other_numbers(said[key], runs[key])
        elif type(said[key]) is int and said[key] != runs[key] and not key.endswith("_id"):
            yield key, said[key], runs[key]


@contextlib.contextmanager
def _complete(model: Any, books_of: Callable[[nn.Module], Any]) -> Iterator[None]:
    """Have a reload raise where the folder lacks a part of the model: vLLM warns at most, and leaves there what was."""
    from vllm.model_executor.layers.linear import LinearBase  # noqa: PLC0415  (in a worker only)

    load = model.load_weights

    def load_all(tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str] | None:
        loaded: set[str] | None = load(tensors)
        missing = set() if loaded is None else {name for name, _ in model.named_parameters()} - loaded
        for name, layer in model.named_modules():
            books = books_of(layer)
            if isinstance(layer, LinearBase) and books.can_load() and 0 < books.load_numel < books.load_numel_total:
                missing.add(f"a part of {name}")
        if missing:
            msg = f"the checkpoint lacks {some(missing)}"
            raise ConfigError(msg)
        return loaded

    model.load_weights = load_all
    try:
        yield
    finally:
        del model.load_weights


def _tensors_in(folder: Path, model_config: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A folder's tensors, as vLLM's loader for folders reads them."""
    from vllm.config.load import LoadConfig  # noqa: PLC0415  (in a worker only)
    from vllm.model_executor.model_loader import get_model_loader  # noqa: PLC0415

    here = copy.copy(model_config)
    here.model, here.revision = str(folder), None
    tensors: Iterator[tuple[str, torch.Tensor]] = get_model_loader(LoadConfig()).get_all_weights(here, model)
    return tensors


def _held_by(layer: Any) -> tuple[Any, ...]:
    """A module's own lists of what it holds."""
    return layer._parameters, layer._buffers, layer._non_persistent_buffers_set  # noqa: SLF001  (there is no other way)


def _text(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else str(shape)
