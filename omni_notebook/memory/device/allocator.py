"""What drivers over vLLM's allocators share: their books, torch's own memory, and one call before every free.

vLLM's allocators for CUDA, HIP, XPU and vllm-ascend's for NPUs keep the same books (`pointer_to_data`, entries with
`handle`, `tag`) and hand the same two callbacks to their extension; torch's modules for these devices have the same
functions.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from omni_notebook.memory.base import DeviceError
from omni_notebook.memory.device.capturing import CAPTURING
from omni_notebook.memory.device.driver import Allocation, Reserved
from omni_notebook.memory.device.nearness import near_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

_ORDINARY_POOL = (0, 0)
_POOLS = ("small_pool", "large_pool")
_REMEMBERED = 8
_NO_ROOM = ("out of memory", "out of device memory")


class AllocatorDriver:
    """The part of a `Driver` that is the same on every platform.

    Args:
        platform: "cuda", "rocm", "xpu" or "npu".
        index: torch's number of the device.
        allocator: vLLM's allocator, the one of this process.
        init_module: the extension's function that takes its two callbacks.
        torch_device: `torch.cuda`, `torch.xpu` or `torch.npu`.
    """

    name = "device"
    """What errors call the driver."""

    def __init__(
        self, platform: str, index: int, allocator: Any, init_module: Callable[..., Any], torch_device: Any
    ) -> None:
        self.platform = platform
        self._index = index
        self._allocator = allocator
        self._init_module = init_module
        self._torch = torch_device
        self.device = f"{'cuda' if platform == 'rocm' else platform}:{index}"
        self.device_name = str(torch_device.get_device_name(index))
        self._reserved: dict[tuple[int, ...], Reserved] = {}
        torch_device.set_device(index)

    def attach(self) -> None:
        """See `Driver.attach`."""
        with self._errors("attach a thread"):
            self._torch.set_device(self._index)

    def enter(self) -> None:
        """See `Driver.enter`."""
        self.attach()
        with self._errors("synchronize"), CAPTURING:
            self._torch.synchronize(self._index)

    # ---------------------------------------------------------------------------------- books

    def allocations(self) -> Mapping[int, Allocation]:
        """See `Driver.allocations`."""
        entries = self._allocator.pointer_to_data.copy().items()
        return {
            address: Allocation(address, data.handle[1], data.tag, data)
            for address, data in entries
            if data.handle[0] == self._index
        }

    def _is_on_device(self, address: int) -> bool:
        """Whether it lies in one of the allocator's segments, as opposed to host memory."""
        return any(one.address <= address < one.address + one.size_bytes for one in self.allocations().values())

    def is_live(self, allocation: Allocation) -> bool:
        """See `Driver.is_live`."""
        return self._allocator.pointer_to_data.get(allocation.address) is allocation.data

    def set_asleep(self, allocation: Allocation, asleep: bool) -> None:
        """See `Driver.set_asleep`; vLLM 0.24 and vllm-ascend keep no such books."""
        if hasattr(allocation.data, "is_asleep"):
            allocation.data.is_asleep = asleep

    def guard_frees(self, before: Callable[[int], None]) -> None:
        """See `Driver.guard_frees`.

        The extension calls one free callback of the process; ours takes its place and calls vLLM's. It is set on
        vLLM's allocator too, which hands it to the extension again with every new memory pool, and so is the other
        one: the extension keeps no reference to either.
        """
        original = self._allocator.python_free_callback

        @functools.wraps(original)
        def free(address: int) -> Any:
            with contextlib.suppress(Exception):  # raising here leaves the interpreter lock held
                before(address)
            return original(address)

        self._allocator.python_malloc_callback = self._allocator.python_malloc_callback
        self._allocator.python_free_callback = free
        self._init_module(self._allocator.python_malloc_callback, free)

    def bytes_at(self, address: int, n_bytes: int) -> torch.Tensor | None:  # noqa: ARG002
        """See `Driver.bytes_at`: torch makes tensors over foreign memory on CUDA alone."""
        return None

    # ------------------------------------------------------------------------------- measuring

    def near_cpus(self) -> frozenset[int]:
        """See `Driver.near_cpus`."""
        return near_cpus(self._torch, self._index)

    def trim(self) -> None:
        """See `Driver.trim`."""
        with self._errors("empty_cache"), CAPTURING:
            self._torch.empty_cache()

    def free_bytes(self) -> int:
        """See `Driver.free_bytes`."""
        with self._errors("mem_get_info"):
            return int(self._torch.mem_get_info(self._index)[0])

    def reserved(self) -> Reserved:
        """See `Driver.reserved`; pools of the allocator itself are not counted, mapped or not.

        Torch's list of segments takes milliseconds: it is read only when torch's totals are none of the last ones.
        """
        stats = self._torch.memory_stats_as_nested_dict(self._index)
        totals = tuple(stats[what][pool]["current"] for what in ("reserved_bytes", "segment") for pool in _POOLS)
        known = self._reserved.get(totals)
        if known is None:  # orders that overtake others ask on threads of their own
            known = self._read_reserved()
            if len(self._reserved) >= _REMEMBERED:
                self._reserved.clear()
            self._reserved[totals] = known
        return known

    def _read_reserved(self) -> Reserved:
        ours = set(self._pool_ids())
        untagged = graphs = 0
        for segment in self._torch.memory_snapshot():
            pool = tuple(segment.get("segment_pool_id", _ORDINARY_POOL))
            if segment["device"] != self._index or pool in ours:
                continue
            if segment["address"] in self._allocator.pointer_to_data:
                continue
            if pool == _ORDINARY_POOL:
                untagged += segment["total_size"]
            else:
                graphs += segment["total_size"]
        return Reserved(untagged, graphs)

    def _pool_ids(self) -> Iterator[tuple[int, int]]:
        for entry in self._allocator.allocator_and_pools.values():  # 0.24 keeps one pool a tag, later ones a list
            for pool, _ in entry if isinstance(entry, list) else (entry,):
                yield tuple(pool.id)

    # ---------------------------------------------------------------------------------- errors

    @contextlib.contextmanager
    def _errors(self, step: str) -> Iterator[None]:
        """Raise what the extension, the runtime or torch raise as ours."""
        try:
            yield
        except RuntimeError as error:
            text = (str(error).splitlines() or [type(error).__name__])[0]
            raise self._refused(step, text) from error

    def _refused(self, step: str, text: str, *, no_room: bool = False, lost: bool = False) -> DeviceError:
        plain = text.lower().replace("_", " ")
        msg = f"the {self.name} driver refused to {step}: {text}"
        return DeviceError(msg, no_room=no_room or any(one in plain for one in _NO_ROOM), lost=lost)


class AtOnce:
    """The part of a `Driver` whose copies and fills are done when the call returns."""

    def mark(self, *, fills: bool = False) -> None:
        """See `Driver.mark`: all is done."""

    def follow(self, mark: None) -> None:
        """See `Driver.follow`: it was reached at once."""

    def reached(self, mark: None) -> None:
        """See `Driver.reached`: it was, at once."""

    def wait(self) -> None:
        """See `Driver.wait`: there is nothing to wait for."""

    def finish(self) -> None:
        """See `Driver.finish`: there is nothing to wait for."""

    def pin(self, address: int, n_bytes: int) -> bool:  # noqa: ARG002
        """See `Driver.pin`: no call for it that every version of the platform's libraries has; copies are slower."""
        return False

    def unpin(self, address: int) -> None:
        """See `Driver.unpin`: nothing was pinned."""
