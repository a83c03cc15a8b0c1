"""What pools over segments of a device share, whoever allocates these: looking, both steps of a sleep and of a wake."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from omni_notebook.memory.base import WEIGHTS, DeviceError, Held, TagInfo, TransitionOrderError
from omni_notebook.memory.books import TagState
from omni_notebook.memory.device.ahead import RoomAhead, low_bytes
from omni_notebook.memory.device.core import DeviceCore
from omni_notebook.memory.device.measuring import MOVING
from omni_notebook.memory.device.settings import refuse_expandable_segments
from omni_notebook.memory.device.sleeping import DeviceSleeping, host_bytes
from omni_notebook.memory.device.waking import DeviceWaking
from omni_notebook.memory.device.watching import WATCH_S, Watch
from omni_notebook.memory.host import host_memory
from omni_notebook.memory.lanes import never
from omni_notebook.protocol import ResidualBytes, TagMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    import torch

    from omni_notebook.memory.base import HostMemory, MapReport, PrepareReport, RestoreReport, SleepPlan, UnmapReport
    from omni_notebook.memory.device.arriving import Arrivals
    from omni_notebook.memory.device.driver import Driver, Probe
    from omni_notebook.memory.device.tags import DeviceTag
    from omni_notebook.memory.reading import FileReader

SETTLE_S = 0.25
"""How long a measurement waits for the driver's own books to follow."""


