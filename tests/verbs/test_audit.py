"""Audits of real engines: every verdict, every refusal, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import gc
import json
import os
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

import audit_schema
import omni_notebook as omni
from omni_notebook.errors import (
    ArgumentError,
    AsleepError,
    EngineClosedError,
    OmniError,
    PausedError,
    StageBusyError,
    UnsupportedError,
)
from omni_notebook.protocol import MIB
from omni_notebook.verbs.auditing import auditor, outputs
from omni_notebook.verbs.auditing.plan import Plan
from omni_notebook.verbs.auditing.record import Verdict
from omni_notebook.verbs.auditing.result import COLUMNS, SCHEMA, AuditResult
from omni_notebook.verbs.interrupts import InterruptedVerb
from omni_notebook.verbs.registry import execute
from tests.engine.engine_helpers import in_processes, rank_fault, slow, until
from tests.pressing import ctrl_c_once
from tests.verbs.conftest import lying_engine
from tests.verbs.lying_worker import told

if TYPE_CHECKING:
    from pathlib import Path

    from omni_notebook.engine.async_omni import AsyncOmni

LIE_MIB, NOISE_MIB = 24, 12
"""What a rank says too much, and what a process takes and gives back by itself meanwhile (a heap of many tests)."""
QUICK: dict[str, Any] = {"sampling_params": {"num_inference_steps": 3}}


ENGINES = [pytest.param("uni", marks=pytest.mark.alone), "mp"]


@pytest.fixture(scope="module", params=ENGINES)
def shared_engine(request):
    """With ranks in this process, which must be no other test's, and in processes of their own."""
    with lying_engine(executor=request.param) as engine:
        yield engine


def states(engine: AsyncOmni) -> list[tuple[str, str]]:
    return [(str(stage.state), str(stage.pause_state)) for stage in engine.status().stages]


AWAKE = [("AWAKE", "OPEN")] * 2


def failures(result: AuditResult) -> list[str]:
    return [finding.text for finding in result.findings if finding.severity is Verdict.FAIL]


def page(result: AuditResult, folder: Path) -> str:
    """The report as it was written to a file, which stays under pytest's temporary folder to be looked at."""
    result.to_html(folder / "audit.html")
    return (folder / "audit.html").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------ PASS


@pytest.mark.parametrize("level", [1, 2])
def test_a_sound_engine_passes_and_every_number_says_who_measured_it(engine, level, tmp_path):
    result = omni.audit(engine, level=level, probe="32MiB", **QUICK)
    assert ">✓ PASS</span>" in page(result, tmp_path)
    assert (result.verdict, result.ok, failures(result)) == ("PASS", True, [])
    (cycle,) = result.cycles
    assert [(rank.stage_id, rank.sleep_status, rank.wake_status) for rank in cycle.ranks] == [
        (0, "SUCCESS", "SUCCESS"),
        (1, "SUCCESS", "SUCCESS"),
    ]
    assert all(rank.freed_bytes == rank.mapped_bytes > 16 * MIB for rank in cycle.ranks)
    assert len(cycle.processes) == (2 if in_processes(engine) else 1)
    for process in cycle.processes:
        assert process.source == "smaps"
        assert abs(process.left_bytes - process.freed_bytes) <= process.tolerance_bytes
        assert abs(process.came_back_bytes - process.mapped_bytes) <= process.tolerance_bytes
    assert cycle.probe.taken_bytes == 32 * MIB
    assert (cycle.output.same_tokens, cycle.output.same_images, cycle.output.max_difference) == (True, True, 0)
    assert cycle.output.tokens_sha256 == result.record.golden.tokens_sha256
    assert {"ack", "smaps", "probe", "output"} <= {source for f in result.findings for source in f.sources}
    assert states(engine) == AWAKE


def test_every_rank_of_a_group_and_its_own_process_is_audited(pair):
    result = omni.audit(pair, [0], level=2, **QUICK)
    assert result.verdict == "PASS"
    (cycle,) = result.cycles
    assert [(rank.stage_id, rank.rank) for rank in cycle.ranks] == [(0, 0), (0, 1)]
    assert len({process.pid for process in cycle.processes}) == 2
    assert os.getpid() not in {process.pid for process in cycle.processes}


