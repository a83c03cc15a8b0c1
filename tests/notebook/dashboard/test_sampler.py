import gc
import math
import threading
import time
import weakref

import pytest

from omni_notebook.notebook.dashboard import sampler
from omni_notebook.protocol import AckEvent, TagMemory
from tests.notebook.acks import ack, rank, stage, status
from tests.notebook.dashboard.watched import FakeEngine, ranks, two_stages


@pytest.fixture
def frames(engine):
    """Frames of the fake engine as they come."""
    seen = []
    sampled = sampler.attach(engine, seen.append)
    yield seen
    sampler.detach(sampled, seen.append)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "omni-dashboard"]


@pytest.mark.quiet
def test_frames_come_five_times_a_second_and_never_more(engine, until):
    at = []
    watching = sampler.attach(engine, show := (lambda frame: at.append(frame.view.at_s)))
    until(lambda: len(at) >= 15, 20)
    sampler.detach(watching, show)
    assert (at[-1] - at[0]) / (len(at) - 1) >= 0.19
    assert (at[-1] - at[0]) / (len(at) - 1) <= 0.4, "ticks are left out only where the machine is late"


def test_dashboards_of_one_engine_share_one_thread_and_the_last_one_ends_it(engine, until):
    first, second = [], []
    one, two = first.append, second.append
    shared = sampler.attach(engine, one)
    assert sampler.attach(engine, two) is shared
    assert len(threads()) == 1
    until(lambda: first and second)
    sampler.detach(shared, one)
    count = len(first)
    more = len(second) + 2
    until(lambda: len(second) >= more)
    assert len(first) == count, "once detach is back, the listener is not called again"
    sampler.detach(shared, two)
    assert threads() == []
    assert shared.engine is None


def test_a_new_dashboard_right_after_the_last_one_gets_a_sampler_of_its_own(engine, until):
    for _ in range(10):
        seen = []
        show = seen.append
        watching = sampler.attach(engine, show)
        sampler.detach(watching, show)
    seen = []
    show = seen.append
    watching = sampler.attach(engine, show)
    until(lambda: seen)
    sampler.detach(watching, show)
    assert threads() == []


def test_nothing_refers_to_the_engine_after_the_last_detach(until):
    engine = FakeEngine(two_stages(2))
    watching = sampler.attach(engine, print_nothing := (lambda frame: None))
    sampler.detach(watching, print_nothing)
    gone = weakref.ref(engine)
    engine.close()
    del engine
    gc.collect()
    assert gone() is None
    assert watching.frame.cards, "the last frame stays"


def test_no_answer_is_lost_however_many_come_at_once(engine, until):
    counted = []
    watching = sampler.attach(
        engine,
        show := (lambda frame: counted.append(len(frame.view.log.orders[-1].acks) if frame.view.log.orders else 0)),
    )
    for number in range(3000):
        engine.hub.push(AckEvent(time.time(), "sleep", ack(0, number)))
    until(lambda: counted and counted[-1] == 3000)
    sampler.detach(watching, show)


def test_an_engine_that_closes_is_shown_to_the_end_and_let_go(engine, until):
    seen = []
    show = seen.append
    watching = sampler.attach(engine, show)
    until(lambda: seen)
    engine.current = two_stages(2, 1.0, closed=True)
    until(lambda: seen[-1].view.status.closed)
    assert not seen[-1].last, "its memory has not gone back yet"
    engine.hub.push(AckEvent(time.time(), "sleep", ack(0, 0)))
    engine.current = two_stages(2, 0.0, closed=True)
    engine.hub.close()
    until(lambda: seen[-1].last)
    assert seen[-1].view.status.stages[0].ranks[0].tags["weights"].resident_bytes == 0
    assert len(seen[-1].view.log.orders) == 1
    until(lambda: not threads())
    assert watching.engine is None
    sampler.detach(watching, show)


def test_an_engine_that_is_closed_already_shows_once(until):
    engine = FakeEngine(two_stages(2, closed=True))
    engine.close()
    seen = []
    show = seen.append
    watching = sampler.attach(engine, show)
    until(lambda: not watching.running)
    assert watching.frame.view.status.closed
    sampler.detach(watching, show)


def test_a_status_that_fails_is_told_and_the_last_one_stays(engine, frames, until):
    until(lambda: frames)
    engine.current = RuntimeError("the wire is cut")
    until(lambda: frames[-1].view.trouble)
    assert frames[-1].view.trouble == "no status since then: RuntimeError: the wire is cut"
    assert len(frames[-1].cards) == 2
    assert "the wire is cut" in frames[-1].head
    engine.current = two_stages(2)
    until(lambda: not frames[-1].view.trouble)


