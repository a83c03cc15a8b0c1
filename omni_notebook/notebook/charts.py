"""Charts as pure functions: ACKs or a status in, an SVG text or a matplotlib `Figure` out.

No torch, no engine, no pyplot. Colours are Okabe and Ito's; every colour comes with a pattern and a word.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from omni_notebook import palette, units
from omni_notebook.protocol import MemoryState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from omni_notebook.protocol import EngineStatus, OmniACK, RankStatus, StageStatus

BLUE, ORANGE, GREEN, RED, GREY = palette.BLUE, palette.ORANGE, palette.GREEN, palette.RED, palette.GREY
HOLLOW = "none"


@dataclass(frozen=True, slots=True)
class Look:
    """How a kind of bytes is drawn: colour, matplotlib hatch, and the word for it."""

    word: str
    colour: str
    hatch: str


FREED = Look("freed", BLUE, "")
MAPPED = Look("mapped again", GREEN, "..")
RESIDUAL = Look("still held by the process", ORANGE, "//")
FAILED = Look("freed, but the rank answered ERROR", RED, "xx")
RESIDENT = Look("resident", BLUE, "")
ABSENT = Look("mapped, not resident", GREY, "//")
ASLEEP = Look("asleep", HOLLOW, "")
HOST_COPY = Look("copy on the host", "#CC79A7", "..")


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar."""

    look: Look
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled bar of segments; `note` is the text at its end."""

    label: str
    segments: tuple[Segment, ...]
    note: str = ""

    @property
    def total_bytes(self) -> int:
        """The bar's length."""
        return sum(segment.n_bytes for segment in self.segments)


# ------------------------------------------------------------------------------------- data → bars


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a device, the ranks that live in it, and what it still holds."""

    pid: int | None
    device: str | None
    ranks: tuple[str, ...]
    residual_bytes: int


def processes(acks: Sequence[OmniACK]) -> list[Process]:
    """What each process still holds, once a process however many ranks report it.

    Ranks of one process measure one after the other, each before the ones after it have given their part back: the
    smallest figure is the one that has seen them all. A rank without a pid counts as a process of its own.
    """
    groups: dict[tuple[object, ...], list[OmniACK]] = {}
    for place, ack in enumerate(acks):
        if ack.metadata.get("residual_bytes") is not None:
            groups.setdefault(_process_key(ack, place), []).append(ack)
    return [
        Process(
            pid=group[0].metadata.get("pid"),
            device=group[0].metadata.get("device"),
            ranks=tuple(units.place(ack) for ack in group),
            residual_bytes=min(ack.metadata["residual_bytes"] for ack in group),
        )
        for group in groups.values()
    ]


def _process_key(ack: OmniACK, place: int) -> tuple[object, ...]:
    pid = ack.metadata.get("pid")
    return ("none", place) if pid is None else (pid, ack.metadata.get("device"))


def main_segment(ack: OmniACK) -> Segment:
    """What the order did: freed bytes of a sleep, mapped bytes of a wake."""
    mapped_bytes = ack.metadata.get("mapped_bytes") or 0
    if mapped_bytes and not ack.freed_bytes:
        return Segment(MAPPED if ack.ok else FAILED, mapped_bytes)
    return Segment(FREED if ack.ok else FAILED, ack.freed_bytes)


def ack_bars(acks: Sequence[OmniACK]) -> list[Bar]:
    """A bar a rank; what a process holds is part of its rank's bar, or a bar of its own where ranks share it."""
    held = processes(acks)
    alone = {process.ranks[0]: process.residual_bytes for process in held if len(process.ranks) == 1}
    bars = [_rank_bar(ack, alone.get(units.place(ack))) for ack in acks]
    return bars + [_process_bar(process) for process in held if len(process.ranks) > 1]


def _rank_bar(ack: OmniACK, residual_bytes: int | None) -> Bar:
    segments = [main_segment(ack)]
    notes = [units.size(segments[0].n_bytes)] + ([] if ack.ok else ["ERROR"])
    if residual_bytes is not None:
        segments.append(Segment(RESIDUAL, residual_bytes))
        notes.append(f"{units.size(residual_bytes)} still held")
    return Bar(units.place(ack), tuple(segments), " · ".join(notes))


