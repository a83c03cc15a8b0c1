"""The dashboard in a real JupyterLab, in a real Chromium, on the real demo engine."""

from __future__ import annotations

import contextlib
import json
import re
import time

import nbformat
import pytest

from tests.browser.lab import Lab, Server

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(240)]

SOON_MS = 1000
LATENCY_MS, UPDATES = 100.0, 50
BUTTONS = ["Pause", "Resume", "Sleep L1", "Sleep L2", "Wake", "Restart"]
MANY = """
from tests.notebook.dashboard.watched import FakeEngine, two_stages, ranks, busy_error
import asyncio, time
from omni_notebook.protocol import AckEvent, MemoryState
from tests.notebook.acks import ack, stage, status
many = FakeEngine(two_stages({n}))
d_many = omni.dashboard(many)
time.sleep(2)
many.current = status(
    stage(0, name="thinker", state=MemoryState.ASLEEP, level=2, running=0, queued=0, in_transit=0, waiting_at_gate=0,
          ranks=ranks({n} // 2, lambda n: 0.4 if n == 3 else 0.0)),
    stage(1, name="painter", kind="diffusion", ranks=ranks({n} // 2)))
for rank in range({n} // 2):
    wrong = "rank 3 freed 1000.0 MiB of 1556.0 MiB; not all pages left" if rank == 3 else None
    many.hub.push(AckEvent(time.time(), "sleep", ack(
        0, rank, freed_bytes=1556 << 20, pid=1000 + rank, residual_bytes=300 << 20, latency_ms=80.0 + rank,
        error_msg=wrong, error_code="NOT_OBSERVED" if wrong else None)))
time.sleep(3)
d_many
"""
START_FAKE = """
import omni_notebook as omni
from tests.notebook.dashboard.watched import FakeEngine, two_stages
calm = FakeEngine(two_stages(2))
d_calm = omni.dashboard(calm)
d_calm
"""
HOSTILE = """
from tests.notebook.dashboard.watched import FakeEngine, ranks
from tests.notebook.acks import ack, stage, status
bad = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">"><svg onload="window.hacked = 3">'
bad += "\\'"
bad_stage = stage(0, name=bad, model=bad, weight_version=bad, last_error=bad, ranks=ranks(2))
hostile = FakeEngine(status(bad_stage, model=bad))
hostile.error = ValueError(bad)
d_hostile = omni.dashboard(hostile)
d_hostile
"""


def seconds_since(began):
    return time.monotonic() - began


# ------------------------------------------------------------------------------------------ appears


def test_the_dashboard_appears_with_cards_buttons_and_labelled_charts(lab, screenshots):
    for place, name in ((0, "0 thinker"), (1, "1 painter")):
        card = lab.card(place)
        assert name in card.inner_text()
        assert [button.inner_text() for button in card.get_by_role("button").all()] == BUTTONS
        on = [button.inner_text() for button in card.get_by_role("button").all() if button.is_enabled()]
        assert on == ["Pause", "Sleep L1", "Sleep L2", "Restart"]
    assert lab.card(0).get_by_role("button", name="Wake", exact=True).get_attribute("title") == (
        "Stage 0 (thinker), Wake: nothing to do, it is AWAKE"
    )
    chart = lab.page.get_by_role("img", name=re.compile(r"^0 thinker · rank 0: memory of the last"))
    assert chart.first.is_visible()
    lab.page.screenshot(path=screenshots / "light_2_ranks.png")


def test_the_still_picture_is_hidden_while_the_widget_lives(lab):
    stills = lab.page.locator(".omni-still")
    assert stills.count() == 1
    assert not stills.first.is_visible()


# -------------------------------------------------------------------------------------------- press


@pytest.mark.quiet
def test_a_click_while_the_kernel_is_idle_changes_card_and_chart_within_a_second(lab, screenshots):
    began = time.monotonic()
    lab.press(0, "Sleep L2")
    lab.until_card(0, "ASLEEP (level 2)", SOON_MS)
    lab.page.get_by_role("img", name=re.compile(r"^0 thinker.*now 0 B resident.*sleep L2 −")).wait_for(timeout=SOON_MS)
    took = seconds_since(began)
    print(f"idle kernel: click to card and chart {1e3 * took:.0f} ms")
    assert took <= 1.0
    lab.until_card(0, "✓ Sleep L2: 1 rank freed")
    lab.page.screenshot(path=screenshots / "light_asleep.png")


