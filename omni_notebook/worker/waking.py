"""One rank's wake orders: map, copy back or reload, verify; then commit or abort."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import msgspec

from omni_notebook.errors import OmniError
from omni_notebook.memory.base import (
    BALLAST,
    LORA,
    MapReport,
    RestoreReport,
    TransitionCancelledError,
)
from omni_notebook.protocol import PhasesMs, WakeTask
from omni_notebook.worker.ack import rate_gib_per_s
from omni_notebook.worker.early import early_batches
from omni_notebook.worker.graphs import NO_GRAPHS
from omni_notebook.worker.rank import ms_since, no_such
from omni_notebook.worker.reports import WakeOutlook

if TYPE_CHECKING:
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from omni_notebook.protocol import OmniACK
    from omni_notebook.worker.graphs import Recall
    from omni_notebook.worker.rank import Rank

_NOTHING = (
    MapReport(mapped_bytes=0, map_ms=0.0),
    RestoreReport(copied_bytes=0, copy_ms=0.0, needs_reload=()),
)


class _Waking(msgspec.Struct, frozen=True, kw_only=True):
    task: WakeTask
    started_s: float
    mapped: MapReport
    restored: RestoreReport
    reload_ms: float | None
    verify_ms: float | None
    note: str | None
    missing: frozenset[str]
    outlook: WakeOutlook


class WakeOrders:
    """Wakes one rank's tags."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._waking: _Waking | None = None
        self._early = early_batches(rank)

    def has(self, task_id: str) -> bool:
        """Whether this wake is prepared and not committed."""
        return self._waking is not None and self._waking.task.task_id == task_id

    @property
    def missing(self) -> frozenset[str]:
        """Tags whose weights a prepared wake leaves without valid contents."""
        return frozenset() if self._waking is None else self._waking.missing

    @property
    def arrives(self) -> bool:
        """Whether batches here can begin while a wake still copies."""
        return self._early is not None

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
        try:
            mapped, restored = self._map_restore(task, sleeping) if sleeping else _NOTHING
            self._waking = self._refill(task, started_s, mapped, restored)
        except BaseException:
            self._rank.pool.abort_wake()
            raise
        return self._waking.outlook

    def begin_wake(self, task: WakeTask) -> WakeOutlook:
        """As `prepare_wake`; where it can, it leaves copies to `commit_wake`, and batches may follow them."""
        if self._early is None or not self._can_arrive(task):
            return self.prepare_wake(task)
        started_s = time.perf_counter()
        cancelled = self._rank.cancelled
        mapped = self._early.begin(self._sleeping_tags(task), lambda: task.task_id in cancelled)
        try:
            plan = self._refill(task, started_s, mapped, _NOTHING[1])
        except BaseException:
            self._early.end()
            self._rank.pool.abort_wake()
            raise
        self._waking = msgspec.structs.replace(plan, outlook=msgspec.structs.replace(plan.outlook, arriving=True))
        return self._waking.outlook

    def _can_arrive(self, task: WakeTask) -> bool:
        """Whether all that this wake does is to bring back copies, into which no batch writes."""
        rank, tags = self._rank, self._rank.pool.tags()
        whole = set(self._sleeping_tags(task)) == set(tags) and set(rank.levels.values()) == {1}
        return whole and not rank.weights.missing and LORA not in tags

    def beside(self) -> AbstractContextManager[None]:
        """Around each batch; see `EarlyBatches.follow`."""
        return contextlib.nullcontext() if self._early is None else self._early.follow()

    def close(self) -> None:
        """Wait for copies that are on their way."""
        if self._early is not None:
            self._early.close()

    def _map_restore(self, task: WakeTask, tags: tuple[str, ...]) -> tuple[MapReport, RestoreReport]:
        cancelled = self._rank.cancelled
        return self._rank.pool.map_restore(tags, cancelled=lambda: task.task_id in cancelled)

    def _refill(self, task: WakeTask, started_s: float, mapped: MapReport, restored: RestoreReport) -> _Waking:
        self._stop_if_cancelled(task.task_id)
        if BALLAST in restored.needs_reload:
            self._rank.ballast.fill()
        self._stop_if_cancelled(task.task_id)
        reload_ms, verify_ms, note = self._reload_weights(task, restored)
        self._stop_if_cancelled(task.task_id)
        awake = self._awake_after(task)
        missing = self._rank.weights.missing
        if verify_ms is not None:
            missing -= set(awake)
        return _Waking(
            task=task,
            started_s=started_s,
            mapped=mapped,
            restored=restored,
            reload_ms=reload_ms,
            verify_ms=verify_ms,
            note=note,
            missing=missing,
            outlook=WakeOutlook(
                awake_tags=awake,
                all_awake=len(awake) == len(self._rank.pool.tags()),
                weights_valid=not missing,
            ),
        )

    def _reload_weights(self, task: WakeTask, restored: RestoreReport) -> tuple[float | None, float | None, str | None]:
        """Milliseconds to reload and to verify, and a note where weights are left invalid."""
        todo = [tag for tag in self._awake_after(task) if tag in self._rank.weights.missing]
        if not todo:
            return None, None, None
        if not task.reload:
            return None, None, "mapped without weights, as asked; call load_weights, or wake_up to reload"
        dropped = set(todo).intersection(restored.needs_reload)
        why_not = self._rank.weights.why_not_reloaded() if dropped else None
        if why_not is not None:
            return None, None, why_not
        started_s = time.perf_counter()
        self._rank.weights.reload(lambda: self._stop_if_cancelled(task.task_id), todo)
        reload_ms = ms_since(started_s)
        started_s = time.perf_counter()
        self._rank.weights.verify(todo)
        return reload_ms, ms_since(started_s), None

    def _sleeping_tags(self, task: WakeTask) -> tuple[str, ...]:
        """Of the tags that the order names, those that sleep here."""
        return tuple(tag for tag in self._rank.levels if task.tags is None or tag in task.tags)

    def _awake_after(self, task: WakeTask) -> tuple[str, ...]:
        woken = self._sleeping_tags(task)
        return tuple(tag for tag in self._rank.pool.tags() if tag not in self._rank.levels or tag in woken)

    def _stop_if_cancelled(self, task_id: str) -> None:
        if task_id in self._rank.cancelled:
            msg = "the wake was cancelled before it committed; memory is as before it"
            raise TransitionCancelledError(msg)

    def commit_wake(self, task_id: str) -> OmniACK | Future[OmniACK]:
        """The wake is good; answer. What still arrives is waited for on another thread, beside batches.

        The future fails where a copy did, or where the order was cancelled; `abort_wake` then.
        """
        plan = self._waking
        if plan is None or plan.task.task_id != task_id:
            raise OmniError(no_such("wake", task_id))
        if self._early is None or not plan.outlook.arriving:
            return self._commit(plan)

        def commit(restored: RestoreReport) -> OmniACK:
            self._stop_if_cancelled(task_id)
            return self._commit(msgspec.structs.replace(plan, restored=restored))

        return self._early.finish(commit)

    def _commit(self, plan: _Waking) -> OmniACK:
        task_id = plan.task.task_id
        self._waking = None
        self._rank.cancelled.discard(task_id)
        woken = self._sleeping_tags(plan.task)
        self._rank.note(task_id, woken, self._rank.level or 1, slept=False)
        if woken:
            self._rank.pool.commit_wake()
        self._rank.levels = {
            tag: level for tag, level in self._rank.levels.items() if tag not in plan.outlook.awake_tags
        }
        weights = self._rank.weights
        weights.missing = plan.missing
        if set(weights.tags).issubset(plan.outlook.awake_tags):
            weights.lost = False
        backed_up = self._rank.pool.host_backup_bytes()
        if weights.valid:
            self._rank.pool.write_ahead()
        warm = plan.outlook.all_awake and plan.outlook.weights_valid
        recall = self._recall(plan) if warm and woken else NO_GRAPHS
        return self._rank.acks.wake(
            task_id,
            self._rank.pool.held(),
            state="WARM" if warm else "COLD",
            level=self._rank.level,
            mapped_bytes=plan.mapped.mapped_bytes,
            copied_bytes=plan.restored.copied_bytes,
            copy_gib_per_s=rate_gib_per_s(plan.restored.copied_bytes, plan.mapped.map_ms + plan.restored.copy_ms),
            host_backup_bytes=backed_up,
            weight_version=self._rank.weights.version,
            latency_ms=ms_since(plan.started_s),
            cuda_graph_recalled=recall.right,
            note="; ".join(filter(None, (plan.note, recall.note))) or None,
            phases_ms=PhasesMs(
                map=plan.mapped.map_ms, copy=plan.restored.copy_ms, reload=plan.reload_ms, verify=plan.verify_ms
            ),
        )

    def _recall(self, plan: _Waking) -> Recall:
        if self._early is None or not plan.outlook.arriving:
            return self._rank.runner.recall_graphs()
        return self._early.recall

    def abort_wake(self, task_id: str) -> None:
        """Unmap what a prepared wake mapped; a later wake works."""
        self._rank.cancelled.discard(task_id)
        if self._waking is not None:
            self._waking = None
            if self._early is not None:
                self._early.end()
            self._rank.pool.abort_wake()