def _process_bar(process: Process) -> Bar:
    note = f"{units.size(process.residual_bytes)} still held, shared by {len(process.ranks)} ranks"
    return Bar(f"process {process.pid} · {process.device}", (Segment(RESIDUAL, process.residual_bytes),), note)


def status_bars(status: EngineStatus) -> list[Bar]:
    """A bar a stage and tag: what is resident of what is mapped, summed over its ranks; hollow where it sleeps."""
    return [
        _tag_bar(stage, tag, resident, mapped)
        for stage in status.stages
        for tag, (resident, mapped) in tag_sums(stage.ranks).items()
    ]


def _tag_bar(stage: StageStatus, tag: str, resident: int, mapped: int) -> Bar:
    asleep = stage.state == MemoryState.ASLEEP
    return Bar(
        f"stage {stage.stage_id} · {tag_label(tag)}",
        (Segment(RESIDENT, resident), Segment(ASLEEP if asleep else ABSENT, mapped - resident)),
        f"{units.size(resident)} of {units.size(mapped)}" + (" · asleep" if asleep else ""),
    )


def tag_sums(ranks: Sequence[RankStatus]) -> dict[str, tuple[int, int]]:
    """`{tag: (resident, mapped)}` over ranks."""
    sums: dict[str, tuple[int, int]] = {}
    for rank in ranks:
        for tag, memory in rank.tags.items():
            resident, mapped = sums.get(tag, (0, 0))
            sums[tag] = (resident + memory.resident_bytes, mapped + memory.mapped_bytes)
    return sums


def tag_label(tag: str) -> str:
    """The tag, with ballast named for what it is."""
    return "ballast (filler, no model)" if tag == "ballast" else tag


# ---------------------------------------------------------------------------------------------- SVG


def svg_bar(bar: Bar, full_bytes: int, *, width: int = 80, height: int = 12) -> str:
    """One bar as a small inline SVG; `full_bytes` is what the whole width stands for."""
    name = escape(f"{bar.label}: {_spoken(bar)}", quote=True)
    parts = _rects(bar, 0, 0, width / max(full_bytes, 1), height)
    frame = f'<rect width="{width}" height="{height}" fill="none" stroke="currentColor" stroke-opacity=".3"/>'
    return (
        f'<svg role="img" aria-label="{name}" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'style="min-width:{width}px;max-width:none">'
        f"<title>{name}</title>{_patterns([bar])}{parts}{frame}</svg>"
    )


def svg_bars(bars: Sequence[Bar], *, title: str, width: int = 640) -> str:
    """Bars under each other with labels, notes and a legend; text takes the page's colour."""
    full = max([bar.total_bytes for bar in bars], default=0) or 1
    left, row = 210, 22
    right = max([210, *(int(6.4 * len(bar.note)) for bar in bars)])
    factor = max(width - left - right, 40) / full
    lines = [_svg_row(bar, y, left, factor) for y, bar in zip(range(4, 4 + row * len(bars), row), bars, strict=True)]
    height = 8 + row * len(bars) + 20
    return (
        f'<svg role="img" aria-label="{escape(title, quote=True)}" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="currentColor">'
        f"<title>{escape(title)}</title>{_patterns(bars)}{''.join(lines)}{_legend(bars, height - 14)}</svg>"
    )


def _svg_row(bar: Bar, y: int, left: int, factor: float) -> str:
    end = left + bar.total_bytes * factor + 6
    return (
        f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(bar.label)}</text>'
        f'{_rects(bar, left, y, factor, 15)}<text x="{end:.1f}" y="{y + 12}">{escape(bar.note)}</text>'
    )


def _rects(bar: Bar, x: float, y: float, factor: float, height: int) -> str:
    parts = []
    for segment in bar.segments:
        wide = segment.n_bytes * factor
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{height}" {_fill(segment.look)}/>'
            + _hatching(segment.look, x, y, wide, height)
        )
        x += wide
    return "".join(parts)


