"""Forward passes over tensors that a wake is still copying: each module waits, on the device, for its own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle


class Followed(Protocol):
    """What is on its way; see `memory.device.arriving.Arrivals`."""

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have torch's stream wait for these."""
        ...

    def follow_all(self) -> None:
        """Have torch's stream wait for everything."""
        ...


class Execution:
    """In which order a model's modules run, seen in its first pass, and passes that follow what arrives."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._order: dict[nn.Module, None] = {}
        self._noting: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._note) for module in model.modules()
        ]
        self._noting.append(model.register_forward_hook(self._noted, always_call=True))

    def _note(self, module: nn.Module, _inputs: Any) -> None:
        self._order.setdefault(module)

    def _noted(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        for hook in self._noting:
            hook.remove()
        self._noting.clear()

    def tensors(self) -> list[torch.Tensor]:
        """The model's tensors in the order of their first use; those of modules that have not run come last."""
        modules = dict.fromkeys([*self._order, *self._model.modules()])
        return list({id(tensor): tensor for module in modules for tensor in _own(module)}.values())

    @contextlib.contextmanager
    def following(self, arriving: Followed, passed: Callable[[], None] = lambda: None) -> Iterator[None]:
        """While this lasts, a module that begins has the stream wait for its own tensors, and a pass that ends for all.

        So what is used without its module's call (an output head's weight) has come for whoever uses it after the pass;
        `passed` is called then.
        """

        def before(module: nn.Module, _inputs: Any) -> None:
            arriving.follow(_own(module))

        def after(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            arriving.follow_all()
            passed()

        with contextlib.ExitStack() as hooks:
            for module in self._model.modules():
                hooks.callback(module.register_forward_pre_hook(before).remove)
            hooks.callback(self._model.register_forward_hook(after).remove)
            yield


def _own(module: nn.Module) -> list[torch.Tensor]:
    """A module's tensors, without those of modules in it."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
