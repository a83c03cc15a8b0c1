"""Contents that a wake has begun to copy back: whoever needs some waits for those, on the device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from omni_notebook.memory.base import DeviceError
from omni_notebook.memory.device.tensors import plain_tensors, span_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from omni_notebook.memory.device.driver import Driver
    from omni_notebook.memory.device.segments import DeviceSegment, SegmentTable


class Arrivals:
    """Marks behind the copies of segments, in the order in which they were begun: who follows one follows all before.

    `follow` and `follow_all` belong to one thread and one stream of torch's; `end` may be another's. Nothing that is
    computed behind them may leave the rank before `DevicePool.finish_wake` has returned.
    """

    def __init__(self, driver: Driver, table: SegmentTable) -> None:
        self._driver, self._table = driver, table
        self._lock = threading.Lock()
        self._marks: list[Any] = []
        self._places: dict[DeviceSegment, int] = {}
        self._fills: list[Any] = []
        self._followed, self._fills_followed = -1, False

    def __len__(self) -> int:
        return len(self._marks)

    def begun(self, segment: DeviceSegment) -> None:
        """The copy into a segment was begun just now."""
        self._places[segment] = len(self._marks)
        self._marks.append(self._driver.mark())

    def filled(self) -> None:
        """All fills were begun: whoever follows anything follows them, for what they clear is written to by anyone."""
        self._fills.append(self._driver.mark(fills=True))

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have torch's stream wait for the segments of these.

        Raises:
            DeviceError: the driver refused.
        """
        places = [self._place(tensor) for tensor in tensors]
        self._follow_to(max(places, default=-1))

    def follow_all(self) -> None:
        """Have torch's stream wait for everything.

        Raises:
            DeviceError: the driver refused.
        """
        self._follow_to(len(self._marks) - 1)

    def _place(self, tensor: torch.Tensor) -> int:
        spans = (span_of(name, plain, self._table) for name, plain in plain_tensors("", tensor))
        return max((self._places.get(span.segment, -1) for span in spans if span is not None), default=-1)

    def _follow_to(self, place: int) -> None:
        with self._lock:  # a mark must not go between the look and the call
            if not self._fills_followed:
                self._fills_followed = True
                for mark in self._fills:
                    self._driver.follow(mark)
            if self._followed < place < len(self._marks):
                self._driver.follow(self._marks[place])
                self._followed = place

    def end(self) -> None:
        """All has been waited for: the marks go, and who follows now has nothing to wait for.

        Raises:
            DeviceError: a copy failed.
        """
        errors: list[DeviceError] = []
        with self._lock:
            marks, self._marks, self._fills = [*self._marks, *self._fills], [], []
            for mark in marks:
                try:
                    self._driver.reached(mark)
                except DeviceError as error:  # the other marks must go too
                    errors.append(error)
        if errors:
            raise errors[0]
