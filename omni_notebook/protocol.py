"""The plain types that cross layers and processes: ACKs, tasks, states, events, requests, status.

No torch and no IPython here. Bytes are ints, times are milliseconds where the name says `_ms` and seconds where
it says `_s`. Source of the ACK's fields: the specification's "OmniACK Dataclass Fields" and "Metadata Field Analysis".
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import msgspec

from omni_notebook.errors import ArgumentError

GIB = 1024**3
MIB = 1024**2


def gib(n_bytes: int) -> str:
    """`n_bytes` as GiB with two decimals, the specification's form ("78.57")."""
    return f"{n_bytes / GIB:.2f}"


class MemoryState(StrEnum):
    """Where a stage's device memory is."""

    AWAKE = "AWAKE"
    FALLING_ASLEEP = "FALLING_ASLEEP"
    ASLEEP = "ASLEEP"
    WAKING = "WAKING"
    PARTLY_AWAKE = "PARTLY_AWAKE"
    NEEDS_WEIGHTS = "NEEDS_WEIGHTS"
    FAILED = "FAILED"


class PauseState(StrEnum):
    """Whether a stage takes part in a pause."""

    OPEN = "OPEN"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    PAUSE_FAILED = "PAUSE_FAILED"


class PauseMode(StrEnum):
    """What a pause does with the requests that are there."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class AckStatus(StrEnum):
    """A rank's answer."""

    SUCCESS = "SUCCESS"
    ERROR = "ERROR"


ROLLED_BACK = "ROLLED_BACK"
"""The `error_code` of a rank that could, and went back because another one failed."""


class RequestState(StrEnum):
    """Where a request is; the last three are terminal."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


# ---------------------------------------------------------------------------------------------- ACK


class RankId(msgspec.Struct, frozen=True, order=True):
    """Which worker: its stage, its replica in the stage, its rank in the replica's tensor-parallel group."""

    stage_id: int
    replica: int
    rank: int

    @property
    def title(self) -> str:
        """`rank 1`; past a stage's first replica `rank 1 of replica 2`."""
        return f"rank {self.rank} of replica {self.replica}" if self.replica else f"rank {self.rank}"


class TagBytes(msgspec.Struct, frozen=True):
    """One tag's part of a sleep: bytes that left the device and where a copy of them is."""

    freed: int
    backup: str | None  # "spill" | "checkpoint" | "pinned" | "pageable" | "host" | None (nothing kept)


