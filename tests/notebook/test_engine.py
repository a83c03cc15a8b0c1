"""The magic on the real engine, in a real shell of this process."""

import re
import time

import pytest

from omni_notebook import AsyncOmni
from omni_notebook.errors import AsleepError, PausedError, SleepError, StageBusyError
from omni_notebook.notebook.results import AckList
from omni_notebook.protocol import MIB
from omni_notebook.verbs.session import session
from tests.engine.weights_helpers import FOLDERS, others, saved


@pytest.fixture
def engine(cell):
    result, shown = cell("engine = %omni start --ballast 32MiB\nengine")
    assert result.success, shown
    return session().engine


def ok(cell, code):
    result, shown = cell(code)
    assert result.success, shown
    return result.result


def test_start_returns_the_engine_and_shows_its_status(shell, cell, engine):
    assert isinstance(shell.user_ns["engine"], AsyncOmni)
    data, _ = shell.display_formatter.format(engine)
    for part in ("thinker", "painter", "AWAKE", "ballast (filler, no model)"):
        assert part in data["text/plain"]


def test_a_second_start_refuses_and_replace_replaces(cell, engine):
    result, shown = cell("%omni start")
    assert not result.success
    assert "--replace" in shown
    assert session().engine is engine
    new = ok(cell, "%omni start --replace")
    assert session().engine is new
    assert engine.status().closed


def test_a_wrong_replacement_does_not_cost_the_engine_that_runs(cell, engine):
    result, _ = cell("%omni start no/such/folder --replace")
    assert not result.success
    assert session().engine is engine
    assert not engine.status().closed


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_answers_with_a_list_of_every_rank(shell, cell, engine, level):
    acks = ok(cell, f"%omni sleep --level {level} --out kept")
    assert isinstance(acks, AckList)
    assert shell.user_ns["kept"] is acks
    assert session().acks is acks
    assert [(ack.stage_id, ack.ok, ack.metadata["level"]) for ack in acks] == [(0, True, level), (1, True, level)]
    assert all(ack.freed_bytes > 32 * MIB for ack in acks)
    woken = ok(cell, "%omni wake")
    assert all(ack.ok and ack.metadata["mapped_bytes"] > 32 * MIB for ack in woken)


def test_the_same_seed_gives_the_same_picture_after_a_level_2_sleep(cell, engine):
    code = "%%omni generate --seed 42 --steps 3\na red star above a blue circle"
    before = ok(cell, code)
    ok(cell, "%omni sleep --level 2")
    ok(cell, "%omni wake")
    after = ok(cell, code)
    assert before.images[0].tobytes() == after.images[0].tobytes()
    assert (before.seed, before.steps, before.text) == (42, 3, after.text)
    assert before.text


def test_text_only_needs_no_awake_image_stage(cell, engine):
    ok(cell, "%omni sleep 1")
    made = ok(cell, "%omni generate a red star --text-only --out made")
    assert made.text
    assert made.images == []


def test_generate_while_asleep_is_refused_at_once_and_names_wake(cell, engine):
    ok(cell, "%omni sleep 0")
    result, shown = cell("%omni generate a red star")
    assert isinstance(result.error_in_exec, AsleepError)
    assert shown.splitlines() == [
        "\x1b[31mAsleepError: stage 0 (thinker) is ASLEEP (level 1): %omni wake 0; nothing was started\x1b[0m"
    ]


def test_a_refused_prompt_names_every_closed_gate_at_once(cell, engine):
    ok(cell, "%omni sleep")
    ok(cell, "%omni pause 1")
    _, shown = cell("%omni generate a red star")
    for part in ("stage 0 (thinker)", "stage 1 (painter)", "%omni wake 0 1, %omni resume"):
        assert part in shown


@pytest.mark.parametrize("stages", ["painter", "1", "0,1", "thinker painter", "all"])
def test_stages_may_be_named(cell, engine, stages):
    acks = ok(cell, f"%omni sleep {stages}")
    assert len(acks) == (1 if stages in {"painter", "1"} else 2)


def test_an_unknown_stage_name_lists_the_known_ones(cell, engine):
    _, shown = cell("%omni sleep zero")
    assert "'zero' is no stage; stages are: 0 thinker, 1 painter; nothing was changed" in shown


def test_a_stage_behind_tags_is_told_where_it_belongs(cell, engine):
    _, shown = cell("%omni wake --tags weights 0")
    assert "%omni wake 0 --tags" in shown


def test_messages_name_verbs_and_flags(cell, engine):
    _, shown = cell("%omni generate a red star --steps 100000")
    assert "--steps 100000 is out of range" in shown
    _, shown = cell("%omni generate a red star above a blue circle --max-tokens 2")
    assert "raise it" in shown


def test_the_plan_is_labelled(cell, engine):
    _, shown = cell("%omni generate a red star --steps 2 --seed 1")
    assert shown.startswith("plan: red star")
    _, shown = cell("%omni generate a red star --text-only --seed 1")
    assert shown.startswith("red star")


