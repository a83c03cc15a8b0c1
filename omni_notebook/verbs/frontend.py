"""What a verb needs from whoever runs it: a notebook, a terminal, a test."""

from __future__ import annotations

import concurrent.futures
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from omni_notebook.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from omni_notebook.protocol import OmniACK
    from omni_notebook.verbs.engine_api import Engine

_T = TypeVar("_T")
_CELL = "<cell>"

POLL_S = 0.05


class CellError(Exception):
    """The user's own code raised in a cell that a verb ran; `error` is what it raised, to be shown as it is."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(said(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class Progress:
    """How far something is: a word for people and a share of the whole, None where it is not known."""

    label: str
    fraction: float | None = None


class Frontend(Protocol):
    """Everything here is called from the thread that runs the verb, never from another one."""

    def write(self, text: str) -> None:
        """Show plain text as it is; no line end is added."""

    def wait(self, future: Future[_T], gauge: Callable[[], Progress] | None, tick: Callable[[], None] | None) -> _T:
        """The future's result; KeyboardInterrupt comes through. Calls `tick` often, `gauge` to show progress."""

    def dress(self, acks: Sequence[OmniACK], order: str, states: dict[int, str]) -> list[OmniACK]:
        """The same ACKs as a list that this front end shows well; `states` are the stages' after the order."""

    def store(self, name: str, value: object) -> None:
        """Keep `value` for the user under `name`."""

    def preview(self, images: Sequence[Any], label: str) -> None:
        """Show unfinished images in the place of those before; no images: take them away."""

    def shorten(self, error: BaseException) -> None:
        """Let an error that is raised outside of a verb show as one line, where this front end can."""

    def check_cell(self, source: str) -> None:
        """Raise ArgumentError or SyntaxError if `run_cell` could not run this."""

    def run_cell(self, source: str) -> BaseException | None:
        """Run the user's code; what it raised, not shown yet and with no frame's local variables kept alive."""

    def show_error(self, error: BaseException) -> None:
        """Show what `run_cell` returned."""

    def forget_error(self) -> None:
        """Let go of the frames of the last error that was shown."""

    def namespace(self) -> dict[str, Any]:
        """The user's variables."""

    def dashboard(self, engine: Engine) -> object:
        """A live view of an engine, which shows itself as a cell's result.

        Raises:
            UnsupportedError: this front end has none.
        """


def said(error: BaseException) -> str:
    """An error's own words; none where its class can not say them."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  (the user's own class)
        return ""


def drop_frames(error: BaseException | None) -> None:
    """Forget the local variables of the frames that an error and its causes keep; frames that still run keep theirs."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


class PlainFrontend:
    """Text on stdout and no progress: the command line's base, and what tests use. `variables` takes `--out`."""

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {}

    def write(self, text: str) -> None:
        """Write to stdout at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def wait(self, future: Future[_T], gauge: Callable[[], Progress] | None, tick: Callable[[], None] | None) -> _T:
        """Wait without showing anything."""
        del gauge
        return poll(future, tick or _nothing)

    def dress(self, acks: Sequence[OmniACK], order: str, states: dict[int, str]) -> list[OmniACK]:
        """A plain list."""
        del order, states
        return list(acks)

    def store(self, name: str, value: object) -> None:
        """Into `variables`."""
        self.variables[name] = value

    def preview(self, images: Sequence[Any], label: str) -> None:
        """Text has no place for pictures."""

    def shorten(self, error: BaseException) -> None:
        """Python shows it as it is."""

    def check_cell(self, source: str) -> None:
        """Compile it."""
        compile(source, _CELL, "exec")

    def run_cell(self, source: str) -> BaseException | None:
        """Run it over `variables`."""
        try:
            exec(compile(source, _CELL, "exec"), self.variables)  # noqa: S102  (the user's own code)
        except BaseException as error:  # noqa: BLE001  (whatever it is, the caller shows it when its work is done)
            drop_frames(error)
            return error
        return None

    def show_error(self, error: BaseException) -> None:
        """As Python does."""
        self.write("".join(traceback.format_exception(error)))

    def forget_error(self) -> None:
        """None is kept here."""

    def namespace(self) -> dict[str, Any]:
        """Those of the script, and `variables`."""
        return {**vars(sys.modules["__main__"]), **self.variables}

    def dashboard(self, engine: Engine) -> object:
        """Text has none.

        Raises:
            UnsupportedError: always.
        """
        del engine
        msg = "the dashboard needs a notebook; omni status shows the state here. Nothing was changed"
        raise UnsupportedError(msg)


def poll(future: Future[_T], tick: Callable[[], None]) -> _T:
    """The future's result, with `tick()` every `POLL_S` and once after the end; a signal is handled in between."""
    while not concurrent.futures.wait([future], timeout=POLL_S).done:
        tick()
    tick()
    return future.result()


def _nothing() -> None:
    return None