@pytest.mark.quiet
def test_a_click_while_an_awaiting_cell_runs_acts_within_a_second(lab):
    lab.run("import asyncio\nawait asyncio.sleep(5)\nprint('slept')", wait=False)
    lab.until_kernel("busy")
    time.sleep(0.5)
    began = time.monotonic()
    lab.press(1, "Sleep L1")
    lab.until_card(1, "ASLEEP (level 1)", SOON_MS)
    lab.page.get_by_role("img", name=re.compile(r"^1 painter.*now 0 B resident.*sleep L1 −")).wait_for(timeout=SOON_MS)
    took = seconds_since(began)
    print(f"awaiting cell: click to card and chart {1e3 * took:.0f} ms")
    assert took <= 1.0
    assert "slept" not in lab.output(), "the cell still ran"
    lab.until_kernel("idle")


def test_a_synchronous_cell_is_told_of_and_the_press_acts_after_it(lab, screenshots):
    began = time.monotonic()
    lab.run("import time\ntime.sleep(3)", wait=False)
    lab.page.get_by_text("a press is queued until the cell ends").wait_for(timeout=2500)
    lab.page.screenshot(path=screenshots / "light_queued.png")
    lab.press(0, "Sleep L1")
    lab.until_card(0, "ASLEEP (level 1)")
    assert seconds_since(began) >= 3.0, "the kernel took it after the cell"
    lab.page.get_by_text("a press is queued until the cell ends").wait_for(state="detached")


def test_buttons_work_with_the_keyboard(lab):
    button = lab.card(0).get_by_role("button", name="Sleep L1", exact=True)
    lab.card(0).get_by_role("button", name="Pause", exact=True).focus()
    lab.page.keyboard.press("Tab")
    assert button.evaluate("(element) => document.activeElement === element"), "buttons that are off are passed over"
    lab.page.keyboard.press("Enter")
    lab.until_card(0, "ASLEEP (level 1)", 2 * SOON_MS)


def test_an_illegal_order_is_one_line_in_its_card_and_no_traceback(lab, screenshots):
    lab.run("steps = omni.AsyncOmni('demo', step_execution=True)\nd_steps = omni.dashboard(steps)\nd_steps")
    place = lab.page.locator(".omni-card").count() - 1
    lab.press(place, "Pause")
    lab.until_card(place, "✗ Pause: stage 1 runs single steps (--step-execution)", 2 * SOON_MS)
    assert "call %omni sleep 1 --mode wait" in lab.card(place).inner_text()
    assert "Traceback" not in lab.page.inner_text(".jp-Notebook")
    lab.card(place).scroll_into_view_if_needed()
    lab.page.screenshot(path=screenshots / "light_error.png")
    lab.run("d_steps.close(); steps.shutdown()")


def test_the_table_opens_and_follows(lab):
    lab.page.get_by_text("The numbers of the charts as a table").first.click()
    table = lab.page.locator(".omni-dashboard table").filter(has_text="resident").first
    table.get_by_text("64.0 MiB").first.wait_for()
    lab.press(0, "Sleep L2")
    table.get_by_text("0 B").first.wait_for()
    lab.page.get_by_text("The numbers of the charts as a table").first.click()


# -------------------------------------------------------------------------------------------- speed


WATCH = """() => {
    window.latencies = [];
    const box = document.querySelector('.omni-dashboard');
    let last = 0;
    new MutationObserver(() => {
        const drawn = Number(box.querySelector('[data-drawn-ms]').dataset.drawnMs);
        if (drawn === last) return;
        last = drawn;
        requestAnimationFrame(() => setTimeout(() => window.latencies.push(Date.now() - drawn)));
    }).observe(box, {subtree: true, childList: true});
}"""
MOVE = """
import asyncio, time
end = time.monotonic() + 12
while time.monotonic() < end:
    await engine.pause_generation("keep", [0]); await asyncio.sleep(0.2)
    await engine.resume_generation([0]); await asyncio.sleep(0.2)
"""


