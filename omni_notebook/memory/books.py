"""A pool's books: tags, their segments and where each tag is between awake and asleep."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from omni_notebook.errors import ArgumentError
from omni_notebook.memory.arena import ALIGN, CHUNK, Chunk, round_up
from omni_notebook.memory.base import TagInfo, TransitionCancelledError, TransitionOrderError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from omni_notebook.memory.arena import Segment
    from omni_notebook.memory.content import Content


class TagState(StrEnum):
    """AWAKE → PREPARED → ASLEEP → MAPPED → AWAKE."""

    AWAKE = "awake"
    PREPARED = "prepared for sleep"
    ASLEEP = "asleep"
    MAPPED = "mapped, its wake not committed"


class Stated(Protocol):
    """What books need of a tag."""

    name: str
    state: TagState

    @property
    def recomputable(self) -> bool:
        """Whether nobody needs its contents after a sleep."""
        ...

    @property
    def span_bytes(self) -> int:
        """What its mappings span."""
        ...

    @property
    def used_bytes(self) -> int:
        """Of that, tensors."""
        ...


T = TypeVar("T", bound=Stated)


class Kept(NamedTuple):
    """A byte range of a segment whose contents every level keeps."""

    content: Content
    offset: int
    n_bytes: int

    def read(self) -> bytes:
        """Its bytes, from memory."""
        return bytes(self.content.segment.view[self.offset : self.offset + self.n_bytes])

    def write(self, data: bytes) -> None:
        """Put its bytes back."""
        self.content.segment.view[self.offset : self.offset + self.n_bytes] = data

    def read_backup(self) -> bytes:
        """Its bytes, from the spill."""
        spill, segment = self.content.spill, self.content.segment
        data = bytearray()
        first, last = self.offset // CHUNK, (self.offset + self.n_bytes - 1) // CHUNK
        for index in range(first, last + 1):
            chunk = Chunk(segment, index)
            buffer = bytearray(len(chunk.used))
            if spill is not None:
                spill.read(chunk, memoryview(buffer))
            data += buffer
        start = self.offset - first * CHUNK
        return bytes(data[start : start + self.n_bytes])


def sleep_cancelled() -> TransitionCancelledError:
    """The error of a sleep that stopped between two chunks."""
    return TransitionCancelledError("the sleep was cancelled; memory is as before it")


@dataclass(eq=False)
class Tag:
    """One tag; `backup`: what a level-1 or level-2 sleep left to restore from."""

    name: str
    recomputable: bool
    contents: list[Content] = field(default_factory=list)
    state: TagState = TagState.AWAKE
    level: int = 0
    backup: str | None = None
    restored: bool = False
    kept: list[Kept] = field(default_factory=list)
    kept_data: list[bytes] = field(default_factory=list)

    @property
    def segments(self) -> list[Segment]:
        """Its segments."""
        return [content.segment for content in tuple(self.contents)]

    @property
    def span_bytes(self) -> int:
        """What its mappings span."""
        return sum(segment.span_bytes for segment in self.segments)

    @property
    def used_bytes(self) -> int:
        """Of that, tensors."""
        return sum(segment.used_bytes for segment in self.segments)

    def resident_bytes(self) -> int:
        """What of it is physically there, measured."""
        return sum(segment.resident_bytes() for segment in self.segments)

    @property
    def kept_whole(self) -> bool:
        """Whether every byte that tensors use is kept: no checkpoint has any of it."""
        whole = {k.content for k in self.kept if round_up(k.n_bytes, ALIGN) == k.content.segment.used_bytes}
        return bool(self.contents) and whole.issuperset(self.contents)

    def prepare(self, level: int, backup: str | None) -> None:
        """AWAKE → PREPARED; a spill holds kept tensors too, otherwise they are copied to the host now."""
        self.kept_data = [] if backup == "spill" else [kept.read() for kept in self.kept]
        self.state, self.level, self.backup, self.restored = TagState.PREPARED, level, backup, False

    def fall_asleep(self) -> None:
        """PREPARED → ASLEEP; what no wake will read is given up."""
        self.state = TagState.ASLEEP
        if self.backup == "checkpoint":
            for content in self.contents:
                content.drop_spill()
        elif self.backup != "spill":
            self._forget()

    def drop_backup(self) -> None:
        """Level 1 → 2; kept tensors move to the host, a tag that is kept whole stays where it is backed up."""
        self.level = 2
        if self.kept_whole:
            return
        if self.backup == "spill":
            self.kept_data = [kept.read_backup() for kept in self.kept]
        self.backup = "host" if self.kept_data else None
        self._forget()

    def _forget(self) -> None:
        for content in self.contents:
            content.forget()

    def wake(self) -> None:
        """Awake, whatever it was; the spill stays for the next sleep."""
        self.state, self.level, self.backup, self.kept_data = TagState.AWAKE, 0, None, []

    def write_kept(self) -> int:
        """Put kept tensors back from the host; bytes written."""
        for kept, data in zip(self.kept, self.kept_data, strict=False):
            kept.write(data)
        return sum(map(len, self.kept_data))

    def needs_reload(self) -> bool:
        """Whether after `restore` the caller must still fill it."""
        return not self.recomputable and self.backup not in {"spill", "checkpoint"}

    def needs_restore(self) -> bool:
        """Whether a backup waits to be copied back."""
        return not self.restored and (self.backup is not None or bool(self.kept_data))


def check_takes(tag: Stated, *, recomputable: bool) -> None:
    """Whether a tag may get more memory of this kind.

    Raises:
        ArgumentError: the tag is of the other kind.
        TransitionOrderError: it is not awake.
    """
    if tag.recomputable is not recomputable:
        msg = f"tag {tag.name!r} has recomputable={tag.recomputable}; one tag can not be both"
        raise ArgumentError(msg)
    if tag.state is not TagState.AWAKE:
        msg = f"tag {tag.name!r} is {tag.state}; wake it before allocating in it"
        raise TransitionOrderError(msg)


class StateBooks(dict[str, T], Generic[T]):
    """The tags by name, and who may take which step."""

    def infos(self) -> dict[str, TagInfo]:
        """Every tag as the books have it."""
        return {
            tag.name: TagInfo(
                span_bytes=tag.span_bytes,
                used_bytes=tag.used_bytes,
                mapped=tag.state is not TagState.ASLEEP,
                recomputable=tag.recomputable,
            )
            for tag in self.in_state(*TagState)
        }

    def readable(self, name: str) -> T:
        """A tag that has contents to checksum.

        Raises:
            ArgumentError: the name is unknown.
            TransitionOrderError: the tag is asleep.
        """
        (tag,) = self.named((name,))
        if tag.state is TagState.ASLEEP:
            msg = f"tag {name!r} is asleep: it has no contents to checksum; wake it first"
            raise TransitionOrderError(msg)
        return tag

    def in_state(self, *states: TagState) -> list[T]:
        """Tags in one of the states."""
        return [tag for tag in tuple(self.values()) if tag.state in states]

    def named(self, names: Collection[str]) -> list[T]:
        """The named tags.

        Raises:
            ArgumentError: a name is unknown, or none is given.
        """
        if isinstance(names, str) or not names:
            msg = f"tags={names!r}: give a collection of at least one tag; known are: {self._known()}"
            raise ArgumentError(msg)
        for name in names:
            if name not in self:
                msg = f"unknown tag {name!r}; known are: {self._known()}; nothing changed"
                raise ArgumentError(msg)
        return [self[name] for name in dict.fromkeys(names)]

    def _known(self) -> str:
        return ", ".join(self) or "none yet"

    def select(self, names: Collection[str] | None, state: TagState, step: str) -> list[T]:
        """The named tags, or all in `state`.

        Raises:
            ArgumentError: a name is unknown.
            TransitionOrderError: a named tag is in another state, or no tag is in it.
        """
        chosen = self.in_state(state) if names is None else self.named(names)
        for tag in chosen:
            if tag.state is not state:
                msg = f"{step}: tag {tag.name!r} is {tag.state}, it must be {state}; nothing changed"
                raise TransitionOrderError(msg)
        if not chosen:
            msg = f"{step}: no tag is {state} ({self._states()}); nothing changed"
            raise TransitionOrderError(msg)
        return chosen

    def require_none(self, state: TagState, step: str) -> None:
        """Refuse while a tag is in `state`.

        Raises:
            TransitionOrderError: one is.
        """
        if self.in_state(state):
            msg = f"{step}: another transition is not finished ({self._states()}); nothing changed"
            raise TransitionOrderError(msg)

    def _states(self) -> str:
        return ", ".join(f"{tag.name}: {tag.state}" for tag in self.values()) or "the pool is empty"


class Books(StateBooks[Tag]):
    """The books of a pool that has its own segments."""

    def contents(self) -> Iterator[Content]:
        """All contents of all tags."""
        for tag in tuple(self.values()):
            yield from tuple(tag.contents)
