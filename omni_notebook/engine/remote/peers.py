"""Which engine answers at an address: a server may come back as another one, with states of its own."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

NAME_HEADER = "X-Omni-Engine"
"""In each answer of a server of this package: `PID.RANDOM@HOST`, another one after every start of an engine."""


ORDER_HEADER = "X-Omni-Order"
"""In an order: a name of its own. In GET /v1/omni/version: the order that is asked about."""
OTHER_ENGINE = "OTHER_ENGINE"
"""The code of a refusal: the order named another engine than the one that answers."""


class Named(NamedTuple):
    """An engine's name, taken apart."""

    pid: int | None
    host: str

    @classmethod
    def read(cls, name: str) -> Named:
        """What a name tells; None and an empty text where it is of another form."""
        first, _, host = name.partition("@")
        number = first.partition(".")[0]
        return cls(int(number) if number.isascii() and number.isdecimal() else None, unquote(host))


class Peer:
    """Notices when another engine answers than before; from any thread.

    Args:
        url: where it answers.
        came: a method that is called with the new engine's name and the line for people, once for each other engine;
            whose it is is not kept alive.
    """

    def __init__(self, url: str, came: Callable[[str, str], None]) -> None:
        self._url = url
        self._came = weakref.WeakMethod(came)
        self._lock = threading.Lock()
        self.name: str | None = None
        """Of the engine that answered last; None before the first, and where a server tells none."""
        self.note: str | None = None
        """The line about the last change."""
        self._unsaid: str | None = None

    def heard(self, headers: Mapping[str, str]) -> None:
        """Take the head of an answer."""
        name = headers.get(NAME_HEADER)
        if name is None or name == self.name:
            return
        with self._lock:
            before, self.name = self.name, name
            if before in {None, name}:
                return
            self.note = self._unsaid = told = _told(self._url, before, name)
        came = self._came()
        if came is not None:
            came(name, told)

    def said(self, lines: Collection[str]) -> None:
        """A person has seen these lines: orders are for the engine that is there now."""
        with self._lock:
            if self._unsaid in lines:
                self._unsaid = None

    def unsaid(self) -> str | None:
        """The line about the last change, if nobody was told of it; whoever takes it tells."""
        with self._lock:
            unsaid, self._unsaid = self._unsaid, None
            return unsaid


def _told(url: str, before: str | None, name: str) -> str:
    was, now = Named.read(before or ""), Named.read(name)
    where = f" on {now.host}" if now.host != was.host else ""
    whence = "which started it anew" if now == was else f"before: process {was.pid}"
    return (
        f"another engine answers at {url} since {time.strftime('%H:%M:%S')} (process {now.pid}{where}; {whence}): "
        "states and memory are its own, orders to the one before went with that"
    )
