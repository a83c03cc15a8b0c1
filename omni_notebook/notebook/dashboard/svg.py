"""A chart as HTML: one SVG a panel, a strip for many ranks, a legend. Pure functions, no script, every text escaped."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from omni_notebook import units
from omni_notebook.notebook.charts import RED
from omni_notebook.notebook.dashboard import looks
from omni_notebook.notebook.dashboard.panels import MOST_LARGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from omni_notebook.notebook.dashboard.panels import Chart, Mark, Panel, Strip


class Frame(NamedTuple):
    """A panel's size and the place of its plot in it, pixels."""

    width: int
    height: int
    left: int = 56
    right: int = 10
    top: int = 47
    bottom: int = 20

    @property
    def wide(self) -> int:
        """The plot's width."""
        return self.width - self.left - self.right

    @property
    def tall(self) -> int:
        """The plot's height."""
        return self.height - self.top - self.bottom


LARGE, SMALL = Frame(430, 178), Frame(256, 142, left=52)
_FONT = "font-family:var(--jp-ui-font-family, system-ui, sans-serif)"
_STRIP_LEFT, _STRIP_WIDE, _STRIP_ROW = 170, 690, 12
STRIP_WIDTH = _STRIP_LEFT + _STRIP_WIDE + 10
_LABEL_WIDTH = 6.1
_NO_RANKS = "no ranks: this engine reports none"


def chart_html(chart: Chart) -> str:
    """The whole chart: legend, panels side by side as the page has room, and the strip."""
    if not chart.panels:
        return f'<div class="omni-none">{_NO_RANKS}</div>'
    frame = LARGE if len(chart.panels) <= MOST_LARGE else SMALL
    panels = "".join(panel_svg(panel, chart.span_s, frame) for panel in chart.panels)
    grid = f'<div class="omni-grid" style="--omni-width:{frame.width}px">{panels}</div>'
    strip = "" if chart.strip is None else strip_svg(chart.strip, chart.span_s)
    return looks.legend(kinds(chart), extra_legend(chart)) + grid + strip


def kinds(chart: Chart) -> list[int]:
    """The kinds of tags that occur."""
    return [kind for kind in range(len(looks.TAGS)) if any(_has(panel, kind) for panel in chart.panels)]


def _has(panel: Panel, kind: int) -> bool:
    return bool(np.nansum(panel.values[kind]) > 0)


def extra_legend(chart: Chart) -> list[tuple[str, str]]:
    """Swatches and words of the lines."""
    line = '<path d="M0 5H14" fill="none" stroke="{}" stroke-width="1.4" stroke-dasharray="{}"/>'
    found = [(line.format("currentColor", "4 3"), "mapped")]
    if any(panel.marks for panel in chart.panels):
        found.append((line.format("currentColor", "1.5 2"), _marked(chart)))
    return found


def _marked(chart: Chart) -> str:
    restarted = any(mark.order == "restart" for panel in chart.panels for mark in panel.marks)
    return "sleep or wake, as the ranks answered" + ("; restart" if restarted else "")


# ------------------------------------------------------------------------------------------- panels


def panel_svg(panel: Panel, span_s: float, frame: Frame = LARGE, *, at: tuple[int, int] | None = None) -> str:
    """One panel; `at` is its place where it is part of a larger drawing."""
    name = looks.text(f"{panel.title}: {spoken(panel, span_s)}")
    place = "" if at is None else f'x="{at[0]}" y="{at[1]}" '
    fixed = f'width="{frame.width}" height="{frame.height}" ' if at is not None else ""
    return (
        f'<svg role="img" aria-label="{name}" {place}{fixed}viewBox="0 0 {frame.width} {frame.height}" '
        f'font-size="11" fill="currentColor" style="{_FONT}">{_title(panel, frame)}{_axes(panel, span_s, frame)}'
        f"{_stack(panel, span_s, frame)}{_mapped_line(panel, frame)}{_marks(panel, span_s, frame)}</svg>"
    )


def spoken(panel: Panel, span_s: float) -> str:
    """What the picture says, in words."""
    now = f"{units.size(panel.resident_bytes)} resident of {units.size(panel.mapped_bytes)} mapped"
    seen = [mark for mark in panel.marks if mark.age_s <= span_s]
    orders = "; ".join(f"{mark.label} {mark.age_s:.0f} s ago" for mark in seen[:4])
    dead = "" if panel.alive else "the worker is dead; "
    return f"memory of the last {span_s:.0f} s; {dead}now {now}" + (f"; {orders}" if orders else "")


