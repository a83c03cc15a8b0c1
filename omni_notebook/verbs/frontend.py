"""What a verb needs from whoever runs it: a notebook, a terminal, a test."""

from __future__ import annotations

import concurrent.futures
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from omni_notebook.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from omni_notebook.protocol import OmniACK
    from omni_notebook.verbs.engine_api import Engine

_T = TypeVar("_T")

POLL_S = 0.05


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

    def dashboard(self, engine: Engine) -> object:
        """A live view of an engine, which shows itself as a cell's result.

        Raises:
            UnsupportedError: this front end has none.
        """


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