def test_it_looks_from_another_process_than_the_ranks(engine, monkeypatch):
    lookers = []
    close = auditor.Outside.close

    def noting(outside):
        lookers.append(outside.pid)
        close(outside)

    monkeypatch.setattr(auditor.Outside, "close", noting)
    result = omni.audit(engine, **QUICK)
    (looker,) = lookers
    assert looker not in {None, os.getpid(), *(process.pid for process in result.cycles[0].processes)}


def test_it_runs_within_a_running_event_loop_and_as_a_coroutine(engine):
    async def both():
        return omni.audit(engine, [0], level=1, **QUICK), await omni.audit_async(engine, [0], level=1, **QUICK)

    assert [result.verdict for result in asyncio.run(both())] == ["PASS", "PASS"]


# ------------------------------------------------------------------------------------------ FAIL


def test_an_ack_that_says_more_than_left_fails_with_both_numbers(engine, tmp_path):
    with told(engine, 1, lie_bytes=LIE_MIB * MIB):
        result = omni.audit(engine, level=1, **QUICK)
    assert result.verdict == "FAIL"
    (text,) = failures(result)
    written = page(result, tmp_path)
    assert ">✗ FAIL</span>" in written
    assert f'<li class="FAIL">cycle 1: {text} [ack, smaps]</li>' in written
    freed = result.cycles[0].processes[-1].freed_bytes
    left = float(re.search(rf"by its ACKs {freed / MIB:.1f} MiB were freed, by smaps ([\d.]+) MiB were gone", text)[1])
    assert freed / MIB - left == pytest.approx(LIE_MIB, abs=NOISE_MIB)
    assert "MORE THAN" in text
    assert states(engine) == AWAKE


def test_weights_that_changed_on_the_way_fail_by_their_output(engine, tmp_path):
    with told(engine, 1, scribble=True):
        result = omni.audit(engine, level=1, cycles=3, **QUICK)
    asyncio.run(engine.restart(1))
    assert result.verdict == "FAIL"
    (text,) = failures(result)
    assert text.startswith("the images differ by up to ")
    assert result.cycles[0].output.same_images is False
    assert result.cycles[0].output.max_difference > 1
    assert len(result.cycles) == 1, "an audit that has failed goes no further"
    assert "the difference brightened" in page(result, tmp_path)
    assert result.pictures["before the sleep"] != result.pictures["after the wake"]


def test_a_process_that_keeps_more_after_every_cycle_fails(engine, tmp_path):
    with told(engine, 1, leak_bytes=3 * MIB):
        result = omni.audit(engine, level=1, cycles=5, **QUICK)
    assert result.verdict == "FAIL"
    assert "GROWS" in page(result, tmp_path)
    (text,) = failures(result)
    slope = float(re.search(r"GROWS: while asleep it holds ([\d.]+) MiB more a cycle", text)[1])
    assert 2 < slope < 5
    assert "of 5 cycles" in text


def test_garbage_of_before_that_goes_half_way_hides_no_growth(engine, monkeypatch):
    cycle = auditor.Auditor._cycle

    def cycle_and_collect(self, number, outside):
        if number == 3:
            gc.collect()
        return cycle(self, number, outside)

    monkeypatch.setattr(auditor.Auditor, "_cycle", cycle_and_collect)
    garbage = [bytearray(b"x" * (96 * MIB))]
    garbage.append(garbage)
    del garbage
    gc.disable()
    try:
        with told(engine, 1, leak_bytes=3 * MIB):
            result = omni.audit(engine, level=1, cycles=5, **QUICK)
    finally:
        gc.enable()
    assert result.verdict == "FAIL"


def test_a_wake_that_takes_more_than_it_says_fails(engine):
    with told(engine, 1, wake_leak_bytes=LIE_MIB * MIB):
        result = omni.audit(engine, level=1, **QUICK)
    assert result.verdict == "FAIL"
    (text,) = failures(result)
    apart = float(re.search(r"came back; ([\d.]+) MiB apart, MORE THAN", text)[1])
    assert apart == pytest.approx(LIE_MIB, abs=NOISE_MIB)


def test_a_process_that_keeps_nothing_does_not_grow(engine):
    result = omni.audit(engine, level=1, cycles=5, **QUICK)
    assert result.verdict == "PASS"
    assert any("does not grow" in finding.text for finding in result.findings)


