"""The contract of a memory pool and of a probe; every platform fills it, every worker uses it.

A *pool* owns one rank's tagged device memory. Tensors in it keep their addresses for life; a transition takes the
physical pages away and brings them back. A transition has two steps, so that several ranks can move together:

    sleep   prepare_sleep (checks, backup; nothing lost) → commit_sleep (unmap, measure)   | abort_sleep
    wake    map → restore (from backup), or the caller reloads → commit_wake               | abort_wake

A *probe* measures; it never trusts the pool's own books.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec

from omni_notebook.errors import OmniError
from omni_notebook.protocol import ResidualBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import torch
    from torch import nn

    from omni_notebook.memory.reading import FileReader
    from omni_notebook.protocol import TagMemory

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
BALLAST = "ballast"
LORA = "lora"

Scope = Literal["mapping", "process", "device"]


class TransitionOrderError(OmniError):
    """A pool was told to take a step that its tags' states do not allow; nothing changed."""

    error_code = "WRONG_ORDER"


class TransitionCancelledError(OmniError):
    """A transition stopped because its `cancelled()` said so, or the pool was closed; memory is as before it."""

    error_code = "CANCELLED"


class BackupError(OmniError):
    """A backup does not hold what it must (cut short, or a checkpoint with other contents); tags stay as they were."""

    error_code = "BACKUP"


class DeviceError(OmniError):
    """The device's driver refused a call.

    `no_room`: because memory would not suffice. `lost`: in the middle of an unmap, so that contents are gone.
    """

    error_code = "DEVICE"

    def __init__(self, message: str, *, no_room: bool = False, lost: bool = False) -> None:
        super().__init__(message)
        self.no_room = no_room
        self.lost = lost


class TagInfo(msgspec.Struct, frozen=True):
    """One tag as the pool's books have it (no measurement).

    `span_bytes`: what its mappings span; `used_bytes`: of that, tensors; `recomputable`: contents need no backup.
    """

    span_bytes: int
    used_bytes: int
    mapped: bool
    recomputable: bool


class SleepPlan(msgspec.Struct, frozen=True):
    """What a sleep would do, bytes; making it changes nothing."""

    expected_bytes: int
    backup_bytes: int
    kept_bytes: int
    tags: Mapping[str, int]


class PrepareReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `prepare_sleep` did.

    `backup`: tag → "spill" | "checkpoint" | "pinned", "pageable" (all of it, in such host memory) | "host" (only small
    kept state) | None. `modified`: the contents of a
    tag differ from its recorded checksum (someone wrote to the weights after load); None = not looked at.
    `copied_bytes`, `skipped_clean_bytes`, `checksum_ms`, `copy_ms`: without what `late_copy` leaves to the commit.
    """

    backup: Mapping[str, str | None]
    backup_location: str | None
    host_backup_bytes: int
    copied_bytes: int
    skipped_clean_bytes: int
    modified: bool | None
    checksum_ms: float
    copy_ms: float


class UnmapReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `commit_sleep` measured: tag → bytes that left residency, and what was expected to.

    `copied_bytes`, `skipped_clean_bytes`, `checksum_ms`, `copy_ms`: of copies that it made itself
    (`prepare_sleep(late_copy=True)`); the times are apart from `unmap_ms`.
    """

    freed: Mapping[str, int]
    expected_bytes: int
    observed_bytes: int
    scope: Scope
    unmap_ms: float
    note: str | None = None
    copied_bytes: int = 0
    skipped_clean_bytes: int = 0
    checksum_ms: float = 0.0
    copy_ms: float = 0.0


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What the rank's process holds on its device now, measured; with scope "device" it is what all processes hold."""

    total_bytes: int
    scope: Scope
    parts: ResidualBytes


class MapReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `map` brought back: bytes physically there that were not before (measured)."""

    mapped_bytes: int
    map_ms: float


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `restore` copied back; `needs_reload`: tags whose backup was dropped (level 2), for the caller to fill.

    `copy_ms`: until all had come, from the end of `map` or `begin_wake` on where that began the copies.
    """

    copied_bytes: int
    copy_ms: float
    needs_reload: tuple[str, ...]


