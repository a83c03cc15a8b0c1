"""Could a trainer take this much now? A process of its own takes it, touches it and gives it back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omni_notebook import units
from omni_notebook.errors import OmniError
from omni_notebook.memory.host import host_memory
from omni_notebook.protocol import MIB
from omni_notebook.verbs.auditing.child import Child
from omni_notebook.verbs.auditing.record import ProbeLine

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from omni_notebook.memory.base import HostMemory

STEP_BYTES = 64 * MIB
RESERVE_BYTES = 256 * MIB
_RESERVE_SHARE = 0.02


class Probe:
    """Takes `asked_bytes` step by step; `stop` ends it.

    `room` says what the machine, or the cgroup, still has; a reserve of it (256 MiB or 2 %) is never touched.
    """

    def __init__(self, asked_bytes: int, stop: threading.Event, room: Callable[[], HostMemory] = host_memory) -> None:
        self._asked = asked_bytes
        self._stop = stop
        self._room = room
        self._taken = 0

    def take(self) -> ProbeLine:
        """Try; what came of it. All is given back when this returns."""
        started_s = time.perf_counter()
        available = self._available()
        pid, outcome = None, self._refusal(available)
        if outcome is None:
            try:
                with Child("taker.py") as child:
                    pid, outcome = child.pid, self._fill(child)
            except (OSError, OmniError) as error:
                outcome = f"stopped at {units.size(self._taken)}: {error}"
        return ProbeLine(
            asked_bytes=self._asked,
            taken_bytes=self._taken,
            available_bytes=available,
            pid=pid,
            ms=(time.perf_counter() - started_s) * 1000,
            outcome=outcome,
        )

    def _available(self) -> int:
        """What may be taken: room without the reserve."""
        room = self._room()
        return max(0, room.available_bytes - max(RESERVE_BYTES, int(_RESERVE_SHARE * room.limit_bytes)))

    def _refusal(self, available: int) -> str | None:
        if self._asked <= available:
            return None
        return f"not tried: {units.size(available)} are free beside the reserve that keeps the machine alive"

    def _fill(self, child: Child) -> str:
        while self._taken < self._asked:
            step = min(STEP_BYTES, self._asked - self._taken)
            if self._stop.is_set():
                return f"called off at {units.size(self._taken)}"
            if self._available() < step:
                return f"stopped at {units.size(self._taken)}: someone else took memory meanwhile"
            answer = child.ask(str(step))
            if answer != "ok":
                return f"stopped at {units.size(self._taken)}: {answer}"
            self._taken += step
        return "taken, touched and given back"
