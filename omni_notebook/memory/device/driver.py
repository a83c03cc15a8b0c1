"""What a pool over vLLM's allocator needs of the device: acting on segments, and measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import torch


class Allocation(NamedTuple):
    """One segment in the allocator's books; `data` is the allocator's own entry, the allocation's identity."""

    address: int
    size_bytes: int
    tag: str
    data: Any


class Reserved(NamedTuple):
    """What torch's allocator holds outside the pool, bytes: its ordinary segments, and private pools (CUDA graphs)."""

    untagged_bytes: int
    graphs_bytes: int


class Driver(Protocol):
    """Acts on the device. Every call that the device refuses raises `DeviceError`."""

    platform: str
    device: str
    device_name: str

    def attach(self) -> None:
        """Make the device the calling thread's own."""
        ...

    def enter(self) -> None:
        """`attach`, and wait until the device has done all that was started."""
        ...

    def allocations(self) -> Mapping[int, Allocation]:
        """The allocator's segments on this device by address; any thread."""
        ...

    def is_live(self, allocation: Allocation) -> bool:
        """Whether the allocator still has it."""
        ...

    def set_asleep(self, allocation: Allocation, asleep: bool) -> None:
        """Tell the allocator, where its version has books about that."""
        ...

    def guard_frees(self, before: Callable[[int], None]) -> None:
        """Have `before(address)` called before the allocator unmaps a segment that torch gives back; any thread."""
        ...

    def map(self, allocation: Allocation) -> None:
        """Give a segment that is not mapped fresh pages at its address."""
        ...

    def unmap(self, allocation: Allocation) -> None:
        """Give a mapped segment's pages up; its address stays reserved.

        A `DeviceError` with `lost` says that its contents are gone all the same: it counts as unmapped.
        """
        ...

    def is_mapped(self, allocation: Allocation) -> bool | None:
        """Whether pages are there, asked of the device, else of the allocator's books; None where neither tells."""
        ...

    def make_freeable(self, allocation: Allocation) -> None:
        """See that the allocator's free of a segment that has no pages does no harm."""
        ...

    def clear_error(self) -> None:
        """Forget the error that the extension keeps after a free that failed."""
        ...

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        """Begin to copy between any two addresses, host or device; `finish` waits for it."""
        ...

    def zero(self, address: int, n_bytes: int) -> None:
        """Begin to fill device memory with zeroes, beside copies; `finish` waits for it."""
        ...

    def bytes_at(self, address: int, n_bytes: int) -> torch.Tensor | None:
        """Mapped device memory as a uint8 tensor over the same bytes; None where the platform has no way to one."""
        ...

    def mark(self, *, fills: bool = False) -> Any:
        """A mark behind all copies (or all fills) that were begun, for `follow` and `reached`."""
        ...

    def follow(self, mark: Any) -> None:
        """Have what this thread's stream of torch's begins from now on wait for a mark; the thread does not."""
        ...

    def reached(self, mark: Any) -> None:
        """Wait until the device has come to a mark; once for each."""
        ...

    def wait(self) -> None:
        """Wait for all copies and fills that were begun; any thread."""
        ...

    def finish(self) -> None:
        """`wait`, by the thread that began them: until it begins others there is nothing to wait for."""
        ...

    def pin(self, address: int, n_bytes: int) -> bool:
        """Page-lock host memory for fast copies; whether that worked."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin`; where that is refused the memory stays locked."""
        ...

    def near_cpus(self) -> frozenset[int]:
        """The processors near the device; empty where nobody says."""
        ...

    def trim(self) -> None:
        """Give back what torch's allocator caches and nobody uses."""
        ...

    def free_bytes(self) -> int:
        """Device memory that is free."""
        ...

    def reserved(self) -> Reserved:
        """What torch holds outside the pool."""
        ...


class Probe(Protocol):
    """Measures the device from outside the pool's books; `device_source` is what `device_bytes` asks."""

    device_source: str

    def process_bytes(self) -> int | None:
        """What this process holds on the device; None where it is not shown: it holds nothing, or ids are hidden.

        Raises:
            DeviceError: it could not be measured.
        """
        ...

    def device_bytes(self) -> int:
        """What all processes hold on the device.

        Raises:
            DeviceError: it could not be measured.
        """
        ...

    def exclusive(self) -> AbstractContextManager[bool]:
        """Keep others of ours from changing the device's memory meanwhile; False: someone would not let go in time."""
        ...