def test_a_listener_that_fails_does_not_blind_the_others_and_is_told(engine, frames, until):
    def broken(_frame):
        msg = "no comm"
        raise ValueError(msg)

    watching = sampler.attach(engine, broken)
    until(lambda: frames and "a dashboard could not show a frame: ValueError: no comm" in frames[-1].view.trouble)
    sampler.detach(watching, broken)


def test_a_listener_may_close_itself(engine, until):
    ended = []

    def once(_frame):
        sampler.detach(watching, once)
        ended.append(True)

    watching = sampler.attach(engine, once)
    until(lambda: ended)
    until(lambda: not threads())


def test_a_listener_may_close_itself_while_another_thread_closes_the_other_one(engine, until):
    watching = None
    inside, closed = threading.Event(), threading.Event()

    def once(_frame):
        inside.set()
        time.sleep(0.1)  # the other thread is on its way into its own detach
        sampler.detach(watching, once)

    def other(_frame):
        pass

    watching = sampler.attach(engine, other)
    sampler.attach(engine, once)
    assert inside.wait(10)
    threading.Thread(target=lambda: (sampler.detach(watching, other), closed.set()), daemon=True).start()
    assert closed.wait(10), "both wait for each other"
    until(lambda: not threads())


NONSENSE = [
    {"latency_ms": "12"},
    {"freed_bytes": None},
    {"residual_bytes": "<script>"},
    {"residual_bytes": float("nan")},
    {"mapped_bytes": float("inf")},
    {"replica": [1]},
]
TIMES = [float("nan"), float("inf"), -1e18]


@pytest.mark.parametrize("facts", [*NONSENSE, *({"time_s": time_s} for time_s in TIMES)], ids=str)
def test_an_answer_that_can_not_be_drawn_is_told_and_everything_else_goes_on(engine, frames, until, facts):
    async def push(*events):
        for event in events:
            engine.hub.push(event)

    time_s = facts.get("time_s", 1e9)
    odd = ack(0, 0, freed_bytes=facts.get("freed_bytes", 5))
    odd.metadata.update({name: value for name, value in facts.items() if name not in {"time_s", "freed_bytes"}})
    odd.task_id = "odd"
    engine.submit(push(AckEvent(time_s, "sleep", odd))).result(10)
    count = len(frames) + 5
    until(lambda: len(frames) > count)
    frame = frames[-1]
    shown = [frame.head, frame.log, frame.reclaimed, frame.chart, *(card.html for card in frame.cards)]
    assert all(shown)
    assert "<script>" not in "".join(shown)
    assert "thinker" in frame.cards[0].html
    assert [thread.name for thread in threads()] == ["omni-dashboard"]


def test_a_part_that_can_not_be_drawn_says_which_and_why(engine, frames, until):
    async def push(event):
        engine.hub.push(event)

    engine.submit(push(AckEvent(float("nan"), "sleep", ack(0, 0)))).result(10)
    until(lambda: frames and "the log of answers could not be drawn: ValueError" in frames[-1].log)
    assert frames[-1].reclaimed.count("could not be drawn") == 0


def test_a_status_that_holds_nonsense_is_survived(engine, frames, until):
    sound = engine.current
    odd = stage(0, name="thinker", ranks=(rank(rank=0, pid=1, tags={"weights": TagMemory(math.nan, math.nan)}),))
    engine.current = status(odd, stage(1, name="painter", ranks=ranks(1)))
    until(lambda: frames and "could not be drawn" in frames[-1].chart)
    engine.current = sound
    until(lambda: "could not be drawn" not in frames[-1].chart, 20)


def test_a_listeners_trouble_is_told_only_as_long_as_it_lasts(engine, frames, until):
    broken = [True]

    def sometimes(_frame):
        if broken:
            raise ValueError

    watching = sampler.attach(engine, sometimes)
    until(lambda: frames and "could not show a frame" in frames[-1].view.trouble)
    broken.clear()
    until(lambda: not frames[-1].view.trouble)
    sampler.detach(watching, sometimes)


def test_the_latest_frame_stays_after_the_last_dashboard_closed(engine, until):
    watching = sampler.attach(engine, show := (lambda frame: None))
    sampler.detach(watching, show)
    assert sampler.latest_frame() is watching.frame