class DevicePool:
    """The part of `memory.base.MemoryPool` that is the same for all segments of a device.

    While a tag sleeps, touching its tensors on the device is an illegal access that ends the process's context. The
    copies of level 1 stay in page-locked host memory after the wake, for the next sleep, and over sleeps of level 2
    while the host has plenty: `host_backup_bytes`. See `watch_host`.

    Args:
        driver: acts on the device.
        probe: measures it.
        room: how much RAM may still be taken; asked before a sleep.
        environ: where torch's allocator settings are.
        settle_s: how long a measurement waits for the driver's books.
        expected_tags: those that are there before anything is in them.

    Raises:
        UnsupportedError: expandable segments are on.
    """

    def __init__(
        self,
        driver: Driver,
        probe: Probe,
        *,
        room: Callable[[], HostMemory] = host_memory,
        environ: Mapping[str, str] = os.environ,
        settle_s: float = SETTLE_S,
        expected_tags: tuple[str, ...] = (),
    ) -> None:
        refuse_expandable_segments(environ)
        self.platform, self.device, self.device_name = driver.platform, driver.device, driver.device_name
        self._core = DeviceCore(driver, probe, room, settle_s, expected_tags)
        self._sleeping, self._waking = DeviceSleeping(self._core), DeviceWaking(self._core)
        self._ahead = RoomAhead(self._core)
        self._watch: Watch | None = None
        self._lock = threading.RLock()

    # --------------------------------------------------------------------------------------- looking

    def reader(self) -> FileReader | None:
        """None, where the platform has no faster way than torch's copies."""
        return None

    def tags(self) -> Mapping[str, TagInfo]:
        """The tags and their books; the expected ones are always there."""
        return self._core.books.infos()

    def memory(self) -> Mapping[str, TagMemory]:
        """Every tag's memory: a segment has all its pages or none. Any thread may ask at any time."""
        tags = self._core.books.in_state(*TagState)
        return {tag.name: TagMemory(tag.span_bytes, tag.mapped_bytes) for tag in tags}

    def host_backup_bytes(self) -> int:
        """Host memory that copies take now, those that wait for the next sleep too."""
        return host_bytes(self._core)

    def held(self) -> Held:
        """What this process holds on the device, as the driver tells it; what torch caches and graphs hold, by torch.

        `other` is the rest: the device's context, communicators, libraries. Where the driver hides this process, the
        total is all processes', where nothing can be measured that of the mapped segments, and `other` is not told.
        """
        reserved, mapped = self._core.driver.reserved(), self._core.table.mapped_bytes()
        try:
            total, scope = self._core.last_reading()
        except DeviceError:
            total, scope = mapped, "mapping"
        known = mapped + reserved.untagged_bytes + reserved.graphs_bytes
        parts = ResidualBytes(
            untagged=reserved.untagged_bytes,
            graphs=reserved.graphs_bytes,
            other=max(0, total - known) if scope == "process" else None,
        )
        return Held(total_bytes=total, scope=scope, parts=parts)

    def held_bytes(self) -> int:
        """The total of `held`, which the driver tells at once."""
        return self.held().total_bytes

    def plan(self, level: int, tags: Collection[str] | None = None) -> SleepPlan:
        """What a sleep of `tags` (None = all that are awake) would free and copy; tags that sleep count nothing.

        Raises:
            ArgumentError: the level or a tag is unknown.
        """
        with self._lock:
            self._core.refresh()
            return self._sleeping.plan(level, tags)

    def record_checksum(self, tag: str = WEIGHTS) -> str:
        """Checksum the registered tensors of `tag` and remember it as "as loaded"; sixteen hex digits.

        Raises:
            TransitionOrderError: the tag is asleep.
        """
        with self._lock:
            book = self._readable(tag)
            self._core.count_used()
            return self._core.record(book)

    def verify_checksum(self, tag: str = WEIGHTS) -> bool:
        """Whether the registered tensors of `tag`, all read now, equal the recorded checksum.

        Raises:
            TransitionOrderError: the tag is asleep, or no checksum was recorded.
        """
        with self._lock:
            book = self._readable(tag)
            if tag not in self._core.records:
                msg = f"no checksum of {tag!r} was recorded; call record_checksum after loading"
                raise TransitionOrderError(msg)
            return self._core.is_as_recorded(book)

    def _readable(self, name: str) -> DeviceTag:
        self._core.begin("checksum")
        tag = self._core.books.readable(name)
        self._core.require_own((tag,), "checksum")
        return tag

    # --------------------------------------------------------------------------------------- backup

    def set_checkpoint_restorer(self, restorer: Callable[[str], None] | None) -> None:
        """Nothing to do: level 1 always copies."""

    def write_ahead(self) -> None:
        """Begin to take and lock the host memory that a level-1 sleep will copy to, while the host has plenty.

        A sleep takes what is there and makes the rest. The memory counts as `host_backup_bytes` at once.
        """
        with self._lock:
            self._core.check_open("write_ahead")
            self._ahead.begin()
            if self._watch is not None:
                self._watch.start()

    def watch_host(self, period_s: float = WATCH_S) -> None:
        """See so often, from the first `write_ahead` on, whether the host runs short: what waits for a sleep goes back.

        What a wake needs stays. Where there is plenty again, what went back is taken again.
        """
        with self._lock:
            self._core.check_open("watch_host")
            if self._watch is None:
                self._ahead.low = low_bytes
                self._watch = Watch(self._look_at_host, period_s)

    def _look_at_host(self) -> None:
        """What the watch does; not while an order has the pool."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._core.closed:
                    self._ahead.look()
            finally:
                self._lock.release()

    def drop_copies(self) -> int:
        """Give back the host memory that waits for the next sleep of what is awake; the bytes. Any thread.

        For who measures first sleeps: no order asks for it.

        Raises:
            DeviceError: the driver refused to unlock some of it, which stays and counts.
        """
        with self._lock:
            return self._ahead.give_back()

    def wait_write_ahead(self, timeout_s: float) -> bool:
        """Whether the host memory for a level-1 sleep is there."""
        ended = self._core.ahead.wait(timeout_s)
        with self._lock:
            return ended and self._ahead.is_whole()

    # ---------------------------------------------------------------------------------------- sleep

    def prepare_sleep(
        self,
        level: int,
        tags: Collection[str] | None = None,
        *,
        cancelled: Callable[[], bool] | None = None,
        late_copy: bool = False,
    ) -> PrepareReport:
        """Wait for the device, check room, copy to the host what has changed since its last copy; no page is given up.

        `late_copy`: the commit sees what has changed, copies that, and unmaps each segment behind its copy.

        Raises:
            ArgumentError: the level or a tag is unknown.
            TransitionOrderError: a tag is not awake, another transition is not finished, or somebody else unmapped.
            OutOfMemoryError: the host has no room for the copies; nothing changed.
            TransitionCancelledError: `cancelled()` said so; nothing changed.
            DeviceError: the driver refused; nothing changed.
        """
        with self._lock:
            return self._sleeping.prepare(level, tags, cancelled, late_copy=late_copy)

    def commit_sleep(self) -> UnmapReport:
        """Unmap the prepared tags' segments, and measure what left; what was written since the prepare is lost.

        Raises:
            TransitionOrderError: no sleep is prepared.
            DeviceError: the driver refused all of it; the sleep can still be aborted.
        """
        with self._lock:
            return self._sleeping.commit()

    def abort_sleep(self) -> None:
        """Forget a prepared sleep; memory and copies as before it. Without one it does nothing."""
        with self._lock:
            self._sleeping.abort()

    def drop_backup(self, tags: Collection[str] | None = None) -> int:
        """Sleeping tags lose their copy but for kept tensors (level 1 → 2); host bytes given back.

        Raises:
            TransitionOrderError: a tag is not asleep.
        """
        with self._lock:
            self._core.check_open("drop_backup")
            return self._sleeping.drop_backup(tags)

    def modified_in_backup(self, tag: str = WEIGHTS) -> bool:
        """Whether a sleeping tag's copy differs from the recorded checksum; reads all of the copy.

        Raises:
            TransitionOrderError: the tag is not asleep.
        """
        with self._lock:
            (book,) = self._core.books.select((tag,), TagState.ASLEEP, "modified_in_backup")
            return self._core.has_copy(book) and not self._core.is_copy_as_recorded(book)

    # ----------------------------------------------------------------------------------------- wake

    def map(self, tags: Collection[str] | None = None) -> MapReport:
        """Map sleeping tags' segments again, zeroed, at the same addresses.

        Raises:
            TransitionOrderError: a tag is not asleep.
            OutOfMemoryError: not enough room; nothing is mapped then.
            DeviceError: the driver refused; nothing is mapped then.
        """
        with self._lock:
            return self._waking.map(tags)

    def restore(self, tags: Collection[str] | None = None) -> RestoreReport:
        """Copy back into the mapped tags; a tag that this wake restored already is left alone.

        Raises:
            TransitionOrderError: a tag is not mapped.
            DeviceError: the driver refused; `abort_wake` is possible.
        """
        with self._lock:
            return self._waking.restore(tags)

    def map_restore(
        self, tags: Collection[str] | None = None, *, cancelled: Callable[[], bool] = never
    ) -> tuple[MapReport, RestoreReport]:
        """`map`, then `restore`; on an error nothing is mapped.

        Raises:
            TransitionOrderError, OutOfMemoryError, DeviceError: as `map` and `restore`.
            TransitionCancelledError: `cancelled()` said so; nothing is mapped.
        """
        with self._lock:
            return self._waking.map_restore(tags, lambda: self._core.closed or cancelled())

    def begin_wake(
        self,
        tags: Collection[str] | None = None,
        *,
        order: Iterable[torch.Tensor] = (),
        cancelled: Callable[[], bool] = never,
    ) -> tuple[MapReport, Arrivals]:
        """Map, and begin to copy back, first what holds the tensors of `order`; do not wait for the copies.

        What is computed behind `Arrivals.follow` is right once `finish_wake` has returned, and to be thrown away if it
        raises, or if the wake is aborted. On an error here nothing is mapped.

        Raises:
            TransitionOrderError, OutOfMemoryError, DeviceError, TransitionCancelledError: as `map_restore`.
        """
        with self._lock:
            return self._waking.begin(tags, lambda: self._core.closed or cancelled(), order)

    def finish_wake(self) -> RestoreReport:
        """Wait for what `begin_wake` has begun, and copy back what else the sleep kept; any thread, beside a pass.

        On an error all stays mapped, because a pass may still run there: `abort_wake`, once it has ended.

        Raises:
            TransitionOrderError: no wake has begun.
            DeviceError: a copy failed.
        """
        with self._lock:
            return self._waking.finish()

    def commit_wake(self) -> None:
        """The mapped tags are awake; their copies stay for the next sleep.

        Raises:
            TransitionOrderError: no tag is mapped, or a backup was not restored.
        """
        with self._lock:
            self._waking.commit()

    def abort_wake(self) -> None:
        """Unmap what this wake mapped; copies stay. Without a wake it does nothing.

        Raises:
            DeviceError: the driver kept some of it mapped; `memory` shows it, and a later wake works.
        """
        with self._lock:
            self._waking.abort()

    # ---------------------------------------------------------------------------------------- close

    def close(self) -> None:
        """Give pages and copies back, at rest or not, and what torch caches; idempotent.

        Its tensors may be freed after, not used.
        """
        with self._lock, MOVING:
            if self._core.closed:
                return
            self._core.closed = True
            self._core.ahead.stop()
            if self._watch is not None:
                self._watch.stop()
            with contextlib.suppress(DeviceError):
                self._core.driver.enter()
            for segment in self._core.table.all():
                with contextlib.suppress(DeviceError):
                    self._core.table.unmap(segment)
            self._core.give_up([*self._core.table.all(), *self._core.stuck])
            for tag in self._core.books.values():
                tag.kept_data = {}
            self._core.modules.clear()
            with contextlib.suppress(DeviceError):
                self._core.driver.trim()
