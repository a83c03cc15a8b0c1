"""Which bytes of the pool's segments belong to whom: modules that were registered, and tensors that nobody named."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from omni_notebook.memory.device.segments import DeviceSegment, SegmentTable


class Span(NamedTuple):
    """The bytes between a tensor's first and last element, and where they lie; `layout` has the tensor's strides."""

    name: str
    segment: DeviceSegment
    offset: int
    n_bytes: int
    layout: torch.Tensor

    @property
    def address(self) -> int:
        """Where they begin."""
        return self.segment.address + self.offset

    def flat(self) -> torch.Tensor:
        """These bytes as a uint8 tensor over the same memory."""
        return flat_bytes(self.layout.untyped_storage(), _low(self.layout), self.n_bytes, self.layout.device)


class ModuleTensors:
    """The registered modules; their tensors are looked up anew each time, because loaders replace parameters."""

    def __init__(self, table: SegmentTable) -> None:
        self._table = table
        self._modules: list[tuple[str, nn.Module]] = []

    def add(self, module: nn.Module, tag: str) -> None:
        """Register a module whose tensors are expected in `tag`'s segments; once is enough."""
        if all(known is not module for _, known in self._modules):
            self._modules.append((tag, module))

    def forget(self, tag: str) -> None:
        """Forget the modules of a tag that is no more."""
        self._modules = [one for one in self._modules if one[0] != tag]

    def clear(self) -> None:
        """Forget all."""
        self._modules.clear()

    def _named(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(expected tag, name, tensor) of all plain tensors that have bytes."""
        for number, (tag, module) in enumerate(tuple(self._modules)):
            tables = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
            for named in tables:
                for name, tensor in named:
                    for inner, plain in plain_tensors(f"{number}.{name}", tensor):
                        yield tag, inner, plain

    def spans(self, tag: str) -> list[Span]:
        """What lies in `tag`'s segments, by name; bytes that have several names are there once."""
        found: dict[tuple[int, int], Span] = {}
        for _, name, tensor in self._named():
            span = span_of(name, tensor, self._table)
            if span is not None and span.segment.tag == tag:
                key = (span.address, span.n_bytes)
                if key not in found or name < found[key].name:
                    found[key] = span
        return sorted(found.values(), key=lambda span: span.name)

    def strays(self) -> dict[str, list[Span]]:
        """By tag: registered tensors in its segments that are expected in another tag, one whose contents matter."""
        found: dict[str, list[Span]] = {}
        for expected, name, tensor in self._named():
            span = span_of(name, tensor, self._table)
            if span is not None and span.segment.tag != expected:
                found.setdefault(span.segment.tag, []).append(span)
        return found

    def untagged(self) -> dict[str, int]:
        """Registered tensors that lie in none of the segments: name → bytes."""
        return {
            name: tensor.numel() * tensor.itemsize
            for _, name, tensor in self._named()
            if span_of(name, tensor, self._table) is None
        }

    def loose(self, tag: str) -> list[torch.Tensor]:
        """The storages of living tensors in `tag`'s segments that no registered module has, as flat bytes."""
        known = {_storage_address(tensor) for _, _, tensor in self._named()}
        found: dict[int, torch.Tensor] = {}
        for tensor in living_tensors():
            address = _storage_address(tensor)
            storage = tensor.untyped_storage()
            segment = self._table.find(address, storage.nbytes())
            if segment is not None and segment.tag == tag and address not in known and address not in found:
                found[address] = flat_bytes(storage, 0, storage.nbytes(), tensor.device)
        return [found[address] for address in sorted(found)]


def plain_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor with bytes of its own as it is; of a wrapper (quantised weights) the tensors inside."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for part in flatten()[0]:
            yield from plain_tensors(f"{name}.{part}", getattr(tensor, part))
    elif tensor.numel() and _storage_address(tensor):
        yield name, tensor


def span_of(name: str, tensor: torch.Tensor, table: SegmentTable) -> Span | None:
    """A tensor's span, if it lies in a segment."""
    n_bytes = _high(tensor) - _low(tensor)
    segment = table.find(tensor.data_ptr(), n_bytes)
    if segment is None:
        return None
    return Span(name, segment, tensor.data_ptr() - segment.address, n_bytes, tensor.detach())


def flat_bytes(storage: torch.UntypedStorage, start: int, n_bytes: int, device: torch.device) -> torch.Tensor:
    """Bytes of a storage as a uint8 tensor over the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, start, (n_bytes,), (1,))


def _low(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


def _high(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.itemsize


def _storage_address(tensor: torch.Tensor) -> int:
    """Where a tensor's storage begins; 0 where it has none (meta, fake, sparse)."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def living_tensors() -> Iterable[torch.Tensor]:
    """Every tensor with memory that Python's collector knows, also of a heap that was frozen (vLLM freezes its own).

    A frozen heap is frozen again after, with all that has come since.
    """
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    try:
        everything = gc.get_objects()
        tensors = [thing for thing in everything if issubclass(type(thing), torch.Tensor)]
        del everything
    finally:
        if frozen:
            gc.freeze()
    return [tensor for tensor in tensors if tensor.numel() and _storage_address(tensor)]
