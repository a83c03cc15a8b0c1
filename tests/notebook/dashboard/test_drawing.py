import itertools
import re
import statistics
import time
import tracemalloc
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from omni_notebook.notebook import charts
from omni_notebook.notebook.dashboard import drawing, looks, panels, parts, still, svg
from omni_notebook.notebook.dashboard.devices import Device, Holder
from omni_notebook.notebook.dashboard.drawing import Note
from omni_notebook.protocol import GIB, MIB, MemoryState, PauseState, StateEvent
from tests.notebook.acks import ack, rank, stage, status
from tests.notebook.dashboard.watched import Samples, slept, two_stages

BAD = """<script>alert("1")</script>'"><img src=x onerror=alert(1)>&amp;\x1b[31m\ud800"""
FRAME_MS = 50.0


class Tags(HTMLParser):
    """The elements and attributes that a browser would make of a text, and whether they are balanced."""

    VOID = frozenset({"img", "br"})

    def __init__(self, text):
        super().__init__()
        self.names, self.attributes, self.open, self.wrong = set(), {}, [], []
        self.feed(text)
        self.wrong += self.open

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def everything(frame):
    cards = [text for card in frame.cards for text in (card.html, card.below)]
    return [frame.head, *cards, frame.chart, frame.reclaimed, frame.host, frame.devices, frame.log, frame.table()]


def chart_of(samples):
    return panels.chart(samples.timeline.window(), samples.status, samples.log)


# --------------------------------------------------------------------------------------- structure


@pytest.mark.parametrize("n", [0, 1, 2, 3, 16, 17, 256, 1024])
def test_every_number_of_ranks_draws_balanced_markup(n):
    samples = slept(n)
    for text in everything(samples.frame()):
        assert Tags(text).wrong == []
    for drawn in re.findall(r"<svg.*?</svg>", samples.frame().chart):
        ET.fromstring(drawn)
    ET.fromstring(still.picture(samples.frame()))


def test_no_ranks_and_no_stages_say_so_and_are_not_blank():
    frame = Samples().sample(status()).frame()
    assert "no ranks" in frame.chart
    assert frame.cards == ()
    assert "no rank has slept" in frame.reclaimed
    assert "none since this opened" in frame.log
    assert "no ranks" in still.picture(frame)
    figure = still.figure(frame)
    assert next(text.get_text() for text in figure.texts) == "no ranks"


@pytest.mark.parametrize("n", [2, 16])
def test_up_to_sixteen_ranks_each_has_a_panel_with_a_name_for_those_who_do_not_see_it(n):
    chart = slept(n).frame().chart
    names = re.findall(r'<svg role="img" aria-label="([^"]*)"', chart)
    assert len(names) == n
    assert names[0] == (
        "0 thinker · rank 0: memory of the last 30 s; now 0 B resident of 1.52 GiB mapped; sleep L2 −1.52 GiB 10 s ago"
    )
    assert names[-1].startswith(f"1 painter · rank {n // 2 - 1}: memory of the last 30 s; now 1.52 GiB resident")


@pytest.mark.parametrize("n", [17, 256, 1024])
def test_more_ranks_are_a_panel_a_stage_and_a_strip_of_at_most_34_rows(n):
    chart = chart_of(slept(n))
    assert [panel.title for panel in chart.panels] == [
        f"0 thinker · sum of {n // 2} ranks",
        f"1 painter · sum of {n - n // 2} ranks",
    ]
    assert 16 <= len(chart.strip.labels) <= 34
    counted = 0
    for label in chart.strip.labels:
        ends = re.fullmatch(r"stage [01] · ranks? (\d+)(?:–(\d+))?", label)
        counted += int(ends[2] or ends[1]) - int(ends[1]) + 1
    assert counted == n