def test_frames_reach_the_screen_in_a_tenth_of_a_second(lab):
    """From the kernel's drawing to the painted page; the best of three rounds, because others use this machine."""
    lab.page.evaluate(WATCH)
    rounds = []
    for _ in range(3):
        lab.page.evaluate("() => { window.latencies.length = 0; }")
        lab.run(MOVE)
        found = sorted(lab.page.evaluate("() => window.latencies"))
        assert len(found) >= UPDATES
        p50, p95 = found[len(found) // 2], found[int(len(found) * 0.95)]
        print(f"kernel to screen over {len(found)} updates: p50 {p50} ms, p95 {p95} ms, worst {found[-1]} ms")
        rounds.append(p95)
        if p95 <= LATENCY_MS:
            break
    assert min(rounds) <= LATENCY_MS


# -------------------------------------------------------------------------------------------- looks


CONTRAST = """(root) => {
    const linear = (part) => part <= .03928 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4;
    const channel = (value) => linear(value / 255);
    const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
    const over = (top, under) => [0, 1, 2].map((i) => top[i] * (top[3] ?? 1) + under[i] * (1 - (top[3] ?? 1)));
    const light = (c) => .2126 * channel(c[0]) + .7152 * channel(c[1]) + .0722 * channel(c[2]);
    const paper = (element) => {
        const layers = [];
        for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
        return layers.reverse().reduce((under, top) => top.length ? over(top, under) : under, [255, 255, 255]);
    };
    const found = [];
    for (const element of root.querySelectorAll('span, div, td, th, text, li')) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!own || element.closest('[aria-hidden]') || element.closest('button')) continue;
        const style = getComputedStyle(element), svg = element.tagName === 'text';
        const under = paper(element), ink = over(parse(svg ? style.fill : style.color), under);
        const [a, b] = [light(ink), light(under)].sort((x, y) => y - x);
        found.push([(a + .05) / (b + .05), element.textContent.trim().slice(0, 40)]);
    }
    return found;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(lab, screenshots, theme):
    lab.press(1, "Sleep L2")
    lab.until_card(1, "ASLEEP (level 2)")
    lab.theme(theme)
    time.sleep(0.5)
    found = lab.page.locator(".omni-dashboard").first.evaluate(CONTRAST)
    assert len(found) > 40
    assert [one for one in found if one[0] < 4.5] == []
    lab.page.screenshot(path=screenshots / f"{theme}_themes.png")


OVERLAPS = """(root) => {
    const texts = [...root.querySelectorAll('svg text')];
    const boxes = texts.map((text) => [text.getBoundingClientRect(), text.textContent]);
    const hits = [];
    boxes.forEach(([a, first], i) => boxes.slice(i + 1).forEach(([b, second]) => {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const tall = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1.5 && tall > 3) hits.push([first, second, wide, tall]);
    }));
    return hits;
}"""


@pytest.mark.parametrize("n", [2, 16, 256])
@pytest.mark.parametrize("wide", [1280, 760])
def test_no_text_of_a_chart_overlaps_another_at_any_number_of_ranks(lab, screenshots, n, wide):
    lab.page.set_viewport_size({"width": wide, "height": 2200})
    lab.run(MANY.format(n=n))
    dashboard = lab.page.locator(".omni-dashboard").last
    dashboard.get_by_text("NOT_OBSERVED").wait_for() if n > 7 else dashboard.get_by_text("✓ freed").first.wait_for()
    dashboard.scroll_into_view_if_needed()
    assert dashboard.evaluate(OVERLAPS) == []
    inside, page = dashboard.evaluate("(e) => [e.scrollWidth, e.clientWidth]")
    assert inside <= page + 2
    if wide == 1280:
        dashboard.screenshot(path=screenshots / f"light_{n}_ranks_asleep.png")
        lab.theme("dark")
        dashboard.screenshot(path=screenshots / f"dark_{n}_ranks_asleep.png")
    lab.run("d_many.close(); many.close()")


def test_names_and_errors_with_script_are_text(lab):
    lab.run(HOSTILE)
    place = lab.page.locator(".omni-card").count() - 1
    lab.press(place, "Restart")
    lab.until_card(place, "✗ Restart: <script>window.hacked = 1</script>")
    lab.run("d_hostile.close(); hostile.close()")
    lab.page.locator(".omni-still").last.wait_for()
    time.sleep(0.5)
    assert lab.page.evaluate("() => window.hacked") is None


# ------------------------------------------------------------------------------------- several, end


def test_two_dashboards_show_the_same_and_closing_one_leaves_its_picture(lab):
    lab.run("second = omni.dashboard(engine)\nsecond")
    lab.page.wait_for_function("() => document.querySelectorAll('.omni-dashboard').length === 2")
    lab.press(3, "Sleep L1")
    lab.until_card(1, "ASLEEP (level 1)", 2 * SOON_MS)
    lab.until_card(3, "ASLEEP (level 1)", 2 * SOON_MS)
    assert not lab.page.locator(".omni-still").last.is_visible()
    lab.run("second.close()")
    lab.page.wait_for_function("() => document.querySelectorAll('.omni-dashboard').length === 1")
    still = lab.page.locator(".omni-still").last
    still.wait_for()
    assert "1 painter ASLEEP (level 1)" in picture_of(still)
    lab.press(1, "Wake")
    lab.until_card(1, "AWAKE", 2 * SOON_MS)


def picture_of(still):
    """The SVG in a still picture, after making sure that the page could draw it."""
    image = still.locator("img").first
    assert image.evaluate("(image) => image.complete && image.naturalWidth > 300")
    return image.evaluate("(image) => fetch(image.src).then((answer) => answer.text())")


def reopened(server: Server, page, name: str) -> Lab:
    lab = Lab(page, server)
    lab.open(name, kernel=False)
    page.locator(".omni-still").first.wait_for()
    return lab


def test_a_notebook_saved_and_reopened_without_a_kernel_shows_the_last_state(new_page, server, screenshots):
    lab = Lab(new_page(), server)
    lab.open("saved.ipynb")
    lab.run("%load_ext omni_notebook\nengine = %omni start --ballast 64MiB")
    lab.run("%omni dashboard")
    lab.page.wait_for_selector(".omni-card")
    lab.press(0, "Sleep L2")
    lab.until_card(0, "ASLEEP (level 2)")
    assert until_saved(lab, "saved.ipynb", lambda data: "ASLEEP (level 2)" in "".join(data.get("text/html", "")))
    lab.shut_down_kernel()
    lab.page.close()

    fresh = reopened(server, new_page(), "saved.ipynb")
    still = fresh.page.locator(".omni-still").first
    assert still.is_visible()
    assert "0 thinker ASLEEP (level 2)" in picture_of(still)
    assert "ASLEEP (level 2)" in still.inner_text()
    assert "Loading widget" not in fresh.page.inner_text(".jp-Notebook")
    assert "model not found" not in fresh.page.inner_text(".jp-Notebook")
    fresh.page.screenshot(path=screenshots / "light_reopened_without_kernel.png")

    path = server.folder / "saved.ipynb"
    changed = nbformat.read(path, 4)
    changed.cells.insert(0, nbformat.v4.new_markdown_cell("changed by someone else: the outputs are not trusted"))
    nbformat.write(changed, server.folder / "untrusted.ipynb")
    untrusted = reopened(server, new_page(), "untrusted.ipynb")
    assert "0 thinker ASLEEP (level 2)" in picture_of(untrusted.page.locator(".omni-still").first)
    untrusted.page.screenshot(path=screenshots / "light_untrusted.png")


def test_an_engine_that_stops_is_shown_and_its_picture_stays(new_page, server, screenshots):
    lab = Lab(new_page(), server)
    lab.open("stopped.ipynb")
    lab.run("%load_ext omni_notebook\nengine = %omni start")
    lab.run("%omni dashboard")
    lab.page.wait_for_selector(".omni-card")
    lab.run("%omni stop")
    lab.until_card(0, "STOPPED")
    lab.page.locator(".omni-dashboard").get_by_text("the engine was shut down; %omni start starts a new one").wait_for()
    assert not any(button.is_enabled() for button in lab.card(0).get_by_role("button").all())
    lab.page.screenshot(path=screenshots / "light_stopped.png")
    assert until_saved(
        lab, "stopped.ipynb", lambda data: "image/png" in data and "STOPPED" in "".join(data["text/html"])
    )
    lab.shut_down_kernel()


def until_saved(lab, name, there, seconds=30.0):
    """Save the notebook until one of its outputs is as wanted."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        lab.save()
        saved = json.loads((lab.server.folder / name).read_text())
        data = [output["data"] for cell in saved["cells"] for output in cell.get("outputs", ()) if "data" in output]
        if any(map(there, data)):
            return True
        time.sleep(0.3)
    return False