class MemoryPool(Protocol):
    """One rank's tagged device memory. One thread at a time, but for `memory()` (any thread, never waits)."""

    platform: str
    device: str
    device_name: str

    def adopt(self, module: nn.Module, tag: str = WEIGHTS) -> None:
        """Move a module's parameters and buffers (persistent or not, meta ones as uninitialised) into the pool.

        Ties are kept (one storage stays one storage), values are kept, `requires_grad` becomes False.
        """
        ...

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, tag: str = KV_CACHE, *, recomputable: bool = True
    ) -> torch.Tensor:
        """A zeroed tensor in the pool; `recomputable` contents are dropped by every sleep and zeroed by its wake."""
        ...

    def reader(self) -> FileReader | None:
        """What reads files straight into the pool's tensors; None: nothing is faster than copying to them."""
        ...

    def tags(self) -> Mapping[str, TagInfo]:
        """The tags and their books."""
        ...

    def memory(self) -> Mapping[str, TagMemory]:
        """Every tag's memory, *measured* now; callable from any thread during anything."""
        ...

    def host_backup_bytes(self) -> int:
        """Bytes of host memory or disk that backups take now."""
        ...

    def held(self) -> Held:
        """What this process holds on the device now, by cause as far as that can be measured."""
        ...

    def held_bytes(self) -> int:
        """The total of `held`, in microseconds: off by a few hundred KiB where exactness takes milliseconds."""
        ...

    def plan(self, level: int, tags: Collection[str] | None = None) -> SleepPlan:
        """What a sleep of `tags` (None = all that are mapped) would free and copy."""
        ...

    def record_checksum(self, tag: str = WEIGHTS) -> str:
        """Checksum `tag`'s contents now and remember it as "as loaded"; a short hex digest."""
        ...

    def verify_checksum(self, tag: str = WEIGHTS) -> bool:
        """Whether `tag`'s contents equal the recorded checksum."""
        ...

    def keep(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """Name pool tensors (buffers, scales) whose contents no checkpoint has; every level keeps them on the host.

        May be called again for tensors that came later. A tag that is kept from end to end is backed up at level 2 as
        at level 1.
        """
        ...

    def discard(self, tag: str) -> None:
        """Give an awake tag and its backup up for good; its tensors must not be touched after."""
        ...

    def write_ahead(self) -> None:
        """Start making the level-1 backup in the background; returns at once. A sleep joins or supersedes it."""
        ...

    def wait_write_ahead(self, timeout_s: float) -> bool:
        """Whether the background backup is complete, waiting at most `timeout_s`."""
        ...

    def prepare_sleep(
        self,
        level: int,
        tags: Collection[str] | None = None,
        *,
        cancelled: Callable[[], bool] | None = None,
        late_copy: bool = False,
    ) -> PrepareReport:
        """Check room, back up; no page is given up.

        `late_copy`: the caller moves alone, so that a pool may leave copying to `commit_sleep`, each page given up
        behind its copy; if a copy fails there, memory is put back as it was, recomputable contents zeroed.

        Raises:
            OutOfMemoryError: the backup has no room (needed and free bytes on it); nothing changed.
            OSError: the backup could not be written; nothing changed.
        """
        ...

    def commit_sleep(self) -> UnmapReport:
        """Give the prepared tags' pages up, and measure."""
        ...

    def abort_sleep(self) -> None:
        """Forget a prepared sleep; memory and backup as before it."""
        ...

    def drop_backup(self, tags: Collection[str] | None = None) -> int:
        """Sleeping tags lose their backup but for kept tensors (level 1 → 2); host bytes given back, measured."""
        ...

    def modified_in_backup(self, tag: str = WEIGHTS) -> bool:
        """Whether a sleeping tag's backup differs from the recorded checksum (a level 2 would lose the difference)."""
        ...

    def map(self, tags: Collection[str] | None = None) -> MapReport:
        """Make sleeping tags' pages physically there again, zeroed, at the same addresses.

        Raises:
            OutOfMemoryError: not enough room (needed and free bytes on it); nothing is mapped then.
        """
        ...

    def restore(self, tags: Collection[str] | None = None) -> RestoreReport:
        """Copy backups (or kept tensors after a level 2) into the mapped tags."""
        ...

    def set_checkpoint_restorer(self, restorer: Callable[[str], None] | None) -> None:
        """Who refills a tag from its checkpoint, for pools that keep no copy of unmodified weights."""
        ...

    def map_restore(
        self, tags: Collection[str] | None = None, *, cancelled: Callable[[], bool] = ...
    ) -> tuple[MapReport, RestoreReport]:
        """`map` and `restore` overlapped; on an error, or when `cancelled()` says so, nothing is mapped."""
        ...

    def commit_wake(self) -> None:
        """The wake is good: the tags are awake."""
        ...

    def abort_wake(self) -> None:
        """Unmap what this wake mapped; the backup is still there and a later wake works."""
        ...

    def close(self) -> None:
        """Give everything back; idempotent, legal while asleep. Tensors of the pool must not be touched after."""
        ...


@runtime_checkable
class ArrivingPool(Protocol):
    """What a pool has beside `MemoryPool` whose wakes can be followed while they copy."""

    def begin_wake(
        self,
        tags: Collection[str] | None = None,
        *,
        order: Iterable[torch.Tensor] = (),
        cancelled: Callable[[], bool] = ...,
    ) -> tuple[MapReport, Any]:
        """Map, and begin to copy back, first what holds the tensors of `order`; what follows it is `worker.arriving`'s.

        On an error nothing is mapped.
        """
        ...

    def finish_wake(self) -> RestoreReport:
        """Wait for what `begin_wake` has begun; any thread. On an error all stays mapped until `abort_wake`."""
        ...


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A process's host memory in bytes: resident, and of that private (anonymous + private file pages)."""

    rss_bytes: int
    private_bytes: int


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host RAM that this process may still take: the smaller of the machine's and its cgroup's room."""

    limit_bytes: int
    available_bytes: int
