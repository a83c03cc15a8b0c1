import pytest

from omni_notebook.errors import ArgumentError
from omni_notebook.protocol import MemoryState, PauseState
from omni_notebook.verbs import hints
from tests.notebook.acks import stage, status

ASLEEP = {"state": MemoryState.ASLEEP, "level": 2}


@pytest.mark.parametrize(
    ("python", "verbs"),
    [
        ("stage 0 is ASLEEP; call wake_up([0]) to open it", "stage 0 is ASLEEP; call %omni wake 0 to open it"),
        ("call wake_up([0, 1]) first", "call %omni wake 0 1 first"),
        ("stage 1 has FAILED; call restart(1)", "stage 1 has FAILED; call %omni restart 1"),
        ("closed: call resume_generation() to open it", "closed: call %omni resume to open it"),
        (
            (
                "stage 1 is busy. Call pause_generation(mode='keep', stage_ids=[1]) first, or "
                "sleep(..., mode='keep' | 'wait' | 'abort')"
            ),
            "stage 1 is busy. Call %omni pause 1 --mode keep first, or %omni sleep 1 --mode keep (or wait, abort)",
        ),
        ("stage 1: sleep(2) is refused", "stage 1: sleep --level 2 is refused"),
        (
            "call load_weights(0, path) or wake_up([0]) to reload",
            "call %omni weights 0 FOLDER or %omni wake 0 to reload",
        ),
        (
            "stage 1 is NEEDS_WEIGHTS. Call load_weights(1, source), or wake_up([1])",
            "stage 1 is NEEDS_WEIGHTS. Call %omni weights 1 FOLDER, or %omni wake 1",
        ),
        (
            "no checkpoint path reproduces these weights; call load_weights(stage_id, source)",
            "no checkpoint path reproduces these weights; call %omni weights STAGE FOLDER",
        ),
        ("stage 0: wake_up(reload=False) maps", "stage 0: %omni wake 0 --no-reload maps"),
        ("all answers are in .acks", "all answers are in omni_notebook.last_acks()"),
        ("num_inference_steps=0 is out of range", "--steps 0 is out of range"),
        ("max_tokens=0 is out of range", "--max-tokens 0 is out of range"),
        ("known are: num_inference_steps, max_tokens", "known are: --steps, --max-tokens"),
        ("two.yaml: max_tokens is no key", "two.yaml: max_tokens is no key"),
        ("call remove_lora(3) first", "call %omni lora remove 3 first"),
        ("none; call add_lora(request)", "none; call %omni lora add PATH"),
        ("more than max_lora_rank=16", "more than --max-lora-rank 16"),
        ("the stage is asleep; wake_up works", "the stage is asleep; %omni wake works"),
    ],
)
def test_python_calls_become_verbs(python, verbs):
    assert hints.in_verbs(python) == verbs
    assert hints.in_verbs(verbs) == verbs


def test_an_error_is_reworded_in_place():
    error = ArgumentError("num_inference_steps=0 is out of range")
    hints.reword(error)
    assert str(error) == "--steps 0 is out of range"


def test_every_closed_gate_is_named_with_one_line_that_opens_all():
    both = status(stage(0, **ASLEEP), stage(1, name="painter", kind="diffusion", **ASLEEP))
    assert hints.closed_gates(both, text_only=False) == (
        "stage 0 (thinker) is ASLEEP (level 2); stage 1 (painter) is ASLEEP (level 2): %omni wake 0 1"
    )
    assert hints.closed_gates(both, text_only=True) == "stage 0 (thinker) is ASLEEP (level 2): %omni wake 0"


def test_a_stage_whose_weights_no_path_has_is_not_told_to_wake():
    lost = stage(1, name="painter", state=MemoryState.NEEDS_WEIGHTS, recoverable=False)
    assert hints.call_that_helps(lost) == "%omni weights 1 FOLDER loads some"
    assert hints.closed_gates(status(lost), text_only=False).endswith("NEEDS_WEIGHTS: %omni weights 1 FOLDER")
    found = stage(1, name="painter", state=MemoryState.NEEDS_WEIGHTS)
    assert hints.call_that_helps(found) == ("%omni wake 1 reloads the checkpoint, %omni weights 1 FOLDER takes another")
    assert hints.closed_gates(status(found), text_only=False).endswith("NEEDS_WEIGHTS: %omni wake 1")


def test_a_stage_that_sleeps_and_is_paused_needs_both():
    one = stage(0, pause_state=PauseState.PAUSED, pause_mode="keep", **ASLEEP)
    assert hints.closed_gates(status(one), text_only=False).endswith("%omni wake 0, %omni resume")
    assert hints.call_that_helps(one) == "%omni wake 0 wakes it, %omni resume 0 opens it"


def test_open_gates_name_nothing():
    assert hints.closed_gates(status(stage(0)), text_only=False) is None


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([stage(0), stage(1)], "interrupted and rolled back"),
        ([stage(0, **ASLEEP), stage(1, **ASLEEP)], "interrupted too late: the sleep ended"),
        (
            [stage(0, **ASLEEP), stage(1)],
            "interrupted half-way: the sleep ended for stage 0, the rest was rolled back",
        ),
        ([stage(0, state=MemoryState.FALLING_ASLEEP), stage(1)], "interrupted"),
        ([stage(0, state=MemoryState.FAILED), stage(1)], "interrupted"),
    ],
)
def test_what_an_interrupt_came_to_is_told_by_the_states(after, words):
    assert hints.outcome("sleep", [stage(0), stage(1)], after) == words


def test_an_interrupted_order_that_had_nothing_to_do_was_not_rolled_back():
    assert hints.outcome("wake", [stage(0)], [stage(0)]) == "interrupted; nothing had to change"


def test_an_order_that_moves_no_state_claims_nothing():
    assert hints.outcome(None, [stage(0)], [stage(0)]) == "interrupted"


def test_stages_that_only_a_pause_holds_share_one_call_that_opens_them():
    held = {"pause_state": PauseState.PAUSED, "pause_mode": "keep"}
    two = [stage(0, **held), stage(1, name="painter", **held)]
    assert hints.describe(two) == (
        "stage 0 (thinker) is AWAKE, PAUSED (keep); stage 1 (painter) is AWAKE, PAUSED (keep): %omni resume opens both"
    )
    assert hints.describe([*two, stage(2, **held)]).endswith(": %omni resume opens them all")
    assert hints.describe([two[0], stage(1, **ASLEEP)]) == (
        "stage 0 (thinker) is AWAKE, PAUSED (keep): %omni resume 0 opens it; "
        "stage 1 (thinker) is ASLEEP (level 2): %omni wake 1 wakes it"
    )


def test_a_failed_stage_of_vllm_omni_is_helped_by_no_restart():
    one = stage(1, state=MemoryState.FAILED, runtime="vllm-omni")
    for words in (hints.describe([one]), hints.closed_gates(status(stage(0), one), text_only=False)):
        assert words.startswith("stage 1 (thinker) is FAILED: ")
        assert words.endswith("start the engine anew")
        assert "%omni restart" not in words
    assert hints.in_verbs("call shutdown() and start the engine anew") == "%omni stop and start the engine anew"