# ------------------------------------------------------------------------------------- other pages


def test_after_a_kernel_restart_the_last_state_stands_there_as_a_picture_and_says_so(new_page, server, screenshots):
    lab = Lab(new_page(), server)
    lab.open("restarted.ipynb")
    lab.run(START_FAKE)
    lab.page.wait_for_selector(".omni-card")
    assert not lab.page.locator(".omni-still").is_visible()
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.sessionContext.restartKernel()")
    lab.page.locator(".omni-still").wait_for()
    assert "0 thinker AWAKE" in picture_of(lab.page.locator(".omni-still"))
    assert not lab.page.locator(".omni-card").first.is_visible()
    said = lab.page.locator(".omni-still").evaluate("(e) => getComputedStyle(e, '::before').content")
    assert "The kernel has ended; this is the last state" in said
    lab.page.screenshot(path=screenshots / "light_restarted.png")
    lab.until_kernel("idle")
    lab.run(START_FAKE)
    lab.page.wait_for_function("() => document.querySelectorAll('.omni-card').length === 4")
    assert lab.card(2).is_visible()


def test_a_page_that_is_loaded_again_while_the_kernel_runs_shows_it_live(new_page, server):
    lab = Lab(new_page(), server)
    lab.open("again.ipynb")
    lab.run(START_FAKE)
    lab.page.wait_for_selector(".omni-card")
    lab.save()
    lab.page.close()
    fresh = Lab(new_page(), server)
    fresh.open("again.ipynb")
    fresh.page.wait_for_selector(".omni-card")
    fresh.press(0, "Pause")
    fresh.until_card(0, "✓ Pause: done", 2 * SOON_MS)
    assert not fresh.page.locator(".omni-still").first.is_visible()
    fresh.shut_down_kernel()