def hold(engine):
    """A request that keeps the diffusion stage busy."""

    async def paint():
        async for _ in engine.generate("a red star", sampling_params={"num_inference_steps": 300, "seed": 1}):
            pass

    request = engine.submit(paint())
    while not engine.status().stages[1].running:
        time.sleep(0.02)
    return request


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_pause_that_does_not_stop_a_diffusion_stage_says_so(cell, engine, mode):
    request = hold(engine)
    _, shown = cell(f"%omni pause 1 --mode {mode}")
    request.cancel()
    assert (
        "stage 1 still has 1 running: on a diffusion stage this mode only closes admission; use --mode keep, or "
        "%omni sleep 1 --mode wait\n"
    ) in shown


def test_stop_says_what_it_ended_and_gave_back(cell, engine):
    request = hold(engine)
    _, shown = cell("%omni stop")
    assert re.search(r"the engine was stopped: 1 request was aborted, \d+\.\d MiB of stage memory given back; ", shown)
    request.cancel()


def test_a_wake_of_awake_stages_has_nothing_to_do(cell, engine):
    assert repr(ok(cell, "%omni wake")).startswith("nothing to do: already awake\n")


def test_pause_closes_admission_and_resume_opens_it(cell, engine):
    _, shown = cell("%omni pause 1")
    assert "admission is closed" in shown
    assert "%omni resume 1" in shown
    result, _ = cell("%omni generate a red star")
    assert isinstance(result.error_in_exec, PausedError)
    _, shown = cell("%omni resume")
    assert shown == "admission is open\n"
    ok(cell, "%omni pause 0")
    ok(cell, "%omni sleep 0")
    _, shown = cell("%omni resume")
    assert shown == "admission is open; stage 0 (thinker) is ASLEEP (level 1): %omni wake 0 wakes it\n"


@pytest.mark.parametrize(
    "code",
    [
        "%omni sleep 9",
        "%omni wake --tags nonsense",
        "%omni restart 9",
        "%omni generate a star --steps 100000",
        "%omni generate a star --seed -1",
    ],
)
def test_a_wrong_argument_is_one_line_and_changes_nothing(cell, engine, code):
    before = [(stage.state, stage.pause_state) for stage in engine.status().stages]
    result, shown = cell(code)
    assert not result.success
    assert len(shown.splitlines()) == 1
    assert [(stage.state, stage.pause_state) for stage in engine.status().stages] == before


def test_wake_by_tags_leaves_a_partly_awake_stage(cell, engine):
    ok(cell, "%omni sleep 0")
    ok(cell, "%omni wake 0 --tags weights")
    _, shown = cell("%omni")
    assert "PARTLY_AWAKE (weights awake)" in shown
    ok(cell, "%omni wake 0")


def test_restart_brings_a_stage_back(cell, engine):
    _, shown = cell("%omni restart 1")
    assert "stage 1 (painter) is AWAKE" in shown


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return saved(others(), tmp_path_factory.mktemp("weights") / "other")


PICTURE = "%%omni generate --seed 42 --steps 3\na red star above a blue circle"


def test_weights_loads_a_folder_and_says_which_weights_the_stage_has(cell, engine, other):
    before = ok(cell, PICTURE).images[0].tobytes()
    _, shown = cell(f"%omni weights painter '{other}' --version v2 --timeout 60")
    assert re.fullmatch(r"stage 1 \(painter\) is AWAKE with weights v2, loaded in \d+ ms\n", shown)
    assert ok(cell, PICTURE).images[0].tobytes() != before
    _, shown = cell(f"%omni weights 1 {FOLDERS[1]}")
    assert re.fullmatch(r"stage 1 \(painter\) is AWAKE with weights [0-9a-f]{10}, loaded in \d+ ms\n", shown)
    assert ok(cell, PICTURE).images[0].tobytes() == before


def test_weights_of_a_busy_stage_are_refused_and_a_pause_holds_what_waits(cell, engine, other):
    requests = [hold(engine) for _ in range(2)]
    result, shown = cell(f"%omni weights 1 {other}")
    assert isinstance(result.error_in_exec, StageBusyError)
    assert "%omni pause 1 --mode keep" in shown
    requests[0].cancel()
    ok(cell, "%omni pause 1")
    _, shown = cell(f"%omni weights 1 {other} --version v2")
    found = re.fullmatch(
        r"stage 1 \(painter\) is AWAKE, PAUSED \(keep\) with weights v2, loaded in \d+ ms(; [^:]+)?: "
        r"%omni resume 1 opens it\n",
        shown,
    )
    waiting = engine.status().stages[1]
    counts = [f"{waiting.queued} queued"] * bool(waiting.queued) + [f"{waiting.in_transit} in transit"] * bool(
        waiting.in_transit
    )
    assert [count in (found[1] or "") for count in counts] == [True] * len(counts)
    requests[1].cancel()


