"""What happens in a process with vLLM's CUDA allocator and our pool over it; `test_cumem_gpu.py` watches from outside.

Each scenario is a generator of facts: dictionaries that go to the watcher as lines of JSON. After each the process
waits for a line, so that the watcher can measure. By hand: `python -m tests.gpu.cumem_child levels < /dev/null`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.gpu.watch import tell

MIB = 1024**2
WEIGHTS_MIB, KV_MIB = 768, 1024
Facts = Iterator[dict[str, Any]]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Parameter(torch.empty(512 * MIB // 2, dtype=torch.bfloat16), requires_grad=False)
        self.turned = nn.Parameter(torch.empty(4096, 16384, dtype=torch.float32).t(), requires_grad=False)
        self.register_buffer("table", torch.empty(64))
        self.scale = torch.empty(3)


class Rig:
    """A small model and cache in vLLM's allocator, and our pool over them."""

    def __init__(self) -> None:
        from vllm.device_allocator import cumem

        from omni_notebook.memory.cumem import cumem_pool

        torch.cuda.set_device(0)
        torch.set_default_device("cuda:0")
        self.allocator = cumem.CuMemAllocator.get_instance()
        with self.allocator.use_memory_pool("weights"):
            self.model = Model()
        self.cache = nn.Module()
        with self.allocator.use_memory_pool("kv_cache"):
            self.cache.register_buffer("kv", torch.empty(KV_MIB * MIB, dtype=torch.uint8))
        self.fill()
        self.pool = cumem_pool(0)
        self.pool.adopt(self.model)
        self.pool.adopt(self.cache, "kv_cache")
        self.pool.keep("weights", [self.model.table, *self.pool.loose_tensors("weights")])

    def tensors(self) -> list[torch.Tensor]:
        return [self.model.big, self.model.turned, self.model.table, self.model.scale]

    def fill(self) -> None:
        torch.manual_seed(7)
        for tensor in self.tensors():
            tensor.normal_()
        self.cache.kv.fill_(5)

    def on_host(self) -> list[torch.Tensor]:
        return [tensor.cpu() for tensor in self.tensors()]

    def sleep(self, level: int) -> dict[str, Any]:
        started = time.perf_counter()
        prepared = self.pool.prepare_sleep(level)
        unmapped = self.pool.commit_sleep()
        held = self.pool.held()
        return {
            "freed": sum(unmapped.freed.values()),
            "expected": unmapped.expected_bytes,
            "observed": unmapped.observed_bytes,
            "scope": unmapped.scope,
            "note": unmapped.note,
            "backup": dict(prepared.backup),
            "modified": prepared.modified,
            "host_bytes": self.pool.host_backup_bytes(),
            "resident": sum(tag.resident_bytes for tag in self.pool.memory().values()),
            "held": held.total_bytes,
            "other": held.parts.other,
            "untagged": held.parts.untagged,
            "seconds": time.perf_counter() - started,
        }

    def wake(self) -> dict[str, Any]:
        started = time.perf_counter()
        mapped, restored = self.pool.map_restore()
        self.pool.commit_wake()
        return {
            "mapped": mapped.mapped_bytes,
            "reload": list(restored.needs_reload),
            "seconds": time.perf_counter() - started,
        }


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def levels() -> Facts:
    """Both levels, with a CUDA graph over the weights."""
    rig = Rig()
    before, addresses = rig.on_host(), [tensor.data_ptr() for tensor in rig.tensors()]
    result = torch.zeros(())
    graph = torch.cuda.CUDAGraph()
    rig.model.big[:1024].float().sum()  # warm
    with torch.cuda.graph(graph):
        result.copy_(rig.model.big[:1024].float().sum())
    graph.replay()
    expected = result.item()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    used = torch.cuda.memory_allocated()
    started = time.perf_counter()
    digest = rig.pool.record_checksum()
    yield {
        "step": "awake",
        "spans": {name: info.span_bytes for name, info in rig.pool.tags().items()},
        "untagged": rig.pool.untagged(),
        "foreign": rig.pool.foreign_changes(),
        "verified": rig.pool.verify_checksum(),
        "digest": digest,
        "checksum_s": time.perf_counter() - started,
        "scratch": torch.cuda.max_memory_allocated() - used,
        "graphs": rig.pool.held().parts.graphs,
    }
    for number in range(2):
        yield {"step": "asleep", "level": 1, **rig.sleep(1), "foreign": rig.pool.foreign_changes()}
        woken = rig.wake()
        result.zero_()
        graph.replay()
        yield {
            "step": "awake again",
            **woken,
            "equal": equal(rig.on_host(), before),
            "kv_zero": not bool(rig.cache.kv.any()),
            "addresses": [tensor.data_ptr() for tensor in rig.tensors()] == addresses,
            "graph": result.item() == expected,
            "number": number,
            "verified": rig.pool.verify_checksum(),
        }
        rig.cache.kv.fill_(5)
    yield {"step": "asleep", "level": 2, **rig.sleep(2), "foreign": rig.pool.foreign_changes()}
    woken = rig.wake()
    table, scale = rig.model.table.cpu(), rig.model.scale.cpu()
    empty = not bool(rig.model.big.any()) and not bool(rig.cache.kv.any())
    with torch.no_grad():
        for tensor, value in zip(rig.tensors()[:2], before[:2], strict=True):
            tensor.copy_(value)
    yield {
        "step": "awake again",
        **woken,
        "empty": empty,
        "kept": torch.equal(table, before[2]) and torch.equal(scale, before[3]),
        "addresses": [tensor.data_ptr() for tensor in rig.tensors()] == addresses,
        "verified": rig.pool.verify_checksum(),
        "same_digest": rig.pool.record_checksum() == digest,
    }
    rig.sleep(1)
    rig.pool.close()
    yield {"step": "closed", "host_bytes": rig.pool.host_backup_bytes()}


