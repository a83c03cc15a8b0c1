"""What drivers for CUDA devices share, whoever allocates: copies, fills, page-locked host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_notebook.memory.base import DeviceError
from omni_notebook.memory.device.allocator import AllocatorDriver

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class CudaDriver(AllocatorDriver):
    """The part of a `Driver` for CUDA that moves bytes.

    Args:
        platform, index, allocator, init_module: see `AllocatorDriver`.
        cuda: `torch.cuda`.
        driver: `memory.device.libcuda`, or what has its functions.
    """

    name = "CUDA"

    def __init__(
        self, platform: str, index: int, allocator: Any, init_module: Callable[..., Any], *, cuda: Any, driver: Any
    ) -> None:
        super().__init__(platform, index, allocator, init_module, cuda)
        self._driver = driver
        self._copying = self._filling = 0  # streams
        self._busy: set[int] = set()

    def enter(self) -> None:
        """See `Driver.enter`; the streams, for which the driver takes memory, are there before a sleep is measured."""
        super().enter()
        self._make_streams()

    def _make_streams(self) -> None:
        self._copying = self._copying or self._driver.new_stream()
        self._filling = self._filling or self._driver.new_stream()

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        """See `Driver.copy`."""
        self._make_streams()
        self._busy.add(self._copying)
        self._driver.copy(to, source, n_bytes, self._copying)

    def zero(self, address: int, n_bytes: int) -> None:
        """See `Driver.zero`."""
        self._make_streams()
        self._busy.add(self._filling)
        self._driver.zero(address, n_bytes, self._filling)

    def bytes_at(self, address: int, n_bytes: int) -> torch.Tensor | None:
        """See `Driver.bytes_at`."""
        found: torch.Tensor = self._driver.tensor_at(self._index, address, n_bytes, None)
        return found

    def mark(self, *, fills: bool = False) -> int:
        """See `Driver.mark`."""
        self._make_streams()
        mark: int = self._driver.record_event(self._filling if fills else self._copying)
        return mark

    def follow(self, mark: int) -> None:
        """See `Driver.follow`."""
        self._driver.follow_event(self._torch.current_stream(self._index).cuda_stream, mark)

    def reached(self, mark: int) -> None:
        """See `Driver.reached`."""
        self._driver.wait_event(mark)

    def wait(self) -> None:
        """See `Driver.wait`."""
        errors = []
        for stream in tuple(self._busy):
            try:
                self._driver.wait(stream)
            except DeviceError as error:  # what the others have begun must end too
                errors.append(error)
        if errors:
            raise errors[0]

    def finish(self) -> None:
        """See `Driver.finish`."""
        try:
            self.wait()
        finally:
            self._busy.clear()

    def pin(self, address: int, n_bytes: int) -> bool:
        """See `Driver.pin`."""
        pinned: bool = self._driver.pin(address, n_bytes)
        return pinned

    def unpin(self, address: int) -> None:
        """See `Driver.unpin`."""
        self._driver.unpin(address)
