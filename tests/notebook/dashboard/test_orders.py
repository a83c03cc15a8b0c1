"""A button is on where the engine's table lets the order run, and says why not where it is off."""

import itertools

import pytest

from omni_notebook.notebook.dashboard.orders import Press, busy, buttons, call, line, refusal
from omni_notebook.protocol import MemoryState, PauseMode, PauseState
from tests.notebook.acks import stage

IDLE = {"running": 0, "queued": 0, "in_transit": 0, "waiting_at_gate": 0}
P, R, S1, S2, W, X = Press
ON = {
    ("AWAKE", None): {P, S1, S2, X},
    ("ASLEEP", 1): {P, S2, W, X},
    ("ASLEEP", 2): {P, W, X},
    ("PARTLY_AWAKE", 1): {P, S1, S2, W, X},
    ("NEEDS_WEIGHTS", 2): {P, S2, W, X},
    ("FAILED", None): {X},
    ("FALLING_ASLEEP", 1): set(),
    ("WAKING", None): set(),
}


def enabled(one, **options):
    return {button.press for button in buttons(one, **options) if button.enabled}


@pytest.mark.parametrize(("place", "expected"), ON.items(), ids=[f"{state} {level}" for state, level in ON])
def test_what_is_on_in_each_state(place, expected):
    state, level = place
    assert enabled(stage(state=MemoryState(state), level=level, **IDLE)) == expected


@pytest.mark.parametrize(
    ("pause", "mode", "expected"),
    [
        (PauseState.PAUSED, PauseMode.KEEP, {R, S1, S2, X}),
        (PauseState.PAUSING, PauseMode.KEEP, {R, X}),
        (PauseState.PAUSE_FAILED, PauseMode.KEEP, {P, R, X}),
        (PauseState.OPEN, None, {P, S1, S2, X}),
    ],
)
def test_what_is_on_in_each_pause_state(pause, mode, expected):
    assert enabled(stage(pause_state=pause, pause_mode=mode, **IDLE)) == expected


def test_a_stage_of_vllm_omni_is_not_restarted_and_its_buttons_do_not_say_so():
    for state in ON:
        one = stage(state=MemoryState(state[0]), level=state[1], runtime="vllm-omni", **IDLE)
        assert X not in enabled(one)
        for button in buttons(one):
            assert "%omni restart" not in button.tooltip
            assert "press Restart" not in button.tooltip
    failed = stage(state=MemoryState.FAILED, runtime="vllm-omni")
    for press in (P, S1, W, X):
        assert "start the engine anew" in refusal(press, failed)


def test_the_reason_of_a_button_that_is_off_names_its_stage_once_and_the_state_as_the_card_does():
    one = stage(stage_id=1, name="painter", state=MemoryState.ASLEEP, level=2, **IDLE)
    tooltip = next(button.tooltip for button in buttons(one) if button.press == S1)
    assert tooltip.startswith("Stage 1 (painter), Sleep L1: it is ASLEEP (level 2): its weights are gone")
    assert tooltip.endswith("call %omni wake 1 first")
    assert "stage 1" not in tooltip


def test_a_pause_says_what_becomes_of_a_new_request_before_and_after_it():
    for one in (stage(**IDLE), stage(pause_state=PauseState.PAUSED, pause_mode=PauseMode.KEEP, **IDLE)):
        tooltip = next(button.tooltip for button in buttons(one) if button.press == P)
        assert "%omni generate refuses at once; engine.generate() waits up to 60 s (admission_timeout)" in tooltip


def test_nothing_is_on_after_the_engine_was_shut_down():
    closed = buttons(stage(), closed=True)
    assert not any(button.enabled for button in closed)
    assert all("the engine was shut down; %omni start starts a new one" in button.tooltip for button in closed)


def test_every_button_that_is_off_says_why_and_none_names_a_python_call():
    for (state, level), pause in itertools.product(ON, PauseState):
        for button in buttons(stage(state=MemoryState(state), level=level, pause_state=pause)):
            assert button.tooltip.startswith(f"Stage 0 (thinker), {button.press}: ")
            assert len(button.tooltip) > len(f"Stage 0 (thinker), {button.press}: ") + 8
            assert not any(name in button.tooltip for name in ("wake_up", "restart(", "sleep(", "resume_gen"))


@pytest.mark.parametrize(
    ("press", "facts", "words"),
    [
        (S1, {"state": MemoryState.ASLEEP, "level": 2}, "its weights are gone, level 1 has nothing to back up"),
        (S2, {"state": MemoryState.ASLEEP, "level": 2}, "nothing to do, it is ASLEEP (level 2)"),
        (S2, {"recoverable": False}, "they would be LOST; %omni sleep 0 --level 2 --discard"),
        (W, {}, "nothing to do, it is AWAKE"),
        (P, {"state": MemoryState.FAILED}, "it has FAILED; press Restart first"),
        (R, {}, "it is not paused"),
        (W, {"state": MemoryState.WAKING}, "it is WAKING; wait until that has ended"),
        (S1, {"pause_state": PauseState.PAUSE_FAILED}, "press Pause again or Resume first"),
    ],
)
def test_why_not_names_the_way_out(press, facts, words):
    assert words in refusal(press, stage(**facts))


def test_a_sleep_of_a_busy_stage_quiesces_it_first_and_says_so():
    held = stage(running=1)
    tooltip = next(button.tooltip for button in buttons(held) if button.press == S1)
    assert "first its running batch ends, the rest is held until the wake" in tooltip
    assert line(S1, held) == "sleep 0 --level 1 --mode keep"
    assert line(S1, stage(**IDLE)) == "sleep 0 --level 1"


def test_a_stage_that_a_keep_pause_holds_needs_no_mode():
    assert not busy(stage(running=1, pause_state=PauseState.PAUSED, pause_mode=PauseMode.KEEP))
    assert busy(stage(running=1, pause_state=PauseState.PAUSED, pause_mode=PauseMode.WAIT))


class Recorder:
    def __getattr__(self, name):
        return lambda *args, **options: (name, args, options)


@pytest.mark.parametrize(
    ("press", "expected"),
    [
        (P, ("pause_generation", ("keep", [0]), {})),
        (R, ("resume_generation", ([0],), {})),
        (S1, ("sleep", ([0], 1, None), {"discard": False})),
        (S2, ("sleep", ([0], 2, None), {"discard": False})),
        (W, ("wake_up", ([0],), {})),
        (X, ("restart", (0,), {})),
    ],
)
def test_the_call_of_each_press(press, expected):
    assert call(press, Recorder(), stage(**IDLE)) == expected


@pytest.mark.parametrize(
    ("press", "expected"),
    [(P, "pause 0 --mode keep"), (R, "resume 0"), (S2, "sleep 0 --level 2"), (W, "wake 0"), (X, "restart 0")],
)
def test_the_line_that_does_the_same(press, expected):
    assert line(press, stage(**IDLE)) == expected
