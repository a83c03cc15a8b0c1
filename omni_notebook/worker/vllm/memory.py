"""vLLM's memory in our pools: which pool a worker gets, and how its KV cache comes into it."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omni_notebook.errors import OmniError
from omni_notebook.memory.base import KV_CACHE, WEIGHTS
from omni_notebook.memory.cumem import CumemPool
from omni_notebook.memory.platforms import VLLM_PLATFORMS, create_pool, vllm_pool

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from omni_notebook.config import StageConfig
    from omni_notebook.memory.base import MemoryPool


def make_pool(worker: Any, config: StageConfig) -> MemoryPool:
    """The pool for the device that vLLM runs on.

    Raises:
        UnsupportedError: there is none for it; names the reason.
    """
    platform = _platform_of(worker.device.type)
    if platform in VLLM_PLATFORMS:
        return vllm_pool(platform, worker.device.index or 0)
    return create_pool(platform, spill_dir=config.spill_dir, backup=config.backup)


def _platform_of(device_type: str) -> str:
    """The platform of torch's kind of device; torch calls AMD's GPUs "cuda" too."""
    return "rocm" if device_type == "cuda" and torch.version.hip else device_type


def adopt(worker: Any, modules: Iterable[nn.Module], pool: MemoryPool) -> None:
    """Move, or where vLLM's allocator has it already only register, all that a worker holds.

    Raises:
        OmniError: something holds on to the old memory.
    """
    if isinstance(pool, CumemPool):
        pool.adopt(_as_module(kv_tensors(worker)), KV_CACHE)  # first: what is known to be cache is not kept
    for module in modules:
        pool.adopt(module, WEIGHTS)
    if not isinstance(pool, CumemPool):
        adopt_kv_cache(worker, pool)


def _as_module(tensors: Iterable[torch.Tensor]) -> nn.Module:
    module = nn.Module()
    for number, tensor in enumerate(tensors):
        module.register_buffer(f"tensor{number}", tensor)
    return module


def keep(pool: MemoryPool, buffers: Sequence[torch.Tensor]) -> None:
    """Have every level keep what no checkpoint has: buffers, and what vLLM allocated and no module owns."""
    pool.keep(WEIGHTS, buffers)
    if isinstance(pool, CumemPool):
        for tag in (WEIGHTS, KV_CACHE):
            pool.keep(tag, pool.loose_tensors(tag))


def adopt_kv_cache(worker: Any, pool: MemoryPool) -> None:
    """Move the storages of a worker's KV cache into the pool; every tensor that views one follows.

    Raises:
        OmniError: something holds on to the old memory.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kv_tensors(worker)}
    for address, storage in storages.items():
        _move(address, storage.nbytes(), pool)
    left = [tensor for tensor in _alive() if tensor.untyped_storage().data_ptr() in storages]
    if left:
        msg = f"{len(left)} tensors still hold vLLM's old KV cache; it can not be given back"
        raise OmniError(msg)


def kv_tensors(worker: Any) -> Iterator[torch.Tensor]:
    """Every tensor of the worker's KV cache, as its layers hold them."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        cache = getattr(layer, "kv_cache", None)  # layers without attention have none
        yield from _tensors_in(cache)


def _tensors_in(cache: Any) -> Iterator[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        if cache.numel():
            yield cache
    elif isinstance(cache, list | tuple):
        for item in cache:
            yield from _tensors_in(item)


def _move(address: int, n_bytes: int, pool: MemoryPool) -> None:
    """Give a storage's tensors new bytes (zeroes); the old ones go with their last tensor."""
    new = pool.empty((n_bytes,), torch.uint8, KV_CACHE)
    start = new.storage_offset()
    with torch.inference_mode():
        for tensor in [one for one in _alive() if one.untyped_storage().data_ptr() == address]:
            offset = start // tensor.itemsize + tensor.storage_offset()
            tensor.set_(new.untyped_storage(), offset, tensor.size(), tensor.stride())


def _alive() -> list[torch.Tensor]:
    """Every tensor with memory that Python knows."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return [tensor for tensor in tensors if tensor.device.type == "cpu" and _has_storage(tensor)]


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except (NotImplementedError, RuntimeError):  # fake, sparse and functional tensors
        return False
