import io
import re

import pytest
from PIL import Image

from omni_notebook import units
from omni_notebook.notebook import html, results, tables
from omni_notebook.notebook.results import AckList
from omni_notebook.protocol import GIB, MIB, MemoryState, PauseState, PhasesMs
from omni_notebook.verbs.generating import Generation
from tests.notebook.acks import ack, rank, stage, status

HOSTILE = "<script>alert('x')</script> & \"quoted\""


def test_an_ack_list_is_a_list():
    acks = AckList([ack(), ack(rank=1)])
    assert isinstance(acks, list)
    assert len(acks) == 2
    assert sum(one.freed_bytes for one in acks) == 512 * MIB


def test_it_shows_as_text_html_and_picture():
    bundle = AckList([ack()])._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "image/png"}
    picture = Image.open(io.BytesIO(bundle["image/png"]))
    assert picture.width > 500
    assert len(picture.convert("RGB").getcolors(1 << 20)) > 5
    assert 'role="img"' in bundle["text/html"]


def test_an_empty_list_says_so():
    assert AckList([])._repr_mimebundle_()["text/plain"] == "no acknowledgements"


def test_a_row_has_every_figure():
    one = ack(
        2,
        1,
        expected_bytes=250 * MIB,
        observed_bytes=256 * MIB,
        residual_bytes=2 * GIB,
        host_backup_bytes=12 * MIB,
        latency_ms=1234.0,
        replica=3,
        note="warm page cache",
    )
    text = repr(AckList([one]))
    row = text.splitlines()[2]
    assert row.split()[:4] == ["2", "1", "3", "✓"]
    for part in ("SUCCESS", "ASLEEP (level 2)", "256.0 MiB", "250.0 MiB / 256.0 MiB", "2.00 GiB", "12.0 MiB", "1.23 s"):
        assert part in row
    assert row.endswith("warm page cache")


def test_an_error_is_readable_in_its_row():
    bad = ack(rank=1, freed_bytes=0, error_msg="the spill folder is full", error_code="OUT_OF_MEMORY")
    bundle = AckList([ack(), bad])._repr_mimebundle_()
    assert bundle["text/plain"].startswith("2 ranks answered, 1 with ERROR")
    for form in ("text/plain", "text/html"):
        assert "✗ ERROR" in bundle[form]
        assert "OUT_OF_MEMORY; the spill folder is full" in bundle[form]


def test_a_shared_process_is_counted_once():
    text = repr(AckList([ack(0, residual_bytes=410 * MIB), ack(1, residual_bytes=408 * MIB)]))
    assert "residual 408.0 MiB in 1 process" in text
    assert "410.0 MiB*" in text
    assert "stage 0 · rank 0, stage 1 · rank 0 together (the last one measured); counted once" in text


def test_a_wake_shows_what_is_mapped():
    one = ack(
        freed_bytes=0,
        state="WARM",
        level=None,
        mapped_bytes=260 * MIB,
        host_backup_bytes=MIB,
        expected_bytes=0,
        observed_bytes=0,
    )
    text = repr(AckList([one]))
    assert "mapped 260.0 MiB" in text
    assert "AWAKE" in text
    assert "▓" * 12 in text
    for word in ("freed", "WARM", "host backup", "expected"):
        assert word not in text


def test_a_wake_of_some_tags_has_a_full_bar_and_the_stages_own_state():
    one = ack(freed_bytes=0, state="COLD", mapped_bytes=2 * MIB)
    text = repr(AckList([one], "wake", {0: "PARTLY_AWAKE (weights awake)"}))
    assert "PARTLY_AWAKE (weights awake)" in text
    assert "▓" * 12 in text
    assert "COLD" not in text


@pytest.mark.parametrize(("order", "word", "state"), [("wake", "awake", "WARM"), ("sleep", "asleep", "COLD")])
def test_an_order_that_had_nothing_to_do_says_so(order, word, state):
    text = repr(AckList([ack(freed_bytes=0, noop=True, state=state)], order))
    assert text.splitlines()[0] == f"nothing to do: already {word}"


def test_a_reload_says_that_weights_were_loaded():
    one = ack(freed_bytes=0, state="WARM", phases_ms=PhasesMs(reload=4.0))
    assert repr(AckList([one], "wake")).splitlines()[-1].endswith("weights loaded")


