import itertools

import pytest

import omni_notebook as omni
from omni_notebook.errors import ArgumentError
from omni_notebook.notebook.dashboard import figures, panels, sampler
from tests.notebook.acks import ack
from tests.notebook.dashboard.watched import slept


def drawn(n):
    samples = slept(n)
    chart = panels.chart(samples.timeline.window(), samples.status, samples.log)
    figure = figures.chart_figure(chart, "demo: device memory by rank and tag")
    figure.draw_without_rendering()
    return figure


def boxes(artists):
    return [artist.get_window_extent() for artist in artists if artist.get_visible() and artist.get_text().strip()]


def texts(axes):
    labels = [
        tick.label1
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim()))
        for tick in axis.get_major_ticks()
        if min(low, high) <= tick.get_loc() <= max(low, high)  # matplotlib keeps others, and does not draw them
    ]
    titles = [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
    return [text for text in (*labels, *titles, *axes.texts) if text.get_text().strip()]


@pytest.mark.parametrize("n", [1, 2, 4, 16, 64])
def test_no_text_overlaps_another_and_none_leaves_the_figure(n):
    figure = drawn(n)
    shown = [text for axes in figure.axes for text in texts(axes)]
    found = boxes([*shown, figure._suptitle, *(text for legend in figure.legends for text in legend.get_texts())])
    for one, other in itertools.combinations(found, 2):
        assert not one.padded(-1).overlaps(other), (one, other)
    for box in found:
        assert box.x0 >= -1
        assert box.x1 <= figure.bbox.x1 + 1
        assert box.y0 >= -1
        assert box.y1 <= figure.bbox.y1 + 1


def test_every_rank_has_a_panel_with_its_unit_and_the_legend_is_outside():
    figure = drawn(16)
    assert [axes.get_title("left") for axes in figure.axes] == [
        f"{stage} {name} · rank {rank}" for stage, name in ((0, "thinker"), (1, "painter")) for rank in range(8)
    ]
    assert {axes.get_ylabel() for axes in figure.axes} == {"GiB"}
    assert {axes.get_xlabel() for axes in figure.axes[-4:]} == {"seconds before the last sample"}
    legend = figure.legends[0]
    assert not any(legend.get_window_extent().overlaps(axes.get_window_extent()) for axes in figure.axes)
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["weights", "kv cache", "ballast (filler, no model)", "mapped", "sleep or wake"]


def test_freed_bytes_stand_where_the_stage_slept():
    figure = drawn(2)
    assert [[note.get_text() for note in axes.texts] for axes in figure.axes] == [["sleep L2 −1.52 GiB"], []]


def test_many_ranks_are_a_panel_a_stage_and_a_strip_whose_rows_are_named():
    figure = drawn(64)
    assert [axes.get_title("left") for axes in figure.axes[:2]] == [
        "0 thinker · sum of 32 ranks",
        "1 painter · sum of 32 ranks",
    ]
    rows = [label.get_text() for label in figure.axes[2].get_yticklabels()]
    assert rows[0] == "stage 0 · ranks 0–1"
    assert len(rows) == 32


def test_of_acks_the_phases_are_drawn_with_their_times():
    phases = {"quiesce": 5.0, "copy": 40.0, "unmap": 10.0}
    acks = [ack(0, rank, phases_ms=phases, latency_ms=60.0 + rank) for rank in range(16)]
    acks[3].status = "ERROR"
    figure = omni.plot_timeline(acks)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"stage 0 · rank {rank}" for rank in range(16)]
    assert axes.get_xlabel() == "milliseconds"
    assert [note.get_text() for note in axes.texts][2:4] == ["62 ms", "63 ms · ERROR"]
    widths = [round(bar.get_width(), 6) for bar in axes.patches[:3]]
    assert widths == [5.0, 40.0, 10.0]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["quiesce", "copy", "unmap"]
    found = boxes(texts(axes))
    assert not any(one.overlaps(other) for one, other in itertools.combinations(found, 2))


def test_no_acks_say_so():
    assert [text.get_text() for text in omni.plot_timeline([]).axes[0].texts] == ["no ACKs"]


def test_without_samples_the_error_names_the_dashboard(monkeypatch):
    monkeypatch.setattr(sampler, "_LATEST", [])
    with pytest.raises(ArgumentError, match=r"open a dashboard first \(%omni dashboard\), or give ACKs"):
        omni.plot_timeline()
