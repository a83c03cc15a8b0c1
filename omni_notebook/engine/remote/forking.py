"""A fork of this process lets go of its connections: with a copy of one, no server would hear that its client left."""

from __future__ import annotations

import os
from typing import Any

_sockets: list[Any] = []
"""Those that are open; any loop's thread adds to it, a fork reads it."""


async def note(event: str, facts: dict[str, Any]) -> None:
    """Remember a connection that was made; a `trace` of httpcore."""
    if event == "connection.connect_tcp.complete":
        made = facts["return_value"].get_extra_info("socket")
        _sockets[:] = [*(one for one in _sockets if one.fileno() >= 0), made]


def _let_go() -> None:
    """In the fork: other objects there know the numbers, so each becomes nothing, and is not free for another file."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in {one.fileno() for one in _sockets} - {-1}:
        os.dup2(nothing, number, inheritable=False)
    os.close(nothing)
    _sockets.clear()


if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(after_in_child=_let_go)
