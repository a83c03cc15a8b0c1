from omni_notebook.notebook.dashboard.log import KEPT_ACKS, KEPT_ORDERS, Log
from omni_notebook.protocol import AckEvent, MemoryState, PauseState, RequestEvent, RequestState, StateEvent
from tests.notebook.acks import ack

OPEN, PAUSED, PAUSING = PauseState.OPEN, PauseState.PAUSED, PauseState.PAUSING
AWAKE, FAILED = MemoryState.AWAKE, MemoryState.FAILED


def answered(task_id, stage_id=0, rank=0, order="sleep", **facts):
    one = ack(stage_id, rank, **facts)
    one.task_id = task_id
    return AckEvent(12.0, order, one)


def state(memory=AWAKE, pause=OPEN, reason="", stage_id=0):
    return StateEvent(12.0, stage_id, memory, None, pause, reason)


def test_the_ranks_of_one_order_are_one_entry():
    log = Log()
    for rank in range(3):
        log.take(answered("a", rank=rank), 1.0 + rank)
    log.take(answered("b", order="wake", state="WARM", level=None, freed_bytes=0), 9.0)
    assert [(entry.title, len(entry.acks), entry.at_s) for entry in log.orders] == [
        ("sleep L2", 3, 1.0),
        ("wake", 1, 9.0),
    ]


def test_each_ranks_last_answer_is_kept_in_order_of_ranks():
    log = Log()
    for task_id, stage_id, rank, replica in (("a", 1, 0, 0), ("a", 0, 1, 1), ("a", 0, 1, 0), ("b", 0, 1, 0)):
        log.take(answered(task_id, stage_id, rank, replica=replica), 0.0)
    places = [(one.stage_id, one.metadata["replica"], one.rank, one.task_id) for one in log.last_acks]
    assert places == [(0, 0, 1, "b"), (0, 1, 1, "a"), (1, 0, 0, "a")]


def test_an_order_that_had_nothing_to_do_does_not_hide_what_a_rank_gave_back():
    log = Log()
    log.take(answered("a"), 0.0)
    log.take(answered("b", freed_bytes=0, noop=True), 1.0)
    assert [one.task_id for one in log.last_acks] == ["a"]
    assert len(log.orders) == 2


def test_the_last_sleep_stands_after_the_wake_and_says_what_came_since():
    log = Log()
    slept = answered("a"), answered("a", rank=1), answered("a", stage_id=1)
    for event in (*slept, answered("b", order="wake", state="WARM", level=None, freed_bytes=0)):
        log.take(event, 0.0)
    assert [(one.stage_id, one.rank, log.since(one)) for one in log.last_sleeps] == [
        (0, 0, "since woken"),
        (0, 1, ""),
        (1, 0, ""),
    ]
    log.take(state(MemoryState.WAKING, reason="restart"), 1.0)
    assert [log.since(one) for one in log.last_sleeps] == ["since restarted", "since restarted", ""]
    log.take(answered("c", freed_bytes=7), 2.0)
    assert next((one.freed_bytes, log.since(one)) for one in log.last_sleeps) == (7, "")


def test_what_a_process_holds_is_that_of_its_latest_sleep():
    log = Log()
    log.take(answered("a", stage_id=1, residual_bytes=500), 0.0)
    log.take(answered("b", residual_bytes=700), 1.0)
    log.take(answered("b", rank=1, residual_bytes=650), 1.0)
    log.take(answered("a", stage_id=2, pid=7, residual_bytes=40), 2.0)
    held = [(one.stage_id, one.rank, one.metadata["residual_bytes"]) for one in log.last_sleeps]
    assert held == [(0, 0, 700), (0, 1, 650), (1, 0, None), (2, 0, 40)]


def test_a_wake_that_failed_and_a_copy_that_was_dropped_leave_the_figures_of_the_sleep():
    log = Log()
    log.take(answered("a"), 0.0)
    log.take(answered("b", freed_bytes=0, host_freed_bytes=5), 0.0)
    log.take(answered("c", order="wake", freed_bytes=0, error_msg="no room"), 0.0)
    assert [(one.task_id, log.since(one)) for one in log.last_sleeps] == [("a", "")]


def test_the_log_is_bounded_in_orders_and_in_answers():
    log = Log()
    for number in range(KEPT_ORDERS + 50):
        log.take(answered(f"t{number}"), number)
    assert [entry.at_s for entry in log.orders] == list(range(50, KEPT_ORDERS + 50))
    for number in range(10):
        for rank in range(1024):
            log.take(answered(f"big{number}", rank=rank), 0.0)
    assert sum(len(entry.acks) for entry in log.orders) <= KEPT_ACKS
    assert len(log.last_acks) == 1024


def test_an_order_of_more_ranks_than_fit_is_kept_whole():
    log = Log()
    for rank in range(KEPT_ACKS + 10):
        log.take(answered("one", rank=rank), 0.0)
    assert len(log.orders[0].acks) == KEPT_ACKS + 10


def test_requests_are_not_kept_and_change_nothing():
    log = Log()
    log.take(RequestEvent(1.0, "r", 0, RequestState.RUNNING), 0.0)
    assert (log.count, log.orders, list(log.moves)) == (0, [], [])


def test_what_no_answer_tells_is_told_once():
    log = Log()
    for event in (
        state(pause=PAUSING, reason="pause keep"),
        state(pause=PAUSED, reason="paused (keep)"),
        state(pause=OPEN, reason="resumed"),
        state(FAILED, reason="WorkerDiedError: gone"),
        state(FAILED, reason="resumed"),
        state(MemoryState.WAKING, PAUSED, reason="restart"),
        state(AWAKE, PAUSED, reason="loaded"),
        state(AWAKE, PAUSED, reason="weights v2"),
        state(MemoryState.FALLING_ASLEEP, PAUSED, reason="sleep level 1"),
        state(MemoryState.ASLEEP, PAUSED, reason="asleep at level 1"),
    ):
        log.take(event, 0.0)
    assert [(move.words, move.failed) for move in log.moves] == [
        ("paused (keep)", False),
        ("resumed", False),
        ("FAILED: WorkerDiedError: gone", True),
        ("restarts", False),
        ("loaded, AWAKE", False),
        ("weights v2, AWAKE", False),
    ]


def test_a_pause_of_one_stage_says_nothing_of_another():
    log = Log()
    log.take(state(pause=PAUSED, reason="paused (keep)"), 0.0)
    log.take(state(pause=OPEN, reason="woken", stage_id=1), 0.0)
    assert [move.stage_id for move in log.moves] == [0]
