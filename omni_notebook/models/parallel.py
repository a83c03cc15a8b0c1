"""Tensor parallelism: several ranks hold one model together, each a slice of every large matrix.

Shoeybi et al. 2019 (Megatron-LM): of two matrices in a row the first is split by output features (whole heads), the
second by input features; nothing is exchanged between them and one sum over the ranks follows. Embeddings, norms,
modulation and the output head are whole on every rank, so that every rank computes the same scores.

Parameters are plain tensors in the rank's own shape: a memory pool adopts them, their addresses stay, and
`loaders` fills them in place from slices of the file. `torch.distributed.tensor.parallel` is not used for that reason:
it wraps parameters in DTensors, which own their local tensor and are filled by scattering a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from omni_notebook.errors import ConfigError, PeerLostError


class Group(Protocol):
    """What is used of a process group of torch.distributed; its sockets close with the last reference to it."""

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor], /) -> Any:
        """Start to collect one tensor from every rank; `.wait()` on the answer ends or raises RuntimeError."""
        ...


class TensorParallel:
    """One rank's place among those that hold a model together; of size 1 it does nothing and needs no group.

    All ranks must make the same calls in the same order, within the group's timeout of one another.
    """

    def __init__(self, size: int = 1, rank: int = 0, group: Group | None = None, device: str = "cpu") -> None:
        if not 0 <= rank < size:
            msg = f"rank {rank} is none of a tensor-parallel group of {size}"
            raise ConfigError(msg)
        self.size = size
        self.rank = rank
        self._group = group
        self._device = device

    def part(self, units: int, width: int = 1) -> slice:
        """Return this rank's features of `units` heads of `width` features each.

        With fewer units than ranks, neighbours hold the same unit. `check_split` tells whether a number can be split.
        """
        first = self.rank * units // self.size
        return slice(first * width, (first + max(units // self.size, 1)) * width)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, the same bytes on each.

        Parts are gathered and added in the order of ranks, half types in float32: the result depends neither on the
        collective's algorithm nor on an element's place in the batch. With few ranks and small messages this is
        also one round trip less than a ring that reduces.

        Raises:
            PeerLostError: another rank is gone or did not answer within the group's timeout.
        """
        if self.size == 1:
            return tensor
        first, *others = self._gather(tensor)
        total = first.float() if first.dtype in {torch.float16, torch.bfloat16} else first
        for part in others:
            total = total + part
        return total.to(tensor.dtype)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank, the same answer on each; raises like `all_reduce`."""
        if self.size == 1:
            return flag
        return any(bool(part) for part in self._gather(torch.tensor([flag], dtype=torch.uint8, device=self._device)))

    def leave(self) -> None:
        """Leave the group for good; idempotent. The others' next exchange fails: see `worker.group.RankGroup.close`."""
        self._group = None

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        if self._group is None:
            raise PeerLostError(self._gone("this rank is in no group (any more)"))
        parts = list(torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device).unbind())
        try:
            self._group.allgather([parts], [tensor.contiguous()]).wait()
        except RuntimeError as error:
            self.leave()
            raise PeerLostError(self._gone(first_line(error))) from error
        return parts

    def _gone(self, why: str) -> str:
        return (
            f"rank {self.rank} of {self.size} lost its tensor-parallel peers: {why}. The batch has no result and the "
            "ranks can not compute together any more; restart(stage_id) brings the stage back"
        )


SOLO = TensorParallel()
"""One rank by itself."""


def first_line(error: BaseException) -> str:
    """Return what a torch error says, without the C++ frames below it."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def check_split(size: int, key: str, units: int, *, shared: bool = False) -> None:
    """Raise ConfigError, naming the key, unless `units` can be split over `size` ranks evenly.

    shared: also allow fewer units than ranks, where the same number of ranks holds each.
    """
    if units % size and not (shared and size % units == 0):
        msg = f"{key} ({units}) can not be split over tensor_parallel_size={size}; nothing was started"
        raise ConfigError(msg)


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank holds of a checkpoint's tensor: the shape of the whole and one slice a dimension."""

    whole: tuple[int, ...]
    part: tuple[slice, ...]


class ColumnParallelLinear(nn.Linear):
    """A linear layer of which each rank computes its own output features: (…, in) to (…, out of this rank).

    units: split between these (heads) only; default between any two features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parallel: TensorParallel = SOLO,
        *,
        bias: bool = True,
        units: int | None = None,
    ) -> None:
        units = units or out_features
        part = parallel.part(units, out_features // units)
        super().__init__(in_features, part.stop - part.start, bias)
        self._shards = {"weight": Shard((out_features, in_features), (part, slice(None)))}
        if bias:
            self._shards["bias"] = Shard((out_features,), (part,))

    def shards(self) -> dict[str, Shard]:
        """Return what this rank holds of the layer's tensors."""
        return self._shards


class RowParallelLinear(nn.Linear):
    """A linear layer over input features that are split over the ranks: (…, in of this rank) to (…, out), summed.

    The bias is whole on every rank and added once, after the sum. `forward` raises like `TensorParallel.all_reduce`.
    """

    def __init__(
        self, in_features: int, out_features: int, parallel: TensorParallel = SOLO, *, bias: bool = True
    ) -> None:
        part = parallel.part(in_features)
        super().__init__(part.stop - part.start, out_features, bias)
        self._parallel = parallel
        self._has_bias = bias
        self._shards = {"weight": Shard((out_features, in_features), (slice(None), part))}

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (nn.Linear's name)
        """Return the sum over the ranks, plus the bias."""
        if self._parallel.size == 1:
            return super().forward(input)
        total = self._parallel.all_reduce(F.linear(input, self.weight))
        return total + self.bias if self._has_bias else total

    def shards(self) -> dict[str, Shard]:
        """Return what this rank holds of the layer's tensors; the bias is whole."""
        return self._shards


class ParallelModel(nn.Module):
    """A model whose large matrices are split over the ranks; `loaders` asks it which slices to read."""

    def __init__(self, parallel: TensorParallel) -> None:
        super().__init__()
        self.parallel = parallel

    def checkpoint_slices(self) -> dict[str, tuple[slice, ...]]:
        """Return which part of the checkpoint's tensors this rank holds; those not named it holds whole."""
        return {name: shard.part for name, shard in self._shards().items()}

    def checkpoint_wholes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that the checkpoint's tensors must have, of those that this rank holds a part of."""
        return {name: shard.whole for name, shard in self._shards().items()}

    def _shards(self) -> dict[str, Shard]:
        if self.parallel.size == 1:
            return {}
        return {
            f"{path}.{name}": shard
            for path, layer in self.named_modules()
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear)
            for name, shard in layer.shards().items()
        }
