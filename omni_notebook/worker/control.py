"""One rank's control orders: two-step sleep and wake, each answered by an ACK.

An order that raises leaves the rank as it was before the order.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from omni_notebook.errors import NeedsWeightsError, OmniError
from omni_notebook.memory.base import (
    BALLAST,
    WEIGHTS,
    MapReport,
    PrepareReport,
    RestoreReport,
    TransitionCancelledError,
)
from omni_notebook.memory.host import process_memory
from omni_notebook.protocol import PhasesMs, SleepTask, WakeTask
from omni_notebook.worker.ack import rate_gib_per_s

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.protocol import OmniACK
    from omni_notebook.worker.ack import AckBuilder
    from omni_notebook.worker.ballast import Ballast
    from omni_notebook.worker.runner import Runner
    from omni_notebook.worker.weights import Weights


_NOTHING = (
    MapReport(mapped_bytes=0, map_ms=0.0),
    RestoreReport(copied_bytes=0, copy_ms=0.0, needs_reload=()),
)


class UnrecoverableError(OmniError):
    """A level-2 sleep would discard weights that no path reproduces."""

    error_code = "UNRECOVERABLE"


class WakeOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """What a prepared wake leads to: the tags that will be awake, whether that is all, whether weights are valid."""

    awake_tags: tuple[str, ...]
    all_awake: bool
    weights_valid: bool


class _Sleeping(msgspec.Struct, frozen=True, kw_only=True):
    task: SleepTask
    started_s: float
    prepared: PrepareReport
    sync_ms: float
    unrecoverable: str | None


class _Done(msgspec.Struct, frozen=True):
    """The last order that committed, so that it can be undone if another rank did not commit."""

    task_id: str
    tags: tuple[str, ...]
    level: int
    slept: bool


class _Waking(msgspec.Struct, frozen=True, kw_only=True):
    task: WakeTask
    started_s: float
    mapped: MapReport
    restored: RestoreReport
    reload_ms: float | None
    verify_ms: float | None
    note: str | None
    outlook: WakeOutlook


def ms_since(started_s: float) -> float:
    """Milliseconds since a `time.perf_counter()` reading."""
    return (time.perf_counter() - started_s) * 1000


class Control:
    """Carries out sleep and wake orders over one pool; one thread calls it, but for `cancel`."""

    def __init__(
        self, *, pool: MemoryPool, runner: Runner, weights: Weights, ballast: Ballast, acks: AckBuilder
    ) -> None:
        self._pool = pool
        self._runner = runner
        self._weights = weights
        self._ballast = ballast
        self._acks = acks
        self._levels: dict[str, int] = {}
        self._sleeping: _Sleeping | None = None
        self._waking: _Waking | None = None
        self._done: _Done | None = None
        self._cancelled: set[str] = set()

    @property
    def level(self) -> int | None:
        """The level that the sleeping tags are at, decided by those whose contents matter; None = all awake."""
        tags = self._pool.tags()
        matter = [level for tag, level in self._levels.items() if not tags[tag].recomputable]
        return max(matter or self._levels.values(), default=None)

    def cancel(self, task_id: str) -> None:
        """Ask a transition that has not committed to stop (any thread); its prepare then raises."""
        self._cancelled.add(task_id)

    # --------------------------------------------------------------------------------- sleep

    def prepare_sleep(self, task: SleepTask) -> None:
        """Quiesce the device, check room, back up; nothing is given up yet.

        Raises:
            OutOfMemoryError, OSError: the backup has no room.
            UnrecoverableError: `task.discard` is False and no path reproduces the weights.
            TransitionCancelledError: `cancel` was called.
        """
        started_s = time.perf_counter()
        self._runner.synchronize()
        sync_ms = ms_since(started_s)
        prepared = self._pool.prepare_sleep(task.level, task.tags, cancelled=lambda: task.task_id in self._cancelled)
        why = self._why_unrecoverable(prepared) if task.level == 2 and self._weights.valid else None
        if why is not None and not task.discard:
            self._pool.abort_sleep()
            raise UnrecoverableError(_refusal(why))
        self._sleeping = _Sleeping(
            task=task, started_s=started_s, prepared=prepared, sync_ms=sync_ms, unrecoverable=why
        )

    def _why_unrecoverable(self, prepared: PrepareReport) -> str | None:
        """Why a level 2 could not be undone; weights that sleep already are looked at in their backup."""
        if WEIGHTS in prepared.backup:
            return self._weights.why_unrecoverable(modified=bool(prepared.modified))
        return self._weights.why_unrecoverable(modified=self._pool.modified_in_backup(WEIGHTS))

    def commit_sleep(self, task_id: str) -> OmniACK:
        """Give the pages up, measure, answer."""
        plan = self._sleeping
        if plan is None or plan.task.task_id != task_id:
            raise OmniError(_no_such("sleep", task_id))
        self._sleeping = None
        self._cancelled.discard(task_id)
        unmapped = self._pool.commit_sleep()
        dropped = self._after_unmap(plan, unmapped.freed)
        task = plan.task
        self._done = _Done(task_id, tuple(unmapped.freed), task.level, slept=True)
        return self._acks.sleep(
            task_id,
            plan.prepared,
            unmapped,
            process_memory(),
            level=self.level,
            recoverable=plan.unrecoverable is None,
            host_freed_bytes=dropped,
            weight_version=self._weights.version,
            latency_ms=ms_since(plan.started_s) + task.quiesce_ms,
            phases_ms=PhasesMs(
                quiesce=task.quiesce_ms + plan.sync_ms,
                checksum=plan.prepared.checksum_ms,
                copy=plan.prepared.copy_ms,
                unmap=unmapped.unmap_ms,
            ),
        )

    def _after_unmap(self, plan: _Sleeping, tags: Iterable[str]) -> int | None:
        """Books after the pages went; at level 2 tags that slept at level 1 lose their backup too."""
        earlier = [tag for tag, level in self._levels.items() if level == 1]
        for tag in tags:
            self._levels[tag] = plan.task.level
        if plan.task.level == 1:
            return None
        self._weights_dropped(plan.unrecoverable)
        if not earlier:
            return None
        self._levels.update(dict.fromkeys(earlier, 2))
        return self._pool.drop_backup(earlier)

    def _weights_dropped(self, why: str | None) -> None:
        if self._weights.valid:
            self._weights.lost = why is not None
        self._weights.valid = False

    def abort_sleep(self, task_id: str) -> None:
        """Forget a prepared sleep; memory is as before it."""
        self._cancelled.discard(task_id)
        if self._sleeping is not None:
            self._sleeping = None
            self._pool.abort_sleep()

    def drop_backup(self, task: SleepTask) -> OmniACK:
        """Level 1 → 2 while asleep: the host copy goes, device memory stays as it is (none).

        Raises:
            UnrecoverableError: `task.discard` is False and no path reproduces the weights.
        """
        started_s = time.perf_counter()
        why = self._weights.why_unrecoverable(modified=self._pool.modified_in_backup(WEIGHTS))
        if why is not None and not task.discard:
            raise UnrecoverableError(_refusal(why))
        freed = self._pool.drop_backup(None)
        self._levels = dict.fromkeys(self._levels, 2)
        self._weights_dropped(why)
        return self._acks.dropped(
            task.task_id,
            freed,
            process_memory(),
            level=2,
            recoverable=why is None,
            host_backup_bytes=self._pool.host_backup_bytes(),
            weight_version=self._weights.version,
            latency_ms=ms_since(started_s),
        )

    def noop(self, task_id: str) -> OmniACK:
        """Answer an order that has nothing to do."""
        level = self.level
        return self._acks.noop(
            task_id,
            process_memory(),
            level=level,
            state="COLD" if level else "WARM",
            mapped_bytes=0,
            host_backup_bytes=self._pool.host_backup_bytes(),
            weight_version=self._weights.version,
            latency_ms=0.0,
        )

    # ---------------------------------------------------------------------------------- wake

    def prepare_wake(self, task: WakeTask) -> WakeOutlook:
        """Map, copy back or reload, verify.

        Raises:
            OutOfMemoryError: no room to map; memory is as before.
            ConfigError: the checkpoint is gone or does not fit; memory is as before.
            WeightsMismatchError: the checkpoint is not the one that was loaded; memory is as before.
            NeedsWeightsError: the memory is mapped and there is no path to load from.
        """
        started_s = time.perf_counter()
        sleeping = self._sleeping_tags(task)
        mapped, restored = self._pool.map_restore(sleeping) if sleeping else _NOTHING
        try:
            self._waking = self._refill(task, started_s, mapped, restored)
        except BaseException:
            self._pool.abort_wake()
            raise
        return self._waking.outlook

    def _refill(self, task: WakeTask, started_s: float, mapped: MapReport, restored: RestoreReport) -> _Waking:
        self._stop_if_cancelled(task.task_id)
        if BALLAST in restored.needs_reload:
            self._ballast.fill()
        self._stop_if_cancelled(task.task_id)
        reload_ms, verify_ms, note = self._reload_weights(task, restored)
        self._stop_if_cancelled(task.task_id)
        awake = self._awake_after(task)
        return _Waking(
            task=task,
            started_s=started_s,
            mapped=mapped,
            restored=restored,
            reload_ms=reload_ms,
            verify_ms=verify_ms,
            note=note,
            outlook=WakeOutlook(
                awake_tags=awake,
                all_awake=len(awake) == len(self._pool.tags()),
                weights_valid=self._weights.valid or verify_ms is not None,
            ),
        )

    def _reload_weights(self, task: WakeTask, restored: RestoreReport) -> tuple[float | None, float | None, str | None]:
        """Milliseconds to reload and to verify, and a note where weights are left invalid."""
        if self._weights.valid or WEIGHTS not in self._awake_after(task):
            return None, None, None
        if not task.reload:
            return None, None, "mapped without weights, as asked; call load_weights, or wake_up to reload"
        if self._weights.lost and WEIGHTS in restored.needs_reload:
            return (
                None,
                None,
                (
                    "the sleep discarded weights that no path reproduces; call load_weights(stage_id, source), "
                    "or wake_up once more to take the last checkpoint instead"
                ),
            )
        started_s = time.perf_counter()
        self._weights.reload()
        reload_ms = ms_since(started_s)
        started_s = time.perf_counter()
        self._weights.verify()
        return reload_ms, ms_since(started_s), None

    def _sleeping_tags(self, task: WakeTask) -> tuple[str, ...]:
        """Of the tags that the order names, those that sleep here."""
        return tuple(tag for tag in self._levels if task.tags is None or tag in task.tags)

    def _awake_after(self, task: WakeTask) -> tuple[str, ...]:
        woken = self._sleeping_tags(task)
        return tuple(tag for tag in self._pool.tags() if tag not in self._levels or tag in woken)

    def _stop_if_cancelled(self, task_id: str) -> None:
        if task_id in self._cancelled:
            msg = "the wake was cancelled before it committed; memory is as before it"
            raise TransitionCancelledError(msg)

    def commit_wake(self, task_id: str) -> OmniACK:
        """The wake is good; answer."""
        plan = self._waking
        if plan is None or plan.task.task_id != task_id:
            raise OmniError(_no_such("wake", task_id))
        self._waking = None
        self._cancelled.discard(task_id)
        woken = self._sleeping_tags(plan.task)
        self._done = _Done(task_id, woken, self.level or 1, slept=False)
        if woken:
            self._pool.commit_wake()
        self._levels = {tag: level for tag, level in self._levels.items() if tag not in plan.outlook.awake_tags}
        if WEIGHTS in plan.outlook.awake_tags:
            self._weights.valid, self._weights.lost = plan.outlook.weights_valid, False
        if self._weights.valid:
            self._pool.write_ahead()
        warm = plan.outlook.all_awake and plan.outlook.weights_valid
        return self._acks.wake(
            task_id,
            process_memory(),
            state="WARM" if warm else "COLD",
            level=self.level,
            mapped_bytes=plan.mapped.mapped_bytes,
            copied_bytes=plan.restored.copied_bytes,
            copy_gib_per_s=rate_gib_per_s(plan.restored.copied_bytes, plan.mapped.map_ms + plan.restored.copy_ms),
            host_backup_bytes=self._pool.host_backup_bytes(),
            weight_version=self._weights.version,
            latency_ms=ms_since(plan.started_s),
            note=plan.note,
            phases_ms=PhasesMs(
                map=plan.mapped.map_ms, copy=plan.restored.copy_ms, reload=plan.reload_ms, verify=plan.verify_ms
            ),
        )

    def abort_wake(self, task_id: str) -> None:
        """Unmap what a prepared wake mapped; a later wake works."""
        self._cancelled.discard(task_id)
        if self._waking is not None:
            self._waking = None
            self._pool.abort_wake()

    def undo(self, task_id: str) -> None:
        """Take back an order that this rank prepared or committed, because another rank could not commit it.

        Raises:
            OmniError: this rank never prepared it, or what it dropped can not be had again.
        """
        if self._sleeping is not None and self._sleeping.task.task_id == task_id:
            self.abort_sleep(task_id)
        elif self._waking is not None and self._waking.task.task_id == task_id:
            self.abort_wake(task_id)
        elif self._done is not None and self._done.task_id == task_id:
            self._undo_done(self._done)
        else:
            raise OmniError(_no_such("order", task_id))

    def _undo_done(self, done: _Done) -> None:
        if not done.slept:
            self.prepare_sleep(SleepTask(task_id=done.task_id, level=done.level, tags=done.tags))
            self.commit_sleep(done.task_id)
            return
        outlook = self.prepare_wake(WakeTask(task_id=done.task_id, tags=done.tags))
        if not outlook.weights_valid and WEIGHTS in done.tags:
            self.abort_wake(done.task_id)
            msg = "the sleep that is to be undone discarded weights that no path reproduces"
            raise NeedsWeightsError(msg)
        self.commit_wake(done.task_id)


def _refusal(why: str) -> str:
    return (
        f"level 2 would discard weights that can not be had again: {why}; nothing changed. "
        "Use level 1, load_weights(stage_id, path) first, or sleep(..., discard=True) (magic: --discard)"
    )


def _no_such(order: str, task_id: str) -> str:
    return f"no {order} {task_id} was prepared on this rank; nothing changed"
