import itertools
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

from omni_notebook.notebook import charts
from omni_notebook.protocol import GIB, MIB, MemoryState
from tests.notebook.acks import ack, stage, status


def texts(figure):
    figure.draw_without_rendering()
    axes = figure.axes[0]
    return [label.get_text() for label in axes.get_yticklabels()], [note.get_text() for note in axes.texts]


def test_ranks_of_one_process_share_one_residual_bar():
    bars = charts.ack_bars([ack(0, residual_bytes=410 * MIB), ack(1, residual_bytes=400 * MIB)])
    assert [bar.label for bar in bars] == ["stage 0 · rank 0", "stage 1 · rank 0", "process 100 · cpu"]
    assert [bar.total_bytes for bar in bars] == [256 * MIB, 256 * MIB, 400 * MIB]


def test_a_rank_with_its_own_process_has_its_residual_beside_it():
    bars = charts.ack_bars([ack(rank=n, pid=n, residual_bytes=MIB) for n in range(2)])
    assert [bar.total_bytes for bar in bars] == [257 * MIB, 257 * MIB]


def test_one_process_on_two_devices_holds_something_on_each():
    held = charts.processes([ack(rank=n, device=f"cuda:{n}", residual_bytes=n + 1) for n in range(2)])
    assert [(process.device, process.residual_bytes) for process in held] == [("cuda:0", 1), ("cuda:1", 2)]


def test_ranks_without_a_process_id_are_not_merged():
    assert len(charts.processes([ack(rank=n, pid=None, residual_bytes=1) for n in range(3)])) == 3


def test_an_unknown_residual_draws_nothing():
    assert charts.processes([ack(residual_bytes=None)]) == []


def test_the_figure_names_every_rank_and_the_unit():
    figure = charts.plot_reclaimed([ack(rank=n, pid=n, residual_bytes=2 * MIB) for n in range(3)])
    labels, notes = texts(figure)
    assert labels == [f"stage 0 · rank {n}" for n in range(3)]
    assert notes == ["256.0 MiB · 2.0 MiB still held"] * 3
    assert figure.axes[0].get_xlabel() == "MiB"


@pytest.mark.parametrize(("freed", "unit"), [(3 * GIB, "GiB"), (5 * MIB, "MiB"), (2048, "KiB"), (0, "bytes")])
def test_the_unit_fits_what_is_shown(freed, unit):
    assert charts.plot_reclaimed([ack(freed_bytes=freed)]).axes[0].get_xlabel() == unit


def test_sixteen_ranks_do_not_overlap_and_the_legend_is_outside():
    acks = [ack(n // 8, n % 8, pid=n, residual_bytes=2 * GIB, freed_bytes=(70 - n) * GIB) for n in range(16)]
    figure = charts.plot_reclaimed(acks)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert all(above.y0 >= below.y1 for above, below in itertools.pairwise(boxes))
    right = figure.bbox.x1
    assert all(note.get_window_extent().x1 <= right for note in axes.texts)
    assert not figure.legends[0].get_window_extent().overlaps(axes.get_window_extent())


def test_no_acks_still_make_a_figure():
    _, notes = texts(charts.plot_reclaimed([]))
    assert notes == ["no ACKs"]


def test_an_error_has_a_pattern_and_a_word_beside_its_colour():
    bar = charts.ack_bars([ack(error_msg="broken")])[0]
    assert bar.segments[0].look is charts.FAILED
    assert "ERROR" in bar.note
    assert charts.FAILED.hatch


def test_svg_is_well_formed_named_and_escaped():
    bars = [charts.Bar("<b>&", (charts.Segment(charts.RESIDUAL, 5), charts.Segment(charts.FREED, 7)), "<i>")]
    for text in (charts.svg_bars(bars, title='"<x>'), charts.svg_bar(bars[0], 12)):
        root = ET.fromstring(text)
        assert root.attrib["role"] == "img"
        assert "<b>" not in text
        assert "<script" not in text
        assert root.find("title") is not None
        assert 'fill="url(#omni-' in text


def test_status_bars_call_ballast_ballast():
    bars = charts.status_bars(status(stage()))
    assert [bar.label for bar in bars] == ["stage 0 · weights", "stage 0 · ballast (filler, no model)"]
    assert bars[1].note == "64.0 MiB of 256.0 MiB"


def test_a_sleeping_stage_is_hollow_and_says_so():
    bars = charts.status_bars(status(stage(state=MemoryState.ASLEEP, level=1)))
    assert bars[1].note == "64.0 MiB of 256.0 MiB · asleep"
    assert charts.looks_of(bars) == [charts.RESIDENT, charts.ASLEEP]
    assert 'fill="none" stroke="currentColor"' in charts.svg_bars(bars, title="x")


def test_charts_need_neither_torch_nor_an_engine_nor_pyplot():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from omni_notebook.notebook import charts\n"
        "charts.plot_reclaimed([])\n"
        "bad = [m for m in sys.modules if m == 'matplotlib.pyplot' or m.startswith('omni_notebook.engine')]\n"
        "print(bad)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
