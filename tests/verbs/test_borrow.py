"""Borrowed memory on real engines: what sleeps wakes, whatever the code did; what lacks room says who has it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import mmap
import os
import re
import signal
import sys
import time
import weakref
from typing import Any

import pytest
import torch

import omni_notebook as omni
from omni_notebook.errors import ArgumentError, AsleepError, SleepError, StageFailedError, WakeError
from omni_notebook.protocol import MIB
from omni_notebook.verbs.borrowing import holders, tidying
from omni_notebook.verbs.borrowing.lease import Lease
from omni_notebook.verbs.borrowing.peak import Peak, PeakWatch
from omni_notebook.verbs.frontend import CellError
from omni_notebook.verbs.interrupts import InterruptedVerb
from omni_notebook.verbs.registry import execute
from tests.engine.engine_helpers import collect, fault, golden, rank_fault, slow, until
from tests.notebook.acks import ack
from tests.pressing import ctrl_c_once
from tests.verbs.lying_worker import told


def states(engine) -> list[str]:
    return [str(stage.state) for stage in engine.status().stages]


def pauses(engine) -> list[str]:
    return [str(stage.pause_state) for stage in engine.status().stages]


# ------------------------------------------------------------------------------------- a context


@pytest.mark.parametrize("level", [1, 2])
def test_stages_sleep_inside_and_are_awake_after_with_the_same_output(engine, level):
    before = asyncio.run(golden(engine))
    with omni.borrowed([0, 1], level=level, engine=engine) as lease:
        assert states(engine) == ["ASLEEP", "ASLEEP"]
        assert [stage.level for stage in engine.status().stages] == [level, level]
        assert lease.freed_bytes == sum(ack.freed_bytes for ack in lease.acks) > 32 * MIB
    assert states(engine) == ["AWAKE", "AWAKE"]
    assert asyncio.run(golden(engine)) == before
    assert [ack.ok for ack in lease.woken] == [True, True]
    assert min(lease.sleep_ms, lease.wake_ms) > 0
    assert re.fullmatch(
        r"borrowed [\d.]+ MiB of stage 0, 1 · asleep in .* · the code's own peak .* \(VmHWM\) · awake again in .*",
        repr(lease),
    )


def test_one_context_is_for_one_block_and_a_second_use_leaves_everything_as_it_is(engine):
    context = omni.borrowed([0], engine=engine)
    with context:
        with pytest.raises(ArgumentError, match="call it again for another"), context:
            pass
        assert states(engine) == ["ASLEEP", "AWAKE"]
    assert states(engine) == ["AWAKE", "AWAKE"], "the first use must not be forgotten"
    with pytest.raises(ArgumentError, match="call it again for another"), context:
        pass
    assert states(engine) == ["AWAKE", "AWAKE"]


@pytest.mark.parametrize("way", ["with", "async with"])
def test_a_wake_that_fails_does_not_hide_what_the_code_raised(engine, way):
    mine = ValueError("mine")

    async def later():
        async with omni.borrowed([1], engine=engine):
            raise mine

    def now():
        with omni.borrowed([1], engine=engine):
            raise mine

    borrow = now if way == "with" else lambda: asyncio.run(later())
    with (
        told(engine, 1, room_bytes=0),
        pytest.raises(WakeError, match="the code itself raised ValueError: mine") as one,
    ):
        borrow()
    assert one.value.__cause__ is mine
    asyncio.run(engine.wake_up())


@pytest.mark.parametrize(("peak_mib", "more"), [(90, ""), (140, ", 40.0 MiB MORE than was borrowed")])
def test_a_peak_above_what_was_borrowed_is_said(peak_mib, more):
    peak = Peak(begin_bytes=0, high_bytes=peak_mib * MIB, how="VmHWM")
    lease = Lease([0], level=1, acks=[ack(freed_bytes=100 * MIB)], peak=peak)
    assert repr(lease) == f"borrowed 100.0 MiB of stage 0 · the code's own peak {peak_mib}.0 MiB (VmHWM){more}"


def test_the_asynchronous_context_does_the_same(engine):
    async def borrow():
        async with omni.borrowed(0, engine=engine) as lease:
            await asyncio.sleep(0)
            inside = states(engine)
        return inside, lease

    inside, lease = asyncio.run(borrow())
    assert inside == ["ASLEEP", "AWAKE"]
    assert states(engine) == ["AWAKE", "AWAKE"]
    assert lease.stage_ids == [0]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_the_stages_wake_whatever_the_code_raises_and_it_comes_through(engine, error):
    with pytest.raises(type(error)) as caught, omni.borrowed(engine=engine):
        raise error
    assert caught.value is error
    assert states(engine) == ["AWAKE", "AWAKE"]


def test_a_cancelled_task_wakes_too(engine):
    async def cancelled():
        async def work():
            async with omni.borrowed(engine=engine):
                await asyncio.sleep(60)

        running = asyncio.create_task(work())
        await until(lambda: states(engine) == ["ASLEEP", "ASLEEP"])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return states(engine)

    assert asyncio.run(cancelled()) == ["AWAKE", "AWAKE"]


@pytest.mark.quiet
def test_a_cancelled_sleep_does_not_hold_up_the_callers_loop(engine):
    async def cancelled():
        async def work():
            async with omni.borrowed(engine=engine):
                await asyncio.sleep(60)

        async def beat():
            while True:
                at.append(time.monotonic())
                await asyncio.sleep(0.01)

        at: list[float] = []
        beating, running = asyncio.create_task(beat()), asyncio.create_task(work())
        await until(lambda: engine.status().stages[1].state == "FALLING_ASLEEP")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(0.05)
        beating.cancel()
        return max(after - before for before, after in itertools.pairwise(at))

    with slow(engine, 1, 2.0, "prepare_sleep"):
        assert asyncio.run(cancelled()) < 0.5
        asyncio.run(until(lambda: states(engine) == ["AWAKE", "AWAKE"]))


@pytest.mark.parametrize("level", [1, 2])
def test_a_stage_that_slept_before_sleeps_after(engine, level):
    asyncio.run(engine.sleep([0], level=level))
    with omni.borrowed(engine=engine) as lease:
        assert states(engine) == ["ASLEEP", "ASLEEP"]
    assert lease.stage_ids == [1]
    assert states(engine) == ["ASLEEP", "AWAKE"]
    assert engine.status().stages[0].level == level


def test_all_asleep_already_is_nothing_to_borrow(engine):
    asyncio.run(engine.sleep())
    with omni.borrowed(engine=engine) as lease:
        pass
    assert states(engine) == ["ASLEEP", "ASLEEP"]
    assert (lease.freed_bytes, lease.sleep_ms) == (0, None)
    assert "nothing (all asleep already)" in repr(lease)


def test_a_stage_that_was_partly_awake_is_so_again(engine):
    asyncio.run(engine.sleep([0]))
    asyncio.run(engine.wake_up([0], tags=["weights"]))
    with omni.borrowed([0], engine=engine):
        assert states(engine)[0] == "ASLEEP"
    assert (states(engine)[0], engine.status().stages[0].awake_tags) == ("PARTLY_AWAKE", ("weights",))


def test_a_stage_that_was_paused_stays_paused(engine):
    asyncio.run(engine.pause_generation("keep", [1]))
    with omni.borrowed(engine=engine):
        assert pauses(engine) == ["OPEN", "PAUSED"]
    assert (states(engine), pauses(engine)) == (["AWAKE", "AWAKE"], ["OPEN", "PAUSED"])


def test_requests_that_are_there_are_held_and_end_after_the_wake(engine):
    async def requests():
        alone = await golden(engine)
        with slow(engine, 1, 0.5):
            running = [asyncio.ensure_future(collect(engine))]
            await until(lambda: engine.status().stages[1].running > 0)
            running += [asyncio.ensure_future(collect(engine)) for _ in range(2)]
            await until(lambda: engine.status().stages[1].queued + engine.status().stages[1].in_transit == 2)
        async with omni.borrowed([1], engine=engine):
            assert states(engine)[1] == "ASLEEP"
            held = engine.status().stages[1].queued + engine.status().stages[1].in_transit
        outputs = await asyncio.wait_for(asyncio.gather(*running), 30)
        return alone, held, [made[-1].images[0].tobytes() for made in outputs]

    alone, held, images = asyncio.run(requests())
    assert held == 2
    assert len(images) == 3
    assert images[0] == alone[1], "the batch that ran ended on its own weights"


# ------------------------------------------------------------------------------ refusals and faults


def test_an_unknown_stage_is_refused(engine):
    with pytest.raises(ArgumentError, match="no stage 7"), omni.borrowed([7], engine=engine):
        pytest.fail("nothing may run")
    assert states(engine) == ["AWAKE", "AWAKE"]


def test_a_stage_on_its_way_elsewhere_is_refused(engine):
    async def moving():
        with slow(engine, 0, 0.5, "prepare_sleep"):
            sleeping = asyncio.ensure_future(engine.sleep([0]))
            await until(lambda: states(engine)[0] == "FALLING_ASLEEP")
            with pytest.raises(AsleepError, match="another order is on its way"):
                async with omni.borrowed([0], engine=engine):
                    pytest.fail("nothing may run")
            await sleeping

    asyncio.run(moving())


def test_a_sleep_that_fails_for_one_stage_wakes_the_other_and_runs_nothing(engine):
    with (
        fault(engine, 1, "prepare_sleep", OSError("the disk is full")),
        pytest.raises(SleepError, match="nothing was borrowed") as caught,
        omni.borrowed(engine=engine),
    ):
        pytest.fail("nothing may run")
    assert states(engine) == ["AWAKE", "AWAKE"]
    assert "the disk is full" in str(caught.value)
    assert [ack.ok for ack in caught.value.acks] == [True, False]


def test_weights_that_could_not_be_had_again_are_not_borrowed_at_level_2(engine):
    with told(engine, 1, scribble=True):
        asyncio.run(engine.sleep([1]))
        asyncio.run(engine.wake_up([1]))
    with pytest.raises(SleepError, match="can not be had again"), omni.borrowed([1], level=2, engine=engine):
        pytest.fail("nothing may run")
    assert states(engine) == ["AWAKE", "AWAKE"]
    asyncio.run(engine.restart(1))


def test_a_wake_without_room_says_who_holds_it_and_what_wakes(engine, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "activations", torch.ones(8 * MIB), raising=False)
    stuck = pytest.raises(WakeError, match="painter")
    with told(engine, 1, room_bytes=MIB), stuck as caught, omni.borrowed(engine=engine) as lease:
        pass
    message = str(caught.value)
    assert "activations (Tensor) 32.0 MiB" in message
    assert re.search(r"other processes: process \d+ \(.+?\) [\d.]+ [MG]iB", message)
    assert message.endswith("stage 1 (painter) is ASLEEP (level 1): %omni wake 1 wakes it")
    assert [ack.metadata["error_code"] for ack in caught.value.acks] == [None, "OUT_OF_MEMORY"]
    assert states(engine) == ["AWAKE", "ASLEEP"]
    assert lease.wake_ms is None
    assert all(ack.ok for ack in asyncio.run(engine.wake_up([1])))


def test_a_stage_that_fails_meanwhile_is_named_and_the_other_wakes(pair):
    def kill():
        os.kill(pair.status().stages[1].ranks[0].pid, signal.SIGKILL)
        asyncio.run(until(lambda: states(pair)[1] == "FAILED"))

    named = pytest.raises(StageFailedError, match=r"stage 1 failed meanwhile.*%omni restart 1")
    with named, omni.borrowed(engine=pair):
        kill()
    assert states(pair) == ["AWAKE", "FAILED"]


def test_a_rank_that_dies_in_the_wake_leaves_the_others_awake(pair):
    with (
        rank_fault(pair, 1, (0, 1), "prepare_wake", signal=signal.SIGKILL),
        pytest.raises(WakeError, match="%omni restart 1"),
        omni.borrowed(engine=pair),
    ):
        pass
    assert states(pair) == ["AWAKE", "FAILED"]


@pytest.mark.parametrize("moment", ["FALLING_ASLEEP", "WAKING"])
def test_ctrl_c_in_the_orders_leaves_the_stages_awake(engine, moment):
    order = {"FALLING_ASLEEP": "prepare_sleep", "WAKING": "prepare_wake"}[moment]
    with (
        slow(engine, 1, 0.5, order),
        ctrl_c_once(lambda: engine.status().stages[1].state == moment),
        pytest.raises(InterruptedVerb, match="interrupted"),
        omni.borrowed(engine=engine),
    ):
        pass
    assert not PeakWatch._watching, "a watch of code that never ran goes on"
    deadline = time.monotonic() + 10
    while states(engine) != ["AWAKE", "AWAKE"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert states(engine) == ["AWAKE", "AWAKE"]


# ----------------------------------------------------------------------------- what the code took


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  (proc)
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.alone
def test_what_a_failed_code_held_is_free_before_the_wake(engine, monkeypatch):
    seen = []
    real = engine.wake_up

    def looking(*args: Any, **known: Any) -> Any:
        seen.append((resident(), kept() is None))
        return real(*args, **known)

    monkeypatch.setattr(engine, "wake_up", looking)

    def train():
        nonlocal kept
        taken = torch.ones(48 * MIB)
        kept = weakref.ref(taken)
        loop = [taken]
        loop.append(loop)
        msg = "out of luck"
        raise RuntimeError(msg)

    kept: Any = None
    before = resident()
    with pytest.raises(RuntimeError), omni.borrowed([0], engine=engine):
        train()
    ((at_the_wake, gone),) = seen
    assert gone, "the frames of the error held the tensor"
    assert at_the_wake - before < 64 * MIB


@pytest.mark.alone
def test_the_peak_is_that_of_the_code_alone(engine):
    with omni.borrowed([0], engine=engine) as lease:
        taken = torch.ones(32 * MIB)
        del taken
    assert 120 * MIB < lease.peak.own_bytes < 200 * MIB
    assert lease.peak.how == "VmHWM"


@pytest.mark.alone
@pytest.mark.parametrize("sampled", [False, True])
def test_a_peak_inside_another_counts_for_both(sampled):
    outer = PeakWatch(sampled=sampled)
    first = mmap.mmap(-1, 64 * MIB)
    first.write(b"x" * (64 * MIB))
    time.sleep(0.05)
    first.close()
    inner = PeakWatch(sampled=sampled)
    second = mmap.mmap(-1, 16 * MIB)
    second.write(b"x" * (16 * MIB))
    time.sleep(0.05)
    second.close()
    within, whole = inner.end(), outer.end()
    assert 15 * MIB < within.own_bytes < 48 * MIB
    assert 63 * MIB < whole.own_bytes < 200 * MIB
    assert within.how == whole.how == ("psutil, every 10 ms" if sampled else "VmHWM")


def test_tidying_drops_the_last_traceback_and_cycles():
    def fail():
        taken = torch.ones(10)
        refs.append(weakref.ref(taken))
        msg = "no"
        raise ValueError(msg)

    refs: list[Any] = []
    with contextlib.suppress(ValueError):
        try:
            fail()
        except ValueError as error:
            sys.last_value, sys.last_traceback = error, error.__traceback__
            raise
    gc.collect()
    assert refs[0]() is not None
    tidying.tidy()
    assert refs[0]() is None
    assert sys.last_traceback is None


def test_holders_are_tensors_arrays_modules_and_what_is_in_containers():
    import numpy as np

    module = torch.nn.Linear(1024, 1024)
    module.weight.grad = torch.ones_like(module.weight)
    shared = torch.ones(1024, 1024)
    found = holders.variables(
        {
            "array": np.ones(3 * MIB, np.uint8)[10:],
            "module": module,
            "batches": [shared, shared[:10], {"deep": torch.ones(1024, 512)}],
            "small": torch.ones(10),
            "text": "x",
            "__dunder__": shared,
        }
    )
    assert [(one.name, one.n_bytes // MIB) for one in found] == [("module", 8), ("batches", 6), ("array", 3)]
    assert str(found[2]) == "array (ndarray) 3.0 MiB"


def test_holders_know_an_optimizers_state():
    module = torch.nn.Linear(512, 1024)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    (found,) = holders.variables({"optimizer": optimizer})
    assert found.n_bytes >= 2 * 512 * 1024 * 4


# ----------------------------------------------------------------------------------------- the verb


def test_the_verb_runs_the_cell_while_the_stages_sleep(session, engine, capsys):
    session.frontend.variables["states"] = lambda: states(engine)
    execute(session, "borrow 0 1 --level 2 --out lease", "inside = states()")
    assert session.frontend.variables["inside"] == ["ASLEEP", "ASLEEP"]
    assert states(engine) == ["AWAKE", "AWAKE"]
    shown = capsys.readouterr().out
    assert shown == f"{session.frontend.variables['lease']!r}\n"
    assert shown.startswith("borrowed ")
    assert session.acks == session.frontend.variables["lease"].woken


def test_an_error_of_the_cell_comes_after_the_wake_once(session, engine, capsys):
    with pytest.raises(CellError) as caught:
        execute(session, "borrow 0", "1 / 0")
    assert isinstance(caught.value.error, ZeroDivisionError)
    assert states(engine) == ["AWAKE", "AWAKE"]
    shown = capsys.readouterr().out
    assert shown.startswith("borrowed ")
    assert "ZeroDivisionError" not in shown


def test_an_error_of_the_cell_is_shown_before_a_wake_that_failed(session, engine, capsys):
    with told(engine, 1, room_bytes=0), pytest.raises(WakeError, match="%omni wake 1 wakes it"):
        execute(session, "borrow", "1 / 0")
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().out
    asyncio.run(engine.wake_up())


def test_ctrl_c_in_the_cell_wakes_and_says_so(session, engine):
    with pytest.raises(InterruptedVerb, match=r"was given back; now stage 0 \(thinker\) is AWAKE"):
        execute(session, "borrow 0", "raise KeyboardInterrupt")
    assert states(engine) == ["AWAKE", "AWAKE"]


@pytest.mark.parametrize(("line", "cell"), [("borrow", None), ("borrow 0", "  \n"), ("borrow 9", "x = 1")])
def test_mistakes_are_refused_before_anything_sleeps(session, engine, line, cell):
    with pytest.raises(ArgumentError):
        execute(session, line, cell)
    assert states(engine) == ["AWAKE", "AWAKE"]


def test_a_cell_that_is_no_python_runs_nothing(session, engine):
    with pytest.raises(SyntaxError):
        execute(session, "borrow 0", "if x =")
    assert states(engine) == ["AWAKE", "AWAKE"]
