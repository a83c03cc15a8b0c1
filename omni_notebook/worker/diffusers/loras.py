"""A pipeline's LoRA adapters: diffusers and peft put them into the layers, their memory is moved into the pool.

One adapter at a time is active, or none; layers whose adapters are off give the base model's very bytes. All adapters
of a stage stay on the device, so that there are no slots to swap.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omni_notebook.errors import ConfigError, LoRAError
from omni_notebook.memory.base import LORA
from omni_notebook.models.lora import check_fits, check_rank
from omni_notebook.models.pipeline_lora import LORA_FILE, read_pipeline_adapter
from omni_notebook.worker.diffusers.library import named, quietly
from omni_notebook.worker.reports import LoRAReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.models.lora import Adapter
    from omni_notebook.protocol import LoRARequest
    from omni_notebook.worker.diffusers.parts import Part

_ALIGN = 64


class PipelineLoras:
    """The adapters of one rank's pipeline, by their numbers."""

    def __init__(self, pipe: Any, parts: dict[str, Part], pool: MemoryPool, max_rank: int) -> None:
        self._pipe = pipe
        self._modules: dict[str, nn.Module] = {name: part.module for name, part in parts.items()}
        self._known = {
            f"{name}.{path}": shape for name, part in parts.items() for path, shape in part.linear_shapes().items()
        }
        self._own = {id(tensor) for part in parts.values() for tensor in part.tensors()}
        self._pool = pool
        self._max_rank = max_rank
        self._prepared: dict[int, Adapter] = {}
        self._taken: set[int] = set()
        self._moved: set[int] = set()

    def prepare(self, request: LoRARequest) -> LoRAReport:
        """Read and check an adapter; nothing uses it before `commit`.

        Raises:
            ConfigError: its file is broken or does not fit.
            LoRAError: peft is not installed, or the pipeline takes no adapters.
        """
        adapter = read_pipeline_adapter(Path(request.lora_path))
        check_fits(adapter, self._known)
        check_rank(adapter, self._max_rank)
        self._check_able()
        self._prepared[request.lora_int_id] = adapter
        return LoRAReport(digest=adapter.digest, rank=adapter.rank)

    def _check_able(self) -> None:
        from diffusers.utils import USE_PEFT_BACKEND  # noqa: PLC0415  (heavy: where adapters are asked for)

        if not USE_PEFT_BACKEND:
            msg = "adapters of a diffusers stage need peft: pip install 'omni-notebook[diffusers]'; nothing changed"
            raise LoRAError(msg)
        if not hasattr(self._pipe, "load_lora_weights"):
            msg = f"a {type(self._pipe).__name__} takes no adapters; nothing changed"
            raise LoRAError(msg)

    def abort(self, lora_id: int) -> None:
        """Forget a prepared adapter."""
        self._prepared.pop(lora_id, None)

    def commit(self, lora_id: int) -> None:
        """Take a prepared adapter; it is off until a batch names it.

        Raises:
            ConfigError: its file was changed since, or diffusers can not load it.
            OutOfMemoryError: no room for it.
        """
        adapter = self._prepared.pop(lora_id)
        self._taken.add(lora_id)
        with quietly(), named(adapter.folder):
            self._pipe.load_lora_weights(
                str(adapter.folder), weight_name=LORA_FILE, adapter_name=_name(lora_id), local_files_only=True
            )
        self._switch(0)
        if read_pipeline_adapter(adapter.folder).digest != adapter.digest:
            msg = f"{adapter.folder / LORA_FILE} was changed while it was read"
            raise ConfigError(msg)
        self._check_taken(adapter, lora_id)
        self._move(tensor for tensor in self._tensors() if id(tensor) not in self._moved)

    def _check_taken(self, adapter: Adapter, lora_id: int) -> None:
        """Raise ConfigError unless diffusers put every matrix of the file into a layer, and nothing else."""
        mark = f".{_name(lora_id)}."
        names = (f"{part}.{name}" for part, one in self._modules.items() for name, _ in one.named_parameters())
        found = sum(mark in f"{name}." for name in names)
        if found != 2 * len(adapter.pairs):
            msg = f"{adapter.folder}: diffusers took {found} of its {2 * len(adapter.pairs)} matrices"
            raise ConfigError(msg)

    def remove(self, lora_id: int) -> None:
        """Forget an adapter, prepared or taken; its memory goes back."""
        self._prepared.pop(lora_id, None)
        if lora_id not in self._taken:
            return
        self._switch(0)
        self._taken.discard(lora_id)
        with quietly():
            if self._taken:
                self._pipe.delete_adapters(_name(lora_id))
            else:
                self._pipe.unload_lora_weights()
        for tensor in self._tensors():
            tensor.data = tensor.data.clone()
        if LORA in self._pool.tags():
            self._pool.discard(LORA)
        self._moved.clear()
        self._move(self._tensors())

    def pin(self, lora_id: int) -> None:
        """It is on the device anyway.

        Raises:
            LoRAError: it is not there.
        """
        self._check_there(lora_id)

    def unpin(self, lora_id: int) -> None:
        """It stays on the device."""

    @contextmanager
    def applied(self, lora_id: int) -> Iterator[None]:
        """Within it the pipeline uses this adapter, 0 = none.

        Raises:
            LoRAError: it is not there.
        """
        if lora_id:
            self._check_there(lora_id)
        self._switch(lora_id)
        yield

    def _check_there(self, lora_id: int) -> None:
        if lora_id not in self._taken:
            msg = f"adapter {lora_id} is not on this rank; call add_lora(request)"
            raise LoRAError(msg)

    def _switch(self, lora_id: int) -> None:
        if not self._taken:
            return
        if lora_id:
            self._pipe.enable_lora()
            self._pipe.set_adapters([_name(lora_id)])
        else:
            self._pipe.disable_lora()

    # ------------------------------------------------------------------------------------- memory

    def _tensors(self) -> list[torch.Tensor]:
        """What adapters have in the pipeline's sub-models."""
        found = {id(tensor): tensor for module in self._modules.values() for tensor in module.parameters()}
        return [tensor for key, tensor in found.items() if key not in self._own]

    @torch.no_grad()
    def _move(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move tensors into one piece of the pool that every level keeps.

        Raises:
            OutOfMemoryError: no room; they stay where they are.
        """
        moving: Sequence[torch.Tensor] = [tensor for tensor in tensors if tensor.numel()]
        if not moving:
            return
        sizes = [-(-tensor.numel() * tensor.itemsize // _ALIGN) * _ALIGN for tensor in moving]
        flat = self._pool.empty((sum(sizes),), torch.uint8, LORA, recomputable=False)
        self._pool.keep(LORA, [flat])
        for tensor, room in zip(moving, flat.split(sizes), strict=True):
            place = room[: tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor)
            tensor.requires_grad_(False)
            tensor.data = place
            self._moved.add(id(tensor))


def _name(lora_id: int) -> str:
    return f"omni_{lora_id}"
