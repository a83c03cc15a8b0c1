"""The types of each worker method's arguments and answer, for those that call it across a process border."""

from __future__ import annotations

from typing import Any, NamedTuple

from omni_notebook.protocol import LoRARequest, OmniACK, SleepTask, WakeTask
from omni_notebook.worker.batches import (
    ArBatch,
    DiffusionBatch,
    Executed,
    ImageAnswer,
    PipelineBatch,
    Prefetch,
    SequenceAnswer,
    StepBatch,
)
from omni_notebook.worker.reports import LoadReport, LoRAReport, WakeOutlook
from omni_notebook.worker.tensors import TensorChunk, TensorHeader
from omni_notebook.worker.vllm.wire import TextRequest


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
    "execute": Signature(tuple[ArBatch | DiffusionBatch | StepBatch | PipelineBatch], list[SequenceAnswer] | Executed),
    "reached": Signature(tuple[str, int], bool),
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
    "begin_wake": Signature(tuple[WakeTask], WakeOutlook),
    "prepare_wake": Signature(tuple[WakeTask], WakeOutlook),
    "commit_wake": Signature(tuple[str], OmniACK),
    "abort_wake": Signature(tuple[str], None),
    "undo": Signature(tuple[str], None),
    "noop": Signature(tuple[str], OmniACK),
}
"""Every order that the engine gives; a worker's other methods get and give plain types and arrays."""

AT_ONCE = frozenset({"noop"})
"""Methods that do not wait for the orders before them, a running batch among them; any thread may call them."""
HOST_METHODS = {"submit": Signature(tuple[TextRequest], None)}
"""What the host of vLLM is told that is not of plain types."""
_PLAIN = Signature(tuple[Any, ...], Any)


def signature(method: str) -> Signature:
    """The types of a method."""
    return METHODS.get(method) or HOST_METHODS.get(method, _PLAIN)
