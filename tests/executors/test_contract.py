"""What every executor must do, whichever way it carries calls."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from omni_notebook.errors import (
    ConfigError,
    DeadlineError,
    EngineClosedError,
    OmniError,
    OutOfMemoryError,
    UnsupportedError,
    WorkerDiedError,
)
from omni_notebook.worker.batches import Prefetch
from tests.executors.executor_helpers import alive, fds, frame_maps, until

if TYPE_CHECKING:
    from tests.executors.conftest import Run


def values(answers: list[Any]) -> list[Any]:
    return [answer.unwrap() for answer in answers]


def test_every_rank_answers_in_rank_order(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        answers = await executor.call("rank")
        assert values(answers) == list(range(run.n_ranks))
        assert [answer.where for answer in answers] == list(executor.ranks)

    run(test)


def test_calls_reach_each_rank_in_the_order_in_which_they_were_made(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        slow = asyncio.create_task(executor.call("wait", 0.1))
        await asyncio.sleep(0)
        calls = [asyncio.create_task(executor.call("note", n)) for n in range(50)]
        last = values(await calls[-1])
        assert slow.done()
        assert last == [list(range(50))] * run.n_ranks

    run(test)


def test_one_rank_raises_and_the_others_answer(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        culprit = run.n_ranks - 1
        answers = await executor.call("fail_on", culprit, "os")
        assert [type(a.error) for a in answers] == [type(None)] * culprit + [OSError]
        assert str(answers[-1].error) == "[Errno 28] No space left on device: '/spill/file'"
        assert values(await executor.call("echo", "still here")) == ["still here"] * run.n_ranks

    run(test)


def test_our_errors_and_pythons_come_back_as_themselves(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        kinds = {"config": ConfigError, "memory": OutOfMemoryError, "value": ValueError, "plain memory": MemoryError}
        for kind, wanted in kinds.items():
            error = (await executor.call("fail", kind))[0].error
            assert type(error) is wanted
        error = (await executor.call("fail", "memory"))[0].error
        assert (str(error), error.needed_bytes, error.free_bytes) == ("no room", 7, 5)

    run(test)


@pytest.mark.quiet
def test_a_rank_that_is_late_answers_deadline_error_and_its_late_answer_is_dropped(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("ping")
        started = time.monotonic()
        answers = await executor.call("wait", 0.4, timeout_s=0.1)
        assert time.monotonic() - started < 0.35
        assert {type(a.error) for a in answers} == {DeadlineError}
        assert "did not answer 'wait' within 0.1 s" in str(answers[0].error)
        assert values(await executor.call("echo", "next")) == ["next"] * run.n_ranks

    run(test)


def test_only_the_late_rank_answers_deadline_error(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("ping")
        answers = await executor.call("wait_on", run.n_ranks - 1, 0.5, timeout_s=0.2)
        assert [a.error is None for a in answers] == [True] * (run.n_ranks - 1) + [False]

    run(test)


def test_after_an_error_the_others_are_waited_for_no_longer_than_asked(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("ping")
        culprit = run.n_ranks - 1
        started = time.monotonic()
        answers = await executor.call("wait_or_fail", culprit, 2.0, settle_s=0.2)
        assert time.monotonic() - started < 1.5
        assert [type(a.error) for a in answers] == [DeadlineError] * culprit + [ValueError]
        answers = await executor.call("wait_or_fail", culprit, 0.1, settle_s=20.0)
        assert [type(a.error) for a in answers] == [type(None)] * culprit + [ValueError]
        answers = await executor.call("wait_or_fail", culprit, 2.0, timeout_s=0.2, settle_s=20.0)
        assert [type(a.error) for a in answers] == [DeadlineError] * culprit + [ValueError]

    run(test)


@pytest.mark.quiet
def test_waits_of_all_ranks_are_at_the_same_time(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("ping")
        started = time.monotonic()
        await executor.call("wait", 0.2)
        assert time.monotonic() - started < 0.4

    run(test)


def test_cancel_reaches_an_order_in_progress(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("ping")
        order = asyncio.create_task(executor.call("work", "t1", 30.0))
        await asyncio.sleep(0.05)
        executor.cancel("t1")
        assert values(await asyncio.wait_for(order, 5)) == ["cancelled"] * run.n_ranks

    run(test)


@pytest.mark.quiet
def test_memory_does_not_wait_for_an_order_in_progress(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("hold", "weights", 1000)
        order = asyncio.create_task(executor.call("work", "t1", 30.0))
        await asyncio.sleep(0.02)
        started = time.monotonic()
        ranks = executor.memory()
        assert time.monotonic() - started < 0.02
        assert [(r.rank, r.alive, r.tags["weights"].resident_bytes) for r in ranks] == [
            (n, True, 1000) for n in range(run.n_ranks)
        ]
        executor.cancel("t1")
        await order

    run(test)


def test_an_order_that_has_nothing_to_do_waits_for_none_before_it(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("ping")
        order = asyncio.create_task(executor.call("work", "t1", 30.0))
        await asyncio.sleep(0.02)
        acks = values(await asyncio.wait_for(executor.call("noop", "t2"), 5))
        assert [(ack.task_id, ack.rank) for ack in acks] == [("t2", rank) for rank in range(run.n_ranks)]
        assert not order.done()
        executor.cancel("t1")
        await order

    run(test)


def test_memory_is_as_the_last_order_left_it(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        for n_bytes in range(20):
            await executor.call("hold", "kv_cache", n_bytes)
            assert {r.tags["kv_cache"].mapped_bytes for r in executor.memory()} == {n_bytes}

    run(test)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "float16", "int64", "bool"])
def test_big_arrays_arrive_equal_both_ways(run: Run, dtype: str) -> None:
    array = np.random.default_rng(1).integers(0, 2, 10_000_000 // np.dtype(dtype).itemsize).astype(dtype)
    array = array.reshape(1000, -1)

    async def test() -> None:
        executor = run.make()
        for answer in values(await executor.call("echo", {"a": array, "b": [array[:3, :2].T, 5, "x"]})):
            assert answer["a"].dtype == array.dtype
            assert np.array_equal(answer["a"], array)
            assert np.array_equal(answer["b"][0], array[:3, :2].T)
            assert answer["b"][1:] == [5, "x"]
            assert answer["a"].flags.writeable

    run(test)


def test_plain_values_arrive_equal(run: Run) -> None:
    value = {"none": None, "int": 2**63, "float": 1.5, "text": "ä" * 100_000, "list": [1, [2]], "bytes": b"\0" * 50_000}

    async def test() -> None:
        executor = run.make()
        assert values(await executor.call("echo", value)) == [value] * run.n_ranks
        empty = values(await executor.call("echo", np.zeros((0, 3), "float32")))
        assert {(a.shape, str(a.dtype)) for a in empty} == {((0, 3), "float32")}
        point = values(await executor.call("echo", np.array(7)))
        assert {(a.shape, int(a)) for a in point} == {((), 7)}

    run(test)


def test_a_thousand_calls_leave_no_file_and_no_mapping(run: Run) -> None:
    array = np.ones(20_000)

    async def test() -> None:
        executor = run.make()
        await executor.call("echo", array)
        before, maps = fds(), frame_maps()
        for n in range(1000):
            assert values(await executor.call("total", array if n % 10 == 0 else array[:5]))[0] in {20_000.0, 5.0}
        assert fds() == before
        assert frame_maps() <= maps
        assert max([frame_maps(pid) for pid in alive(executor)], default=0) <= 1

    run(test)


@pytest.mark.parametrize("method", ["no_such_method", "_private", "where", "__class__"])
def test_a_method_that_the_worker_does_not_have_is_refused(run: Run, method: str) -> None:
    async def test() -> None:
        executor = run.make()
        answers = await executor.call(method)
        assert {type(a.error) for a in answers} == {UnsupportedError}
        assert f"no method {method!r}" in str(answers[0].error)
        assert values(await executor.call("rank")) == list(range(run.n_ranks))

    run(test)


@pytest.mark.quiet
def test_shutdown_ends_after_the_calls_before_and_refuses_those_after(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("ping")
        order = asyncio.create_task(executor.call("wait", 0.1))
        await asyncio.sleep(0)
        started = time.monotonic()
        executor.shutdown()
        executor.shutdown()
        assert time.monotonic() - started < 0.05
        late = await executor.call("ping")
        assert {type(a.error) for a in late} == {EngineClosedError}
        assert values(await order) == ["done"] * run.n_ranks
        await until(lambda: executor.ended, 5)

    run(test)


def test_shutdown_may_come_from_another_thread(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("ping")
        thread = threading.Thread(target=executor.shutdown)
        thread.start()
        await until(lambda: executor.ended, 5)
        thread.join()

    run(test)


def test_two_calls_at_once_keep_their_answers_apart(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        calls = [executor.call("echo", n) for n in range(200)]
        answers = await asyncio.gather(*calls)
        assert [values(a) for a in answers] == [[n] * run.n_ranks for n in range(200)]

    run(test)


def test_a_caller_that_goes_away_disturbs_nobody(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("ping")
        order = asyncio.create_task(executor.call("wait", 0.1))
        await asyncio.sleep(0.02)
        order.cancel()
        assert values(await executor.call("echo", 1)) == [1] * run.n_ranks

    run(test)


# ------------------------------------------------------------------------- answers that come later


def test_an_order_that_answers_later_does_not_hold_the_next_one_back(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("ping")
        order = asyncio.create_task(executor.call("later", 0.5, "picture"))
        await asyncio.sleep(0)
        assert values(await executor.call("note", 1)) == [[1]] * run.n_ranks
        assert not order.done()
        assert values(await order) == ["picture"] * run.n_ranks

    run(test)


def test_later_answers_come_when_they_are_ready_each_to_its_caller(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("ping")
        ended: list[int] = []

        async def one(n: int) -> None:
            assert values(await executor.call("later", 0.5 - n * 0.1, n)) == [n] * run.n_ranks
            ended.append(n)

        await asyncio.gather(*map(one, range(5)))
        assert ended == [4, 3, 2, 1, 0]

    run(test)


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_the_error_of_a_later_answer_comes_back_as_itself(run: Run, seconds: float) -> None:
    async def test() -> None:
        executor = run.make()
        for kind, wanted in {"memory": OutOfMemoryError, "value": ValueError}.items():
            answers = await executor.call("fail_later", seconds, kind)
            assert [type(a.error) for a in answers] == [wanted] * run.n_ranks
        assert values(await executor.call("rank")) == list(range(run.n_ranks))

    run(test)


def test_a_later_answer_that_was_called_off_is_an_error_and_not_silence(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        answers = await executor.call("called_off", timeout_s=20.0)
        assert [isinstance(a.error, OmniError) for a in answers] == [True] * run.n_ranks
        assert DeadlineError not in {type(a.error) for a in answers}
        assert values(await executor.call("rank")) == list(range(run.n_ranks))

    run(test)


def test_only_the_rank_whose_answer_comes_too_late_answers_deadline_error(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("ping")
        answers = await executor.call("later_on", run.n_ranks - 1, 0.6, timeout_s=0.2)
        assert [type(a.error) for a in answers] == [type(None)] * (run.n_ranks - 1) + [DeadlineError]
        await asyncio.sleep(0.5)  # its late answer is dropped
        assert values(await executor.call("echo", "next")) == ["next"] * run.n_ranks

    run(test)


@pytest.mark.parametrize("kind", ["mp", "simulated"])
def test_a_rank_that_dies_while_its_answer_is_on_its_way_answers_for_itself(kind: str) -> None:
    from tests.executors.conftest import Run

    run, died = Run(kind), []

    async def test() -> None:
        executor = run.make(on_death=lambda where, _error: died.append(where.rank))
        await executor.call("ping")
        if kind == "mp":
            answers = await executor.call("exit_later_on", 1, 0.1, timeout_s=20.0)
        else:
            asyncio.get_running_loop().call_later(0.1, executor.kill, 1)
            answers = await executor.call("later_on", 1, 5.0, timeout_s=20.0)
        assert [type(a.error) for a in answers] == [
            WorkerDiedError if rank == 1 else type(None) for rank in range(run.n_ranks)
        ]
        assert died == [1]

    run(test)


def test_shutdown_while_an_answer_is_on_its_way_keeps_nobody_waiting(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("ping")
        never = asyncio.create_task(executor.call("never"))
        last = asyncio.create_task(executor.call("at_the_end"))
        await asyncio.sleep(0)
        assert values(await executor.call("rank")) == list(range(run.n_ranks))
        started = time.monotonic()
        executor.shutdown()
        answers = await asyncio.wait_for(never, 10)
        assert [type(a.error) for a in answers] == [EngineClosedError] * run.n_ranks
        assert values(await last) == ["last word"] * run.n_ranks
        await until(lambda: executor.ended, 10)
        assert time.monotonic() - started < 8

    run(test)


# ------------------------------------------------------------------------------ what overtakes


def test_what_is_told_overtakes_an_order_in_progress(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("ping")
        order = asyncio.create_task(executor.call("wait_until_told", 20.0))
        await asyncio.sleep(0.05)
        executor.tell("prefetch", Prefetch(conditions={}, keep=(3, 4)))
        assert values(await asyncio.wait_for(order, 10)) == [[True, [[3, 4]]]] * run.n_ranks

    run(test)


def test_what_is_told_and_can_not_be_followed_disturbs_nobody(run: Run) -> None:
    async def test() -> None:
        executor = run.make()
        await executor.call("break_cancel")
        executor.cancel("t1")
        executor.tell("cancel", "t2")
        assert values(await executor.call("note", 1)) == [[1]] * run.n_ranks

    run(test)


@pytest.mark.parametrize("method", ["note", "execute", "barrier", "shutdown", "no_such_method"])
def test_only_what_never_waits_may_overtake_orders(run: Run, method: str) -> None:
    async def test() -> None:
        executor = run.make()
        with pytest.raises(UnsupportedError, match=f"'{method}' can not overtake orders.*Nothing was called"):
            executor.tell(method, 1)
        assert values(await executor.call("note", 2)) == [[2]] * run.n_ranks

    run(test)


def test_a_worker_that_can_not_be_made_answers_every_call_with_the_reason() -> None:
    from tests.executors.conftest import Run

    for kind in ("uni", "mp"):
        run = Run(kind)

        async def test(run: Run = run) -> None:
            executor = run.make(version="broken")
            for _ in range(2):
                answers = await executor.call("ping")
                assert {type(a.error) for a in answers} == {ConfigError}
                assert "can not be made" in str(answers[0].error)

        run(test)
