"""A pipeline's sub-models in the pool, one tag each, and the way of their weights back from the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from omni_notebook.errors import ConfigError
from omni_notebook.models.loaders import opened
from omni_notebook.models.straight import fill
from omni_notebook.worker.diffusers.library import load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.memory.reading import FileReader
    from omni_notebook.models.parallel import Shard
    from omni_notebook.models.pipeline_folder import Component


class Part:
    """One sub-model, whose memory is in the pool under its name.

    Its tensors are taken by the names that they have before any adapter wraps a layer. `shards`: of those that are
    split over ranks, what is held here.
    """

    def __init__(self, module: nn.Module, tag: str, dtype: torch.dtype, shards: Mapping[str, Shard]) -> None:
        self.tag = tag
        self.module = module
        self._slices = {name: shard.part for name, shard in shards.items()}
        self._dtype = dtype
        self._direct = False
        self._reader: FileReader | None = None
        self._kept: list[Tensor] = []
        self._targets: dict[str, Tensor] = {}

    def adopt(self, component: Component, pool: MemoryPool) -> None:
        """Move it into the pool, and find out how its files are read.

        Where tensors have the same names in the files, and reading them gives the library's very bytes, they are read
        one by one into their place. Else the library loads the sub-model anew, beside this one, and it is copied.

        Raises:
            ConfigError: loading it twice gives different weights: some come from no file.
            OutOfMemoryError: no room for it.
        """
        pool.adopt(self.module, self.tag)
        self._reader = pool.reader()
        self._targets = self.module.state_dict(keep_vars=True)
        in_files = self._in_files(component)
        self._direct = in_files is not None
        self._kept = [buffer for buffer in self.module.buffers() if buffer.data_ptr() not in (in_files or ())]
        if self._direct and not self._gives_back(component, pool):
            self._direct = False
            self._kept = list(self.module.buffers())
            self.load(component)
        if not self._direct and not self._gives_back(component, pool):
            msg = f"{component.folder}: loaded twice it gives different weights; some are in no file of it"
            raise ConfigError(msg)

    def _in_files(self, component: Component) -> set[int] | None:
        """Addresses of the tensors that the files hold by our names; None: other names, or some are missing."""
        names = component.shapes()
        if not names.keys() <= self._targets.keys():
            return None
        held = {self._targets[name].data_ptr() for name in names}
        parameters = {parameter.data_ptr() for parameter in self.module.parameters() if parameter.numel()}
        return held if parameters <= held else None

    def _gives_back(self, component: Component, pool: MemoryPool) -> bool:
        """Whether loading it anew leaves every byte as it is."""
        before = pool.record_checksum(self.tag)
        self.load(component)
        return pool.record_checksum(self.tag) == before

    def tensors(self) -> list[Tensor]:
        """Its parameters and buffers."""
        return [*self.module.parameters(), *self.module.buffers()]

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes (out, in) of its matrices, by the names of their layers."""
        named = {name.removesuffix(".weight"): one for name, one in self._targets.items() if name.endswith(".weight")}
        return {name: (one.shape[0], one.shape[1]) for name, one in named.items() if one.ndim == 2}

    @property
    def kept(self) -> Sequence[Tensor]:
        """Tensors that no file has."""
        return self._kept

    @torch.no_grad()
    def load(self, component: Component, between: Callable[[], None] = lambda: None) -> None:
        """Fill it from a component's files, which were checked; `between` is called before each tensor and may raise.

        Raises:
            ConfigError: a file can not be read, or the library can not load it.
        """
        if self._direct:
            with opened(component.files) as files:
                fill(files, self._targets, self._slices, self._reader, between)
            return
        between()
        fresh = load_model(type(self.module), component, self._dtype)
        whole = ((name, tensor, self._slices.get(name, ())) for name, tensor in fresh.state_dict().items())
        for name, tensor, part in whole:
            between()
            self._targets[name].copy_(tensor[part] if part else tensor)


def check_apart(modules: dict[str, nn.Module]) -> None:
    """Raise ConfigError if two sub-models share memory: they could not sleep one without the other."""
    owner: dict[int, str] = {}
    for name, module in modules.items():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.numel() and owner.setdefault(tensor.untyped_storage().data_ptr(), name) != name:
                first = owner[tensor.untyped_storage().data_ptr()]
                msg = f"the components {first!r} and {name!r} share a tensor; each has a tag of its own here"
                raise ConfigError(msg)