class PhasesMs(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds a transition spent in each phase; a phase that did not happen is null."""

    quiesce: float | None = None
    checksum: float | None = None
    copy: float | None = None
    unmap: float | None = None
    map: float | None = None
    reload: float | None = None
    verify: float | None = None


class ResidualBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's process still holds after a sleep, by cause; null where the platform can not tell."""

    context: int | None = None
    graphs: int | None = None
    collectives: int | None = None
    untagged: int | None = None
    other: int | None = None


class AckMetadata(msgspec.Struct, kw_only=True):
    """The ACK's `metadata`: all keys are always there, null where they do not apply."""

    source: str
    total_freed_gib: str = "0.00"
    rank_residual_gib: str | None = None
    state: Literal["COLD", "WARM"] | None = None
    level: int | None = None
    noop: bool = False
    tags: dict[str, TagBytes] = msgspec.field(default_factory=dict)
    expected_bytes: int | None = None
    observed_bytes: int | None = None
    observed_scope: Literal["mapping", "process", "device"] | None = None
    mapped_bytes: int | None = None
    residual_bytes: int | None = None
    residual: ResidualBytes | None = None
    host_backup_bytes: int | None = None
    host_freed_bytes: int | None = None
    backup_location: str | None = None
    copied_bytes: int | None = None
    skipped_clean_bytes: int | None = None
    recoverable: bool | None = None
    latency_ms: float | None = None
    phases_ms: PhasesMs = msgspec.field(default_factory=PhasesMs)
    copy_gib_per_s: float | None = None
    cuda_graph_recalled: bool | None = None
    weight_version: str | None = None
    replica: int = 0
    pid: int | None = None
    device: str | None = None
    current_vram_gib: str | None = None
    error_code: str | None = None
    shared_with: list[str] | None = None
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, ints and strings, as they stand in `OmniACK.metadata`."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


@dataclass(slots=True, kw_only=True)
class OmniACK:
    """One rank's answer to one sleep or wake order.

    Attributes:
        task_id: shared by all ACKs of one order.
        status: "SUCCESS" or "ERROR".
        stage_id: the stage that responded.
        rank: the rank within the tensor-parallel group (`metadata["replica"]` tells copies apart).
        freed_bytes: device memory that this rank gave back, measured around the transition.
        metadata: `AckMetadata` as a plain dict.
        error_msg: why the status is ERROR, else None.
    """

    task_id: str
    status: str
    stage_id: int
    rank: int
    freed_bytes: int
    metadata: dict[str, Any]
    error_msg: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the status is SUCCESS."""
        return self.status == AckStatus.SUCCESS


# -------------------------------------------------------------------------------------------- tasks


def new_task_id() -> str:
    """A fresh id for one sleep or wake order."""
    return uuid.uuid4().hex[:12]


class SleepTask(msgspec.Struct, frozen=True, kw_only=True):
    """An order to sleep, as every rank gets it.

    `tags` None means every tag. `discard` False refuses (in prepare) a level 2 that no path could undo.
    `quiesce_ms` is what bringing the scheduler to rest took before the order went out.
    """

    task_id: str
    level: int
    tags: tuple[str, ...] | None = None
    discard: bool = True
    quiesce_ms: float = 0.0


class WakeTask(msgspec.Struct, frozen=True, kw_only=True):
    """An order to wake; `reload` False maps without loading (→ NEEDS_WEIGHTS after a level 2)."""

    task_id: str
    tags: tuple[str, ...] | None = None
    reload: bool = True


# ----------------------------------------------------------------------------------------- adapters


def is_unicode(text: str) -> bool:
    """Whether a name can be sent, stored and shown; a lone surrogate, of a broken file name say, can not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class LoRARequest(msgspec.Struct, frozen=True):
    """A LoRA adapter: what people call it, its number (1 or more), its folder in peft's format. vLLM's field names.

    Raises:
        ArgumentError: an empty name or path, a name that is not Unicode, or a number below 1.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if isinstance(self.lora_path, os.PathLike):
            msgspec.structs.force_setattr(self, "lora_path", os.fspath(self.lora_path))
        for key in ("lora_name", "lora_path"):
            value = getattr(self, key)
            if not isinstance(value, str) or not value.strip():
                msg = f"{key}={value!r} is not a non-empty string; nothing changed"
                raise ArgumentError(msg)
        if not is_unicode(self.lora_name):
            msg = f"lora_name={self.lora_name!r} is not Unicode text; nothing changed"
            raise ArgumentError(msg)
        number: Any = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            msg = f"lora_int_id={number!r} is not a whole number of 1 or more; nothing changed"
            raise ArgumentError(msg)

    @property
    def title(self) -> str:
        """`'style' (id 3)`."""
        return f"{self.lora_name!r} (id {self.lora_int_id})"


class LoRAStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter of a stage: the largest rank of its matrices, and whether it never leaves its slot."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    rank: int
    pinned: bool


# ----------------------------------------------------------------------------------------- requests

MAX_INFERENCE_STEPS = 1000
MAX_NEW_TOKENS = 1_000_000


class OmniSamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to generate; a stage takes what concerns it.

    A value that is the default here counts as not said where stages have defaults of their own (vLLM-Omni's); what a
    dict names is always said.

    Attributes:
        seed: 64-bit seed of sampling and of the initial noise; None draws one (reported in `metrics["seed"]`).
        num_inference_steps: denoise steps of a diffusion stage, 1 … 1000.
        guidance_scale: classifier-free guidance weight, 1.0 = off.
        width, height: image size in pixels; None = the model's own.
        max_tokens: most new tokens of an AR stage.
        temperature: 0 = greedy.
        top_p, top_k: nucleus and top-k cut; top_k 0 = off.
        stop_token_ids: more ids that end a sequence.

    Raises:
        ArgumentError: a value is out of range (from `validated`).
    """

    seed: int | None = None
    num_inference_steps: int = 20
    guidance_scale: float = 2.0
    width: int | None = None
    height: int | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def validated(self) -> OmniSamplingParams:
        """Itself, if every value is in range."""
        ranges = (
            ("num_inference_steps", self.num_inference_steps, 1, MAX_INFERENCE_STEPS),
            ("guidance_scale", self.guidance_scale, 0.0, 100.0),
            ("max_tokens", self.max_tokens, 1, MAX_NEW_TOKENS),
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_p", self.top_p, 1e-6, 1.0),
            ("top_k", self.top_k, 0, 1_000_000),
        )
        for name, value, low, high in ranges:
            if not low <= value <= high:  # also catches NaN
                msg = f"{name}={value!r} is out of range: it must lie between {low} and {high}; nothing was started"
                raise ArgumentError(msg)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            msg = f"seed={self.seed!r} is out of range: it must lie between 0 and 2**63 - 1; nothing was started"
            raise ArgumentError(msg)
        return self


def _plain(value: Any) -> Any:
    """A numpy scalar as the Python number that it stands for; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def sampling_params_from(value: Any) -> OmniSamplingParams:
    """The typed class from what a caller gave.

    Raises:
        ArgumentError: an unknown key, a wrong type or a value out of range.
    """
    if isinstance(value, OmniSamplingParams):
        value = {name: getattr(value, name) for name in OmniSamplingParams.__struct_fields__}
    if value is not None and not isinstance(value, dict):
        msg = f"sampling_params={value!r} is not a dict or OmniSamplingParams; nothing was started"
        raise ArgumentError(msg)
    given = {} if value is None else {str(key): _plain(item) for key, item in value.items()}
    known = OmniSamplingParams.__struct_fields__
    unknown = sorted(set(given) - set(known))
    if unknown:
        msg = f"unknown sampling parameter {unknown[0]!r}; known are: {', '.join(known)}"
        raise ArgumentError(msg)
    try:
        return msgspec.convert(given, OmniSamplingParams).validated()
    except msgspec.ValidationError as error:
        msg = f"sampling_params: {error}"
        raise ArgumentError(msg) from None


def said_of(value: OmniSamplingParams | dict[str, Any] | None) -> dict[str, Any]:
    """What a caller said, by name: all that a dict has, of the typed class what is not its default.

    `value` was checked by `sampling_params_from`.
    """
    if isinstance(value, OmniSamplingParams):
        blank = OmniSamplingParams()
        said = ((name, getattr(value, name)) for name in OmniSamplingParams.__struct_fields__)
        return {name: one for name, one in said if one != getattr(blank, name)}
    return dict(value or {})


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One sequence that an AR stage made."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    index: int = 0


@dataclass(slots=True, kw_only=True)
class OmniRequestOutput:
    """What `generate` yields: partial text, then the final text or images.

    Attributes:
        request_id: the request's id.
        stage_id: the stage that made this output.
        finished: whether this is the request's last output.
        final_output_type: "text" or "image", the kind this request ends with.
        state: "running", "finished" or "aborted".
        text: the text so far (AR stages), else ""; in whole characters, until it is finished.
        outputs: sequences with `.token_ids` (AR stages).
        images: PIL images (diffusion stages).
        png: the same images as PNG files, encoded by the rank that made them.
        weight_version: the version of the weights that made it.
        metrics: seed, steps, queue_ms, run_ms, … as measured; `lora`: the adapter's name, if one had a part in this.
    """

    request_id: str
    stage_id: int
    finished: bool
    final_output_type: str
    state: str = RequestState.RUNNING
    text: str = ""
    outputs: list[CompletionOutput] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    png: list[bytes] = field(default_factory=list)
    weight_version: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------- status


class TagMemory(msgspec.Struct, frozen=True):
    """One tag's memory on one rank, bytes: what its mappings span and what of it is physically there."""

    mapped_bytes: int
    resident_bytes: int


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as seen without asking its worker to stop.

    Where the engine does not tell tags, `tags` is empty and `process_bytes` is what is known.
    """

    rank: int
    replica: int
    pid: int | None
    device: str
    alive: bool
    tags: dict[str, TagMemory]
    host_backup_bytes: int | None
    process_bytes: int | None


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: state, pause, load and ranks."""

    stage_id: int
    name: str
    kind: str
    runtime: str
    model: str
    state: MemoryState
    level: int | None
    awake_tags: tuple[str, ...]
    pause_state: PauseState
    pause_mode: str | None
    weight_version: str | None
    recoverable: bool
    running: int
    queued: int
    in_transit: int
    waiting_at_gate: int
    ballast_bytes: int
    ranks: tuple[RankStatus, ...]
    last_error: str | None
    loras: tuple[LoRAStatus, ...] = ()

    @property
    def host_backup_bytes(self) -> int | None:
        """What all ranks hold to wake from; None where one does not tell."""
        sizes = [rank.host_backup_bytes for rank in self.ranks]
        return None if None in sizes else sum(size for size in sizes if size is not None)


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine; taking it never waits for a worker and never changes state.

    `notes` are lines that a person must know, such as why no history is kept. `left_at` is the URL of a server whose
    engine runs on: `closed` then says that the connection to it is.
    """

    model: str
    closed: bool
    paused: bool
    uptime_s: float
    stages: tuple[StageStatus, ...]
    notes: tuple[str, ...] = ()
    time_s: float = msgspec.field(default_factory=time.time)
    left_at: str | None = None


# ------------------------------------------------------------------------------------------- events


class AckEvent(msgspec.Struct, frozen=True, tag="ack"):
    """A rank answered an order ("sleep" or "wake")."""

    time_s: float
    order: str
    ack: OmniACK


class StateEvent(msgspec.Struct, frozen=True, tag="state"):
    """A stage changed its memory or pause state."""

    time_s: float
    stage_id: int
    state: MemoryState
    level: int | None
    pause_state: PauseState
    reason: str = ""


class MemoryEvent(msgspec.Struct, frozen=True, tag="memory"):
    """A sample of one rank's memory."""

    time_s: float
    stage_id: int
    rank: int
    replica: int
    tags: dict[str, TagMemory]
    process_bytes: int | None
    host_backup_bytes: int | None


class RequestEvent(msgspec.Struct, frozen=True, tag="request"):
    """A request moved."""

    time_s: float
    request_id: str
    stage_id: int
    state: RequestState
    progress: float | None = None


class LinkEvent(msgspec.Struct, frozen=True, tag="link"):
    """The way to an engine on a server broke, or is there again: what happened between the two was not heard.

    `other`: another engine answers there than before; nothing that was known of the one before is true of it.
    """

    time_s: float
    connected: bool
    reason: str = ""
    other: bool = False


Event = AckEvent | StateEvent | MemoryEvent | RequestEvent | LinkEvent
