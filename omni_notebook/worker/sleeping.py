"""One rank's sleep orders: prepare, commit, abort, and level 1 → 2 while asleep."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from omni_notebook.errors import OmniError
from omni_notebook.memory.base import DeviceError, PrepareReport
from omni_notebook.protocol import PhasesMs, SleepTask
from omni_notebook.worker.rank import ms_since, no_such

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_notebook.protocol import OmniACK
    from omni_notebook.worker.rank import Rank


class UnrecoverableError(OmniError):
    """A level-2 sleep would discard weights that no path reproduces."""

    error_code = "UNRECOVERABLE"


class _Sleeping(msgspec.Struct, frozen=True, kw_only=True):
    task: SleepTask
    started_s: float
    prepared: PrepareReport
    sync_ms: float
    check_ms: float | None
    unrecoverable: str | None


class SleepOrders:
    """Puts one rank's tags to sleep."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._sleeping: _Sleeping | None = None
        self._taken_back = ""

    def has(self, task_id: str) -> bool:
        """Whether this sleep is prepared and not committed."""
        return self._sleeping is not None and self._sleeping.task.task_id == task_id

    def was_taken_back(self, task_id: str) -> bool:
        """Whether this was the last sleep whose commit failed here and left all as before it."""
        return self._taken_back == task_id

    def prepare_sleep(self, task: SleepTask) -> None:
        """Quiesce the device, check room, back up; nothing is given up yet.

        Raises:
            OutOfMemoryError, OSError: the backup has no room.
            UnrecoverableError: `task.discard` is False and no path reproduces the weights.
            TransitionCancelledError: `cancel` was called.
        """
        started_s = time.perf_counter()
        self._rank.runner.synchronize()
        sync_ms = ms_since(started_s)
        prepared = self._rank.pool.prepare_sleep(
            task.level,
            task.tags,
            cancelled=lambda: task.task_id in self._rank.cancelled,
            late_copy=self._rank.alone,
        )
        why, check_ms = None, None
        if task.level == 2 and self._whole(prepared.backup):
            checking_s = time.perf_counter()
            why, check_ms = self._why_unrecoverable(prepared), ms_since(checking_s)
        if why is not None and not task.discard:
            self._rank.pool.abort_sleep()
            raise UnrecoverableError(_refusal(why))
        self._sleeping = _Sleeping(
            task=task, started_s=started_s, prepared=prepared, sync_ms=sync_ms, check_ms=check_ms, unrecoverable=why
        )

    def _whole(self, falling: Iterable[str]) -> bool:
        """Whether a level 2 has whole weights to discard: those that fall asleep, and those that sleep at level 1."""
        missing, tags = self._rank.weights.missing, set(self._rank.weights.tags)
        return not missing & set(falling) and bool(tags - missing)

    def _why_unrecoverable(self, prepared: PrepareReport) -> str | None:
        """Why a level 2 could not be undone; weights that sleep already are looked at in their backup."""
        modified = bool(prepared.modified) or self._modified_asleep()
        return self._rank.weights.why_unrecoverable(modified=modified)

    def _modified_asleep(self) -> bool:
        """Whether a backup of weights that sleep has other contents than were loaded."""
        asleep = [tag for tag in self._rank.weights.tags if self._rank.levels.get(tag) == 1]
        return any(self._rank.pool.modified_in_backup(tag) for tag in asleep if tag not in self._rank.weights.missing)

    def commit_sleep(self, task_id: str) -> OmniACK:
        """Give the pages up, measure, answer.

        Raises:
            DeviceError: the device kept all of them, or refused a copy; memory is as before the prepare, or `lost`.
        """
        plan = self._sleeping
        if plan is None or plan.task.task_id != task_id:
            raise OmniError(no_such("sleep", task_id))
        self._sleeping = None
        self._rank.cancelled.discard(task_id)
        if plan.task.level == 2:
            self._rank.runner.drop_graphs()
        try:
            unmapped = self._rank.pool.commit_sleep()
        except BaseException as error:
            self._rank.pool.abort_sleep()
            if not (isinstance(error, DeviceError) and error.lost):
                self._taken_back = task_id
            raise
        task = plan.task
        self._rank.note(task_id, tuple(unmapped.freed), task.level, slept=True)
        dropped = self._after_unmap(plan, unmapped.freed)
        return self._rank.acks.sleep(
            task_id,
            plan.prepared,
            unmapped,
            self._rank.pool.held(),
            level=self._rank.level,
            recoverable=plan.unrecoverable is None and (task.level == 1 or self._rank.weights.source is not None),
            host_freed_bytes=dropped,
            weight_version=self._rank.weights.version,
            latency_ms=ms_since(plan.started_s) + task.quiesce_ms,
            phases_ms=PhasesMs(
                quiesce=task.quiesce_ms + plan.sync_ms,
                checksum=plan.prepared.checksum_ms + unmapped.checksum_ms,
                copy=plan.prepared.copy_ms + unmapped.copy_ms,
                unmap=unmapped.unmap_ms,
                verify=plan.check_ms,
            ),
        )

    def _after_unmap(self, plan: _Sleeping, tags: Iterable[str]) -> int | None:
        """Books after the pages went; at level 2 tags that slept at level 1 lose their backup too."""
        earlier = [tag for tag, level in self._rank.levels.items() if level == 1]
        for tag in tags:
            self._rank.levels[tag] = plan.task.level
        if plan.task.level == 1:
            return None
        self._weights_dropped(plan.unrecoverable, (*tags, *earlier))
        if not earlier:
            return None
        self._rank.levels.update(dict.fromkeys(earlier, 2))
        return self._rank.pool.drop_backup(earlier)

    def _weights_dropped(self, why: str | None, tags: Iterable[str]) -> None:
        weights = self._rank.weights
        if weights.valid or why is not None:
            weights.lost = why is not None
        weights.missing |= set(weights.tags).intersection(tags)

    def abort_sleep(self, task_id: str) -> None:
        """Forget a prepared sleep; memory is as before it."""
        self._rank.cancelled.discard(task_id)
        if self._sleeping is not None:
            self._sleeping = None
            self._rank.pool.abort_sleep()

    def drop_backup(self, task: SleepTask) -> OmniACK:
        """Level 1 → 2 while asleep: the host copy goes, and CUDA graphs, which level 1 keeps.

        Raises:
            UnrecoverableError: `task.discard` is False and no path reproduces the weights.
        """
        started_s = time.perf_counter()
        why = self._rank.weights.why_unrecoverable(modified=self._modified_asleep())
        if why is not None and not task.discard:
            raise UnrecoverableError(_refusal(why))
        self._rank.runner.drop_graphs()
        freed = self._rank.pool.drop_backup(None)
        self._rank.levels = dict.fromkeys(self._rank.levels, 2)
        self._weights_dropped(why, self._rank.levels)
        return self._rank.acks.dropped(
            task.task_id,
            freed,
            self._rank.pool.held(),
            level=2,
            recoverable=why is None,
            host_backup_bytes=self._rank.pool.host_backup_bytes(),
            weight_version=self._rank.weights.version,
            latency_ms=ms_since(started_s),
        )


def _refusal(why: str) -> str:
    return (
        f"level 2 would discard weights that can not be had again: {why}; nothing changed. "
        "Use level 1, load_weights(stage_id, path) first, or sleep(..., discard=True) (magic: --discard)"
    )
