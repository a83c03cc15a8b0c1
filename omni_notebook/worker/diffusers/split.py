"""Tensor parallelism for pipelines: the blocks of a transformer are split over the ranks, all else is whole on each.

`parallelize_module` of torch walks the plan; the styles are our own. Those of torch would turn parameters into
DTensors, which own their memory: no pool could hold it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from omni_notebook.models.parallel import ColumnParallelLinear, RowParallelLinear, check_split

if TYPE_CHECKING:
    from omni_notebook.models.parallel import Shard, TensorParallel

_INTO_HEADS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")


def split(model: nn.Module, parallel: TensorParallel) -> dict[str, Shard]:
    """Split the attention and feed-forward parts of a transformer's blocks; what this rank holds, by tensor.

    Raises:
        ConfigError: heads or features can not be split evenly.
    """
    names = {
        name for block in model.get_submodule("transformer_blocks").children() for name, _ in block.named_children()
    }
    styles: dict[str, ParallelStyle] = {
        **dict.fromkeys(("attn", "attn2"), _SplitAttention(parallel)),
        **dict.fromkeys(("ff", "ff_context"), _SplitFeedForward(parallel)),
    }
    plan = {f"transformer_blocks.*.{name}": style for name, style in styles.items() if name in names}
    ranks: Any = list(range(parallel.size))
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=parallel.rank)  # a shape: nothing is sent over it
    for block_plan in plan.items():
        parallelize_module(model, mesh, dict([block_plan]))
    return {
        f"{path}.{name}": shard
        for path, layer in model.named_modules()
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear)
        for name, shard in layer.shards().items()
    }


class _SplitAttention(ParallelStyle):
    """Each rank has some of the heads; one sum follows each projection out of them."""

    def __init__(self, parallel: TensorParallel) -> None:
        super().__init__()
        self._parallel = parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002
        attention = cast("Any", module)
        check_split(self._parallel.size, "num_attention_heads", attention.heads)
        for name in _INTO_HEADS:
            if getattr(attention, name, None) is not None:
                setattr(attention, name, _column(getattr(attention, name), self._parallel, attention.heads))
        attention.to_out[0] = _row(attention.to_out[0], self._parallel)
        if getattr(attention, "to_add_out", None) is not None:
            attention.to_add_out = _row(attention.to_add_out, self._parallel)
        attention.heads //= self._parallel.size
        return module


class _SplitFeedForward(ParallelStyle):
    """Each rank has some of the inner features; one sum follows."""

    def __init__(self, parallel: TensorParallel) -> None:
        super().__init__()
        self._parallel = parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002
        into, out = cast("Any", module).net[0], cast("Any", module).net
        check_split(self._parallel.size, "inner features of a feed-forward part", into.proj.out_features)
        into.proj = _column(into.proj, self._parallel, None)
        out[2] = _row(out[2], self._parallel)
        return module


def _column(layer: nn.Linear, parallel: TensorParallel, units: int | None) -> nn.Linear:
    with torch.device("meta"):
        part = ColumnParallelLinear(
            layer.in_features, layer.out_features, parallel, bias=layer.bias is not None, units=units
        )
    return _filled(part, layer, part.shards())


def _row(layer: nn.Linear, parallel: TensorParallel) -> nn.Linear:
    with torch.device("meta"):
        part = RowParallelLinear(layer.in_features, layer.out_features, parallel, bias=layer.bias is not None)
    return _filled(part, layer, part.shards())


def _filled(part: nn.Linear, layer: nn.Linear, shards: dict[str, Shard]) -> nn.Linear:
    """The rank's layer with its part of the whole one's values."""
    for name, tensor in layer.named_parameters():
        held = tensor.detach()
        if name in shards:
            held = held[shards[name].part].clone()  # else it would hold on to all of it
        setattr(part, name, nn.Parameter(held, requires_grad=False))
    return part.eval()