def test_a_dashboard_that_was_scrolled_out_of_sight_is_up_to_date_when_it_comes_back(new_page, chromium, tmp_path):
    server = Server(tmp_path, windowed=True)
    try:
        lab = Lab(new_page(), server)
        lab.open("windowed.ipynb")
        lab.run(START_FAKE)
        lab.page.wait_for_selector(".omni-card")
        for _ in range(12):
            lab.run("print('a line\\n' * 30)")
        lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.scrollToItem(13)")
        lab.page.wait_for_function("() => document.querySelector('.omni-card').innerText === ''")
        lab.run("calm.current = two_stages(2, 0.5)")
        time.sleep(1)
        lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.scrollToItem(1)")
        lab.until_card(0, "778.0 MiB of 1.52 GiB")
        lab.press(0, "Pause")
        lab.until_card(0, "✓ Pause: done", 2 * SOON_MS)
    finally:
        server.close()


def test_the_classic_notebook_shows_it_and_presses_work(new_page, tmp_path, screenshots):
    server = Server(tmp_path, app="nbclassic")
    try:
        from playwright.sync_api import Error

        page = new_page()
        server.notebook("classic.ipynb", ["import sys\n" + START_FAKE])
        page.goto(f"{server.url}/notebooks/classic.ipynb?token={server.token}")
        page.wait_for_function("() => window.Jupyter?.notebook?.kernel?.is_connected()", timeout=60_000)
        card = page.locator(".omni-card").first
        for _ in range(5):  # this page takes widgets away, anyone's, that are made before it has settled
            page.evaluate("() => window.Jupyter.notebook.execute_all_cells()")
            page.locator(".omni-still").first.wait_for(state="attached", timeout=60_000)
            time.sleep(3)
            if card.is_visible():
                card.get_by_role("button", name="Sleep L1", exact=True).click()
                with contextlib.suppress(Error):
                    card.get_by_text("✓ Sleep L1: done").wait_for(timeout=2 * SOON_MS)
                    break
        assert card.get_by_text("✓ Sleep L1: done").is_visible()
        page.get_by_role("img", name=re.compile(r"^0 thinker · rank 0: memory of the last")).wait_for()
        assert not page.locator(".omni-still").first.is_visible()
        page.screenshot(path=screenshots / "classic.png")
    finally:
        server.close()
