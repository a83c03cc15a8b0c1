"""Ranks that die, hang or are left alone: answered for at once, and nothing of them stays."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from omni_notebook.errors import ArgumentError, DeadlineError, EngineClosedError, RemoteWorkerError, WorkerDiedError
from omni_notebook.executors.mp import executor as mp_executor
from omni_notebook.executors.mp.executor import MpExecutor
from omni_notebook.executors.mp.logs import KEPT_BYTES
from tests.executors.echo_worker import ECHO
from tests.executors.executor_helpers import (
    alive,
    fds,
    gone,
    make_specs,
    runs,
    shared_files,
    until,
    wait_until,
    zombies,
)

if TYPE_CHECKING:
    from tests.executors.conftest import Run


@pytest.mark.quiet
def test_a_killed_rank_answers_for_all_its_calls_at_once(mp: Run) -> None:
    async def test() -> None:
        deaths: list[Any] = []
        executor = mp.make(on_death=lambda *death: deaths.append((time.monotonic(), *death)))
        await executor.call("ping")
        calls = [asyncio.create_task(executor.call("wait_on", 1, 30.0)) for _ in range(3)]
        await asyncio.sleep(0.1)
        pid = executor.memory()[1].pid
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        answers = await calls[0]
        assert time.monotonic() - killed < 0.05
        for call in calls:
            answers = await call
            assert [type(a.error) for a in answers] == [type(None), WorkerDiedError, type(None)]
        error = answers[1].error
        assert (error.stage_id, error.rank) == (7, 1)
        assert (
            f"rank 1 of stage 7 was killed by SIGKILL, by someone or because the machine ran out of memory (pid {pid}"
            in str(error)
        )
        assert "call restart(7)" in str(error)
        assert [(where.rank, type(e)) for _, where, e in deaths] == [(1, WorkerDiedError)]
        assert [r.alive for r in executor.memory()] == [True, False, True]
        started = time.monotonic()
        answers = await executor.call("rank")
        assert time.monotonic() - started < 0.2
        assert [type(a.error) for a in answers] == [type(None), WorkerDiedError, type(None)]
        assert zombies() == []

    mp(test)


def test_what_a_rank_said_before_it_died_is_heard(mp: Run) -> None:
    async def test() -> None:
        executor = mp.make(1)
        await executor.call("ping")
        first, last = await asyncio.gather(executor.call("echo", np.ones(100_000)), executor.call("exit", 3))
        assert first[0].unwrap().sum() == 100_000
        error = last[0].error
        assert isinstance(error, WorkerDiedError)
        assert "ended with status 3" in str(error)
        assert "it wrote last: last words" in str(error)
        assert error.log_lines == ["last words"]
        assert executor.log_tail(0) == ["last words"]

    mp(test)


def test_a_crash_in_c_code_names_the_signal_and_shows_where(mp: Run) -> None:
    async def test() -> None:
        executor = mp.make(1)
        error = (await executor.call("crash"))[0].error
        assert "was killed by SIGSEGV" in str(error)
        assert any("in crash" in line for line in error.log_lines)

    mp(test)


def test_a_worker_that_dies_while_it_is_made_is_a_death_with_its_last_lines(mp: Run) -> None:
    async def test() -> None:
        deaths: list[Any] = []
        executor = mp.make(2, version="dies", on_death=lambda where, error: deaths.append(where.rank))
        answers = await executor.call("load")
        assert {type(a.error) for a in answers} == {WorkerDiedError}
        assert answers[0].error.log_lines == ["about to die"]
        assert sorted(deaths) == [0, 1]
        assert executor.ended

    mp(test)


def test_a_worker_class_that_is_not_there_is_told(mp: Run) -> None:
    async def test() -> None:
        executor = MpExecutor(make_specs(1), worker="no.such.module:Worker")
        mp.made.append(executor)
        assert isinstance((await executor.call("load"))[0].error, ModuleNotFoundError)

    mp(test)


@pytest.mark.quiet
def test_a_stopped_rank_is_silent_until_its_deadline_and_is_killed_at_shutdown(mp: Run) -> None:
    async def test() -> None:
        executor = mp.make(2)
        await executor.call("ping")
        pid = executor.memory()[1].pid
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        answers = await executor.call("rank", timeout_s=0.3)
        assert time.monotonic() - started < 0.6
        assert [type(a.error) for a in answers] == [type(None), DeadlineError]
        assert isinstance((await executor.ping(0.2))[1].error, DeadlineError)
        os.kill(pid, signal.SIGCONT)
        answers = await executor.call("rank", timeout_s=5)
        assert [a.unwrap() for a in answers] == [0, 1]
        os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.create_task(executor.call("rank"))
        await asyncio.sleep(0.05)
        executor.shutdown()
        started = time.monotonic()
        await until(lambda: executor.ended, 5)
        assert time.monotonic() - started < 4
        assert isinstance((await waiting)[1].error, EngineClosedError)
        assert gone([pid])

    mp(test)


def test_a_rank_that_works_answers_the_side_channel(mp: Run) -> None:
    async def test() -> None:
        executor = mp.make(2)
        await executor.call("hold", "weights", 5)
        order = asyncio.create_task(executor.call("work", "t", 30.0))
        await asyncio.sleep(0.02)
        assert [a.unwrap() for a in await executor.ping(5)] == alive(executor)
        measured = [a.unwrap() for a in await executor.measure(5)]
        assert [m.tags["weights"].resident_bytes for m in measured] == [5, 5]
        executor.set_log_level("DEBUG")
        with pytest.raises(ArgumentError, match="no log level"):
            executor.set_log_level("LOUD")
        executor.cancel("t")
        await order

    mp(test)


def test_a_cancel_that_raises_does_not_end_the_rank(mp: Run) -> None:
    async def test() -> None:
        executor = mp.make(1)
        await executor.call("break_cancel")
        executor.cancel("t")
        assert (await executor.call("rank"))[0].unwrap() == 0
        assert any("could not be followed" in line for line in executor.log_tail(0))

    mp(test)


def test_memory_that_changes_by_itself_is_seen_within_a_second(mp: Run) -> None:
    async def test() -> None:
        executor = mp.make(1)
        await executor.call("ping")
        await executor.call("hold_later", "weights", 5, 0.1)
        assert executor.memory()[0].tags == {}
        await until(lambda: executor.memory()[0].tags, 2)

    mp(test)


def test_an_error_of_a_foreign_class_keeps_its_name_and_its_traceback(mp: Run) -> None:
    async def test() -> None:
        executor = mp.make(1)
        error = (await executor.call("fail", "odd"))[0].error
        assert isinstance(error, RemoteWorkerError)
        assert (error.type_name, error.error_code) == ("OddError", "OddError")
        assert "OddError: strange" in str(error)
        assert "in fail" in error.remote_traceback
        ended = (await executor.call("fail", "exit"))[0].error
        assert (type(ended), ended.type_name) == (RemoteWorkerError, "SystemExit")
        broken = (await executor.call("fail", "surrogate"))[0].error
        assert isinstance(broken, ValueError)
        assert str(broken) == r"no weights in \udcff.safetensors"
        bad = (await executor.call("fail", "unicode"))[0].error
        assert isinstance(bad, UnicodeDecodeError)
        ours = (await executor.call("fail", "config"))[0].error
        assert "in fail" in ours.remote_traceback

    mp(test)


def test_what_has_no_form_on_the_wire_is_refused_on_the_side_that_sends(mp: Run) -> None:
    async def test() -> None:
        executor = mp.make(1)
        for answers in (await executor.call("echo", object()), await executor.call("unsendable")):
            assert isinstance(answers[0].error, ArgumentError)
            assert "can not be sent between processes" in str(answers[0].error)
        for name in ("\ud800", "a\udcff"):
            error = (await executor.call("echo", name))[0].error
            assert isinstance(error, ArgumentError)
            assert "surrogates not allowed" in str(error)
        wrong = (await executor.call("ping", 5))[0].error
        assert isinstance(wrong, ArgumentError)
        assert "'ping': Expected `array` of length 0" in str(wrong)
        assert (await executor.call("rank"))[0].unwrap() == 0

    mp(test)


def test_logs_are_kept_by_rank_and_bounded(mp: Run, capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        executor = mp.make(2)
        for n in range(250):
            await executor.call("say", f"line {n}")
        lines = executor.log_tail(1)
        assert len(lines) == 200
        assert lines[-2:] == ["line 249", "line 249 on stderr"]
        with pytest.raises(ArgumentError, match="no rank 5"):
            executor.log_tail(5)
        await executor.call("say", "x" * (4 * KEPT_BYTES))
        log = executor._links[0]._process.log
        await until(lambda: os.fstat(log).st_blocks * 512 <= 2 * KEPT_BYTES, 5)
        await executor.call("say", "the end")
        assert executor.log_tail(0)[-2:] == ["the end", "the end on stderr"]

    mp(test)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_ranks_start_without_torch_and_split_the_processors(mp: Run) -> None:
    async def test() -> None:
        cpus = len(os.sched_getaffinity(0))
        alone = (await mp.make(1).call("facts"))[0].unwrap()
        assert (alone["torch"], alone["numpy"]) == (False, False)
        assert (int(alone["threads"]), len(alone["cpus"])) == (cpus, cpus)
        many = [a.unwrap() for a in await mp.make(cpus).call("facts")]
        assert [int(facts["threads"]) for facts in many] == [1] * cpus
        assert sorted(cpu for facts in many for cpu in facts["cpus"]) == sorted(os.sched_getaffinity(0))
        assert many[0]["fds"] <= 7

    mp(test)


@pytest.mark.quiet
def test_nothing_is_left_after_use(mp: Run) -> None:
    files = shared_files()
    before = fds(), set(psutil.Process().children(recursive=True))

    async def test() -> None:
        for _ in range(3):
            executor = mp.make(2)
            await executor.call("echo", np.ones(50_000))
            executor.shutdown()
            await until(lambda executor=executor: executor.ended, 5)

    mp(test)
    gc.collect()
    assert (fds(), set(psutil.Process().children(recursive=True))) == before
    wait_until(lambda: shared_files() <= files)


def test_what_a_rank_has_started_ends_with_it(mp: Run) -> None:
    async def test() -> None:
        executor = mp.make(1)
        grandchild = (await executor.call("spawn"))[0].unwrap()
        assert runs(grandchild)
        os.kill(executor.memory()[0].pid, signal.SIGKILL)
        await until(lambda: executor.ended, 1)
        await until(lambda: gone([grandchild]), 2)

    mp(test)


def test_a_start_that_fails_half_way_leaves_nothing(mp: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fds()
    link = mp_executor.RankLink
    made: list[int] = []

    def failing(where: Any, *rest: Any) -> Any:
        if where.rank == 2:
            raise OSError(24, "Too many open files")
        one = link(where, *rest)
        made.append(one.pid)
        return one

    monkeypatch.setattr(mp_executor, "RankLink", failing)

    async def test() -> None:
        with pytest.raises(OSError, match="Too many open files"):
            mp.make(4)
        assert len(made) == 2
        assert gone(made)
        assert zombies() == []

    mp(test)
    assert fds() == before


def test_an_executor_whose_loop_ended_without_shutdown_is_ended_all_the_same() -> None:
    async def careless() -> Any:
        executor = MpExecutor(make_specs(2), worker=ECHO)
        await executor.call("ping")
        return executor

    before = fds()
    executor = asyncio.run(careless())
    pids = alive(executor)
    executor.shutdown()
    assert gone(pids)
    assert executor.ended
    assert zombies() == []
    del executor
    gc.collect()
    assert fds() == before