def test_a_rank_that_dies_fails_and_the_message_names_the_restart(pair):
    with rank_fault(pair, 1, (0, 1), "commit_sleep", signal=signal.SIGKILL):
        result = omni.audit(pair, level=2, **QUICK)
    assert result.verdict == "FAIL"
    text = "\n".join(failures(result))
    assert "stage 1 · rank 1 answered ERROR to the sleep" in text
    assert "%omni restart 1 brings it back" in text
    assert states(pair)[0] == ("AWAKE", "OPEN"), "the stage that is well was woken"


class Around:
    """An engine around another one."""

    def __init__(self, engine: AsyncOmni) -> None:
        self._engine = engine
        self.recorded: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def record_audit(self, verdict: str, report: Any) -> None:
        self.recorded.append((verdict, json.loads(json.dumps(report))))


class Forgetful(Around):
    """An engine that loses the answer of the last rank."""

    async def sleep(self, *args: Any, **known: Any) -> Any:
        return (await self._engine.sleep(*args, **known))[:-1]


def test_a_rank_that_does_not_answer_fails(pair):
    result = omni.audit(Forgetful(pair), level=1, **QUICK)
    assert result.verdict == "FAIL"
    assert "no answer to the sleep from stage 1 · rank 1" in failures(result)
    assert states(pair) == AWAKE


def test_weights_that_could_not_be_had_again_fail_before_anything_is_lost(engine):
    with told(engine, 1, scribble=True):
        omni.audit(engine, [1], level=1, **QUICK)
    before = asyncio.run(_image(engine))
    result = omni.audit(engine, [1], level=2, **QUICK)
    assert result.verdict == "FAIL"
    assert "refused the sleep, nothing was lost" in failures(result)[0]
    assert states(engine) == AWAKE
    assert asyncio.run(_image(engine)) == before, "the changed weights are still there"
    asyncio.run(engine.restart(1))


async def _image(engine: AsyncOmni) -> bytes:
    async for output in engine.generate("a red star", sampling_params={"seed": 1, "num_inference_steps": 3}):
        last = output
    return last.images[0].tobytes()


def test_a_wake_that_fails_names_the_state_and_the_line_that_wakes(engine):
    with told(engine, 1, room_bytes=0):
        result = omni.audit(engine, level=1, **QUICK)
    assert result.verdict == "FAIL"
    text = "\n".join(failures(result))
    assert "stage 1 · rank 0 answered ERROR to the wake" in text
    assert "stage 1 (painter) is ASLEEP (level 1): %omni wake 1 wakes it" in text
    assert states(engine) == [("AWAKE", "OPEN"), ("ASLEEP", "OPEN")]
    assert all(ack.ok for ack in asyncio.run(engine.wake_up()))


# ------------------------------------------------------------------------------------------ WARN


def test_a_process_that_nobody_can_look_at_is_a_warning_and_says_not_available(engine, monkeypatch, tmp_path):
    monkeypatch.setattr("omni_notebook.verbs.auditing.outside._is_ours", lambda _pid: False)
    result = omni.audit(engine, level=1, **QUICK)
    assert result.verdict == "WARN"
    assert ">! WARN</span>" in page(result, tmp_path)
    assert result.ok
    assert all("not available" in reason for reason in result.reasons)
    assert all(process.source is None for process in result.cycles[0].processes)


def test_a_stage_that_no_prompt_can_reach_is_a_warning(engine):
    asyncio.run(engine.sleep([0]))
    result = omni.audit(engine, [1], level=1)
    assert result.verdict == "WARN"
    assert "stage 1's output was not compared" in result.reasons[0]
    assert states(engine) == [("ASLEEP", "OPEN"), ("AWAKE", "OPEN")]


def test_a_text_stage_is_compared_by_its_tokens_while_the_image_stage_sleeps(engine):
    asyncio.run(engine.sleep([1]))
    result = omni.audit(engine, [0], level=1)
    assert result.verdict == "PASS"
    assert (result.cycles[0].output.same_tokens, result.cycles[0].output.same_images) == (True, None)


def test_a_probe_that_is_more_than_there_is_warns_and_takes_nothing(engine):
    result = omni.audit(engine, [0], level=1, probe="1000TiB", **QUICK)
    assert result.verdict == "WARN"
    assert result.cycles[0].probe.taken_bytes == 0
    assert "a trainer could NOT take 1024000.00 GiB: not tried" in result.reasons[0]


