"""The chart as a matplotlib `Figure`, for people to keep; and the phases of an order's ACKs. No pyplot, no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omni_notebook import units
from omni_notebook.notebook import charts
from omni_notebook.notebook.dashboard import looks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from omni_notebook.notebook.dashboard.panels import Chart, Panel, Strip
    from omni_notebook.protocol import OmniACK

_HATCHES = {"//": "////", "xx": "xxxx", "..": "....", "--": "----"}
_LABEL_SHARE = 0.0165
"""Width of one letter of a mark's words, as a share of a panel that is one inch wide … divided by its inches."""

PHASES = (
    ("quiesce", charts.GREY, "--"),
    ("checksum", looks.YELLOW, ".."),
    ("copy", charts.BLUE, ""),
    ("unmap", charts.ORANGE, "//"),
    ("map", looks.SKY, "xx"),
    ("reload", charts.GREEN, "\\\\"),
    ("verify", looks.PURPLE, "oo"),
)


# ---------------------------------------------------------------------------------- memory over time


def chart_figure(chart: Chart, title: str) -> Figure:
    """Memory over time, a panel a rank; above 16 ranks a panel a stage and a strip of all ranks."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (a heavy import: only when a figure is made)

    columns = 1 if len(chart.panels) == 1 else 2 if len(chart.panels) <= 4 else 4
    rows = max(-(-len(chart.panels) // columns), 1)
    panel = (4.4, 2.3) if columns <= 2 else (3.3, 1.9)
    strip_inches = 0.0 if chart.strip is None else 1.2 + 0.13 * len(chart.strip.labels)
    width, height = max(panel[0] * columns, 8.0), panel[1] * rows + strip_inches + 0.9
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained", facecolor="white")
    heights = [panel[1]] * rows + ([strip_inches] if chart.strip is not None else [])
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for place, one in enumerate(chart.panels):
        row, column = divmod(place, columns)
        axes = figure.add_subplot(grid[row, column])
        last = place + columns >= len(chart.panels)
        _draw_panel(axes, one, chart.span_s, width / columns, last=last)
    if chart.strip is not None:
        _draw_strip(figure.add_subplot(grid[-1, :]), chart.strip, chart.span_s)
    if not chart.panels:
        figure.text(0.5, 0.5, "no ranks", ha="center", va="center")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _legend(figure, chart)
    return figure


def _draw_panel(axes: Axes, panel: Panel, span_s: float, inches: float, *, last: bool) -> None:
    unit, name = units.scale(panel.full_bytes)
    x = -panel.ages_s
    tops = np.cumsum(panel.values, axis=0) / unit
    below = np.zeros(x.size)
    for kind, look in enumerate(looks.TAGS):
        if np.nansum(panel.values[kind]) > 0:
            hatch = _HATCHES.get(look.hatch, "")
            axes.fill_between(x, below, tops[kind], facecolor=look.colour, hatch=hatch, edgecolor="black", lw=0)
        below = tops[kind]
    axes.axhline(panel.mapped_bytes / unit, color="black", lw=0.9, ls=(0, (4, 3)))
    axes.set_xlim(-span_s, 0)
    axes.set_ylim(0, panel.full_bytes / unit * 1.02)
    axes.set_ylabel(name, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.locator_params(nbins=4)
    axes.spines[["top", "right"]].set_visible(False)
    if last:
        axes.set_xlabel("seconds before the last sample", fontsize=8)
    rows = _draw_marks(axes, panel, span_s, inches)
    dead = "" if panel.alive else " · worker dead"
    axes.set_title(panel.title + dead, fontsize=9, loc="left", pad=4 + 9 * rows)


def _draw_marks(axes: Axes, panel: Panel, span_s: float, inches: float) -> int:
    """Lines where orders ended; their words stand above the axes in up to two rows. How many rows are used."""
    taken: tuple[list[tuple[float, float]], ...] = ([], [])
    for mark in (mark for mark in panel.marks if 0 <= mark.age_s <= span_s):
        colour = "black" if mark.ok else charts.RED
        axes.axvline(-mark.age_s, color=colour, lw=1.2, ls=":")
        wide = 0.068 * len(mark.label) / (inches - 0.7)
        start = min(max(1 - mark.age_s / span_s - wide / 2, 0.0), 1.0 - wide)
        for row, others in enumerate(taken):
            if all(start > end or start + wide < begin for begin, end in others):
                others.append((start - 0.015, start + wide + 0.015))
                place = (start, 1.0)
                axes.annotate(
                    mark.label,
                    place,
                    xycoords="axes fraction",
                    xytext=(0, 3 + 9 * row),
                    textcoords="offset points",
                    fontsize=7,
                    color=colour,
                    annotation_clip=False,
                )
                break
    return sum(map(bool, taken))


def _draw_strip(axes: Axes, strip: Strip, span_s: float) -> None:
    from matplotlib.colors import ListedColormap, to_rgba  # noqa: PLC0415  (with the figure)

    opacities = (0.06, 0.28, 0.5, 0.75, 1.0)
    colours = [to_rgba("#dddddd"), *(to_rgba(charts.BLUE, opacity) for opacity in opacities)]
    if strip.ages_s.size:
        edges = np.append(-strip.ages_s, 0.0)
        rows = np.arange(len(strip.labels) + 1) - 0.5
        axes.pcolormesh(edges, rows, strip.levels, cmap=ListedColormap(colours), vmin=-1.5, vmax=4.5)
        differ = np.where(strip.differ, 1.0, np.nan)
        axes.pcolor(edges, rows, differ, hatch="////", facecolor="none", edgecolor=charts.RED, lw=0, cmap="Oranges")
    axes.set_xlim(-span_s, 0)
    axes.set_ylim(len(strip.labels) - 0.5, -0.5)
    axes.set_yticks(range(len(strip.labels)), strip.labels, fontsize=7)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("seconds before the last sample", fontsize=8)
    axes.set_title("resident share of each rank or group of ranks: the darker, the more", fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, chart: Chart) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415  (with the figure)
    from matplotlib.patches import Patch  # noqa: PLC0415  (with the figure)

    kinds = [n for n in range(len(looks.TAGS)) if any(np.nansum(panel.values[n]) > 0 for panel in chart.panels)]
    handles: list[Patch | Line2D] = [
        Patch(
            facecolor=looks.TAGS[kind].colour,
            hatch=_HATCHES.get(looks.TAGS[kind].hatch, ""),
            edgecolor="black",
            lw=0.5,
            label=looks.TAGS[kind].word,
        )
        for kind in kinds
    ]
    handles.append(Line2D([], [], color="black", lw=0.9, ls=(0, (4, 3)), label="mapped"))
    if any(panel.marks for panel in chart.panels):
        handles.append(Line2D([], [], color="black", lw=1.2, ls=":", label="sleep or wake"))
    if chart.strip is not None and chart.strip.differ.any():
        handles.append(
            Patch(facecolor="none", hatch="////", edgecolor=charts.RED, lw=0, label="ranks of the row differ")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 7), fontsize=8, frameon=False)


# ------------------------------------------------------------------------------------ phases of ACKs


def phases_figure(acks: Sequence[OmniACK]) -> Figure:
    """Where each rank's time went: the phases of its ACK one after the other, milliseconds."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (with the figure)
    from matplotlib.patches import Patch  # noqa: PLC0415  (with the figure)

    figure = Figure(figsize=(8.5, 1.5 + 0.34 * max(len(acks), 1)), dpi=100, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    seen = {name for ack in acks for name, value in _phases(ack).items() if value}
    longest = 0.0
    for row, ack in enumerate(acks):
        longest = max(longest, _draw_phases(axes, row, ack))
    axes.set_yticks(range(len(acks)), [units.place(ack) for ack in acks], fontsize=9)
    axes.set_ylim(max(len(acks), 1) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * longest or 1)
    axes.set_xlabel("milliseconds")
    axes.set_title("Time of each rank's order, by phase", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if not acks:
        axes.text(0.5, 0.5, "no ACKs", transform=axes.transAxes, ha="center", va="center")
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="black", lw=0.5, label=name)
        for name, colour, hatch in PHASES
        if name in seen
    ]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    return figure


def _phases(ack: OmniACK) -> dict[str, float | None]:
    return dict(ack.metadata.get("phases_ms") or {})


def _draw_phases(axes: Axes, row: int, ack: OmniACK) -> float:
    """One rank's bar; where it ends."""
    left, phases = 0.0, _phases(ack)
    for name, colour, hatch in PHASES:
        wide = phases.get(name) or 0.0
        if wide:
            axes.barh(row, wide, left=left, height=0.68, color=colour, hatch=hatch, edgecolor="black", lw=0.5)
            left += wide
    total = ack.metadata.get("latency_ms")
    words = units.milliseconds(total) + ("" if ack.ok else " · ERROR")
    axes.annotate(words, (left, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    return left