def _title(panel: Panel, frame: Frame) -> str:
    now = f"{units.size(panel.resident_bytes)} of {units.size(panel.mapped_bytes)}"
    if not panel.alive:
        now = "✗ worker dead"
    elif len(panel.title) > _room(now, frame):
        now = units.size(panel.resident_bytes)
    room = _room(now, frame)
    title = panel.title if len(panel.title) <= room else panel.title[: max(room - 1, 1)] + "…"
    return (
        f'<text x="4" y="13" font-weight="600">{looks.text(title)}</text>'
        f'<text x="{frame.width - frame.right}" y="13" text-anchor="end">{looks.text(now)}</text>'
    )


def _room(now: str, frame: Frame) -> int:
    """Letters of a title that fit beside `now`."""
    return int((frame.width - 20 - 6.2 * len(now)) / 7.0)


def _axes(panel: Panel, span_s: float, frame: Frame) -> str:
    unit, name = units.scale(panel.full_bytes)
    bottom = frame.top + frame.tall
    parts = []
    for tick in _ticks(panel.full_bytes / unit):
        y = bottom - tick * unit / panel.full_bytes * frame.tall
        parts.append(
            f'<path d="M{frame.left} {y:.1f}h{frame.wide}" stroke="currentColor" stroke-opacity=".14"/>'
            f'<text x="{frame.left - 5}" y="{y + 3.5:.1f}" text-anchor="end" font-size="10">{tick:g} {name}</text>'
        )
    for share in (0.0, 0.5, 1.0):
        x = frame.left + share * frame.wide
        anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
        words = "now" if share == 1.0 else f"{(1 - share) * span_s:g} s ago"
        parts.append(f'<text x="{x:.0f}" y="{bottom + 14}" text-anchor="{anchor}" font-size="10">{words}</text>')
    parts.append(f'<path d="M{frame.left} {bottom}h{frame.wide}" stroke="currentColor" stroke-opacity=".55"/>')
    return "".join(parts)


def _ticks(largest: float) -> list[float]:
    """Two or three round numbers up to `largest`."""
    step = 10.0 ** np.floor(np.log10(max(largest, 1e-9)))
    for part in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0):
        count = int(largest / (step * part) + 1e-9)
        if count <= 3:
            return [round(step * part * n, 9) for n in range(count + 1)]
    return [0.0]


def _stack(panel: Panel, span_s: float, frame: Frame) -> str:
    if not panel.ages_s.size:
        return ""
    x = frame.left + (1 - np.minimum(panel.ages_s, span_s) / span_s) * frame.wide
    tops = np.cumsum(panel.values, axis=0)
    height = frame.tall / panel.full_bytes
    bottom = frame.top + frame.tall
    parts = []
    for run in _runs(~np.isnan(tops[-1]) & (panel.ages_s <= span_s)):
        below = np.full(run.stop - run.start, float(bottom))
        for kind in range(len(tops)):
            above = bottom - tops[kind, run] * height
            if (below - above).max() > 0.05:
                parts.append(f'<path d="{_area(x[run], above, below)}" fill="{looks.fill(kind)}"/>')
            below = above
    return "".join(parts)


