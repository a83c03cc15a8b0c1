"""Every error that omni_notebook raises on purpose.

    OmniError                     base: catch it to catch all of the below
    ├── ArgumentError             a call's argument is wrong (also a ValueError); nothing changed
    ├── ConfigError               a model folder, pipeline file or option is wrong (also a ValueError)
    ├── UnsupportedError          this platform, runtime or build can not do it, and says why
    │   └── StepLevelError        a stage that runs single steps can not be kept (also a NotImplementedError)
    ├── StageBusyError            requests run, wait or are on their way; quiesce first
    ├── AsleepError               a stage on the request's route is not awake
    ├── PausedError               admission is closed by a pause
    ├── NeedsWeightsError         the stage's memory is mapped but holds no valid weights
    ├── StageFailedError          the stage is in the state FAILED; restart it
    ├── SleepError                at least one rank answered ERROR to a sleep; `.acks` has every answer
    ├── WakeError                 the same for a wake
    ├── PauseError                a pause did not complete, or forbids this order
    ├── LoRAError                 an adapter could not be put on every rank, has no slot, or is gone
    ├── DeadlineError             a wait reached its bound (also a TimeoutError)
    ├── OutOfMemoryError          host or device memory would not suffice (also a MemoryError)
    ├── WorkerDiedError           a rank's process ended; `.stage_id`, `.rank`, `.log_lines`
    ├── RemoteWorkerError         a rank's process raised an error of a class that is not known here; `.type_name`
    ├── LedgerError               the file that keeps the history can not be used; it was left as it is
    ├── UpstreamError             the vllm_omni engine behind this one raised, or ended without an answer
    ├── PeerLostError             a rank lost the others of its tensor-parallel group; restart the stage
    ├── ServerLostError           a server does not answer (also a ConnectionError); says what may go on there
    └── EngineClosedError         the engine was shut down

Why so many: a notebook user reads the message, a training loop catches the class. A class exists where a
program would react differently. Every message says what happened, what state things are in, what to call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.protocol import OmniACK


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement


class OmniError(Exception):
    """Base of all errors raised on purpose; `str()` is one line for a person."""

    error_code: str = "OMNI_ERROR"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by state, so that an error crosses a process border whatever its constructor takes."""
        return (rebuilt, (type(self), self.args, self.__dict__))


def rebuilt(cls: type[OmniError], args: tuple[Any, ...], state: dict[str, Any]) -> OmniError:
    """An error from its class and state, whatever its constructor takes."""
    builtin: type = cls
    while builtin.__flags__ & _HEAP_TYPE:  # `cls.__new__` may belong to a base that Python calls unsafe for `cls`
        builtin = builtin.__base__ or object
    error: OmniError = builtin.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ArgumentError(OmniError, ValueError):
    """A call's argument is wrong; raised before anything changes."""

    error_code = "BAD_ARGUMENT"


class ConfigError(OmniError, ValueError):
    """A model folder, a pipeline file or an option is wrong; names the file and the key."""

    error_code = "BAD_CONFIG"


class UnsupportedError(OmniError):
    """This platform, runtime or build can not do what was asked."""

    error_code = "UNSUPPORTED"


class StepLevelError(UnsupportedError, NotImplementedError):
    """A stage that runs single steps has no batch boundary to keep its requests at (specification, support matrix)."""

    error_code = "STEP_LEVEL"


class StageBusyError(OmniError):
    """Requests are running, queued or in transit on a stage that was to be changed."""

    error_code = "BUSY"

    def __init__(self, message: str, *, stage_id: int, running: int, queued: int, in_transit: int) -> None:
        super().__init__(message)
        self.stage_id = stage_id
        self.running = running
        self.queued = queued
        self.in_transit = in_transit


class AsleepError(OmniError):
    """A stage on the request's route is not awake."""

    error_code = "ASLEEP"


class PausedError(OmniError):
    """Admission is closed by a pause that someone made."""

    error_code = "PAUSED"


class NeedsWeightsError(OmniError):
    """The stage is mapped but holds no valid weights; `load_weights` or a reloading wake helps."""

    error_code = "NEEDS_WEIGHTS"


class StageFailedError(OmniError):
    """The stage is FAILED; `restart` brings it back."""

    error_code = "FAILED"


class _AckError(OmniError):
    def __init__(self, message: str, acks: Sequence[OmniACK]) -> None:
        super().__init__(message)
        self.acks: list[OmniACK] = list(acks)


class SleepError(_AckError):
    """At least one rank answered ERROR to a sleep; `.acks` holds every rank's answer."""

    error_code = "SLEEP_FAILED"


class WakeError(_AckError):
    """At least one rank answered ERROR to a wake; `.acks` holds every rank's answer."""

    error_code = "WAKE_FAILED"


class PauseError(OmniError):
    """A pause did not complete, or a pause in progress forbids this order."""

    error_code = "PAUSE"


class LoRAError(OmniError):
    """An adapter could not be put on every rank, has no slot to run in, or is not there any more."""

    error_code = "LORA"


class DeadlineError(OmniError, TimeoutError):
    """A wait reached its bound; the message says what was waited for and what is true now."""

    error_code = "DEADLINE"


class OutOfMemoryError(OmniError, MemoryError):
    """Host or device memory would not suffice; `.needed_bytes` and `.free_bytes` say by how much."""

    error_code = "OUT_OF_MEMORY"

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class WorkerDiedError(OmniError):
    """A rank's worker ended; `.log_lines` are the last lines that it wrote."""

    error_code = "WORKER_DIED"

    def __init__(self, message: str, *, stage_id: int, rank: int, log_lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.stage_id = stage_id
        self.rank = rank
        self.log_lines = list(log_lines)


class RemoteWorkerError(OmniError):
    """A rank raised an error whose class only its own process knows; `.type_name`, `.remote_traceback` (text)."""

    def __init__(self, message: str, *, type_name: str) -> None:
        super().__init__(message)
        self.type_name = type_name
        self.error_code = type_name
        self.remote_traceback = ""


class LedgerError(OmniError):
    """The file that keeps the history can not be used, and was left as it is; no order raises this."""

    error_code = "LEDGER"


class PeerLostError(OmniError):
    """A rank of the tensor-parallel group died, failed or stopped answering; this rank has left the group for good."""

    error_code = "PEER_LOST"


class ServerLostError(OmniError, ConnectionError):
    """A server can not be reached, or went away before it had answered; says whether an order may go on there."""

    error_code = "SERVER_LOST"


class UpstreamError(OmniError):
    """The installed `vllm_omni` engine raised, or ended a call without an answer; its own words, `__cause__` if any."""

    error_code = "UPSTREAM"


class EngineClosedError(OmniError):
    """The engine was shut down; start a new one."""

    error_code = "CLOSED"
