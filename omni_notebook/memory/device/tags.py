"""The tags of a pool over vLLM's allocator: what each means, where it is between awake and asleep, what is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from omni_notebook.memory.arena import CHUNK
from omni_notebook.memory.base import KV_CACHE, WEIGHTS
from omni_notebook.memory.books import TagState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from omni_notebook.memory.device.segments import DeviceSegment

WORKSPACE = "workspace"
_RECOMPUTABLE = frozenset({KV_CACHE, WORKSPACE})

WHOLE = frozenset({"pinned", "pageable"})
"""Kinds of backups that hold all of a tag."""


class KeptRange(NamedTuple):
    """Bytes of a segment whose contents every level keeps."""

    segment: DeviceSegment
    offset: int
    n_bytes: int

    @property
    def address(self) -> int:
        """Where it begins on the device."""
        return self.segment.address + self.offset


def together(ranges: Iterable[KeptRange]) -> Iterator[list[KeptRange]]:
    """Ranges in groups that lie within 2 MiB of a segment; a larger range is a group by itself."""
    group: list[KeptRange] = []
    end = 0
    for kept in sorted(ranges, key=lambda one: one.address):
        end = max(end, kept.offset + kept.n_bytes)
        if group and (kept.segment is not group[0].segment or end - group[0].offset > CHUNK):
            yield group
            group, end = [], kept.offset + kept.n_bytes
        group.append(kept)
    if group:
        yield group


def hull(group: Sequence[KeptRange]) -> int:
    """Bytes from the first of a group's to its last."""
    return max(kept.offset + kept.n_bytes for kept in group) - group[0].offset


@dataclass(eq=False)
class DeviceTag:
    """One tag; `segments` as of the last refresh.

    `recomputable`: nobody needs its contents after a sleep. `kept_whole`: no checkpoint has what it holds, every level
    backs all of it up.
    `slept`: the segments that its sleep is about; later ones stay as they are. `created`: of these, whose copy got its
    room from this sleep. `keeps_room`: the memory of its last copies outlives a sleep that makes none.
    """

    name: str
    recomputable: bool
    kept_whole: bool = False
    state: TagState = TagState.AWAKE
    level: int = 0
    backup: str | None = None
    restored: bool = False
    keeps_room: bool = False
    used_bytes: int = 0
    segments: list[DeviceSegment] = field(default_factory=list)
    kept: list[KeptRange] = field(default_factory=list)
    kept_data: dict[KeptRange, bytearray] = field(default_factory=dict)
    slept: list[DeviceSegment] = field(default_factory=list)
    created: list[DeviceSegment] = field(default_factory=list)

    @property
    def span_bytes(self) -> int:
        """What its segments span."""
        return sum(segment.size_bytes for segment in tuple(self.segments))

    @property
    def mapped_bytes(self) -> int:
        """Of that, what is mapped."""
        return sum(segment.size_bytes for segment in tuple(self.segments) if segment.mapped)

    def backed_up_at(self, level: int) -> bool:
        """Whether a sleep of this level copies all of it."""
        return self.kept_whole or (level == 1 and not self.recomputable)

    def prepare(self, level: int, backup: str | None, kept: dict[KeptRange, bytearray]) -> None:
        """AWAKE → PREPARED."""
        self.state, self.level, self.backup, self.restored = TagState.PREPARED, level, backup, False
        self.kept_data, self.slept = kept, list(self.segments)

    def sleeping_segments(self) -> list[DeviceSegment]:
        """The segments that its sleep is about, but for those that vLLM has freed since."""
        return [segment for segment in self.slept if segment in self.segments]

    def wake(self) -> None:
        """Awake, whatever it was; what backups hold stays with their keeper."""
        self.state, self.level, self.backup, self.restored = TagState.AWAKE, 0, None, False
        self.kept_data, self.slept, self.created = {}, [], []

    def needs_reload(self) -> bool:
        """Whether after `restore` the caller must still fill it."""
        return not self.recomputable and self.backup not in WHOLE

    def needs_restore(self) -> bool:
        """Whether a backup waits to be copied back."""
        return not self.restored and self.backup is not None


def vllm_tag(name: str) -> DeviceTag:
    """What vLLM means by a tag: caches and workspaces are dropped, weights have a checkpoint, all else is kept."""
    recomputable = name in _RECOMPUTABLE
    return DeviceTag(name, recomputable, kept_whole=not recomputable and name != WEIGHTS)
