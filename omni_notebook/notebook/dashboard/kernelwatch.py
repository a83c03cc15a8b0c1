"""Whether the kernel would carry a press out now, or only when the cell that runs has ended.

ipykernel 6 answers a press after the running cell. Versions 7.0 to 7.3 answer at once where the page uses a subshell
(JupyterLab does), else after the cell. Since 7.4 a press is answered while an asynchronous cell waits, and after a
synchronous one, whatever the page uses. The page tells nobody of a press that waits, so it is said beforehand.
"""

from __future__ import annotations

import contextlib
import threading
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

BUSY_S = 0.5
WAITS = "A cell is running and this kernel takes presses only after it: a press is queued until the cell ends."
_HELD_BY_ANY_CELL, _HELD_BY_LOOP = "any cell", "a busy loop"


class KernelWatch:
    """Asks the kernel's loop now and then whether it turns; belongs to the thread that calls `waiting`."""

    def __init__(self, shell: InteractiveShell | None, kernel_version: tuple[int, ...]) -> None:
        self._shell = shell
        self._loop: Any = getattr(getattr(shell, "kernel", None), "io_loop", None)
        self._held_by = _HELD_BY_LOOP if kernel_version >= (7, 4) else _HELD_BY_ANY_CELL
        self._asked_s: float | None = None
        self._cell_s: float | None = None
        self.by_subshell = False
        """Whether this page's messages were seen to arrive on a thread of their own."""
        if shell is not None:
            shell.events.register("pre_run_cell", self._begun)
            shell.events.register("post_run_cell", self._over)

    def close(self) -> None:
        """Watch no longer."""
        if self._shell is not None:
            with contextlib.suppress(ValueError):  # someone has taken all of them away
                self._shell.events.unregister("pre_run_cell", self._begun)
                self._shell.events.unregister("post_run_cell", self._over)
        self._shell = self._loop = None

    def heard(self) -> None:
        """A message of the page is being handled on this thread."""
        self.by_subshell = threading.current_thread() is not threading.main_thread()

    def waiting(self) -> bool:
        """Whether a press would have to wait."""
        if self._loop is None:
            return False
        now_s = time.monotonic()
        if self._held_by == _HELD_BY_ANY_CELL:
            return not self.by_subshell and self._cell_s is not None and now_s - self._cell_s > BUSY_S
        if self._asked_s is None:
            self._asked_s = now_s
            self._loop.add_callback(self._turned)
            return False
        return now_s - self._asked_s > BUSY_S

    def _turned(self) -> None:
        self._asked_s = None

    def _begun(self, _info: object) -> None:
        self._cell_s = time.monotonic()

    def _over(self, _result: object) -> None:
        self._cell_s = None


def watch_kernel() -> KernelWatch:
    """A watch of the kernel that this runs in; one that never waits where there is none."""
    from IPython.core.getipython import get_ipython  # noqa: PLC0415  (a notebook has loaded it)

    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return KernelWatch(None, ())
    return KernelWatch(shell, tuple(int(part) for part in version("ipykernel").split(".")[:2]))
