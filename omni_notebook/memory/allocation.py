"""Taking tensors into a pool: adopted modules, empty tensors, and which contents every level keeps."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from omni_notebook.errors import ArgumentError
from omni_notebook.memory.adoption import Adoption
from omni_notebook.memory.arena import CHUNK, Segment, no_memory, round_up, tensor_bytes
from omni_notebook.memory.books import Kept, Tag, TagState, check_takes
from omni_notebook.memory.content import Content
from omni_notebook.memory.tracking import Tracker, Untracked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from omni_notebook.memory.core import Core


_ROOM = threading.Lock()


class Allocation:
    """Makes segments: one for each `adopt` and each `empty`."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def adopt(self, module: nn.Module, name: str) -> None:
        """See `CpuPool.adopt`."""
        tag = self._open_tag(name, recomputable=False)
        adoption = Adoption(module, skip=lambda tensor: self._find(tensor) is not None)
        adoption.move_into([self._add(tag, n_bytes) for n_bytes in adoption.parts])

    def empty(self, shape: Sequence[int], dtype: torch.dtype, name: str, *, recomputable: bool) -> torch.Tensor:
        """See `CpuPool.empty`."""
        n_bytes = tensor_bytes(shape, dtype)
        tag = self._open_tag(name, recomputable=recomputable)
        if n_bytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return self._add(tag, n_bytes).tensor(0, shape, dtype)

    def _open_tag(self, name: str, *, recomputable: bool) -> Tag:
        self._core.check_open("allocate")
        tag = self._core.books.get(name) or Tag(name, recomputable)
        check_takes(tag, recomputable=recomputable)
        return tag

    def _add(self, tag: Tag, n_bytes: int) -> Segment:
        with _ROOM:  # pools of one process must not both count on the same free memory
            self._check_room(n_bytes)
            segment = Segment(n_bytes)
        tracker: Tracker = Untracked() if tag.recomputable else self._core.tracker
        tag.contents.append(Content(segment, tracker))
        self._core.books.setdefault(tag.name, tag)
        return segment

    def _check_room(self, n_bytes: int) -> None:
        """Refuse what the host has no room for, instead of letting the kernel kill someone.

        Raises:
            OutOfMemoryError: too little is free.
        """
        free = self._core.room().available_bytes
        needed = round_up(n_bytes, CHUNK)
        if needed > free:
            raise no_memory(needed, free_bytes=free)

    def discard(self, name: str) -> None:
        """See `CpuPool.discard`."""
        (tag,) = self._core.books.select((name,), TagState.AWAKE, "discard")
        self._core.ahead.stop()
        self._core.records.forget(tag)
        del self._core.books[name]
        for content in tag.contents:
            content.segment.close()
            content.drop_spill()

    def _find(self, tensor: torch.Tensor) -> Content | None:
        if tensor.device.type != "cpu" or not tensor.numel():
            return None
        start, n_bytes = tensor.data_ptr(), tensor.numel() * tensor.itemsize
        return next((c for c in self._core.books.contents() if c.segment.holds(start, n_bytes)), None)

    def keep(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """See `CpuPool.keep`."""
        (tag,) = self._core.books.named((name,))
        kept = [item for tensor in tensors if tensor.numel() for item in self._kept(tag, tensor)]
        tag.kept.extend(item for item in dict.fromkeys(kept) if item not in tag.kept)

    def _kept(self, tag: Tag, tensor: torch.Tensor) -> list[Kept]:
        content = self._find(tensor)
        if content is None or content not in tag.contents or not tensor.is_contiguous():
            msg = f"keep: a tensor of shape {tuple(tensor.shape)} is not contiguous in the pool under {tag.name!r}"
            raise ArgumentError(msg)
        return [Kept(content, tensor.data_ptr() - content.segment.address, tensor.numel() * tensor.itemsize)]