def test_an_engine_that_does_not_repeat_itself_is_not_compared(engine, monkeypatch):
    seeds = iter(range(100))
    monkeypatch.setattr(Plan, "params", property(lambda _plan: {"seed": next(seeds), "num_inference_steps": 3}))
    result = omni.audit(engine, level=1, prompt="a red star")
    assert result.verdict == "WARN"
    assert "two runs before the sleep did not give the same" in result.reasons[0]


# -------------------------------------------------------------------------------------- refusals


def refused(engine, error, **known):
    before = states(engine)
    with pytest.raises(error) as caught:
        omni.audit(engine, **known)
    assert states(engine) == before
    assert "\n" not in str(caught.value)
    assert "nothing was changed" in str(caught.value) or "nothing was started" in str(caught.value)
    return str(caught.value)


def test_a_paused_engine_is_refused(engine):
    asyncio.run(engine.pause_generation("keep", [1]))
    assert "%omni resume 1" in refused(engine, PausedError)


def test_a_sleeping_stage_is_refused(engine):
    asyncio.run(engine.sleep([1]))
    assert "%omni wake 1" in refused(engine, AsleepError)


def test_a_busy_engine_is_refused(engine):
    async def paint():
        async for _ in engine.generate("a red star", sampling_params={"num_inference_steps": 3}):
            pass

    with slow(engine, 1, 0.5):
        request = engine.submit(paint())
        while not any(stage.running for stage in engine.status().stages):
            time.sleep(0.005)
        assert "is busy: " in refused(engine, StageBusyError)
        request.result(20)


@pytest.mark.parametrize(
    "known",
    [
        {"stage_ids": [7]},
        {"stage_ids": []},
        {"level": 3},
        {"cycles": 0},
        {"cycles": 1.5},
        {"prompt": "  "},
        {"seed": -1},
        {"sampling_params": {"steps": 3}},
    ],
)
def test_a_wrong_argument_is_refused(engine, known):
    before = states(engine)
    with pytest.raises(ArgumentError):
        omni.audit(engine, **known)
    assert states(engine) == before


def test_the_engines_own_thread_is_refused(engine):
    async def inside():
        return omni.audit(engine)

    with pytest.raises(ArgumentError, match="audit_async"):
        engine.submit(inside()).result(10)


# ---------------------------------------------------------------------------- interrupts and ends


def test_a_cancelled_audit_wakes_what_it_put_to_sleep(engine):
    async def cancelled():
        running = asyncio.create_task(omni.audit_async(engine, level=1, probe=64 * MIB, cycles=100, **QUICK))
        await until(lambda: engine.status().stages[0].state == "ASLEEP")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return states(engine)

    assert asyncio.run(cancelled()) == AWAKE


@pytest.mark.parametrize("moment", ["FALLING_ASLEEP", "ASLEEP", "WAKING"])
def test_ctrl_c_leaves_the_stages_awake_or_says_what_they_are(engine, moment):
    order = {"FALLING_ASLEEP": "prepare_sleep", "ASLEEP": None, "WAKING": "prepare_wake"}[moment]
    pressing = ctrl_c_once(lambda: engine.status().stages[1].state == moment)
    begin = time.monotonic()
    held = contextlib.nullcontext() if order is None else slow(engine, 1, 0.3, order)
    with held, pressing, pytest.raises(InterruptedVerb) as caught:
        omni.audit(engine, level=1, probe=512 * MIB, cycles=1000, **QUICK)
    assert "the audit ended early" in str(caught.value)
    assert "stage 0 (thinker) is" in str(caught.value)
    assert time.monotonic() - begin < 30
    deadline = time.monotonic() + 10
    while states(engine) != AWAKE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert states(engine) == AWAKE


def test_an_engine_that_is_stopped_meanwhile_ends_the_audit(tmp_path):
    with lying_engine(executor="uni") as engine:
        timer = threading.Timer(1.0, engine.shutdown)
        timer.start()
        with pytest.raises(EngineClosedError):
            omni.audit(engine, level=1, cycles=10_000, **QUICK)
        timer.join()


# --------------------------------------------------------------------------------------- exports


def test_an_audit_goes_on_record_where_the_engine_keeps_one(engine):
    keeping = Around(engine)
    result = omni.audit(keeping, [0], level=1, **QUICK)
    assert keeping.recorded == [("PASS", result.to_dict())]


@pytest.fixture(scope="module")
def result(shared_engine):
    return omni.audit(shared_engine, level=1, cycles=2, probe="16MiB", prompt="a red star", **QUICK)


