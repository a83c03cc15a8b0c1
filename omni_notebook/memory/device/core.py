"""What the parts of a pool over vLLM's allocator share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from omni_notebook.memory.base import KV_CACHE, WEIGHTS, DeviceError, TransitionOrderError
from omni_notebook.memory.books import StateBooks
from omni_notebook.memory.device.checksum import Summer, digest, pieces
from omni_notebook.memory.device.copies import Copies, HostCopies
from omni_notebook.memory.device.segments import SegmentTable
from omni_notebook.memory.device.shadow import Shadow
from omni_notebook.memory.device.tags import WHOLE, DeviceTag, KeptRange, vllm_tag
from omni_notebook.memory.device.tensors import ModuleTensors, plain_tensors, span_of
from omni_notebook.memory.writeahead import WriteAhead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from omni_notebook.memory.base import HostMemory, Scope
    from omni_notebook.memory.device.checksum import TensorSums
    from omni_notebook.memory.device.driver import Driver, Probe
    from omni_notebook.memory.device.segments import DeviceSegment
    from omni_notebook.memory.device.tensors import Span


_STANDS_S = 0.02
"""A reading that ended a transition is asked for again at once, and takes milliseconds."""


class Reading(NamedTuple):
    """Bytes held on the device, by whom: this process, or all of them where it can not be seen alone."""

    n_bytes: int
    scope: Scope


@dataclass
class DeviceCore:
    """One pool's state; the pool's lock guards all of it but reading the books.

    `stuck`: segments that are gone, whose copies' memory the driver did not unlock.
    """

    driver: Driver
    probe: Probe
    room: Callable[[], HostMemory]
    settle_s: float
    expected_tags: tuple[str, ...] = (WEIGHTS, KV_CACHE)
    books: StateBooks[DeviceTag] = field(default_factory=StateBooks)
    closed: bool = False
    broken: str | None = None

    def __post_init__(self) -> None:
        self.table = SegmentTable(self.driver)
        self.modules = ModuleTensors(self.table)
        self.copies: Copies = HostCopies(self.driver, Shadow(self.driver))
        self.ahead = WriteAhead()
        self.records: dict[str, TensorSums] = {}
        self.stuck: list[DeviceSegment] = []
        self._noted: tuple[float, Reading] | None = None
        for name in self.expected_tags:
            self.books[name] = vllm_tag(name)
        self.refresh()

    def check_open(self, step: str) -> None:
        """Refuse a step of a closed pool, or of one whose memory is not what its books say (`broken`: why).

        Raises:
            TransitionOrderError: it is closed or broken.
        """
        if self.broken is not None:
            msg = f"{step}: {self.broken}; nothing changed, restart the stage"
            raise TransitionOrderError(msg)
        if self.closed:
            msg = f"{step}: the pool is closed; start the stage again"
            raise TransitionOrderError(msg)

    def refresh(self) -> None:
        """Take over what vLLM has allocated and freed since."""
        gone = self.table.refresh()
        if gone:
            self.ahead.stop()
            self.stuck += gone
            self.give_up(self.stuck)
            self.stuck = [one for one in self.stuck if self.copies.has(one)]
        for segment in self.table.all():
            self.books.setdefault(segment.tag, vllm_tag(segment.tag))
        for tag in self.books.values():
            tag.segments = self.table.of(tag.name)
            tag.kept = [one for one in tag.kept if one.segment in tag.segments]

    def give_up(self, segments: Iterable[DeviceSegment]) -> list[DeviceError]:
        """Give up the copies of these, and their memory; why the driver did not unlock some, which stay and count."""
        errors = []
        for segment in segments:
            try:
                self.copies.forget(segment)
            except DeviceError as error:
                errors.append(error)
        return errors

    def count_used(self) -> None:
        """Bring the tags' `used_bytes` up to date."""
        for tag in self.books.values():
            tag.used_bytes = _covered_bytes(self.modules.spans(tag.name))

    def kept_ranges(self, tags: Iterable[DeviceTag]) -> dict[str, list[KeptRange]]:
        """What every level keeps of tags: what was named, and tensors of modules that belong to another tag."""
        strays = self.modules.strays()
        return {tag.name: list(dict.fromkeys([*tag.kept, *map(_range, strays.get(tag.name, ()))])) for tag in tags}

    def begin(self, step: str) -> None:
        """What every transition begins with: an open pool, true books, a device at rest."""
        self.check_open(step)
        self._noted = None
        self.driver.enter()
        self.refresh()

    def require_own(self, tags: Iterable[DeviceTag], step: str) -> None:
        """Refuse a sleep of segments that somebody else has unmapped.

        Raises:
            TransitionOrderError: vLLM's own sleep did.
        """
        strangers = set(self.table.strangers())
        for tag in tags:
            if not strangers.isdisjoint(tag.segments):
                msg = (
                    f"{step}: memory of {tag.name!r} was unmapped by somebody else (vLLM's own sleep?); nothing "
                    "changed. Call vLLM's own wake_up first"
                )
                raise TransitionOrderError(msg)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's bytes at every level, wherever in the segments it lies."""
        for name, plain in plain_tensors("kept", tensor):
            span = span_of(name, plain, self.table)
            if span is not None:
                kept = self.books[span.segment.tag].kept
                one = KeptRange(span.segment, span.offset, span.n_bytes)
                if one not in kept:
                    kept.append(one)

    def note_reading(self, reading: Reading) -> None:
        """Let a reading that was just taken stand for `last_reading`, for 20 ms."""
        self._noted = time.monotonic(), reading

    def last_reading(self) -> Reading:
        """What is held: as a transition that ended just now read it, or read anew."""
        noted, self._noted = self._noted, None
        return noted[1] if noted is not None and time.monotonic() - noted[0] < _STANDS_S else self.reading()

    def reading(self) -> Reading:
        """What is held now; a process that seems to hold less than our mapped segments is another one of that id.

        Raises:
            DeviceError: neither the process nor the device could be measured.
        """
        try:
            ours = self.probe.process_bytes()
        except DeviceError:
            ours = None
        if ours is not None and ours >= self.table.mapped_bytes():
            return Reading(ours, "process")
        return Reading(self.probe.device_bytes(), "device")

    # ------------------------------------------------------------------------------- checksums

    def record(self, tag: DeviceTag) -> str:
        """Checksum a tag's registered tensors and remember it."""
        self.records[tag.name] = sums = self._on_device(tag)
        return digest(sums)

    def is_as_recorded(self, tag: DeviceTag) -> bool:
        """Whether the tensors on the device equal the record."""
        return self._on_device(tag) == self.records[tag.name]

    def _on_device(self, tag: DeviceTag) -> TensorSums:
        return self._sums(self.modules.spans(tag.name), lambda span: span.flat())

    def has_copy(self, tag: DeviceTag) -> bool:
        """Whether a sleeping tag's contents are all on the host."""
        return tag.backup in WHOLE

    def is_copy_as_recorded(self, tag: DeviceTag) -> bool:
        """Whether a sleeping tag's copies equal the record; without a record they do not."""
        return (
            tag.name in self.records
            and self._sums(self.modules.spans(tag.name), self._copied) == self.records[tag.name]
        )

    def _copied(self, span: Span) -> torch.Tensor:
        return torch.frombuffer(self.copies.read(span.segment, span.offset, span.n_bytes), dtype=torch.uint8)

    @staticmethod
    def _sums(spans: Iterable[Span], flat_of: Callable[[Span], torch.Tensor]) -> TensorSums:
        summers: dict[torch.device, Summer] = {}
        rows: dict[str, tuple[Summer, list[int]]] = {}
        with torch.inference_mode():
            for span in spans:
                flat = flat_of(span)
                summer = summers.get(flat.device) or summers.setdefault(flat.device, Summer(flat.device))
                rows[span.name] = summer, summer.add(pieces(flat, span.layout))
            tables = {summer: summer.result() for summer in summers.values()}
        return {name: tables[summer][places].astype("<i8").tobytes() for name, (summer, places) in rows.items()}


def _range(span: Span) -> KeptRange:
    return KeptRange(span.segment, span.offset, span.n_bytes)


def _covered_bytes(spans: Iterable[Span]) -> int:
    """Bytes that the spans cover together."""
    total = end = 0
    for span in sorted(spans, key=lambda span: span.address):
        total += max(0, span.address + span.n_bytes - max(span.address, end))
        end = max(end, span.address + span.n_bytes)
    return total
