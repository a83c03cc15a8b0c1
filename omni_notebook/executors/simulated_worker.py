"""A rank that only keeps the books of one: every control order in no time, ACKs with the right sums, no memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from omni_notebook.memory.base import WEIGHTS, Held, PrepareReport, UnmapReport
from omni_notebook.protocol import MIB, PhasesMs, RankStatus, ResidualBytes, TagMemory
from omni_notebook.worker.ack import AckBuilder
from omni_notebook.worker.reports import LoadReport, WakeOutlook

if TYPE_CHECKING:
    from omni_notebook.protocol import OmniACK, SleepTask, WakeTask
    from omni_notebook.worker.reports import WorkerSpec
    from omni_notebook.worker.tensors import TensorChunk, TensorHeader

SIMULATED = "simulated"


class SimulatedWorker:
    """One tag of `n_bytes`, awake or asleep; runs no model."""

    def __init__(self, spec: WorkerSpec, n_bytes: int = 64 * MIB) -> None:
        self._where = spec.where
        self._n_bytes = n_bytes
        self._version = spec.version or SIMULATED
        self._level: int | None = None
        self._sleeping: SleepTask | None = None
        self._before: int | None = None
        self._acks = AckBuilder(spec.where, device="cpu", device_name=SIMULATED)

    def load(self) -> LoadReport:
        """Nothing to load."""
        return LoadReport(
            pid=os.getpid(),
            device="cpu",
            device_name=SIMULATED,
            weight_version=self._version,
            tags={WEIGHTS: self._n_bytes},
        )

    def shutdown(self) -> None:
        """Nothing to give back."""

    def cancel(self, task_id: str) -> None:
        """Orders take no time; none can be stopped."""

    def prefetch(self, wanted: Any) -> None:
        """No model needs it."""

    def barrier(self) -> None:
        """Nothing runs."""

    def ping(self) -> int:
        """The process id."""
        return os.getpid()

    def weights_valid(self) -> bool:
        """Always."""
        return True

    def prepare_weights(self, source: str) -> None:
        """Everything fits."""

    def revoke_weights(self) -> None:
        """None were loaded."""

    def load_weights(self, source: str, version: str | None) -> str:
        """The new version."""
        self._version = version or source
        return self._version

    def prepare_tensors(self, headers: tuple[TensorHeader, ...] | None) -> None:
        """Everything fits."""

    def load_tensors(self, chunk: TensorChunk) -> None:
        """Nothing is written."""

    def finish_tensors(self, version: str | None) -> str:
        """The new version."""
        self._version = version or SIMULATED
        return self._version

    # -------------------------------------------------------------------------- control orders

    def prepare_sleep(self, task: SleepTask) -> None:
        """Remember the order."""
        self._sleeping = task

    def abort_sleep(self, task_id: str) -> None:  # noqa: ARG002
        """Forget it."""
        self._sleeping = None

    def commit_sleep(self, task_id: str) -> OmniACK:
        """Asleep."""
        self._before = self._level
        self._level = 1 if self._sleeping is None else self._sleeping.level
        return self._acks.sleep(
            task_id,
            _PREPARED,
            UnmapReport(
                freed={WEIGHTS: self._n_bytes},
                expected_bytes=self._n_bytes,
                observed_bytes=self._n_bytes,
                scope="mapping",
                unmap_ms=0.0,
            ),
            _NOTHING,
            level=self._level,
            recoverable=True,
            weight_version=self._version,
            latency_ms=0.0,
            phases_ms=PhasesMs(copy=0.0, unmap=0.0),
        )

    def drop_backup(self, task: SleepTask) -> OmniACK:
        """From level 1 to level 2."""
        self._level = 2
        return self._acks.dropped(task.task_id, 0, _NOTHING, level=2, recoverable=True, weight_version=self._version)

    def prepare_wake(self, task: WakeTask) -> WakeOutlook:  # noqa: ARG002
        """All of it will be awake."""
        return WakeOutlook(awake_tags=(WEIGHTS,), all_awake=True, weights_valid=True)

    def abort_wake(self, task_id: str) -> None:
        """Nothing was mapped."""

    def commit_wake(self, task_id: str) -> OmniACK:
        """Awake."""
        self._before = self._level
        self._level = None
        return self._acks.wake(
            task_id, _NOTHING, state="WARM", level=None, mapped_bytes=self._n_bytes, weight_version=self._version
        )

    def undo(self, task_id: str) -> None:  # noqa: ARG002
        """As before the last commit."""
        self._level = self._before

    def noop(self, task_id: str) -> OmniACK:
        """Nothing to do."""
        state = "WARM" if self._level is None else "COLD"
        return self._acks.noop(task_id, 0, state=state, level=self._level, weight_version=self._version)

    def memory(self) -> RankStatus:
        """What the books say."""
        resident = 0 if self._level is not None else self._n_bytes
        return RankStatus(
            rank=self._where.rank,
            replica=self._where.replica,
            pid=os.getpid(),
            device="cpu",
            alive=True,
            tags={WEIGHTS: TagMemory(self._n_bytes, resident)},
            host_backup_bytes=0,
            process_bytes=None,
        )


_NOTHING = Held(total_bytes=0, scope="process", parts=ResidualBytes(other=0))
_PREPARED = PrepareReport(
    backup={WEIGHTS: "host"},
    backup_location=SIMULATED,
    host_backup_bytes=0,
    copied_bytes=0,
    skipped_clean_bytes=0,
    modified=None,
    checksum_ms=0.0,
    copy_ms=0.0,
)