def test_the_shipped_schema_is_that_of_the_types():
    assert SCHEMA.read_text(encoding="utf-8") == audit_schema.text()


def test_the_json_file_follows_the_schema(result, tmp_path):
    path = tmp_path / "audit.json"
    result.to_json(path)
    read = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(read)
    assert read == result.to_dict()
    assert read["verdict"] == "PASS"
    assert read["cycles"][1]["processes"][0]["source"] == "smaps"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(
            {**read, "verdict": "?"}
        )


def test_the_csv_file_has_a_row_a_cycle_and_rank(result, tmp_path):
    path = tmp_path / "audit.csv"
    result.to_csv(path)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["cycle"], row["stage_id"]) for row in rows] == [("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")]
    assert rows[0]["ack_freed_bytes"] == str(result.cycles[0].ranks[0].freed_bytes)
    assert rows[0]["process_source"] == "smaps"


def test_a_data_frame_has_the_same_rows(result, monkeypatch):
    class Pandas:
        @staticmethod
        def DataFrame(rows, columns):  # noqa: N802  (pandas' name)
            return rows, columns

    monkeypatch.setitem(__import__("sys").modules, "pandas", Pandas)
    assert result.to_dataframe() == (result.rows(), list(COLUMNS))


def test_without_pandas_a_data_frame_is_refused_in_one_line(result, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UnsupportedError, match="needs pandas"):
        result.to_dataframe()


@pytest.mark.parametrize("order", ["wake", "sleep"])
def test_an_order_of_someone_else_in_the_middle_is_no_verdict_on_the_engine(engine, monkeypatch, order):
    real = engine.sleep

    async def someone_else_too(*args: Any, **known: Any) -> Any:
        if order == "sleep":
            await real([0], 2)
            return await real(*args, **known)
        acks = await real(*args, **known)
        await engine.wake_up([0])
        return acks

    monkeypatch.setattr(engine, "sleep", someone_else_too)
    with pytest.raises(StageBusyError, match="another order put stage 0 to sleep or woke it during the audit"):
        omni.audit(engine, **QUICK)
    assert states(engine) == AWAKE


def test_a_file_that_can_not_be_written_costs_neither_the_others_nor_the_reasons(session, tmp_path):
    (tmp_path / "there").mkdir()
    gone, good = tmp_path / "there" / "audit.html", tmp_path / "audit.json"
    real = AuditResult.to_html
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AuditResult, "to_html", lambda self, path: ((tmp_path / "there").rmdir(), real(self, path)))
        with pytest.raises(OmniError, match=r"ended with (PASS|WARN), but .*audit.html could not be written.*asleep: "):
            execute(session, f"audit --steps 3 --html {gone} --json {good}")
    assert json.loads(good.read_text(encoding="utf-8"))["verdict"] in {"PASS", "WARN"}


@pytest.mark.parametrize(
    "line",
    [
        "audit --html ~no-such-user/x.html",
        "start ~no-such-user/model",
        "lora add ~no-such-user/adapter",
        "weights 0 ~no-such-user/model",
        "history --csv ~no-such-user/x.csv",
    ],
)
def test_a_home_of_nobody_is_one_clear_line_and_nothing_is_changed(session, engine, line):
    with pytest.raises(OmniError) as caught:
        execute(session, line)
    assert "\n" not in str(caught.value)
    assert "no-such-user" in str(caught.value)
    assert states(engine) == AWAKE


@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
def test_a_report_never_overwrites_the_ledger(session, engine, end):
    target = f"{os.environ['OMNI_NOTEBOOK_LEDGER']}{end}"
    with pytest.raises(ArgumentError, match="is the ledger itself, or a part of it"):
        execute(session, f"audit --html {target}")
    assert states(engine) == AWAKE


def test_other_requests_meanwhile_are_noticed(engine):
    async def beside():
        route = outputs.route_for(engine.status())

        async def other():
            async for _ in engine.generate("a red star", sampling_params={"num_inference_steps": 3}):
                pass

        running = asyncio.ensure_future(other())
        made = await outputs.generate(engine, "a red star", {"seed": 1, "num_inference_steps": 3}, route)
        await running
        alone = await outputs.generate(engine, "a red star", {"seed": 1, "num_inference_steps": 3}, route)
        return made.others, alone.others

    assert asyncio.run(beside()) == (True, False)
