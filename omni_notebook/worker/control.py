"""One rank's control orders: two-step sleep and wake, each answered by an ACK.

An order that raises leaves the rank as it was before the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from omni_notebook.errors import NeedsWeightsError, OmniError
from omni_notebook.protocol import SleepTask, WakeTask
from omni_notebook.worker.rank import no_such
from omni_notebook.worker.sleeping import SleepOrders
from omni_notebook.worker.waking import WakeOrders

if TYPE_CHECKING:
    from concurrent.futures import Future

    from omni_notebook.protocol import OmniACK
    from omni_notebook.worker.rank import Done, Rank
    from omni_notebook.worker.reports import WakeOutlook


class Control:
    """Carries out sleep and wake orders over one rank; one thread calls it, but for `cancel`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.sleeping = SleepOrders(rank)
        self.waking = WakeOrders(rank)

    def cancel(self, task_id: str) -> None:
        """Ask a transition that has not committed to stop (any thread); its prepare then raises."""
        self._rank.cancelled.add(task_id)

    def noop(self, task_id: str) -> OmniACK:
        """Answer an order that has nothing to do."""
        level = self._rank.level
        return self._rank.acks.noop(
            task_id,
            self._rank.pool.held_bytes(),
            level=level,
            state="COLD" if level else "WARM",
            mapped_bytes=0,
            host_backup_bytes=self._rank.pool.host_backup_bytes(),
            weight_version=self._rank.weights.version,
            latency_ms=0.0,
        )

    def undo(self, task_id: str) -> None:
        """Take back an order that this rank prepared or committed, because another rank could not commit it.

        Raises:
            OmniError: this rank never prepared it, or what it dropped can not be had again.
        """
        if self.sleeping.has(task_id):
            self.sleeping.abort_sleep(task_id)
        elif self.waking.has(task_id):
            self.waking.abort_wake(task_id)
        elif self._rank.done is not None and self._rank.done.task_id == task_id:
            self._undo_done(self._rank.done)
        elif not self.sleeping.was_taken_back(task_id):
            raise OmniError(no_such("order", task_id))

    def _undo_done(self, done: Done) -> None:
        done = msgspec.structs.replace(done, task_id=f"{done.task_id}:undo")  # a cancel of the order must not stop it
        weights = self._rank.weights
        if done.slept:
            self._wake_again(done)
        elif done.tags:
            self.sleeping.prepare_sleep(SleepTask(task_id=done.task_id, level=done.level, tags=done.tags))
            self.sleeping.commit_sleep(done.task_id)
        weights.missing, weights.lost = done.missing, done.lost

    def _wake_again(self, done: Done) -> None:
        held = set(self._rank.weights.tags).intersection(done.tags) - done.missing
        self.waking.prepare_wake(WakeTask(task_id=done.task_id, tags=done.tags, reload=bool(held)))
        if held & self.waking.missing:
            self.waking.abort_wake(done.task_id)
            msg = "the sleep that is to be undone discarded weights that no path reproduces"
            raise NeedsWeightsError(msg)
        self.waking.commit_wake(done.task_id)


class ControlOrders:
    """The orders that every rank takes, whoever runs its model; `_control` carries them out."""

    _control: Control

    def prepare_sleep(self, task: SleepTask) -> None:
        """See `SleepOrders.prepare_sleep`."""
        self._control.sleeping.prepare_sleep(task)

    def commit_sleep(self, task_id: str) -> OmniACK:
        """See `SleepOrders.commit_sleep`."""
        return self._control.sleeping.commit_sleep(task_id)

    def abort_sleep(self, task_id: str) -> None:
        """See `SleepOrders.abort_sleep`."""
        self._control.sleeping.abort_sleep(task_id)

    def drop_backup(self, task: SleepTask) -> OmniACK:
        """See `SleepOrders.drop_backup`."""
        return self._control.sleeping.drop_backup(task)

    def begin_wake(self, task: WakeTask) -> WakeOutlook:
        """See `WakeOrders.begin_wake`."""
        return self._control.waking.begin_wake(task)

    def prepare_wake(self, task: WakeTask) -> WakeOutlook:
        """See `WakeOrders.prepare_wake`."""
        return self._control.waking.prepare_wake(task)

    def commit_wake(self, task_id: str) -> OmniACK | Future[OmniACK]:
        """See `WakeOrders.commit_wake`."""
        return self._control.waking.commit_wake(task_id)

    def abort_wake(self, task_id: str) -> None:
        """See `WakeOrders.abort_wake`."""
        self._control.waking.abort_wake(task_id)

    def undo(self, task_id: str) -> None:
        """See `Control.undo`."""
        self._control.undo(task_id)

    def noop(self, task_id: str) -> OmniACK:
        """See `Control.noop`."""
        return self._control.noop(task_id)
