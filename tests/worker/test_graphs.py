"""CUDA graphs of a function of tensors: what is captured when, what replays give, what becomes of one that is wrong."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from omni_notebook.memory.device.capturing import CAPTURING, synchronize
from omni_notebook.worker import graphs
from omni_notebook.worker.graphs import Graphs
from omni_notebook.worker.worker import Worker
from tests.memory.fake_ranges import OwnRig
from tests.worker.fake_graphs import FakeCuda, On


@pytest.fixture
def rig():
    """A function y = x·w (+ b) with weights that can change, its runs by stream, and graphs of it."""
    cuda = FakeCuda()
    w = torch.full((4, 4), 0.5)
    runs = []

    def plain(x, bias):
        return x @ w if bias is None else x @ w + bias

    def run(x, bias=None):
        cuda.check()
        runs.append(cuda.now)
        output = plain(x, bias)
        if cuda.capturing is not None:
            cuda.capturing.recorded.append(lambda: output.copy_(plain(x, bias)))
        return output

    return SimpleNamespace(cuda=cuda, w=w, runs=runs, run=run, graphs=Graphs(run, "cpu", cuda=cuda))


def ones(*shape, value=1.0):
    return torch.full(shape, value)


def test_while_weights_are_on_their_way_the_function_is_called_itself_and_nothing_is_captured(rig):
    rig.graphs(ones(2, 4), None)
    runs, captures = len(rig.runs), len(rig.cuda.captures)
    with rig.graphs.skipped():
        assert torch.equal(rig.graphs(ones(2, 4), None), ones(2, 4) @ rig.w)
        assert torch.equal(rig.graphs(ones(3, 4), None), ones(3, 4) @ rig.w)
    assert (len(rig.runs), len(rig.cuda.captures)) == (runs + 2, captures)
    assert torch.equal(rig.graphs(ones(2, 4), None), ones(2, 4) @ rig.w)
    assert len(rig.runs) == runs + 2  # a replay again


def test_outputs_are_the_functions_for_every_shape_and_are_nobody_elses(rig):
    first = rig.graphs(ones(2, 4), None)
    second = rig.graphs(ones(2, 4, value=3.0), None)
    third = rig.graphs(ones(4, 2).t(), ones(4))
    assert [out.unique().tolist() for out in (first, second, third)] == [[2.0], [6.0], [3.0]]
    assert len(rig.graphs) == 2
    rig.w.fill_(1.0)  # in place, as loads are
    assert rig.graphs(ones(2, 4), None).unique().tolist() == [4.0]


def test_all_captures_share_one_stream_and_one_pool_which_others_never_see(rig):
    for rows in (1, 2, 3):
        rig.graphs(ones(rows, 4), None)
    (stream,) = {stream for _, _, stream in rig.cuda.captures}
    assert {pool for _, pool, _ in rig.cuda.captures} == {1}
    assert set(rig.runs) == {stream}
    rig.graphs.forget()
    assert all(graph.ended for graph, _, _ in rig.cuda.captures)
    assert rig.graphs.recall().right is True
    assert {stream for _, _, stream in rig.cuda.captures} == {stream}
    assert rig.cuda.now is rig.cuda.default


@pytest.mark.parametrize("level", [1, 2])
def test_graphs_that_a_wake_has_no_time_for_are_made_by_their_next_batch(rig, monkeypatch, level):
    for rows in (1, 2, 3):
        rig.graphs(ones(rows, 4), None)
    if level == 2:
        rig.graphs.forget()
    monkeypatch.setattr(graphs, "_RECALL_S", 0.0)
    told = rig.graphs.recall()
    assert told.right is True
    assert "2 CUDA graphs are left to their next batches" in told.note
    assert ("1 CUDA graphs captured again" in told.note) is (level == 2)
    assert len(rig.graphs) == 1
    for rows in (1, 2, 3):
        assert rig.graphs(ones(rows, 4), None).unique().tolist() == [2.0]
    assert len(rig.graphs) == 3


def test_a_capture_that_fails_in_a_batch_costs_the_graphs_not_the_batch(rig):
    rig.graphs(ones(1, 4), None)
    rig.cuda.breaks = 1
    assert rig.graphs(ones(2, 4), None).unique().tolist() == [2.0]
    assert rig.cuda.now is rig.cuda.default, "the capture's stream is no longer the thread's"
    assert len(rig.graphs) == 0
    assert rig.cuda.captures[0][0].ended
    captures = len(rig.cuda.captures)
    assert rig.graphs(ones(1, 4), None).unique().tolist() == [2.0]
    assert len(rig.cuda.captures) == captures, "no batch tries again"
    told = rig.graphs.recall()
    assert told.right is False
    assert "without CUDA graphs from now on: CUDA error: operation failed" in told.note
    assert "second line" not in told.note
    assert rig.graphs.recall() == (None, None), "once is enough"


def test_a_capture_that_fails_in_a_wake_is_told_by_it(rig):
    rig.graphs(ones(1, 4), None)
    rig.graphs.forget()
    rig.cuda.breaks = 1
    assert rig.graphs.recall().right is False
    assert rig.cuda.now is rig.cuda.default
    assert rig.graphs(ones(1, 4), None).unique().tolist() == [2.0]


def test_an_error_of_the_function_itself_is_the_callers_and_costs_no_graphs(rig):
    rig.graphs(ones(1, 4), None)
    with pytest.raises(RuntimeError):
        rig.graphs(ones(2, 5), None)
    assert rig.cuda.now is rig.cuda.default
    assert rig.graphs(ones(1, 4), None).unique().tolist() == [2.0]
    assert rig.graphs.recall() == (True, None)
    assert len(rig.graphs) == 1


@torch.inference_mode()
def test_a_graph_that_gives_other_bytes_is_found_by_the_wake(rig):
    rig.graphs(ones(1, 4), None)
    (made,) = rig.graphs._graphs.values()
    made.graph.recorded.clear()
    made.output.fill_(7.0)
    told = rig.graphs.recall()
    assert told.right is False
    assert "1 of 1 gave other bytes" in told.note


def in_thread(call):
    """Another thread that calls this; whether it is through."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("step", ["synchronize", "trim", "prepare_sleep", "capture"])
