"""The notebook as a front end: progress bars, variables, tables, and waits that Ctrl-C ends.

Everything runs on the thread that runs the cell; engine threads are polled, they never print.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from IPython.display import display

from omni_notebook.notebook.results import AckList
from omni_notebook.verbs.frontend import PlainFrontend, poll

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from IPython.core.interactiveshell import InteractiveShell

    from omni_notebook.protocol import OmniACK
    from omni_notebook.verbs.frontend import Progress

_T = TypeVar("_T")

SHOW_AFTER_S = 1.0
_UPDATE_S = 0.2
_BAR_FORMAT = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}"


class NotebookFrontend(PlainFrontend):
    """Shows in the cell that runs, keeps `--out` in the user's namespace."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__()
        self._shell = shell

    def wait(self, future: Future[_T], gauge: Callable[[], Progress] | None, tick: Callable[[], None] | None) -> _T:
        """Wait with a progress bar after `SHOW_AFTER_S`."""
        bar = ProgressBar(gauge)

        def step() -> None:
            if tick is not None:
                tick()
            bar.update()

        with interruptible():
            try:
                return poll(future, step)
            finally:
                bar.close()

    def dress(self, acks: Sequence[OmniACK]) -> list[OmniACK]:
        """A list that shows as a table."""
        return AckList(acks)

    def store(self, name: str, value: object) -> None:
        """Into the user's namespace."""
        self._shell.user_ns[name] = value


class ProgressBar:
    """A tqdm bar that appears only when something takes more than a second."""

    def __init__(self, gauge: Callable[[], Progress] | None) -> None:
        self._gauge = gauge
        self._next = time.monotonic() + SHOW_AFTER_S
        self._bar: Any = None
        self._shown: Any = None

    def update(self) -> None:
        """Show the latest progress, at most five times a second."""
        if self._gauge is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _UPDATE_S
        progress = self._gauge()
        if self._bar is None:
            self._open(progress.label)
        self._bar.set_description_str(progress.label, refresh=False)
        self._bar.n = round(100 * (progress.fraction or 0.0))
        self._bar.refresh()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._shown is not None:
            self._shown.update({"text/plain": ""}, raw=True)  # a saved notebook keeps no dead widget
            self._shown = None

    def _open(self, label: str) -> None:
        self._bar = _new_bar(label)
        if hasattr(self._bar, "container"):
            self._shown = display(self._bar.container, display_id=True)  # type: ignore[no-untyped-call]


def _new_bar(label: str) -> Any:
    from tqdm.auto import tqdm  # noqa: PLC0415  (loaded when used)
    from tqdm.notebook import tqdm_notebook  # noqa: PLC0415

    # A subclass without the monitor: tqdm's own thread would draw from a thread.
    quiet = type("Bar", (tqdm,), {"monitor_interval": 0})
    look: dict[str, Any] = {"desc": label, "total": 100, "leave": False, "bar_format": _BAR_FORMAT}
    if issubclass(tqdm, tqdm_notebook):
        look["display"] = False  # the caller displays it, so that it can be taken away
    return quiet(**look)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt here, whatever handler the kernel has set for asynchronous cells."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if before is not None:  # None: set outside Python, and not ours to put back
            signal.signal(signal.SIGINT, before)
