"""An audit's charts as SVG text: what each process held before, asleep and awake again, cycle by cycle."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from omni_notebook import units
from omni_notebook.palette import BLUE, GREEN, ORANGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.verbs.auditing.record import Cycle, ProcessLine

WIDTH, HEIGHT = 360, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 8, 10, 26
_BARS_CYCLES = 12
MOST_PROCESSES = 12


class Moment(NamedTuple):
    """One of the three looks: its word, colour, and the pattern over it."""

    word: str
    colour: str
    pattern: str
    field: str


MOMENTS = (
    Moment("before", BLUE, "", "before_bytes"),
    Moment("asleep", ORANGE, "M0 6L6 0", "asleep_bytes"),
    Moment("awake again", GREEN, "M3 2.5V3.5", "awake_bytes"),
)


def chosen(cycles: Sequence[Cycle]) -> list[list[ProcessLine]]:
    """Each process's lines over the cycles; of many processes those that hold most while asleep."""
    by_seat: dict[tuple[int | None, str], list[ProcessLine]] = {}
    for cycle in cycles:
        for process in cycle.processes:
            by_seat.setdefault((process.pid, process.device), []).append(process)
    found = [lines for lines in by_seat.values() if any(line.source is not None for line in lines)]
    if len(found) <= MOST_PROCESSES:
        return found
    return sorted(found, key=lambda lines: -(lines[-1].asleep_bytes or 0))[:MOST_PROCESSES]


def chart(lines: Sequence[ProcessLine]) -> str:
    """One process over the cycles: three bars a cycle, or three lines where there are many cycles."""
    most = max((getattr(line, moment.field) or 0 for line in lines for moment in MOMENTS), default=0) or 1
    title = f"process {lines[0].pid}: {', '.join(lines[0].ranks)}"
    spoken = escape(f"{title}; {_spoken(lines)}", quote=True)
    inner = _bars(lines, most) if len(lines) <= _BARS_CYCLES else _curves(lines, most)
    return (
        f'<svg role="img" aria-label="{spoken}" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="currentColor"><title>{spoken}</title>{_defs()}'
        f"{_axis(most)}{inner}{_cycle_numbers(len(lines))}</svg>"
    )


def _spoken(lines: Sequence[ProcessLine]) -> str:
    first, last = lines[0], lines[-1]
    parts = [f"first cycle {_three(first)}"] + ([f"last cycle {_three(last)}"] if len(lines) > 1 else [])
    return "; ".join(parts)


def _three(line: ProcessLine) -> str:
    return ", ".join(f"{units.size(getattr(line, moment.field))} {moment.word}" for moment in MOMENTS)


def _defs() -> str:
    return (
        "<defs>"
        + "".join(
            f'<pattern id="omni-audit-{place}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<path d="{moment.pattern}" stroke="#000" stroke-width="1.2"/></pattern>'
            for place, moment in enumerate(MOMENTS)
            if moment.pattern
        )
        + "</defs>"
    )


def _y(n_bytes: int, most: int) -> float:
    return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - n_bytes / most)


def _axis(most: int) -> str:
    """A line at nothing, at the half and at the most, with their sizes."""
    parts = []
    for n_bytes in (0, most // 2, most):
        y = _y(n_bytes, most)
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
            f'stroke-opacity=".25"/>'
            f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{units.size(n_bytes)}</text>'
        )
    return "".join(parts)


def _cycle_numbers(count: int) -> str:
    step = (WIDTH - _LEFT - _RIGHT) / count
    every = max(1, -(-count // 12))
    return "".join(
        f'<text x="{_LEFT + step * (place + 0.5):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{word}</text>'
        for place in range(0, count, every)
        for word in [f"cycle {place + 1}" if count <= 4 else str(place + 1)]
    )


def _bars(lines: Sequence[ProcessLine], most: int) -> str:
    step = (WIDTH - _LEFT - _RIGHT) / len(lines)
    wide = min(26.0, step * 0.28)
    return "".join(
        _bar(_LEFT + step * (cycle + 0.5) + (place - 1.5) * wide, wide, getattr(line, moment.field), most, place)
        for cycle, line in enumerate(lines)
        for place, moment in enumerate(MOMENTS)
    )


def _bar(x: float, wide: float, n_bytes: int | None, most: int, place: int) -> str:
    if n_bytes is None:
        return ""
    y = _y(n_bytes, most)
    box = f'x="{x:.1f}" y="{y:.1f}" width="{wide - 1:.1f}" height="{_y(0, most) - y:.1f}"'
    over = f'<rect {box} fill="url(#omni-audit-{place})"/>' if MOMENTS[place].pattern else ""
    return f'<rect {box} fill="{MOMENTS[place].colour}"/>{over}'


def _curves(lines: Sequence[ProcessLine], most: int) -> str:
    step = (WIDTH - _LEFT - _RIGHT) / len(lines)
    dashes = ("", "6 3", "2 2")
    made = []
    for moment, dash in zip(MOMENTS, dashes, strict=True):
        points = " ".join(
            f"{_LEFT + step * (place + 0.5):.1f},{_y(value, most):.1f}"
            for place, line in enumerate(lines)
            for value in [getattr(line, moment.field)]
            if value is not None
        )
        made.append(
            f'<polyline points="{points}" fill="none" stroke="{moment.colour}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/>'
        )
    return "".join(made)


def legend() -> str:
    """What the three colours and patterns stand for."""
    parts = []
    for place, moment in enumerate(MOMENTS):
        over = f'<rect width="14" height="10" fill="url(#omni-audit-{place})"/>' if moment.pattern else ""
        swatch = f'<svg width="14" height="10" aria-hidden="true">{_defs()}<rect width="14" height="10" '
        parts.append(f'<span>{swatch}fill="{moment.colour}"/>{over}</svg> {moment.word}</span>')
    return f'<p class="legend">{" ".join(parts)}</p>'
