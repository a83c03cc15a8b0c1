"""The widget on the real engine and on fake ones; what a page would be sent, without a page."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref

import ipywidgets
import pytest
from ipywidgets.widgets import widget as ipywidgets_registry

import omni_notebook as omni
from omni_notebook.errors import UnsupportedError
from omni_notebook.notebook.dashboard.orders import Press
from omni_notebook.notebook.dashboard.widget import VIEW
from omni_notebook.protocol import MemoryState
from omni_notebook.verbs.frontend import PlainFrontend
from omni_notebook.verbs.session import Session, session
from tests.notebook.acks import stage, status
from tests.notebook.dashboard.watched import busy_error, ranks


@pytest.fixture(params=["uni", "mp"])
def real(request, shell):
    with omni.AsyncOmni("demo", executor=request.param) as made:
        yield made


@pytest.fixture
def shown(engine):
    """A dashboard of the fake engine."""
    made = omni.dashboard(engine)
    yield made
    made.close()


def words(html):
    return re.sub(r"<[^>]*>", " ", html)


def card(dashboard, stage_id):
    """What a card says: the stage, and what stands under its buttons."""
    found = dashboard._pieces._cards[stage_id]
    return words(found._text.value), words(found._below.value)


def button(dashboard, stage_id, press):
    return dashboard._pieces._cards[stage_id]._buttons[press]


def click(dashboard, stage_id, press):
    """What the page sends for a click, handled as the kernel handles it."""
    widget = button(dashboard, stage_id, press)
    widget._handle_msg({"content": {"data": {"method": "custom", "content": {"event": "click"}}}, "buffers": []})


def instances():
    return len(ipywidgets_registry._instances)


# ------------------------------------------------------------------------------------- real engine


def test_a_press_sleeps_and_wakes_a_stage_and_the_card_tells(real, until):
    dashboard = omni.dashboard(real)
    assert "0 thinker" in card(dashboard, 0)[0]
    assert not button(dashboard, 0, Press.SLEEP_2).disabled
    assert button(dashboard, 0, Press.WAKE).disabled
    click(dashboard, 0, Press.SLEEP_2)
    until(lambda: "ASLEEP (level 2)" in card(dashboard, 0)[0] and "✓ Sleep L2: 1 rank freed" in card(dashboard, 0)[1])
    assert real.status().stages[0].state == MemoryState.ASLEEP
    assert button(dashboard, 0, Press.SLEEP_1).disabled
    assert "its weights are gone" in button(dashboard, 0, Press.SLEEP_1).tooltip
    until(lambda: "sleep L2 −" in dashboard.frame.chart)
    assert "✓ freed" in words(dashboard.frame.log)
    click(dashboard, 0, Press.WAKE)
    until(lambda: "✓ Wake: 1 rank mapped" in card(dashboard, 0)[1])
    assert real.status().stages[0].state == MemoryState.AWAKE
    dashboard.close()


def test_a_press_that_came_too_late_says_that_nothing_was_to_do(real, until):
    first, second = omni.dashboard(real), omni.dashboard(real)
    click(first, 0, Press.SLEEP_1)
    click(second, 0, Press.SLEEP_1)  # its button is still on
    until(lambda: "✓ Sleep L1: nothing to do, it was so already" in card(second, 0)[1])
    assert "freed 0 B" not in card(first, 0)[1]
    first.close()
    second.close()


def test_pause_and_resume_by_press(real, until):
    dashboard = omni.dashboard(real)
    click(dashboard, 1, Press.PAUSE)
    until(lambda: "PAUSED (keep)" in card(dashboard, 1)[0] and not button(dashboard, 1, Press.RESUME).disabled)
    assert "admission closed" in words(dashboard._pieces._head.value)
    assert "paused (keep)" in words(dashboard.frame.log)
    click(dashboard, 1, Press.RESUME)
    until(lambda: "admission open" in words(dashboard._pieces._head.value))
    dashboard.close()


def test_a_press_counts_as_the_sessions_last_order(real, until):
    session().use(real)
    dashboard = omni.dashboard()
    click(dashboard, 0, Press.SLEEP_1)
    until(omni.last_acks)
    assert [(one.stage_id, one.metadata["level"]) for one in omni.last_acks()] == [(0, 1)]
    assert "SUCCESS" in repr(omni.last_acks())
    dashboard.close()


def test_a_worker_that_dies_is_shown_and_restart_brings_it_back(shell, until):
    with omni.AsyncOmni("demo", executor="mp") as real:
        dashboard = omni.dashboard(real)
        os.kill(real.status().stages[0].ranks[0].pid, signal.SIGKILL)
        until(lambda: "FAILED" in card(dashboard, 0)[0])
        until(lambda: "FAILED: WorkerDiedError" in words(dashboard._pieces._log.value))
        assert "✗ last error: WorkerDiedError" in card(dashboard, 0)[1]
        assert "%omni restart 0 brings it back" in card(dashboard, 0)[1]
        assert [press for press in Press if not button(dashboard, 0, press).disabled] == [Press.RESTART]
        assert "✗ worker dead" in words(dashboard._pieces._chart.value)
        click(dashboard, 0, Press.RESTART)
        until(lambda: "AWAKE" in card(dashboard, 0)[0] and "✓ Restart" in card(dashboard, 0)[1], 30)
        assert re.search(r"✓ Restart: new workers, \d+\.\d MiB loaded in [\d.]+ m?s", card(dashboard, 0)[1])
        assert "worker dead" not in words(dashboard._pieces._chart.value)
        dashboard.close()


def test_an_engine_that_stops_is_shown_and_let_go(real, until):
    dashboard = omni.dashboard(real)
    click(dashboard, 0, Press.SLEEP_1)
    until(lambda: "✓ Sleep L1" in card(dashboard, 0)[1])
    real.shutdown()
    until(lambda: dashboard.frame.last)
    assert "shut down" in words(dashboard._pieces._head.value)
    assert "Sleep L1" not in card(dashboard, 0)[1], "what became of a press of an engine that has ended"
    assert dashboard.frame.view.window.values[:, -1].tolist() == [0.0] * len(dashboard.frame.view.window.keys)
    assert "worker dead" not in words(dashboard._pieces._chart.value)
    assert "STOPPED" in card(dashboard, 0)[0]
    assert all(button(dashboard, 0, press).disabled for press in Press)
    until(lambda: dashboard.sampler.engine is None)
    click(dashboard, 0, Press.RESTART)  # a click that was on its way
    dashboard.close()


def test_a_refused_order_says_why_in_its_card_and_keeps_the_traceback(shell, until):
    with omni.AsyncOmni("demo", step_execution=True) as real:
        dashboard = omni.dashboard(real)
        click(dashboard, 1, Press.PAUSE)
        until(lambda: "✗ Pause" in card(dashboard, 1)[1])
        text = card(dashboard, 1)[1]
        assert "runs single steps (--step-execution)" in text
        assert "call %omni sleep 1 --mode wait (or abort)" in text
        assert "Traceback" not in text
        assert session().last_traceback.startswith("from: %omni pause 1 --mode keep\nTraceback")
        assert "OPEN" in card(dashboard, 1)[0]
        dashboard.close()


def test_requests_show_while_they_run(real, until):
    async def draw():
        async for _ in real.generate("a red star", sampling_params={"num_inference_steps": 150, "seed": 1}):
            pass

    dashboard = omni.dashboard(real)
    running = real.submit(draw())
    until(lambda: "1 running" in card(dashboard, 1)[0])
    assert not button(dashboard, 1, Press.SLEEP_1).disabled
    assert "first its running batch ends" in button(dashboard, 1, Press.SLEEP_1).tooltip
    running.result(60)
    dashboard.close()


def test_what_stays_is_how_things_were_at_the_close(engine, shell):
    for state in (MemoryState.FAILED, MemoryState.WAKING, MemoryState.NEEDS_WEIGHTS):
        dashboard = omni.dashboard(engine)
        engine.current = status(stage(0, state=state, ranks=ranks(1)))
        dashboard.close()
        assert dashboard.frame.view.status.stages[0].state is state


def test_a_close_is_held_up_by_no_status_that_does_not_come(engine, shell):
    comes, asked = threading.Event(), threading.Event()
    dashboard = omni.dashboard(engine)
    answer = engine.status
    engine.status = lambda: (asked.set(), comes.wait(20), answer())[2]
    assert asked.wait(5)
    began_s = time.monotonic()
    dashboard.close()
    assert time.monotonic() - began_s < 4
    comes.set()


# ------------------------------------------------------------------------------------ one of many


def test_closing_frees_widgets_thread_subscription_and_engine(engine, until):
    before = instances(), len(engine.hub._everyone())
    dashboards = [omni.dashboard(engine) for _ in range(3)]
    assert len(engine.hub._everyone()) == before[1] + 1
    assert [t.name for t in threading.enumerate()].count("omni-dashboard") == 1
    gone = [weakref.ref(dashboard) for dashboard in dashboards]
    for _ in range(2):
        dashboards.pop().close()
    assert len(engine.hub._everyone()) == before[1] + 1
    last = dashboards.pop()
    shown = last.frame.view.at_s
    until(lambda last=last: last.frame.view.at_s > shown)
    last.close()
    last.close()
    assert (instances(), len(engine.hub._everyone())) == before
    assert not [t for t in threading.enumerate() if t.name == "omni-dashboard"]
    del last
    gc.collect()
    assert [one() for one in gone] == [None] * 3


def test_two_dashboards_draw_with_names_of_their_own(engine):
    one, two = omni.dashboard(engine), omni.dashboard(engine)
    ids = [set(re.findall(r'id="([^"]*)"', dashboard._pieces._chart.value)) for dashboard in (one, two)]
    assert all(ids)
    assert ids[0].isdisjoint(ids[1])
    one.close()
    two.close()


def test_only_what_changed_is_sent(engine, shown, until):
    sent = []
    until(lambda: shown._pieces._devices.value)
    seen = shown.frame
    for part in shown.children:
        part.observe(lambda change: sent.append((change["owner"], change["name"])), "value")
    until(lambda: shown.frame.view.at_s > seen.view.at_s + 0.5)
    assert {owner for owner, _ in sent} <= {shown._pieces._chart, shown._pieces._devices}


def test_a_view_that_was_closed_is_drawn_no_more_until_it_is_back(engine, shown, until):
    shown._view_count = 1
    shown._view_count = 0
    engine.current = status(stage(0, name="another", ranks=ranks(1)), stage(1, ranks=ranks(1)))
    until(lambda: "another" in shown.frame.cards[0].html)
    assert "another" not in card(shown, 0)[0]
    shown._view_count = 1
    until(lambda: "another" in card(shown, 0)[0])


def test_the_table_is_made_only_while_someone_looks(engine, shown, until):
    seen = shown.frame
    until(lambda: shown.frame.view.at_s > seen.view.at_s + 0.3)
    table, reasons = shown._pieces._asked
    assert (table.value, reasons.value) == ("", "")
    shown._pieces._accordion.selected_index = 0
    until(lambda: "900.0 MiB" in table.value)
    shown._pieces._accordion.selected_index = 1
    until(lambda: "Stage 0 (thinker), Wake: nothing to do, it is AWAKE" in words(reasons.value))


def test_a_busy_stages_error_is_one_line_in_verbs(engine, shown, until):
    engine.error = busy_error()
    click(shown, 0, Press.SLEEP_1)
    until(lambda: "✗ Sleep L1" in card(shown, 0)[1])
    assert "stage 0 is busy: call %omni sleep 0 --mode keep (or wait, abort)" in card(shown, 0)[1]
    assert engine.calls == [("sleep", [0], 1, "keep", False)]


def test_a_press_on_an_engine_whose_loop_has_ended_is_told(engine, shown, until):
    engine.close()
    click(shown, 0, Press.RESTART)
    until(lambda: "✗ Restart" in card(shown, 0)[1])
    assert "the engine was shut down" in card(shown, 0)[1]


def test_a_press_on_an_engine_whose_status_fails_is_told(engine, shown, until):
    engine.current = ConnectionError("the wire is cut")
    click(shown, 0, Press.RESTART)
    until(lambda: "✗ Restart: the wire is cut" in card(shown, 0)[1])


def test_a_dashboard_of_an_engine_that_gives_no_status_leaves_nothing(engine):
    engine.current = ConnectionError("the wire is cut")
    before = instances(), threading.active_count()
    with pytest.raises(ConnectionError):
        omni.dashboard(engine)
    assert (instances(), threading.active_count()) == before


EXIT = """
import omni_notebook as omni
engine = omni.AsyncOmni("demo")
dashboard = omni.dashboard(engine)
import time; time.sleep(0.5)
"""


def test_a_script_that_leaves_a_dashboard_open_ends_in_time_and_says_nothing():
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    print(f"{time.monotonic() - began:.1f} s with the start")


def test_nothing_is_printed_from_the_thread(engine, shown, until, capfd):
    seen = shown.frame
    engine.current = ValueError("broken")
    until(lambda: shown.frame.view.at_s > seen.view.at_s + 0.5)
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------- what it is


def test_the_bundle_has_the_widget_text_html_and_pictures(shown):
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {VIEW, "text/plain", "text/html", "image/png"}
    assert bundle["text/plain"] == repr(shown)
    assert "thinker" in bundle["text/plain"]
    assert 'src="data:image/svg+xml;base64,' in bundle["text/html"]
    assert bundle["image/png"].startswith(b"\x89PNG")


def test_the_style_hides_the_still_picture_of_this_dashboard_only(shown):
    style = shown.children[0].value
    assert f".{shown.name}-still {{ display: none; }}" in style
    assert {"omni-dashboard", shown.name} <= set(shown._dom_classes)
    assert f'class="omni-still {shown.name}-still"' in shown._repr_mimebundle_()["text/html"]


def test_buttons_are_core_widgets_with_words_and_explanations(shown):
    for press in Press:
        made = button(shown, 0, press)
        assert isinstance(made, ipywidgets.Button)
        assert made.description == press
        assert made.tooltip


def test_the_verb_returns_it_and_a_terminal_gets_the_status_in_text(cell, until):
    result, said = cell("engine = %omni start\nd = %omni dashboard\nd")
    assert result.success, said
    assert "thinker" in said
    assert "AWAKE" in said
    assert "Dashboard" not in said
    assert cell("d.close(); e = engine.dashboard(); e.close()")[0].success


def test_without_an_engine_the_verb_is_one_line(cell):
    result, said = cell("%omni dashboard")
    assert not result.success
    assert "no engine is running; %omni start" in said


def test_where_there_is_no_notebook_it_is_refused_in_one_line(engine):
    plain = Session(PlainFrontend())
    with pytest.raises(UnsupportedError, match="the dashboard needs a notebook; omni status"):
        plain.frontend.dashboard(engine)


def test_a_timeline_is_drawn_from_a_dashboard_open_or_closed(engine, shown, until):
    seen = shown.frame
    until(lambda: shown.frame.view.at_s > seen.view.at_s + 0.5)
    titles = ["0 thinker · rank 0", "1 painter · rank 0"]
    for figure in (omni.plot_timeline(shown), omni.plot_timeline(), shown.plot_timeline()):
        assert [axes.get_title("left") for axes in figure.axes] == titles
    shown.close()
    assert [axes.get_title("left") for axes in omni.plot_timeline(shown).axes] == titles


def test_a_dashboard_opened_in_a_running_loop_works(engine, until):
    async def open_it():
        return omni.dashboard(engine)

    dashboard = asyncio.run(open_it())
    seen = dashboard.frame
    until(lambda: dashboard.frame is not seen)
    dashboard.close()