def test_weights_that_do_not_load_leave_a_line_with_the_state(cell, engine, other):
    _, shown = cell(f"%omni weights 1 {FOLDERS[0]}")
    assert "the checkpoint lacks" in shown
    assert "nothing changed, stage 1 is AWAKE" in shown
    mend = break_order(engine, 1, "prepare_weights")
    _, shown = cell(f"%omni weights 1 {other}")
    mend()
    assert "the <b>spill folder</b> is full" in shown
    assert "stage 1 (painter) is AWAKE" in shown
    assert len(shown.splitlines()) == 1
    mend = break_after(engine, 1, "load_weights")
    _, shown = cell(f"%omni weights 1 {other}")
    mend()
    assert "the stage is NEEDS_WEIGHTS. Call %omni weights 1 FOLDER, or %omni wake 1 to reload" in shown
    assert len(shown.splitlines()) == 1
    _, shown = cell("%omni generate a red star")
    assert "stage 1 (painter) is NEEDS_WEIGHTS: %omni wake 1" in shown
    ok(cell, "%omni wake 1")


def test_weights_takes_one_stage(cell, engine, other):
    for stages in ("0,1", "all"):
        _, shown = cell(f"%omni weights {stages} {other}")
        assert "omni weights takes one stage; nothing was changed" in shown


def test_an_interrupted_load_says_where_to_look(cell, engine, other, monkeypatch):
    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(session().frontend, "wait", interrupted)
    result, shown = cell(f"%omni weights 1 {other}")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert "stage 1 (painter) is AWAKE" in shown
    assert "%omni status shows which weights it has" in shown


def test_a_model_of_this_notebook_goes_in_by_the_python_call(shell, cell, engine):
    before = ok(cell, PICTURE).images[0].tobytes()
    shell.user_ns["tensors"] = others()
    ok(cell, "await engine.load_weights(1, iter(tensors.items()), version='trained')")
    assert ok(cell, PICTURE).images[0].tobytes() != before
    _, shown = cell("%omni sleep 1 --level 2")
    assert "no checkpoint path" in shown
    assert "--discard" in shown
    ok(cell, "%omni restart 1")
    _, shown = cell("%omni generate a red star")
    assert "NEEDS_WEIGHTS: %omni weights 1 FOLDER" in shown
    ok(cell, f"%omni weights 1 {FOLDERS[1]}")
    assert ok(cell, PICTURE).images[0].tobytes() == before


def break_after(engine, stage_id, method):
    """Make a rank raise once it has carried an order out."""
    worker = engine._core.stages[stage_id].replicas[0].executor._worker
    real = getattr(worker, method)

    def broken(*args):
        real(*args)
        msg = "too late"
        raise OSError(msg)

    setattr(worker, method, broken)
    return lambda: delattr(worker, method)


def break_order(engine, stage_id, method):
    """Make a rank raise in one order, at the seam between the executor and the worker."""
    worker = engine._core.stages[stage_id].replicas[0].executor._worker

    def broken(*_args):
        msg = "the <b>spill folder</b> is full"
        raise OSError(msg)

    setattr(worker, method, broken)
    return lambda: delattr(worker, method)


def test_a_failed_sleep_shows_every_answer_and_one_red_line(shell, cell, engine, capsys):
    mend = break_order(engine, 1, "prepare_sleep")
    result, shown = cell("%omni sleep --out kept")
    mend()
    assert isinstance(result.error_in_exec, SleepError)
    assert [ack.ok for ack in shell.user_ns["kept"]] == [True, False]
    assert session().acks is shell.user_ns["kept"]
    assert "2 ranks answered, 1 with ERROR" in shown
    assert "spill folder" in shown
    assert shown.splitlines()[-1].startswith("\x1b[31mSleepError: ")
    assert "Traceback" not in shown
    assert "<b>" not in shell.display_formatter.format(session().acks)[0]["text/html"]
    _, whole = cell("%omni traceback")
    assert "Traceback (most recent call last)" in whole
    assert "SleepError" in whole


def test_a_failed_wake_can_be_caught_and_tried_again(cell, engine):
    ok(cell, "%omni sleep 0")
    mend = break_order(engine, 0, "prepare_wake")
    _, shown = cell(
        "try:\n    %omni wake 0\nexcept Exception as error:\n    print(type(error).__name__, len(error.acks))"
    )
    mend()
    assert shown.splitlines()[-1] == "WakeError 1"
    assert ok(cell, "%omni wake 0")[0].ok


def test_stop_gives_everything_back_and_start_works_again(cell, engine):
    _, shown = cell("%omni stop")
    assert "was stopped" in shown
    assert engine.status().closed
    assert session().running is None
    ok(cell, "%omni start")


def test_an_engine_that_was_shut_down_by_hand_does_not_block_start(cell, engine):
    engine.shutdown()
    _, shown = cell("%omni")
    assert "no engine is running" in shown
    ok(cell, "%omni start")
