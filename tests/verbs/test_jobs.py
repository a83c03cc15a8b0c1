"""Work behind the notebook: how it goes on, ends, is cancelled, and what it leaves."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time

import pytest

from omni_notebook.engine import core
from omni_notebook.errors import (
    ArgumentError,
    AsleepError,
    DeadlineError,
    EngineClosedError,
    OmniError,
    PausedError,
    SleepError,
    StageBusyError,
)
from omni_notebook.verbs import jobs as module
from omni_notebook.verbs.auditing.result import AuditResult
from omni_notebook.verbs.generating import Generation
from omni_notebook.verbs.jobs import Job, JobState, Work
from omni_notebook.verbs.registry import execute
from omni_notebook.verbs.session import Session
from tests.engine.engine_helpers import fault, slow
from tests.verbs.conftest import lying_engine


def states(engine) -> list[str]:
    return [str(stage.state) for stage in engine.status().stages]


def wait_until(predicate, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_generation_goes_on_while_the_caller_does(session, engine, capsys):
    with slow(engine, 1, 0.3):
        job = execute(session, "generate a red star --seed 3 --steps 3 --bg")
        assert isinstance(job, Job)
        assert (job.state, job.done, job.error) == ("running", False, None)
        assert "running" in repr(job)
        made = job.result(20)
    assert isinstance(made, Generation)
    assert (made.seed, len(made.images), job.state, job.done) == (3, 1, "done", True)
    assert made.text
    assert made.images[0].tobytes() == execute(session, "generate a red star --seed 3 --steps 3").images[0].tobytes()
    assert capsys.readouterr().out.count("plan:") == 1, "the job itself writes nothing"


def test_orders_run_behind_and_their_answers_are_the_last_ones(session, engine):
    job = execute(session, "sleep 0 --level 2 --bg --out kept")
    assert session.frontend.variables["kept"] is job
    acks = job.result(20)
    assert [(ack.stage_id, ack.ok) for ack in acks] == [(0, True)]
    assert job.result() is acks, "the same list each time"
    assert [ack.task_id for ack in session.acks] == [acks[0].task_id]
    assert all(ack.ok for ack in execute(session, "wake --bg").result(20))
    assert states(engine) == ["AWAKE", "AWAKE"]


def test_an_audit_runs_behind_and_tells_which_step_it_is_in(session, engine, tmp_path, capsys):
    path = tmp_path / "audit.json"
    job = execute(session, f"audit --level 1 --steps 3 --cycles 2 --json {path} --bg")
    assert capsys.readouterr().out == f"at its end: {path}\n"
    wait_until(lambda: "cycle 2 of 2" in job.words())
    result = job.result(30)
    assert isinstance(result, AuditResult)
    assert result.verdict == "PASS"
    assert path.exists()


def test_a_job_can_be_awaited_on_any_loop(session, engine):
    async def both():
        return await execute(session, "sleep 0 --bg"), await execute(session, "wake 0 --bg")

    slept, woken = asyncio.run(both())
    assert slept[0].freed_bytes == woken[0].metadata["mapped_bytes"] > 0


def test_who_stops_waiting_does_not_stop_the_job(session, engine):
    async def impatient(job):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(job, 0.05)

    with slow(engine, 0, 1.5, "prepare_sleep"):
        job = execute(session, "sleep 0 --bg")
        with pytest.raises(DeadlineError, match=r"job \d+ had not ended after 0.05 s; it goes on"):
            job.result(timeout=0.05)
        asyncio.run(impatient(job))
        assert job.result(20)[0].ok


def test_a_cancelled_order_rolls_back(session, engine):
    with slow(engine, 0, 0.4, "prepare_sleep"):
        job = execute(session, "sleep 0 --bg")
        wait_until(lambda: states(engine)[0] == "FALLING_ASLEEP")
        assert job.cancel()
        with pytest.raises(concurrent.futures.CancelledError, match="was cancelled"):
            job.result(20)
    assert (job.state, job.cancel()) == (JobState.CANCELLED, False)
    wait_until(lambda: states(engine)[0] == "AWAKE")


def test_a_cancelled_generation_leaves_no_request(session, engine):
    with slow(engine, 1, 0.3):
        job = execute(session, "generate a red star --steps 3 --bg")
        wait_until(lambda: engine.status().stages[1].running)
        job.cancel()
    assert job.state == JobState.CANCELLED
    wait_until(lambda: not any(s.running or s.queued for s in engine.status().stages))


def test_a_cancelled_audit_leaves_the_stages_awake(session, engine):
    job = execute(session, "audit --level 1 --steps 3 --cycles 500 --bg")
    wait_until(lambda: states(engine) == ["ASLEEP", "ASLEEP"])
    job.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        job.result(20)
    assert states(engine) == ["AWAKE", "AWAKE"]


def test_an_error_is_one_line_when_shown_and_raised_by_result(session, engine):
    with fault(engine, 0, "prepare_sleep", OSError("the disk\nis full")):
        job = execute(session, "sleep 0 --bg")
        wait_until(lambda: job.done)
    assert (job.state, repr(job).count("\n")) == ("failed", 0)
    assert "SleepError: " in repr(job)
    assert "the disk is full" in repr(job)
    with pytest.raises(SleepError) as caught:
        job.result()
    assert not caught.value.acks[0].ok
    assert not session.acks[0].ok, "the answers of a failed order are the last ones too"
    assert "prepare_sleep" in (session.last_traceback or "") or "SleepError" in (session.last_traceback or "")


def test_what_can_not_start_is_refused_in_the_cell_and_makes_no_job(session, engine):
    execute(session, "sleep 0 --level 2")
    execute(session, "pause 1")
    for line, error, words in (
        ("generate a red star --bg", (AsleepError, PausedError), "%omni wake 0, %omni resume"),
        ("sleep 0 --level 1 --bg", AsleepError, "its weights are gone"),
        ("wake 7 --bg", ArgumentError, "7"),
    ):
        with pytest.raises(error, match=words):
            execute(session, line)
    execute(session, "resume")
    execute(session, "wake")
    for line in ("generate a red star --steps 0 --bg", "audit --steps 0 --bg", "generate a red star --lora none --bg"):
        with pytest.raises(OmniError):
            execute(session, line)
    with slow(engine, 1, 0.5):
        job = execute(session, "generate a red star --steps 3 --bg")
        wait_until(lambda: engine.status().stages[1].running)
        with pytest.raises(StageBusyError, match="sleep 1 --mode"):
            execute(session, "sleep 1 --bg")
        job.result(20)
    assert len(session.jobs.list()) == 1


def test_an_order_that_waits_for_another_one_is_a_job(session, engine):
    with slow(engine, 0, 1.5, "prepare_sleep"):
        first = execute(session, "sleep 0 --bg")
        second = execute(session, "wake 0 --bg")
        assert not second.done
        assert [job.result(20)[0].ok for job in (first, second)] == [True, True]
    assert states(engine) == ["AWAKE", "AWAKE"]


def test_an_audit_that_is_refused_is_refused_at_once(session, engine):
    with slow(engine, 1, 0.5):
        job = execute(session, "generate a red star --steps 3 --bg")
        wait_until(lambda: engine.status().stages[1].running)
        with pytest.raises(StageBusyError):
            execute(session, "audit --bg")
        job.result(20)


@pytest.mark.parametrize("line", ["generate a red star --steps 900 --bg", "sleep 1 --bg", "audit --cycles 900 --bg"])
def test_a_job_of_an_engine_that_was_stopped_ends_with_a_clear_error(line, monkeypatch):
    monkeypatch.setattr(core, "SETTLE_S", 0.1)  # the patience that a stop has with orders on their way
    session = Session()
    with lying_engine(executor="uni") as engine:
        session.use(engine)
        with slow(engine, 1, 1.5, "prepare_sleep"):
            job = execute(session, line)
            time.sleep(0.2)
            engine.shutdown()
            with pytest.raises((EngineClosedError, SleepError), match=r"stopped|closed|shut down"):
                job.result(20)
    assert job.state == JobState.FAILED


# ------------------------------------------------------------------------------------------- history


def test_of_many_that_ended_since_no_more_than_the_bound_are_kept(session, engine, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 3)
    works: list[concurrent.futures.Future[int]] = [concurrent.futures.Future() for _ in range(10)]
    for number, work in enumerate(works):
        session.jobs.start(Work(f"job {number}", work))
    assert len(execute(session, "jobs")) == 10
    for number, work in enumerate(works):
        work.set_result(number)
    assert [job.line for job in execute(session, "jobs")] == ["job 7", "job 8", "job 9"]


def test_jobs_are_listed_and_those_that_run_are_never_forgotten(session, engine, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 3)
    assert repr(execute(session, "jobs")) == "no jobs; %omni generate --bg starts one"
    running: concurrent.futures.Future[int] = concurrent.futures.Future()
    first = session.jobs.start(Work("first", running))
    for number in range(10):
        done: concurrent.futures.Future[int] = concurrent.futures.Future()
        done.set_result(number)
        session.jobs.start(Work(f"job {number}", done))
    listed = execute(session, "jobs --out listed")
    assert [job.line for job in listed] == ["first", "job 7", "job 8", "job 9"]
    assert [job.number for job in listed] == [1, 9, 10, 11]
    running.set_result(0)
    assert first.result() == 0
    assert "job.result() has it" in repr(listed)
    assert (listed[1], listed[10], listed[-1]) == (first, listed[-2], listed[11])
    with pytest.raises(ArgumentError, match="there is no job 0; jobs are: 1, 9, 10, 11"):
        listed[0]


def test_a_job_is_cancelled_by_the_number_that_the_list_shows(session, engine, capsys):
    with slow(engine, 1, 0.3):
        job = execute(session, "generate a red star --steps 3 --bg --seed 3")
        assert repr(job).startswith("<Job 1: %omni generate --steps 3 --seed 3 a red star · running")
        assert execute(session, "jobs --cancel 1")[1] is job
        wait_until(lambda: job.done)
    assert job.state == JobState.CANCELLED
    execute(session, "jobs --cancel 1")
    assert capsys.readouterr().out == "job 1 was told to end\njob 1 had ended: cancelled\n"
    with pytest.raises(ArgumentError, match="there is no job 2; jobs are: 1"):
        execute(session, "jobs --cancel 2")


def test_an_image_that_is_drawn_behind_says_that_its_plan_is_written(session, engine):
    with slow(engine, 1, 0.5):
        job = execute(session, "generate a red star --steps 3 --bg")
        wait_until(lambda: job.words() == "the plan is written, the image is queued or being drawn")
        job.result(20)
