"""What an engine and a rank's process say to each other, and the types of each worker method's arguments and answer."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import msgspec

from omni_notebook.executors.mp.faults import Fault
from omni_notebook.protocol import LoRARequest, OmniACK, RankStatus, SleepTask, WakeTask
from omni_notebook.worker.batches import (
    ArBatch,
    DiffusionBatch,
    Executed,
    ImageAnswer,
    Prefetch,
    SequenceAnswer,
    StepBatch,
)
from omni_notebook.worker.reports import LoadReport, LoRAReport, WakeOutlook
from omni_notebook.worker.tensors import TensorChunk, TensorHeader

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


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    """What an order or a question gave."""

    id: int
    value: msgspec.Raw


class Failure(msgspec.Struct, array_like=True, tag="failure"):
    """What an order raised."""

    id: int
    fault: Fault


class Sample(msgspec.Struct, array_like=True, tag="sample"):
    """The rank's memory; sent when it changed."""

    status: RankStatus


ToParent = Reply | Failure | Sample


def payload(value: Any) -> msgspec.Raw:
    """A value in the place of encoded bytes: it is encoded with the message around it, decoded later by its type."""
    return cast("msgspec.Raw", value)


# ------------------------------------------------------------------------------------------- methods


class Signature(NamedTuple):
    """A worker method as the wire sees it: the tuple type of its arguments, and the type of its answer."""

    args: Any
    answer: Any


_NONE = tuple[()]

METHODS: dict[str, Signature] = {
    "open_rendezvous": Signature(_NONE, str | None),
    "join": Signature(tuple[str], None),
    "load": Signature(_NONE, LoadReport),
    "set_weight_version": Signature(tuple[str], None),
    "execute": Signature(tuple[ArBatch | DiffusionBatch | StepBatch], list[SequenceAnswer] | Executed),
    "collect": Signature(tuple[str], list[ImageAnswer]),
    "prefetch": Signature(tuple[Prefetch], None),
    "cancel": Signature(tuple[str], None),
    "barrier": Signature(_NONE, None),
    "ping": Signature(_NONE, int),
    "prepare_weights": Signature(tuple[str], None),
    "load_weights": Signature(tuple[str, str | None], str),
    "prepare_tensors": Signature(tuple[tuple[TensorHeader, ...] | None], None),
    "load_tensors": Signature(tuple[TensorChunk], None),
    "finish_tensors": Signature(tuple[str | None], str),
    "revoke_weights": Signature(_NONE, None),
    "weights_valid": Signature(_NONE, bool),
    "prepare_lora": Signature(tuple[LoRARequest], LoRAReport),
    "commit_lora": Signature(tuple[int], dict[str, int]),
    "abort_lora": Signature(tuple[int], None),
    "remove_lora": Signature(tuple[int], dict[str, int]),
    "pin_lora": Signature(tuple[int], None),
    "unpin_lora": Signature(tuple[int], None),
    "prepare_sleep": Signature(tuple[SleepTask], None),
    "commit_sleep": Signature(tuple[str], OmniACK),
    "abort_sleep": Signature(tuple[str], None),
    "drop_backup": Signature(tuple[SleepTask], OmniACK),
    "prepare_wake": Signature(tuple[WakeTask], WakeOutlook),
    "commit_wake": Signature(tuple[str], OmniACK),
    "abort_wake": Signature(tuple[str], None),
    "undo": Signature(tuple[str], None),
    "noop": Signature(tuple[str], OmniACK),
}
"""Every order that the engine gives; a worker's other methods get and give plain types and arrays."""

_PLAIN = Signature(tuple[Any, ...], Any)
ASKED: dict[str, Any] = {"ping": int, "memory": RankStatus}


def signature(method: str) -> Signature:
    """The types of a method."""
    return METHODS.get(method, _PLAIN)