def _fill(look: Look) -> str:
    return f'fill="{look.colour}"' + (' stroke="currentColor"' if look.colour == HOLLOW else "")


def _hatching(look: Look, x: float, y: float, width: float, height: int) -> str:
    if not look.hatch:
        return ""
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="url(#{_pattern_id(look)})"/>'


def _pattern_id(look: Look) -> str:
    return "omni-" + hashlib.sha256(f"{look.colour}{look.hatch}".encode()).hexdigest()[:8]


_PATHS = {"//": "M0 6L6 0", "xx": "M0 6L6 0M0 0L6 6", "..": "M3 2.5V3.5"}


def _patterns(bars: Sequence[Bar]) -> str:
    looks = {segment.look for bar in bars for segment in bar.segments if segment.look.hatch}
    if not looks:
        return ""
    made = "".join(
        f'<pattern id="{_pattern_id(look)}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<path d="{_PATHS[look.hatch]}" stroke="#000" stroke-width="1.2"/></pattern>'
        for look in sorted(looks, key=_pattern_id)
    )
    return f"<defs>{made}</defs>"


def _legend(bars: Sequence[Bar], y: int) -> str:
    parts, x = [], 4
    for look in looks_of(bars):
        parts.append(
            f'<rect x="{x}" y="{y}" width="14" height="10" {_fill(look)}/>{_hatching(look, x, y, 14, 10)}'
            f'<text x="{x + 19}" y="{y + 9}">{escape(look.word)}</text>'
        )
        x += 34 + 7 * len(look.word)
    return "".join(parts)


def looks_of(bars: Sequence[Bar]) -> list[Look]:
    """The looks that occur with at least one byte, always in the same order."""
    seen = {segment.look for bar in bars for segment in bar.segments if segment.n_bytes}
    return [look for look in (FREED, FAILED, MAPPED, RESIDUAL, RESIDENT, ABSENT, ASLEEP, HOST_COPY) if look in seen]


def _spoken(bar: Bar) -> str:
    return ", ".join(f"{units.size(segment.n_bytes)} {segment.look.word}" for segment in bar.segments)


# ------------------------------------------------------------------------------------------- Figure


def plot_reclaimed(acks: Sequence[OmniACK]) -> Figure:
    """Bytes that each rank freed, and what its process still holds.

    Ranks that share a process share what it holds: it is drawn once, as a bar of the process.
    """
    return _figure(ack_bars(acks), "Device memory by rank, as the ranks answered")


def plot_resident(status: EngineStatus) -> Figure:
    """What is resident of each stage's memory, by tag."""
    return _figure(status_bars(status), f"Memory of {status.model}, by stage and tag")


def _figure(bars: Sequence[Bar], title: str) -> Figure:
    from matplotlib.figure import Figure  # noqa: PLC0415  (a heavy import: only when a figure is made)

    figure = Figure(figsize=(8.5, 1.5 + 0.34 * max(len(bars), 1)), dpi=100, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    unit, name = units.scale(max([bar.total_bytes for bar in bars], default=0))
    for row, bar in enumerate(bars):
        _draw(axes, row, bar, unit)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=9)
    axes.set_ylim(max(len(bars), 1) - 0.4, -0.6)
    axes.set_xlim(0, 1.55 * max([bar.total_bytes / unit for bar in bars], default=0) or 1)
    axes.set_xlabel(name)
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if not bars:
        axes.text(0.5, 0.5, "no ACKs", transform=axes.transAxes, ha="center", va="center")
    _figure_legend(figure, looks_of(bars))
    return figure


def _draw(axes: Axes, row: int, bar: Bar, unit: int) -> None:
    left = 0.0
    for segment in bar.segments:
        look, wide = segment.look, segment.n_bytes / unit
        axes.barh(row, wide, left=left, height=0.68, color=look.colour, hatch=look.hatch, edgecolor="black", lw=0.5)
        left += wide
    axes.annotate(bar.note, (left, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)


def _figure_legend(figure: Figure, looks: Sequence[Look]) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415

    patches = [Patch(facecolor=look.colour, hatch=look.hatch, edgecolor="black", label=look.word) for look in looks]
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
