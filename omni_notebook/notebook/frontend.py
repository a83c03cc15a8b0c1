"""The notebook as a front end: a line of progress, variables, tables, and waits that Ctrl-C ends.

Everything runs on the thread that runs the cell; engine threads are polled, they never print.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from IPython.display import display

from omni_notebook.notebook import cells
from omni_notebook.notebook.results import AckList, image_png
from omni_notebook.notebook.shortening import shortened
from omni_notebook.verbs.frontend import PlainFrontend, poll

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from IPython.core.interactiveshell import InteractiveShell

    from omni_notebook.protocol import OmniACK
    from omni_notebook.verbs.engine_api import Engine
    from omni_notebook.verbs.frontend import Progress

_T = TypeVar("_T")

SHOW_AFTER_S = 1.0
_UPDATE_S = 0.2


class NotebookFrontend(PlainFrontend):
    """Shows in the cell that runs, keeps `--out` in the user's namespace."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__()
        self._shell = shell
        self._pictures = Place()
        self._next_picture_s = 0.0

    def wait(self, future: Future[_T], gauge: Callable[[], Progress] | None, tick: Callable[[], None] | None) -> _T:
        """Wait, with a line of progress after `SHOW_AFTER_S`."""
        line = StatusLine(gauge, rich=hasattr(self._shell, "kernel"))

        def step() -> None:
            if tick is not None:
                tick()
            line.update()

        with interruptible():
            try:
                return poll(future, step)
            finally:
                line.close()

    def dress(self, acks: Sequence[OmniACK], order: str, states: dict[int, str]) -> list[OmniACK]:
        """A list that shows as a table."""
        return AckList(acks, order, states)

    def store(self, name: str, value: object) -> None:
        """Into the user's namespace."""
        self._shell.user_ns[name] = value

    def shorten(self, error: BaseException) -> None:
        """One red line."""
        shortened(error)

    def check_cell(self, source: str) -> None:
        """See `cells.check`."""
        cells.check(self._shell, source)

    def run_cell(self, source: str) -> BaseException | None:
        """In the user's namespace, as a cell."""
        return cells.run(self._shell, source)

    def show_error(self, error: BaseException) -> None:
        """Its rendered traceback."""
        self.write(cells.rendered(error))

    def forget_error(self) -> None:
        """What `%debug` would look at goes."""
        self._shell.InteractiveTB.tb = None

    def namespace(self) -> dict[str, Any]:
        """The user's variables, and the outputs that IPython keeps in `Out`."""
        return cells.variables(self._shell)

    def preview(self, images: Sequence[Any], label: str) -> None:
        """The images in one place of the cell's output, at most five times a second."""
        now = time.monotonic()
        if not images:
            self._pictures.clear()
        elif now >= self._next_picture_s:
            self._next_picture_s = now + _UPDATE_S
            self._pictures.show({"text/plain": label, "image/png": image_png(list(images))})

    def dashboard(self, engine: Engine) -> object:
        """The widget; it stays when the cell has ended, until it is closed or its engine ends."""
        from omni_notebook.notebook.dashboard import dashboard  # noqa: PLC0415  (loaded when used)

        return dashboard(engine)


class StatusLine:
    """A line that says how far something is; it appears after a second and is gone at the end."""

    def __init__(self, gauge: Callable[[], Progress] | None, *, rich: bool) -> None:
        self._gauge = gauge
        self._begin = time.monotonic()
        self._next = self._begin + SHOW_AFTER_S
        self._rich = rich
        self._place = Place()
        self._width = 0

    def update(self) -> None:
        """Show the latest progress, at most five times a second."""
        now = time.monotonic()
        if self._gauge is None or now < self._next:
            return
        self._next = now + _UPDATE_S
        progress = self._gauge()
        share = f" · {progress.fraction:.0%}" if progress.fraction else ""
        self._show(f"{progress.label}{share} · {now - self._begin:.0f} s")

    def close(self) -> None:
        """Take the line away; a saved notebook keeps nothing of it."""
        self._place.clear()
        if self._width:
            self._show("")

    def _show(self, text: str) -> None:
        if self._rich:
            self._place.show({"text/plain": text})
            return
        sys.stderr.write(f"\r{text.ljust(self._width)}" if text else f"\r{' ' * self._width}\r")
        sys.stderr.flush()
        self._width = len(text)


class Place:
    """An output of a cell that changes where it stands, and leaves nothing behind."""

    def __init__(self) -> None:
        self._shown: Any = None

    def show(self, bundle: dict[str, Any]) -> None:
        """Put a MIME bundle there."""
        if self._shown is None:
            self._shown = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._shown.update(bundle, raw=True)

    def clear(self) -> None:
        """Take away what is there."""
        if self._shown is not None:
            self._shown.update({"text/plain": ""}, raw=True)
            self._shown = None


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
