"""What happens in a process with a pool for stages of our own; `test_own_gpu.py` watches from outside.

By hand: `python -m tests.gpu.own_child cycles < /dev/null`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch import nn

from omni_notebook.errors import OutOfMemoryError
from omni_notebook.memory.base import TransitionOrderError
from omni_notebook.memory.cuda import cuda_pool
from tests.gpu.watch import tell

MIB = 1024**2
CYCLES = 100
Facts = Iterator[dict[str, Any]]


class Model(nn.Module):
    """Several segments of tensors, one of them larger than a segment usually is, ties, a transposed one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(6):
            self.register_parameter(f"w{number}", nn.Parameter(torch.empty(60 * MIB // 2, dtype=torch.bfloat16)))
        self.large = nn.Parameter(torch.empty(300 * MIB // 4))
        self.turned = nn.Parameter(torch.empty(1000, 700).t())
        self.tied = self.w0
        self.register_buffer("table", torch.empty(64))


class Rig:
    """A model and a cache in a pool of our own."""

    def __init__(self, cache_mib: int = 1024) -> None:
        torch.cuda.set_device(0)
        self.pool = cuda_pool(0)
        with torch.device("meta"):
            self.model = Model().requires_grad_(False)
        self.pool.adopt(self.model)
        self.cache = self.pool.empty((cache_mib * MIB,), torch.uint8)
        self.pool.keep("weights", [self.model.table])
        self.fill()
        self.pool.record_checksum()

    def tensors(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def fill(self) -> None:
        torch.manual_seed(7)
        for tensor in self.tensors():
            tensor.normal_()
        self.cache.fill_(5)

    def on_host(self) -> list[torch.Tensor]:
        return [tensor.cpu() for tensor in self.tensors()]

    def sleep(self, level: int = 1, *, late_copy: bool = True) -> dict[str, Any]:
        prepared = self.pool.prepare_sleep(level, late_copy=late_copy)
        unmapped = self.pool.commit_sleep()
        return {
            "level": level,
            "freed": sum(unmapped.freed.values()),
            "expected": unmapped.expected_bytes,
            "observed": unmapped.observed_bytes,
            "scope": unmapped.scope,
            "note": unmapped.note,
            "copied": prepared.copied_bytes + unmapped.copied_bytes,
            "clean": prepared.skipped_clean_bytes + unmapped.skipped_clean_bytes,
            "held": self.pool.held().total_bytes,
        }

    def wake(self) -> None:
        self.pool.map_restore()
        self.pool.commit_wake()


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def rss() -> int:
    return psutil.Process(os.getpid()).memory_info().rss


def cycles() -> Facts:
    """A hundred sleeps and wakes of level 1, some after a write, copies before and in the commit."""
    rig = Rig()
    addresses = [tensor.data_ptr() for tensor in rig.tensors()]
    rig.pool.write_ahead()
    ready = rig.pool.wait_write_ahead(60)
    yield {"step": "awake", "ready": ready, "span": sum(tag.span_bytes for tag in rig.pool.tags().values())}
    same = zero = True
    for number in range(CYCLES):
        if number % 3 == 0:
            rig.model.large[number * 1000] += 1  # one chunk
        before = rig.on_host()
        facts = rig.sleep(late_copy=number % 2 == 0)
        if number in {1, 10, CYCLES - 1} or number % 3 == 0:
            yield {"step": "asleep", "number": number, "rss": rss(), **facts}
        rig.wake()
        same = same and equal(rig.on_host(), before)
        zero = zero and not rig.cache.any().item()
        rig.cache.fill_(7)
    yield {
        "step": "done",
        "same": same,
        "zero": zero,
        "addresses": addresses == [tensor.data_ptr() for tensor in rig.tensors()],
        "rss": rss(),
        "host": rig.pool.host_backup_bytes(),
    }
    rig.pool.close()
    yield {"step": "closed", "host": rig.pool.host_backup_bytes()}


def second_level() -> Facts:
    """Level 2 keeps the buffer; the weights must come from elsewhere."""
    rig = Rig()
    table = rig.model.table.clone()
    before = rig.on_host()
    facts = rig.sleep(2)
    yield {"step": "asleep", **facts}
    rig.wake()
    empty = not any(parameter.any().item() for parameter in rig.model.parameters())
    kept, stale = torch.equal(rig.model.table, table), rig.pool.verify_checksum()
    rig.fill()
    yield {
        "step": "filled",
        "empty": empty,
        "kept": kept,
        "stale": stale,
        "verified": rig.pool.verify_checksum(),
        "equal": equal(rig.on_host(), before),
    }


def full() -> Facts:
    """The device is made full while the pool sleeps."""
    rig = Rig()
    before = rig.on_host()
    rig.sleep()
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(free - 512 * MIB, dtype=torch.uint8, device="cuda")
    try:
        rig.wake()
        refused = {"refused": False}
    except OutOfMemoryError as error:
        refused = {"refused": True, "needed": error.needed_bytes, "free": error.free_bytes, "message": str(error)}
    yield {"step": "refused", **refused, "mapped": sum(tag.resident_bytes for tag in rig.pool.memory().values())}
    del hog
    torch.cuda.empty_cache()
    rig.wake()
    yield {"step": "awake", "equal": equal(rig.on_host(), before)}


def apart() -> Facts:
    """Two pools of one process: each accounts for its own, and addresses of the gone are given to nobody."""
    first, second = Rig(cache_mib=256), Rig(cache_mib=256)
    before = second.on_host()
    one = first.sleep()
    untouched = equal(second.on_host(), before)
    other = second.sleep(late_copy=False)
    second.wake()
    views = first.tensors()  # keep its addresses
    first.pool.close()
    third = Rig(cache_mib=256)
    mine = {tensor.data_ptr() for tensor in views}
    yield {
        "step": "done",
        "freed": [one["freed"], other["freed"]],
        "observed": [one["observed"], other["observed"]],
        "untouched": untouched,
        "equal": equal(second.on_host(), before),
        "apart": mine.isdisjoint(tensor.data_ptr() for tensor in third.tensors()),
    }
    try:
        first.pool.prepare_sleep(1)
    except TransitionOrderError as error:
        yield {"step": "closed", "says": str(error)}


if __name__ == "__main__":
    tell({scenario.__name__: scenario for scenario in (cycles, second_level, full, apart)})