def test_no_other_thread_breaks_a_capture(rig, monkeypatch, step):
    """It waits until the capture is through: torch allows one a process, and no wait for the device within it."""
    begun, go_on, calls = threading.Event(), threading.Event(), []
    other, pooled = Graphs(rig.run, "cpu", cuda=FakeCuda()), OwnRig()
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _device: calls.append(1))
    monkeypatch.setattr(other._cuda, "graph", lambda *_args, **_known: calls.append(1) or On(rig.cuda, None))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(pooled.machine.cuda, name, lambda *_args: calls.append(1))
    steps = {
        "synchronize": lambda: synchronize("cuda:0"),
        "trim": pooled.pool._core.driver.trim,
        "prepare_sleep": lambda: pooled.pool.prepare_sleep(1),
        "capture": lambda: other(ones(1, 4), None),
    }
    graph = rig.cuda.graph

    def slow(*args, **known):
        begun.set()
        assert go_on.wait(10)
        return graph(*args, **known)

    monkeypatch.setattr(rig.cuda, "graph", slow)
    capturing = in_thread(lambda: rig.graphs(ones(1, 4), None))
    assert begun.wait(10)
    waiting = in_thread(steps[step])
    waiting.join(0.1)
    assert (waiting.is_alive(), calls) == (True, [])
    go_on.set()
    capturing.join(10)
    waiting.join(10)
    assert calls
    assert not waiting.is_alive()
    assert CAPTURING.acquire(blocking=False)
    CAPTURING.release()


def test_a_worker_that_ends_gives_its_graphs_up_before_the_memory_that_they_read():
    order = []

    def part(name, *steps):
        return SimpleNamespace(**{step: lambda step=step: order.append(f"{name} {step}") for step in steps})

    worker = SimpleNamespace(
        _outputs=part("outputs", "close"),
        _runner=part("runner", "close", "drop_graphs"),
        _group=part("group", "close"),
        _pool=part("pool", "close"),
        _control=SimpleNamespace(waking=part("wakes", "close")),
    )
    Worker.shutdown(worker)
    assert order.index("outputs close") < order.index("runner drop_graphs") < order.index("pool close")
    assert order.index("wakes close") < order.index("pool close")
