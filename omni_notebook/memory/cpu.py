"""The CPU platform: "device memory" is this process's private pages, backups are unnamed files in `spill_dir`."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from omni_notebook.errors import ArgumentError
from omni_notebook.memory.allocation import Allocation
from omni_notebook.memory.base import KV_CACHE, WEIGHTS, Held, TagInfo
from omni_notebook.memory.books import TagState
from omni_notebook.memory.core import Core
from omni_notebook.memory.host import cpu_name, host_memory, process_memory, rss_bytes
from omni_notebook.memory.lanes import never
from omni_notebook.memory.reading import HostReader
from omni_notebook.memory.sleeping import Sleeping
from omni_notebook.memory.tracking import Tracking, make_tracker
from omni_notebook.memory.waking import Waking
from omni_notebook.protocol import ResidualBytes, TagMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch
    from torch import nn

    from omni_notebook.memory.base import HostMemory, MapReport, PrepareReport, RestoreReport, SleepPlan, UnmapReport

Backup = Literal["spill", "checkpoint"]


class CpuPool:
    """One rank's tagged memory in this process; fills `memory.base.MemoryPool`.

    Each `adopt` and each `empty` makes one segment of whole 2 MiB chunks. Tensors keep their addresses until the last
    view is gone, also after `close`, when they read as zeros. While a tag sleeps its tensors read as zeros too.

    What leaves the pool: `copy.deepcopy`, `.to(dtype)` and `share_memory_()` make tensors of their own elsewhere. A
    forked child does not have the pages (touching a tensor there ends the child); a spawned one never had. Memory that
    a device writes by itself (long-term pins) is not seen by write tracking. Writes between `prepare_sleep` and
    `commit_sleep` are lost.

    Args:
        spill_dir: where backups go; None = the system's folder for temporary files.
        backup: "checkpoint" restores unmodified weights through `set_checkpoint_restorer` instead of a copy.
        tracking: how unchanged chunks are found; "auto" takes the kernel's write tracking where it works.
        room: how much RAM may still be taken; asked before a wake.

    Raises:
        ArgumentError: a wrong `backup`, or a `spill_dir` that can not be used.
    """

    platform = "cpu"
    device = "cpu"

    def __init__(
        self,
        spill_dir: str | None = None,
        backup: Backup = "spill",
        *,
        tracking: Tracking = "auto",
        room: Callable[[], HostMemory] = host_memory,
    ) -> None:
        if backup not in {"spill", "checkpoint"}:
            msg = f'backup={backup!r}: known are "spill" and "checkpoint"'
            raise ArgumentError(msg)
        self.device_name = cpu_name()
        self._core = Core(
            spill_dir=_writable(spill_dir or tempfile.gettempdir()),
            tracker=make_tracker(tracking),
            room=room,
            prefer_checkpoint=backup == "checkpoint",
        )
        self._allocation, self._sleeping, self._waking = (
            Allocation(self._core),
            Sleeping(self._core),
            Waking(self._core),
        )
        self._lock = threading.RLock()
        self._pid = os.getpid()

    # ------------------------------------------------------------------------------------- contents

    def adopt(self, module: nn.Module, tag: str = WEIGHTS) -> None:
        """Move a module's parameters and buffers into the pool; tensors that are already in it stay.

        Raises:
            ArgumentError: a tensor on another device, sparse or quantised.
            OutOfMemoryError: no room; the module is as before.
        """
        with self._lock:
            self._allocation.adopt(module, tag)

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, tag: str = KV_CACHE, *, recomputable: bool = True
    ) -> torch.Tensor:
        """A zeroed tensor in the pool, physically there.

        Raises:
            ArgumentError: `recomputable` differs from the tag's, or a size is negative.
            TransitionOrderError: the tag is not awake.
            OutOfMemoryError: no room.
        """
        with self._lock:
            return self._allocation.empty(shape, dtype, tag, recomputable=recomputable)

    def keep(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """Name contiguous pool tensors of `tag` whose contents every level keeps; may be called again for later ones.

        At level 2 they are kept in host memory; where they are all that the tag has, in a spill file as at level 1.

        Raises:
            ArgumentError: a tensor is not contiguous or not in the pool under `tag`.
        """
        with self._lock:
            self._allocation.keep(tag, tensors)

    def discard(self, tag: str) -> None:
        """Give an awake tag's pages and backup up for good; views that still live read as zeros.

        A background copy is stopped: `write_ahead` starts it again for the rest.

        Raises:
            ArgumentError: the tag is unknown.
            TransitionOrderError: it is not awake.
        """
        with self._lock:
            self._core.check_open("discard")
            self._allocation.discard(tag)

    def reader(self) -> HostReader:
        """What reads files straight into the pool's tensors."""
        return HostReader()

    # --------------------------------------------------------------------------------------- looking

    def tags(self) -> Mapping[str, TagInfo]:
        """The tags and their books."""
        return self._core.books.infos()

    def memory(self) -> Mapping[str, TagMemory]:
        """Every tag's memory, measured now; any thread may ask at any time."""
        tags = self._core.books.in_state(*TagState)
        return {tag.name: TagMemory(tag.span_bytes, tag.resident_bytes()) for tag in tags}

    def host_backup_bytes(self) -> int:
        """Bytes that backups take now: blocks of the spill files, and kept tensors on the host."""
        return self._core.host_backup_bytes()

    def held(self) -> Held:
        """This process's resident memory; it is not told apart."""
        rss = process_memory().rss_bytes
        return Held(total_bytes=rss, scope="process", parts=ResidualBytes(other=rss))

    def held_bytes(self) -> int:
        """See `host.rss_bytes`."""
        return rss_bytes()

    def plan(self, level: int, tags: Collection[str] | None = None) -> SleepPlan:
        """What a sleep of `tags` (None = all that are awake) would free and copy; tags that sleep count nothing.

        Raises:
            ArgumentError: the level or a tag is unknown.
        """
        return self._sleeping.plan(level, tags)

    def record_checksum(self, tag: str = WEIGHTS) -> str:
        """Checksum `tag` now and remember it as "as loaded"; sixteen hex digits.

        Raises:
            TransitionOrderError: the tag is asleep.
        """
        with self._lock:
            return self._core.records.record(self._core.books.readable(tag))

    def verify_checksum(self, tag: str = WEIGHTS) -> bool:
        """Whether `tag`'s contents, all read now, equal the recorded checksum.

        Raises:
            TransitionOrderError: the tag is asleep, or no checksum was recorded.
        """
        with self._lock:
            return self._core.records.verify(self._core.books.readable(tag))

    # --------------------------------------------------------------------------------------- backup

    def set_checkpoint_restorer(self, restorer: Callable[[str], None] | None) -> None:
        """With backup="checkpoint": who refills a tag's tensors in place; unmodified `weights` then get no copy.

        It is called with the tag's name by `restore`, and what it filled in is verified by checksum.
        """
        self._core.restorer = restorer

    def write_ahead(self) -> None:
        """Start copying what a level-1 sleep would copy, in the background; a sleep takes over what is left."""
        with self._lock:
            core = self._core
            core.check_open("write_ahead")
            core.ahead.stop()
            if contents := self._sleeping.ahead_contents():
                core.ahead.start(lambda stop: core.backuper.back_up(contents, stop=stop, ahead=True))

    def wait_write_ahead(self, timeout_s: float) -> bool:
        """Whether the background backup is complete (writes after it are the next sleep's)."""
        held = self._core.ahead.wait(timeout_s)
        return held and all(content.is_held() for content in self._sleeping.ahead_contents())

    # ---------------------------------------------------------------------------------------- sleep

    def prepare_sleep(
        self,
        level: int,
        tags: Collection[str] | None = None,
        *,
        cancelled: Callable[[], bool] | None = None,
        late_copy: bool = False,  # noqa: ARG002  (the spill is written ahead: little is left to copy)
    ) -> PrepareReport:
        """Check room, back up; no page is given up.

        Raises:
            ArgumentError: the level or a tag is unknown.
            TransitionOrderError: a tag is not awake, or another transition is not finished.
            OutOfMemoryError: the backup has no room; nothing changed.
            TransitionCancelledError: `cancelled()` said so; nothing changed.
            OSError: the backup could not be written; nothing changed.
        """
        with self._lock:
            self._core.check_open("prepare_sleep")
            return self._sleeping.prepare(level, tags, cancelled)

    def commit_sleep(self) -> UnmapReport:
        """Give the prepared tags' pages up, and measure; what was written since the prepare is lost.

        Raises:
            TransitionOrderError: no sleep is prepared.
        """
        with self._lock:
            return self._sleeping.commit()

    def abort_sleep(self) -> None:
        """Forget a prepared sleep; without one it does nothing."""
        with self._lock:
            self._sleeping.abort()

    def drop_backup(self, tags: Collection[str] | None = None) -> int:
        """Sleeping tags lose their backup but for kept tensors (level 1 → 2); host bytes given back, measured.

        Raises:
            TransitionOrderError: a tag is not asleep.
        """
        with self._lock:
            return self._sleeping.drop_backup(tags)

    def modified_in_backup(self, tag: str = WEIGHTS) -> bool:
        """Whether what a sleeping tag's backup holds differs from the recorded checksum; reads only suspects.

        Raises:
            TransitionOrderError: the tag is not asleep.
        """
        with self._lock:
            (book,) = self._core.books.select((tag,), TagState.ASLEEP, "modified_in_backup")
            return book.backup == "spill" and self._core.records.modified_in_spill(book)

    # ----------------------------------------------------------------------------------------- wake

    def map(self, tags: Collection[str] | None = None) -> MapReport:
        """Make sleeping tags' pages physically there again, zeroed.

        Raises:
            TransitionOrderError: a tag is not asleep.
            OutOfMemoryError: not enough room; nothing is mapped then.
        """
        with self._lock:
            return self._waking.map(tags)

    def restore(self, tags: Collection[str] | None = None) -> RestoreReport:
        """Copy backups (or kept tensors) into the mapped tags; a tag that this wake restored already is left alone.

        Raises:
            TransitionOrderError: a tag is not mapped.
            BackupError: a spill was cut short, or the checkpoint gave other contents; `abort_wake` is possible.
        """
        with self._lock:
            return self._waking.restore(tags)

    def map_restore(
        self, tags: Collection[str] | None = None, *, cancelled: Callable[[], bool] = never
    ) -> tuple[MapReport, RestoreReport]:
        """`map` and `restore` in one pass: each chunk is filled while its fresh pages are still in the cache.

        `map_ms` is the pass; `copy_ms` only what came after it. On an error nothing is mapped.

        Raises:
            TransitionOrderError, OutOfMemoryError, BackupError: as `map` and `restore`.
            TransitionCancelledError: `cancelled()` said so; nothing is mapped.
        """
        with self._lock:
            return self._waking.map_restore(tags, lambda: self._core.closing.is_set() or cancelled())

    def commit_wake(self) -> None:
        """The mapped tags are awake; their spills stay for the next sleep.

        Raises:
            TransitionOrderError: no tag is mapped, or a backup was not restored.
        """
        with self._lock:
            self._waking.commit()

    def abort_wake(self) -> None:
        """Unmap what this wake mapped; backups stay. Without a wake it does nothing."""
        with self._lock:
            self._waking.abort()

    # ---------------------------------------------------------------------------------------- close

    def close(self) -> None:
        """Give pages, spill files and threads back; a transition in another thread ends first, at its next chunk.

        In a forked child it does nothing: the pool is its parent's.
        """
        if os.getpid() != self._pid:
            return
        self._core.closing.set()
        with self._lock:
            self._core.ahead.stop()
            for content in self._core.books.contents():
                content.segment.close()
                content.drop_spill()
            self._core.books.clear()
            self._core.tracker.close()


def _writable(folder: str) -> str:
    if not Path(folder).is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        msg = f"spill_dir={folder!r} is not a folder that can be written; give one on a disk with room for the weights"
        raise ArgumentError(msg)
    return folder
