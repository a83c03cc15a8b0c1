"""A dashboard's last state for a page without a kernel: text, and HTML with a picture that needs nothing else."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any

from omni_notebook.notebook import html, tables
from omni_notebook.notebook.dashboard import figures, looks, panels, svg
from omni_notebook.notebook.results import figure_png
from omni_notebook.verbs import hints

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from omni_notebook.notebook.dashboard.drawing import Frame
    from omni_notebook.notebook.dashboard.panels import Chart

MOST_ACKS = 32
_EDGE = 8
_NO_WIDGET = ".jp-OutputArea-child:has(+ .jp-OutputArea-child .{name}):not(:has(.omni-dashboard)) {{ display: none; }}"


def bundle(frame: Frame, name: str = "", *, png: bool = True) -> dict[str, Any]:
    """The MIME bundle of a frame; `name` is a class of its outermost element, `png` adds a drawn figure (slow)."""
    data: dict[str, Any] = {"text/plain": as_text(frame), "text/html": as_html(frame, name)}
    if png:
        data["image/png"] = figure_png(figure(frame))
    return data


def figure(frame: Frame) -> Figure:
    """The chart as a matplotlib figure."""
    return figures.chart_figure(_chart(frame), title(frame))


def _chart(frame: Frame) -> Chart:
    return panels.chart(frame.view.window, frame.view.status, frame.view.log)


def title(frame: Frame) -> str:
    """What the picture shows."""
    return f"{frame.view.status.model}: device memory by rank and tag"


def as_text(frame: Frame) -> str:
    """The status, and each rank's last answer."""
    acks = frame.view.log.last_acks[:MOST_ACKS]
    answers = [tables.as_text(tables.ack_table(acks))] if acks else []
    return "\n\n".join([tables.as_text(tables.status_table(frame.view.status)), *answers])


def as_html(frame: Frame, name: str = "") -> str:
    """A picture and tables; no script, nothing from elsewhere.

    The style hides, in JupyterLab, the line "Loading widget…" that stands above where no kernel makes the widget.
    """
    words = looks.text(f"{title(frame)}. {'; '.join(_spoken(frame))}")
    source = base64.b64encode(picture(frame).encode()).decode()
    acks = frame.view.log.last_acks[:MOST_ACKS]
    answers = html.as_html(tables.ack_table(acks)) if acks else ""
    image = f'<img alt="{words}" src="data:image/svg+xml;base64,{source}" style="max-width:100%">'
    status = html.as_html(tables.status_table(frame.view.status))
    style = f"<style>{_NO_WIDGET.format(name=name)}</style>" if name else ""
    return f'<div class="omni-still {name}">{style}{_dated(frame)}{image}{status}{answers}</div>'


def _dated(frame: Frame) -> str:
    """What this is, for who reopens the notebook."""
    when = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(frame.view.status.time_s))
    return f"<div><em>last picture, {looks.text(when)}; run the cell for the live board</em></div>"


def _spoken(frame: Frame) -> list[str]:
    chart = _chart(frame)
    return [f"{panel.title}: {svg.spoken(panel, chart.span_s)}" for panel in chart.panels]


def picture(frame: Frame) -> str:
    """The chart as one SVG file on white."""
    chart = _chart(frame)
    large = len(chart.panels) <= panels.MOST_LARGE
    shape, columns = (svg.LARGE, 2) if large else (svg.SMALL, 4)
    rows = -(-len(chart.panels) // columns)
    top = 44
    placed = [
        svg.panel_svg(
            panel, chart.span_s, shape, at=(_EDGE + n % columns * shape.width, top + n // columns * shape.height)
        )
        for n, panel in enumerate(chart.panels)
    ]
    bottom = top + rows * shape.height
    if chart.strip is not None:
        placed.append(svg.strip_svg(chart.strip, chart.span_s, at=(_EDGE, bottom)))
        bottom += svg.strip_height(chart.strip)
    width = max(columns * shape.width, svg.STRIP_WIDTH if chart.strip is not None else 0) + 2 * _EDGE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + _EDGE}" '
        f'viewBox="0 0 {width} {bottom + _EDGE}" font-family="system-ui, sans-serif" color="#1a1a1a" fill="#1a1a1a">'
        f'<rect width="100%" height="100%" fill="#fff"/>{_heading(frame)}{_legend(chart)}{"".join(placed)}</svg>'
    )


def _heading(frame: Frame) -> str:
    status = frame.view.status
    states = " · ".join(
        f"{stage.stage_id} {stage.name} {'STOPPED' if status.closed else hints.state_words(stage)}"
        for stage in status.stages
    )
    words = looks.text(f"{status.model}: {states}")
    return f'<text x="{_EDGE + 4}" y="16" font-size="13" font-weight="600">{words}</text>'


def _legend(chart: Chart) -> str:
    if not chart.panels:
        return f'<text x="{_EDGE + 4}" y="34" font-size="11">no ranks</text>'
    kinds = svg.kinds(chart)
    entries = [
        *((f'<rect width="14" height="10" fill="{looks.fill(kind)}"/>', looks.TAGS[kind].word) for kind in kinds),
        *svg.extra_legend(chart),
    ]
    x, drawn = _EDGE + 4, []
    for swatch, word in entries:
        drawn.append(
            f'<g transform="translate({x} 26)">{swatch}<text x="20" y="9" font-size="11">{looks.text(word)}</text></g>'
        )
        x += 40 + int(6.1 * len(word))
    return looks.patterns(kinds) + "".join(drawn)
