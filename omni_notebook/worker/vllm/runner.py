"""What our weight books and orders need of a vLLM worker."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from omni_notebook.errors import ConfigError, UnsupportedError
from omni_notebook.memory.base import WEIGHTS
from omni_notebook.models.loaders import checkpoint_files, checkpoint_shapes
from omni_notebook.worker.graphs import NO_GRAPHS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from torch import nn

    from omni_notebook.worker.graphs import Recall


class VllmRunner:
    """One vLLM worker's model; `worker` is vLLM's own."""

    weight_tags = (WEIGHTS,)

    def __init__(self, worker: Any) -> None:
        self.worker = worker
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

    def check_weights(self, folder: Path) -> None:
        """Whether a checkpoint has the tensors of the one that was loaded first, names and shapes.

        Raises:
            ConfigError: it has not, or it is not there.
        """
        shapes = _shapes(folder)
        if self._shapes is None:
            self._shapes = shapes
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

    def weight_files(self, folder: Path) -> Sequence[Path]:
        """The checkpoint's safetensors files."""
        return checkpoint_files(folder)

    def load_weights(
        self,
        folder: Path,
        between: Callable[[], None] | None = None,
        tags: Collection[str] | None = None,  # noqa: ARG002  (there is one tag)
    ) -> None:
        """Reload all weights in place, by vLLM's own loader.

        Raises:
            ConfigError: it is missing, broken or does not fit, and nothing was touched; or vLLM could not load it.
        """
        self.check_weights(folder)
        if between is not None:
            between()
        try:
            with _without_adapters(self.worker, self.model):
                self.worker.reload_weights(weights_path=str(folder))
        except (OSError, ValueError, KeyError) as error:
            msg = f"vLLM could not load {folder}: {error}"
            raise ConfigError(msg) from error

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


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (_, shape) in checkpoint_shapes(folder).items()}


def _text(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else str(shape)
