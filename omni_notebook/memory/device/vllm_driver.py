"""vLLM's CUDA allocator (`CuMemAllocator`) and its extension, as a pool acts on them. Tested with vLLM 0.24.

vLLM allocates; here its segments are only unmapped and mapped again. Facts about the extension that matter (0.24, read
from its machine code): mapping a range that is mapped loses a handle for good; a free of a range that is not mapped
gives the address back, but leaves an error behind that makes the next mapping fail; a free callback that raises leaves
the interpreter lock held.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from omni_notebook.errors import UnsupportedError
from omni_notebook.memory.base import DeviceError
from omni_notebook.memory.device import libcuda
from omni_notebook.memory.device.driver import Allocation, Reserved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_ORDINARY_POOL = (0, 0)
_POOLS = ("small_pool", "large_pool")
_REMEMBERED = 8


class VllmDriver:
    """Drives the `CuMemAllocator` of this process on one device.

    Args:
        index: torch's number of the device.
        cumem: `vllm.device_allocator.cumem`.
        cuda: `torch.cuda`.
        driver: `memory.device.libcuda`.
    """

    def __init__(self, index: int, cumem: Any, *, cuda: Any = torch.cuda, driver: Any = libcuda) -> None:
        self._index = index
        self._cumem = cumem
        self._cuda = cuda
        self._driver = driver
        self._allocator = cumem.CuMemAllocator.get_instance()
        self.device = f"cuda:{index}"
        self.device_name = str(cuda.get_device_name(index))
        cuda.set_device(index)
        self._copying = self._filling = 0  # streams, made when first used
        self._busy: set[int] = set()
        self._reserved: dict[tuple[int, ...], Reserved] = {}
        # vLLM is awake when this is made: a driver that calls nothing mapped can not be asked.
        self._tells = any(driver.is_mapped(address) is True for address in self.allocations())

    def enter(self) -> None:
        """See `Driver.enter`."""
        with _driver_errors("synchronize"):
            self._cuda.set_device(self._index)
            self._cuda.synchronize(self._index)

    # ---------------------------------------------------------------------------------- books

    def allocations(self) -> Mapping[int, Allocation]:
        """See `Driver.allocations`."""
        entries = self._allocator.pointer_to_data.copy().items()
        return {
            address: Allocation(address, data.handle[1], data.tag, data)
            for address, data in entries
            if data.handle[0] == self._index
        }

    def is_live(self, allocation: Allocation) -> bool:
        """See `Driver.is_live`."""
        return self._allocator.pointer_to_data.get(allocation.address) is allocation.data

    def set_asleep(self, allocation: Allocation, asleep: bool) -> None:
        """See `Driver.set_asleep`; vLLM 0.24 keeps no such books."""
        if hasattr(allocation.data, "is_asleep"):
            allocation.data.is_asleep = asleep

    def guard_frees(self, before: Callable[[int], None]) -> None:
        """See `Driver.guard_frees`.

        The extension calls one free callback of the process; ours takes its place and calls vLLM's. It is set on
        vLLM's allocator too, which hands it to the extension again with every new memory pool.
        """
        original = self._allocator.python_free_callback

        @functools.wraps(original)
        def free(address: int) -> Any:
            with contextlib.suppress(Exception):  # raising here leaves the interpreter lock held
                before(address)
            return original(address)

        self._allocator.python_free_callback = free
        self._cumem.init_module(self._allocator.python_malloc_callback, free)

    # ------------------------------------------------------------------------------- segments

    def map(self, allocation: Allocation) -> None:
        """See `Driver.map`."""
        with _driver_errors("map"):
            self._cumem.create_and_map(allocation.data.handle)

    def unmap(self, allocation: Allocation) -> None:
        """See `Driver.unmap`."""
        with _driver_errors("unmap"):
            self._cumem.unmap_and_release(allocation.data.handle)

    def is_mapped(self, allocation: Allocation) -> bool | None:
        """See `Driver.is_mapped`."""
        if not self._tells:
            return None
        mapped: bool | None = self._driver.is_mapped(allocation.address)
        return mapped

    def map_placeholder(self, allocation: Allocation) -> None:
        """See `Driver.map_placeholder`."""
        device, n_bytes, address, cell = allocation.data.handle
        self._driver.map_alias(device, address, n_bytes, cell)

    def clear_error(self) -> None:
        """See `Driver.clear_error`: the extension forgets an error once it has raised one."""
        with contextlib.suppress(RuntimeError):
            self._cumem.unmap_and_release((self._index, 0, 0, 0))

    # ----------------------------------------------------------------------------------- bytes

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        """See `Driver.copy`."""
        self._copying = self._copying or self._driver.new_stream()
        self._busy.add(self._copying)
        self._driver.copy(to, source, n_bytes, self._copying)

    def zero(self, address: int, n_bytes: int) -> None:
        """See `Driver.zero`."""
        self._filling = self._filling or self._driver.new_stream()
        self._busy.add(self._filling)
        self._driver.zero(address, n_bytes, self._filling)

    def wait(self) -> None:
        """See `Driver.wait`."""
        for stream in tuple(self._busy):
            self._driver.wait(stream)

    def finish(self) -> None:
        """See `Driver.finish`."""
        self.wait()
        self._busy.clear()

    def pin(self, address: int, n_bytes: int) -> bool:
        """See `Driver.pin`."""
        pinned = int(self._cuda.cudart().cudaHostRegister(address, n_bytes, 0)) == 0
        if not pinned:
            self._cumem.libcudart.lib.cudaGetLastError()  # or the next kernel's check finds it
        return pinned

    def unpin(self, address: int) -> None:
        """See `Driver.unpin`."""
        self._cuda.cudart().cudaHostUnregister(address)

    # ------------------------------------------------------------------------------- measuring

    def trim(self) -> None:
        """See `Driver.trim`."""
        with _driver_errors("empty_cache"):
            self._cuda.empty_cache()

    def free_bytes(self) -> int:
        """See `Driver.free_bytes`."""
        with _driver_errors("mem_get_info"):
            return int(self._cuda.mem_get_info(self._index)[0])

    def reserved(self) -> Reserved:
        """See `Driver.reserved`; pools of the allocator itself are not counted, mapped or not.

        Torch's list of segments takes milliseconds: it is read only when torch's totals are none of the last ones.
        """
        stats = self._cuda.memory_stats_as_nested_dict(self._index)
        totals = tuple(stats[what][pool]["current"] for what in ("reserved_bytes", "segment") for pool in _POOLS)
        if totals not in self._reserved:
            if len(self._reserved) == _REMEMBERED:
                self._reserved.clear()
            self._reserved[totals] = self._read_reserved()
        return self._reserved[totals]

    def _read_reserved(self) -> Reserved:
        ours = set(self._pool_ids())
        untagged = graphs = 0
        for segment in self._cuda.memory_snapshot():
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


@contextlib.contextmanager
def _driver_errors(step: str) -> Iterator[None]:
    """Raise what the extension, the CUDA runtime or torch raise as ours."""
    try:
        yield
    except RuntimeError as error:
        _refused(step, error)


def _refused(step: str, error: RuntimeError) -> NoReturn:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    msg = f"the CUDA driver refused to {step}: {text}"
    raise DeviceError(msg, no_room="out of memory" in text.lower()) from error


def why_no_cumem() -> str | None:
    """Why vLLM's CUDA allocator can not be used here, or None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device is visible to torch"
    try:
        from vllm.device_allocator import cumem  # noqa: PLC0415  (takes seconds)
    except ImportError as error:
        return f"vLLM's allocator can not be imported ({error})"
    return None if cumem.cumem_available else "this vLLM was built without its CUDA allocator extension"


def vllm_driver(index: int) -> VllmDriver:
    """The driver of this process's allocator.

    Raises:
        UnsupportedError: there is none here; names the reason.
    """
    reason = why_no_cumem()
    if reason is not None:
        raise UnsupportedError(reason)
    from vllm.device_allocator import cumem  # noqa: PLC0415  (takes seconds)

    return VllmDriver(index, cumem)