def _runs(known: NDArray[np.bool_]) -> list[slice]:
    """Unbroken pieces."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(np.int8)))
    return [slice(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def _area(x: NDArray[np.float64], above: NDArray[np.float64], below: NDArray[np.float64]) -> str:
    if x.size == 1:  # a single sample is a hair, not nothing
        x, above, below = np.append(x, x + 1), np.repeat(above, 2), np.repeat(below, 2)
    across = np.concatenate([x, x[::-1]]).tolist()
    along = np.concatenate([above, below[::-1]]).tolist()
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(across, along, strict=True)) + "Z"


def _mapped_line(panel: Panel, frame: Frame) -> str:
    y = frame.top + frame.tall * (1 - panel.mapped_bytes / panel.full_bytes)
    return (
        f'<path d="M{frame.left} {y:.1f}h{frame.wide}" fill="none" stroke="currentColor" stroke-dasharray="4 3" '
        f'stroke-opacity=".8"/>'
    )


def _marks(panel: Panel, span_s: float, frame: Frame) -> str:
    """Lines where orders ended; words on one of two heights, the newest win where there is no room."""
    parts: list[str] = []
    taken: tuple[list[tuple[float, float]], ...] = ([], [])
    for mark in panel.marks:
        if not 0 <= mark.age_s <= span_s:
            continue
        x = frame.left + (1 - mark.age_s / span_s) * frame.wide
        parts.append(_mark_line(mark, x, frame))
        wide = _LABEL_WIDTH * len(mark.label)
        start = min(max(x - wide / 2, frame.left - 20), frame.width - 2 - wide)
        for row, others in enumerate(taken):
            if all(start > end or start + wide < begin for begin, end in others):
                others.append((start - 4, start + wide + 4))
                parts.append(_mark_words(mark, start, frame.top - 8 - 11 * row))
                break
    return "".join(parts)


def _mark_line(mark: Mark, x: float, frame: Frame) -> str:
    ink = "currentColor" if mark.ok else RED
    return (
        f'<path d="M{x:.1f} {frame.top - 4}v{frame.tall + 4}" stroke="{ink}" stroke-width="1.4" '
        f'stroke-dasharray="1.5 2"><title>{looks.text(mark.label)}</title></path>'
    )


def _mark_words(mark: Mark, x: float, y: int) -> str:
    words = mark.label if mark.ok else f"✗ {mark.label}"
    return f'<text x="{x:.1f}" y="{y}" font-size="10">{looks.text(words)}</text>'


# ------------------------------------------------------------------------------------------- strip


def strip_svg(strip: Strip, span_s: float, *, at: tuple[int, int] | None = None) -> str:
    """Ranks under each other, time from left to right, the darker the more is resident."""
    height = 20 + _STRIP_ROW * len(strip.labels) + 34
    name = looks.text(f"resident share of {len(strip.labels)} groups of ranks over the last {span_s:.0f} s")
    place = "" if at is None else f'x="{at[0]}" y="{at[1]}" width="{STRIP_WIDTH}" height="{height}" '
    labels = "".join(
        f'<text x="{_STRIP_LEFT - 6}" y="{29.5 + _STRIP_ROW * row:.1f}" text-anchor="end">{looks.text(label)}</text>'
        for row, label in enumerate(strip.labels)
    )
    return (
        f'<svg role="img" aria-label="{name}" {place}viewBox="0 0 {STRIP_WIDTH} {height}" font-size="10" '
        f'fill="currentColor" style="{_FONT};max-width:{STRIP_WIDTH}px"><defs>{_differ_pattern()}</defs>'
        f'<text x="4" y="13" font-size="11" font-weight="600">resident share of each rank or group of ranks</text>'
        f"{labels}{_cells(strip, span_s)}{_strip_foot(height, span_s)}</svg>"
    )


def strip_height(strip: Strip) -> int:
    """The height of `strip_svg`, pixels."""
    return 20 + _STRIP_ROW * len(strip.labels) + 34


def _differ_pattern() -> str:
    return (
        f'<pattern id="{looks.IDS}differ" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="#fff" fill-opacity=".7"/>'
        f'<path d="M0 6L6 0" stroke="{RED}" stroke-width="2"/></pattern>'
    )


def _cells(strip: Strip, span_s: float) -> str:
    """One path a level; equal neighbours are one rectangle."""
    if not strip.ages_s.size:
        return ""
    left = _STRIP_LEFT + (1 - np.minimum(strip.ages_s, span_s) / span_s) * _STRIP_WIDE
    edges = np.append(left, _STRIP_LEFT + _STRIP_WIDE)
    parts = [
        f'<path d="{path}" {looks.level_fill(level)}/>'
        for level in range(len(looks.LEVELS))
        if (path := _rectangles(strip.levels == level, edges))
    ]
    differ = _rectangles(strip.differ, edges)
    return "".join(parts) + (f'<path d="{differ}" fill="url(#{looks.IDS}differ)"/>' if differ else "")


def _rectangles(cells: NDArray[np.bool_], edges: NDArray[np.float64]) -> str:
    rows, columns = cells.shape
    padded = np.zeros((rows, columns + 2), dtype=np.int8)
    padded[:, 1:-1] = cells
    row, column = np.nonzero(np.diff(padded, axis=1))
    begins, ends, y = edges[column[::2]], edges[column[1::2]], row[::2]
    tall = _STRIP_ROW - 1
    return "".join(
        f"M{x:.1f} {20 + _STRIP_ROW * line}h{end - x:.1f}v{tall}h{x - end:.1f}z"
        for x, end, line in zip(begins.tolist(), ends.tolist(), y.tolist(), strict=True)
    )


def _strip_foot(height: int, span_s: float) -> str:
    y = height - 22
    axis = (
        f'<text x="{_STRIP_LEFT}" y="{y}">{span_s:g} s ago</text>'
        f'<text x="{_STRIP_LEFT + _STRIP_WIDE}" y="{y}" text-anchor="end">now</text>'
    )
    swatches: Sequence[tuple[str, str]] = [
        *((looks.level_fill(level), word) for level, word in enumerate(looks.LEVELS)),
        (f'fill="url(#{looks.IDS}differ)"', "ranks of the row differ"),
    ]
    x, parts = _STRIP_LEFT, [axis]
    for paint, word in swatches:
        parts.append(
            f'<rect x="{x}" y="{height - 14}" width="14" height="9" {paint} stroke="currentColor" '
            f'stroke-opacity=".4" stroke-width=".6"/><text x="{x + 18}" y="{height - 6}">{word}</text>'
        )
        x += 34 + int(5.6 * len(word))
    return "".join(parts)