def full() -> Facts:
    """A wake on a device that was filled meanwhile, a wake after that."""
    from omni_notebook.errors import OutOfMemoryError

    rig = Rig()
    before = rig.on_host()
    rig.sleep(1)
    filler = torch.empty(torch.cuda.mem_get_info()[0] - 900 * MIB, dtype=torch.uint8)
    try:
        rig.wake()
    except OutOfMemoryError as error:
        yield {"step": "refused", "needed": error.needed_bytes, "free": error.free_bytes, "message": str(error)}
    resident = sum(tag.resident_bytes for tag in rig.pool.memory().values())
    rig.pool._core.driver.free_bytes = lambda: 1 << 50  # as if the room went while it maps
    try:
        rig.wake()
    except OutOfMemoryError as error:
        yield {"step": "refused by the driver", "message": str(error)}
    del rig.pool._core.driver.free_bytes
    also = sum(tag.resident_bytes for tag in rig.pool.memory().values())
    del filler
    torch.cuda.empty_cache()
    yield {"step": "awake", **rig.wake(), "equal": equal(rig.on_host(), before), "resident": [resident, also]}


def freeing(room: str = "some") -> Facts:
    """Freeing tensors while they sleep; `room` "none": not even a granule is free then."""
    rig = Rig()
    before = rig.on_host()
    rig.sleep(1)
    there = dict(rig.allocator.pointer_to_data)
    filler = []
    if room == "none":
        filler.append(torch.empty(torch.cuda.mem_get_info()[0] - 64 * MIB, dtype=torch.uint8))
        try:
            while True:
                filler.append(torch.empty(MIB, dtype=torch.uint8))  # torch takes 2 MiB for two of these
        except torch.OutOfMemoryError:
            pass
    kv = rig.cache.kv.data_ptr()
    del rig.cache.kv
    rig.pool._core.modules._modules.pop()
    entry = rig.allocator.allocator_and_pools.pop("kv_cache")
    memory_pool, _outlives_it = entry[0] if isinstance(entry, list) else entry
    del entry, memory_pool  # with its memory pool torch frees the segments
    gc.collect()
    freed = kv not in rig.allocator.pointer_to_data
    filler.clear()
    torch.cuda.empty_cache()
    held = rig.pool.held()
    woken = rig.wake()
    yield {
        "step": "awake",
        **woken,
        "freed": freed,
        "freed_segments": len(there) - len(rig.allocator.pointer_to_data),
        "held_asleep": held.total_bytes,
        "equal": equal(rig.on_host(), before),
    }


def without_room() -> Facts:
    """See `freeing`."""
    return freeing("none")


def foreign() -> Facts:
    """vLLM's own sleep underneath."""
    from omni_notebook.memory.base import TransitionOrderError

    rig = Rig()
    before = rig.on_host()
    rig.allocator.sleep(("weights",))
    found = rig.pool.foreign_changes()
    try:
        rig.pool.prepare_sleep(1)
    except TransitionOrderError as error:
        refused = str(error)
    rig.allocator.wake_up()
    after = rig.pool.foreign_changes()
    rig.sleep(1)
    yield {"step": "done", "found": found, "refused": refused, "after": after}
    yield {"step": "awake", **rig.wake(), "equal": equal(rig.on_host(), before)}


if __name__ == "__main__":
    tell({scenario.__name__: scenario for scenario in (levels, full, freeing, without_room, foreign)})
