"""What an engine and a rank's process say to each other."""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec

from omni_notebook.protocol import RankStatus
from omni_notebook.worker.faults import Fault

# ------------------------------------------------------------------------------------- to the child


class Start(msgspec.Struct, array_like=True, tag="start"):
    """The first frame: which class the worker is ("module:Class"), its spec, and the processors it may use."""

    worker: str
    spec: msgspec.Raw
    cpus: tuple[int, ...]


class Order(msgspec.Struct, array_like=True, tag="order"):
    """Call a worker method, after those before it."""

    id: int
    method: str
    args: msgspec.Raw


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """Answered at once, whatever the worker does: the process id, or its memory measured now."""

    id: int
    what: Literal["ping", "memory"]


class Tell(msgspec.Struct, array_like=True, tag="tell"):
    """Call a worker method now, past the orders in progress; nobody waits for it."""

    method: str
    args: msgspec.Raw


class LogLevel(msgspec.Struct, array_like=True, tag="log"):
    """Set the level of the child's root logger."""

    level: str


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """Shut the worker down after the orders before, then end."""


ToChild = Start | Order | Ask | Tell | LogLevel | Stop

# ------------------------------------------------------------------------------------ to the parent


UNASKED = 0
"""The id of a `Reply` to no order: what a worker says by itself."""


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    """What an order or a question gave."""

    id: int
    value: msgspec.Raw


class Failure(msgspec.Struct, array_like=True, tag="failure"):
    """What an order raised."""

    id: int
    fault: Fault


class Sample(msgspec.Struct, array_like=True, tag="sample"):
    """The memory of the rank, or of all the ranks that one process answers for; sent when it changed."""

    statuses: tuple[RankStatus, ...]


ToParent = Reply | Failure | Sample


def payload(value: Any) -> msgspec.Raw:
    """A value in the place of encoded bytes: it is encoded with the message around it, decoded later by its type."""
    return cast("msgspec.Raw", value)


ASKED: dict[str, Any] = {"ping": int, "memory": RankStatus}
