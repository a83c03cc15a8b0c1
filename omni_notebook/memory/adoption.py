"""Moving a module's parameters and buffers into a segment, ties and all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from omni_notebook.errors import ArgumentError
from omni_notebook.memory.arena import ALIGN, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_LARGEST_ITEM = 16  # complex128


class Room(Protocol):
    """A segment that tensors move into."""

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor at `offset`."""
        ...


@dataclass
class _Block:
    """Bytes of one storage that tensors share, and where they will lie in the segment."""

    low: int
    high: int
    tensors: list[torch.Tensor]
    part: int = 0
    offset: int = 0

    @property
    def is_single(self) -> bool:
        """One way of looking at these bytes: they may be laid out contiguously."""
        first = self.tensors[0]
        return all(
            t.dtype == first.dtype and t.shape == first.shape and _span(t) == _span(first) for t in self.tensors[1:]
        )

    @property
    def size(self) -> int:
        """Bytes that it takes in the segment."""
        if self.is_single:
            return self.tensors[0].numel() * self.tensors[0].itemsize
        return self.high - self.start

    @property
    def start(self) -> int:
        """Where copying a shared block starts, so that views of every item size stay aligned."""
        return self.low // _LARGEST_ITEM * _LARGEST_ITEM


@dataclass
class Adoption:
    """What a module needs of segments (`parts`, bytes each), then the move itself.

    Attributes:
        module: whose tensors move.
        skip: those that stay where they are.
        device: where the segments are; tensors may come from there, from the host, or be meta.
        part_bytes: a segment is full once it has so much; None: all goes into one.

    Raises:
        ArgumentError: a tensor that can not be adopted (another device, sparse, quantised), by name.
    """

    module: nn.Module
    skip: Callable[[torch.Tensor], bool]
    device: str = "cpu"
    part_bytes: int | None = None
    blocks: list[_Block] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        seen: dict[int, torch.Tensor] = {}  # a tensor's tied names are one entry
        for name, tensor in _named_tensors(self.module):
            _check(name, tensor, self.device)
            if tensor.numel() and not self.skip(tensor):
                seen.setdefault(id(tensor), tensor)
        for block in _blocks(list(seen.values())):
            if not self.parts or (self.part_bytes is not None and self.parts[-1] >= self.part_bytes):
                self.parts.append(0)
            block.part, block.offset = len(self.parts) - 1, self.parts[-1]
            self.blocks.append(block)
            self.parts[-1] += round_up(block.size, ALIGN)

    def move_into(self, segments: Sequence[Room]) -> None:
        """Copy all values, then point the module's tensors at the segments, one for each of `parts`."""
        moved: dict[int, torch.Tensor] = {}
        for block in self.blocks:
            for tensor, view in _move_block(block, segments[block.part]):
                moved[id(tensor)] = view
        for submodule in self.module.modules():
            for table in (submodule._parameters, submodule._buffers):  # noqa: SLF001 - no public way to replace meta
                for name, old in table.items():
                    if old is not None:
                        table[name] = _pointed(old, moved)  # type: ignore[assignment]


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _check(name: str, tensor: torch.Tensor, device: str) -> None:
    if tensor.device.type not in {"cpu", "meta"} and str(tensor.device) != device:
        others = "" if device == "cpu" else f", {device}"
        msg = f"{name} is on {tensor.device}; this pool adopts tensors on cpu{others} or meta. Nothing was adopted."
        raise ArgumentError(msg)
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        msg = f"{name} is a {kind} tensor; a pool adopts plain strided tensors. Nothing was adopted."
        raise ArgumentError(msg)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The tensor's first and last-but-one byte in its storage."""
    low = tensor.storage_offset()
    high = low + 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        high += (size - 1) * stride
    return int(low) * tensor.itemsize, int(high) * tensor.itemsize


def _blocks(tensors: list[torch.Tensor]) -> Iterator[_Block]:
    """Tensors grouped by overlapping bytes of the same storage."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)  # noqa: SLF001 - also tells meta apart
    for group in by_storage.values():
        block: _Block | None = None
        for tensor in sorted(group, key=_span):
            low, high = _span(tensor)
            if block is not None and low < block.high:
                block.tensors.append(tensor)
                block.high = max(block.high, high)
                continue
            if block is not None:
                yield block
            block = _Block(low, high, [tensor])
        if block is not None:
            yield block


@torch.no_grad()
def _move_block(block: _Block, segment: Room) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    first = block.tensors[0]
    if block.is_single:
        view = segment.tensor(block.offset, first.shape, first.dtype)
        if first.device.type != "meta":
            view.copy_(first.detach())
        for tensor in block.tensors:
            yield tensor, view
        return
    flat = segment.tensor(block.offset, (block.size,), torch.uint8)
    if first.device.type != "meta":
        source = torch.empty(0, dtype=torch.uint8, device=first.device)
        source.set_(first.untyped_storage(), block.start, (block.size,), (1,))
        flat.copy_(source)
    for tensor in block.tensors:
        low, _ = _span(tensor)
        start = (low - block.start) // tensor.itemsize
        whole = flat[: block.size // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        yield tensor, torch.as_strided(whole, tensor.shape, tensor.stride(), start)


def _pointed(tensor: torch.Tensor, moved: dict[int, torch.Tensor]) -> torch.Tensor:
    """The same tensor over its new bytes; a meta or inference tensor is replaced, once for all its names."""
    view = moved.get(id(tensor))
    if view is None:
        return tensor.requires_grad_(False) if tensor.is_leaf else tensor
    if tensor.device.type != "meta" and not tensor.is_inference():
        tensor.grad = None
        tensor.requires_grad_(False)
        tensor.data = view
        return tensor
    if isinstance(tensor, nn.Parameter) and not isinstance(view, nn.Parameter):
        view = moved[id(tensor)] = nn.Parameter(view, requires_grad=False)
        view.__dict__.update(tensor.__dict__)
    return view