def test_python_calls_in_an_answer_are_shown_as_verbs():
    assert "%omni wake works" in repr(AckList([ack(error_msg="not seen free; wake_up works")]))


@pytest.mark.parametrize("shown", [AckList([ack()])._repr_mimebundle_, lambda: results.status_bundle(status(stage()))])
def test_an_interrupt_while_the_picture_is_drawn_does_not_cost_the_table(shown, monkeypatch):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "figure_png", interrupted)
    assert set(shown()) == {"text/plain", "text/html"}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"noop": True, "freed_bytes": 0}, "no-op: it was so already"),
        ({"host_freed_bytes": 3 * MIB, "freed_bytes": 0}, "host freed 3.0 MiB"),
        ({"recoverable": False}, "NOT recoverable"),
    ],
)
def test_what_a_reader_must_know_is_in_the_note(facts, words):
    assert words in repr(AckList([ack(**facts)]))


def test_every_text_is_escaped():
    acks = AckList([ack(error_msg=HOSTILE, note=HOSTILE, device=HOSTILE)])
    shown = status(stage(name=HOSTILE, last_error=HOSTILE, weight_version=HOSTILE), model=HOSTILE)
    for markup in (acks._repr_mimebundle_()["text/html"], results.status_bundle(shown)["text/html"]):
        assert "<script" not in markup
        assert "&lt;script&gt;" in markup


def test_html_brings_no_page_colours_and_no_script():
    markup = html.as_html(tables.ack_table([ack()]))
    assert not re.search(r"background|color:#(000|111|fff)|<script|onload|<style", markup)
    assert "color:inherit" in markup


def test_a_status_shows_state_requests_and_memory():
    shown = status(
        stage(0, state=MemoryState.ASLEEP, level=2),
        stage(1, name="painter", pause_state=PauseState.PAUSED, pause_mode="keep", last_error="out of paint"),
        paused=True,
    )
    text = results.status_bundle(shown)["text/plain"]
    for part in (
        "demo · admission closed · up 12 s",
        "ASLEEP (level 2)",
        "PAUSED (keep)",
        "1 / 2 / 3 / 4",
        "memory: resident / of",
        "weights id",
        "weights 3.0 MiB / 3.0 MiB",
        "ballast (filler, no model) 64.0 MiB / 256.0 MiB",
        "last error: out of paint",
        "stage 0: %omni wake 0 wakes it",
        "stage 1: %omni resume 1 opens it",
    ):
        assert part in text


def test_a_status_without_notes_has_no_column_for_them():
    assert "note" not in results.status_bundle(status(stage()))["text/plain"]


def test_an_engine_that_was_shut_down_shows_stopped_stages_and_no_calls():
    shown = status(stage(0, state=MemoryState.ASLEEP, level=1, ranks=(rank(alive=False),)), closed=True)
    text = results.status_bundle(shown)["text/plain"]
    assert "STOPPED" in text
    for word in ("ASLEEP", "%omni", "dead"):
        assert word not in text


def test_a_status_sums_ranks_and_names_a_dead_worker():
    text = results.status_bundle(status(stage(ranks=(rank(), rank(rank=1, alive=False)))))["text/plain"]
    assert "weights 6.0 MiB / 6.0 MiB" in text
    assert "a worker is dead; 2 ranks" in text


def test_small_images_are_enlarged_without_blur():
    made = Generation(prompt="p", request_id="r", images=[Image.new("RGB", (64, 64), "red")] * 2, seed=1, elapsed_s=0.5)
    picture = Image.open(io.BytesIO(results.generation_bundle(made)["image/png"]))
    assert picture.size == (2 * 256 + 8, 256)
    assert {colour for _, colour in picture.getcolors()} == {(255, 0, 0), (255, 255, 255)}


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(None, "–"), (0, "0 B"), (5, "5 B"), (1536, "1.5 KiB"), (3 * MIB, "3.0 MiB"), (1536 * MIB, "1.50 GiB")],
)
def test_no_figure_that_is_not_0_reads_as_0(n_bytes, text):
    assert units.size(n_bytes) == text