def test_the_strip_shows_when_a_stage_slept_and_which_ranks_differ():
    chart = chart_of(slept(64, share=lambda number: 1.0 if number == 5 else 0.0))
    strip = chart.strip
    asleep = [row for row, label in enumerate(strip.labels) if label.startswith("stage 0")]
    awake = [row for row, label in enumerate(strip.labels) if label.startswith("stage 1")]
    assert set(strip.levels[awake].ravel()) == {4}
    assert not strip.differ[awake].any()
    ours = next(row for row in asleep if strip.labels[row] == "stage 0 · ranks 4–5")
    assert strip.differ[ours, -1]
    assert strip.levels[ours, -1] == 2
    others = [row for row in asleep if row != ours]
    assert {(int(row[0]), int(row[-1])) for row in strip.levels[others]} == {(4, 0)}


def test_ranks_of_replicas_are_told_apart():
    several = tuple(rank(rank=n % 4, replica=n // 4, pid=n) for n in range(40))
    chart = chart_of(Samples().sample(status(stage(ranks=several)), 3))
    assert chart.strip.labels[:3] == ("stage 0 · ranks 0.0–0.1", "stage 0 · ranks 0.2–0.3", "stage 0 · ranks 1.0–1.1")


def test_colours_come_with_patterns_that_the_legend_and_the_areas_share():
    chart = slept(2).frame().chart
    for kind, look in enumerate(looks.TAGS):
        if look.hatch and look.word not in {"lora", "other"}:
            assert f'<pattern id="{looks.IDS}t{kind}"' in chart
            assert f'fill="url(#{looks.IDS}t{kind})"' in chart
            assert f"</svg>{look.word}</span>" in chart
    assert len({look.hatch for look in looks.TAGS}) == len({look.colour for look in looks.TAGS}) == len(looks.TAGS)


@pytest.mark.parametrize(
    ("tag", "word"),
    [
        ("weights", "weights"),
        ("kv_cache", "kv cache"),
        ("lora", "lora"),
        ("lora_7", "lora"),
        ("ballast", "ballast (filler, no model)"),
        ("vae", "other"),
    ],
)
def test_each_tag_has_its_look_and_unknown_ones_are_other(tag, word):
    assert looks.TAGS[looks.kind_of(tag)].word == word


def test_ink_and_paper_are_the_pages_own_and_bars_take_the_texts_colour():
    assert "var(--jp-ui-font-color1" in parts.CSS
    frame = slept(2).frame()
    assert 'fill="currentColor"' in frame.chart
    assert 'fill="currentColor"' in frame.reclaimed


def test_drawings_name_their_patterns_so_that_two_on_a_page_can_be_told_apart():
    for text in (slept(2).frame().chart, slept(2).frame().reclaimed, slept(2).frame().host, slept(64).frame().chart):
        ids = re.findall(r'id="([^"]*)"', text)
        assert all(name.startswith(looks.IDS) for name in ids)
        assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)


# ----------------------------------------------------------------------------------------- content


def test_the_panel_stacks_tags_up_to_what_is_resident():
    panel = chart_of(slept(2)).panels[1]
    assert panel.values[:, -1].tolist() == [900 * MIB, 400 * MIB, 0, 256 * MIB, 0]
    assert (panel.mapped_bytes, panel.resident_bytes) == (1556 * MIB, 1556 * MIB)
    assert panel.full_bytes == 1556 * MIB


def test_a_sleep_of_one_sample_is_drawn_down_to_nothing():
    samples = Samples().sample(two_stages(2), 40).sample(two_stages(2, 0.0), 1).sample(two_stages(2), 400)
    lows = [panel.values.sum(axis=0).min() for panel in chart_of(samples).panels]
    assert lows == [0, 0]
    bottom = svg.LARGE.top + svg.LARGE.tall
    area = re.search(r'<path d="M([^"]*)Z" fill="#0072B2"', svg.panel_svg(chart_of(samples).panels[0], 120.0))[1]
    upper = area.split("L")[: area.count("L") // 2]
    assert any(float(point.split()[1]) == bottom for point in upper)


def test_sleeps_and_wakes_are_marked_with_what_they_moved_on_the_ranks_that_answered():
    samples = slept(4)
    samples.order([ack(0, 0, freed_bytes=0, mapped_bytes=1556 * MIB, state="WARM", level=None)], "wake", "w")
    samples.order([ack(0, 1, freed_bytes=0, error_msg="no room")], "wake", "w")
    samples.order([ack(1, 0, freed_bytes=0, noop=True)], "sleep", "n")
    marks = [[(mark.label, mark.ok) for mark in panel.marks] for panel in chart_of(samples).panels]
    assert marks == [
        [("wake +1.52 GiB", True), ("sleep L2 −1.52 GiB", True)],
        [("wake ERROR", False), ("sleep L2 −1.52 GiB", True)],
        [],
        [],
    ]


def test_words_of_marks_never_overlap_and_every_mark_keeps_its_line():
    samples = Samples().sample(two_stages(2), 10)
    for number in range(12):
        samples.sample(two_stages(2), 2)
        samples.order([ack(0, 0, freed_bytes=1556 * MIB)], task_id=f"t{number}")
    drawn = svg.panel_svg(chart_of(samples).panels[0], 15.0)
    assert drawn.count("<title>sleep L2") == 12
    words = re.findall(r'<text x="([\d.-]+)" y="(\d+)" font-size="10">(sleep[^<]*)<', drawn)
    assert 2 <= len(words) < 12
    for y in {y for _, y, _ in words}:
        row = sorted((float(x), float(x) + 6.1 * len(text)) for x, height, text in words if height == y)
        assert all(left[1] < right[0] for left, right in itertools.pairwise(row))
        assert row[-1][1] <= svg.LARGE.width


def test_a_card_says_everything_that_a_stage_is():
    html = parts.card(stage(state=MemoryState.ASLEEP, level=2, pause_state=PauseState.PAUSED, pause_mode="keep"))
    text = re.sub(r"<[^>]*>", " ", html)
    for words in ("0 thinker", "ASLEEP (level 2)", "PAUSED (keep)", "v1", "1 running · 2 queued", "3 in transit"):
        assert words in text
    for words in ("4 at the gate", "67.0 MiB of 259.0 MiB", "3.0 MiB"):
        assert words in text


def test_trouble_and_the_call_that_helps_stand_under_the_buttons():
    dead = stage(
        state=MemoryState.FAILED, last_error="WorkerDiedError: rank 0; call restart(0)", ranks=(rank(alive=False),)
    )
    text = re.sub(r"<[^>]*>", "|", parts.below(dead, "", wrong=False))
    assert "✗ 1 of 1 workers dead" in text
    assert "✗ last error: WorkerDiedError: rank 0; call %omni restart 0" in text
    assert "%omni restart 0 brings it back" in text


def test_an_engine_that_was_shut_down_says_so_everywhere():
    frame = Samples().sample(two_stages(2, closed=True)).frame()
    assert "shut down" in frame.head
    assert all("STOPPED" in card.html and not any(b.enabled for b in card.buttons) for card in frame.cards)
    assert "STOPPED" in still.picture(frame)


def test_the_log_shows_answers_in_full_and_errors_where_they_are():
    samples = slept(4)
    samples.order(
        [ack(1, 0, freed_bytes=0, error_msg="host RAM would not suffice", error_code="OUT_OF_MEMORY")], task_id="x"
    )
    samples.log.take(StateEvent(1.0, 1, MemoryState.FAILED, None, PauseState.OPEN, "WorkerDiedError: gone"), 99.0)
    log = samples.frame().log
    text = re.sub(r"<[^>]*>", "|", log)
    assert "✗ OUT_OF_MEMORY: host RAM would not suffice" in text
    assert "✗ FAILED: WorkerDiedError: gone" in text
    assert "✓ freed 1.52 GiB · 30.0 MiB still held by its process" in text
    assert text.index("FAILED") < text.index("OUT_OF_MEMORY") < text.index("✓ freed")
    assert log.count('class="omni-wrong"') == 2


def test_an_order_of_many_ranks_is_one_line_and_the_errors_one_by_one():
    answers = [ack(0, n, freed_bytes=MIB, error_msg="stuck" if n % 50 == 0 else None) for n in range(1000)]
    log = re.sub(r"<[^>]*>", "|", Samples().sample(two_stages(2)).order(answers).frame().log)
    assert "1000 ranks answered · freed 1000.0 MiB · ✗ 20 with ERROR" in log
    assert log.count("✗ ERROR: stuck") == 8
    assert "and 12 more with ERROR" in log


def test_the_last_sleeps_figures_stay_after_the_wake_and_say_so():
    samples = slept(4)
    before = re.sub(r"<[^>]*>", "|", samples.frame().reclaimed)
    assert "Last sleep of each rank: freed, still held" in before
    assert before.count("1.52 GiB · 30.0 MiB still held|") == 2
    samples.order([ack(0, 0, freed_bytes=0, mapped_bytes=1556 * MIB, state="WARM")], order="wake", task_id="w")
    after = re.sub(r"<[^>]*>", "|", samples.frame().reclaimed)
    assert after.count("1.52 GiB · 30.0 MiB still held · since woken|") == 1
    assert after.count("1.52 GiB · 30.0 MiB still held|") == 1


def test_a_restart_is_marked_in_the_chart():
    samples = slept(2)
    samples.log.take(StateEvent(1.0, 1, MemoryState.WAKING, None, PauseState.OPEN, "restart"), samples.at_s - 1.0)
    marks = [[(mark.label, mark.order) for mark in panel.marks] for panel in chart_of(samples).panels]
    assert ("restart", "restart") in marks[1]
    assert all(order != "restart" for _, order in marks[0])
    assert "; restart" in samples.frame().chart


def test_the_saved_picture_says_of_when_it_is_and_that_the_board_is_not_live():
    page = still.as_html(slept(2).frame())
    assert re.search(r"last picture, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+; run the cell for the live board", page)


def test_reclaimed_bars_of_many_ranks_are_grouped_and_lose_no_byte():
    answers = [ack(n % 2, n, freed_bytes=(n + 1) * MIB, pid=n, residual_bytes=GIB) for n in range(300)]
    bars = parts.grouped_bars(answers)
    assert len(bars) <= 18
    freed = sum(s.n_bytes for bar in bars for s in bar.segments if s.look is charts.FREED)
    held = sum(s.n_bytes for bar in bars for s in bar.segments if s.look is charts.RESIDUAL)
    assert (freed, held) == (sum(range(1, 301)) * MIB, 300 * GIB)


def test_a_stage_that_is_paused_has_another_dot_and_says_what_becomes_of_a_new_request():
    held = parts.card(stage(pause_state=PauseState.PAUSED, pause_mode="keep"))
    assert f"color:{charts.ORANGE}" in held
    assert "%omni generate refuses at once; engine.generate() waits up to 60 s (admission_timeout)" in held
    assert f"color:{charts.GREEN}" in parts.card(stage())
    for other in (parts.card(stage()), parts.card(stage(pause_state=PauseState.PAUSED), closed=True)):
        assert "admission_timeout" not in other


def test_host_copies_stand_beside_device_memory():
    text = re.sub(r"<[^>]*>", "|", parts.host((stage(0), stage(1))))
    assert "stage 1 · device|" in text
    assert "67.0 MiB of 259.0 MiB" in text
    assert "stage 1 · host copy|" in text
    assert "copy on the host" in text


def test_devices_say_who_holds_what():
    found = (Device("host RAM", 3 * GIB, 8 * GIB, (Holder("this kernel", GIB), Holder("others", None)), "a note"),)
    text = re.sub(r"<[^>]*>", "|", parts.devices(found))
    assert "host RAM|: 3.00 GiB of 8.00 GiB in use" in text
    assert "this kernel: 1.00 GiB" in text
    assert "others: –" in text
    assert "a note" in text
    many = (Device("host RAM", 3 * GIB, 8 * GIB, tuple(Holder(f"rank {n}", n * MIB) for n in range(100))),)
    text = re.sub(r"<[^>]*>", "|", parts.devices(many))
    assert "|rank 99: 99.0 MiB||rank 98: 98.0 MiB|" in text
    assert f"|88 more: {sum(range(88)) / 1024:.2f} GiB|" in text


def test_the_table_has_the_charts_numbers():
    table = parts.table(two_stages(2))
    assert table.count("<tr>") == 1 + 6
    assert "<td>900.0 MiB</td><td>900.0 MiB</td>" in table
    assert "and 2816 more rows" in parts.table(two_stages(1024))


@pytest.mark.parametrize(("seconds", "words"), [(5, "5 s"), (65, "1 min 05 s"), (7815, "2 h 10 min")])
def test_times_are_written_for_people(seconds, words):
    assert parts.units_of_time(seconds) == words


# ---------------------------------------------------------------------------------------- escaping


def test_nothing_that_anyone_names_becomes_markup():
    hostile = stage(
        name=BAD,
        model=BAD,
        kind=BAD,
        weight_version=BAD,
        last_error=BAD,
        pause_mode=BAD,
        ranks=(rank(device=BAD, tags=rank().tags),),
    )
    samples = Samples().sample(status(hostile, model=BAD), 3)
    samples.devices = (Device(BAD, 1, 2, (Holder(BAD, 1),), BAD),)
    samples.notes = {0: Note(BAD, wrong=True)}
    samples.order([ack(0, 0, error_msg=BAD, error_code=BAD, note=BAD)])
    samples.order([ack(0, 0, note=BAD)], task_id="b")
    samples.log.take(StateEvent(1.0, 0, MemoryState.FAILED, None, PauseState.OPEN, BAD), 99.0)
    frame = samples.frame(trouble=BAD)
    allowed = {"div", "span", "svg", "path", "rect", "text", "title", "defs", "pattern", "table", "thead", "tbody"}
    allowed |= {"tr", "td", "th", "ul", "li"}
    for text in everything(frame):
        tags = Tags(text)
        assert (tags.names - allowed, tags.wrong) == (set(), [])
        assert not any(name.startswith("on") for name in tags.attributes)
    tags = Tags(still.as_html(frame))
    assert tags.names - allowed == {"img", "em"}
    assert len(tags.attributes["src"]) == 1
    assert tags.attributes["src"][0].startswith("data:image/svg+xml;base64,")
    assert "onerror" not in tags.attributes
    ET.fromstring(still.picture(frame))
    for text in [*everything(frame), still.picture(frame)]:
        text.encode()


# ------------------------------------------------------------------------------------------- speed


@pytest.mark.quiet
def test_a_frame_of_256_ranks_takes_at_most_50_ms_of_cpu():
    samples = slept(256)
    took = []
    for number in range(15):
        state = two_stages(256, 1.0 - number / 100)
        began = time.process_time()
        samples.sample(state).frame()
        took.append(1e3 * (time.process_time() - began))
    print(f"frame of 256 ranks: median {statistics.median(took):.1f} ms of CPU, worst {max(took):.1f} ms")
    assert statistics.median(took) <= FRAME_MS


def test_frames_take_no_more_and_more_memory():
    samples = slept(18).sample(two_stages(18), 600)
    states = [two_stages(18, share) for share in (0.2, 0.9)]

    def many(n):
        for number in range(n):
            samples.order([ack(0, 0)], task_id=f"t{samples.at_s}")
            samples.sample(states[number // 10 % 2]).frame()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        settled = many(100)  # the log is full
        grown = many(60) - settled
    finally:
        tracemalloc.stop()
    assert grown < 200_000, "a single frame is larger than a sixtieth of this"


def test_a_chart_whose_values_stand_still_is_drawn_once_a_second():
    samples = slept(2)
    drawn = [samples.sample(samples.status).frame().chart for _ in range(13)]
    assert [one is before for before, one in itertools.pairwise(drawn)].count(False) == 2
    assert drawing.REDRAW_S == 1.0
