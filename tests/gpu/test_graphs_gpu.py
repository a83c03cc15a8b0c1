"""CUDA graphs on a real GPU: captures that fail, and captures beside threads that wait for the device."""

from __future__ import annotations

import threading

import pytest
import torch

from omni_notebook.memory.device.capturing import synchronize
from omni_notebook.memory.device.ranges import RangeDriver
from omni_notebook.worker.graphs import Graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@torch.inference_mode()
def test_a_capture_that_fails_leaves_a_thread_that_computes_and_gives_its_cache_back():
    weights = torch.randn(64, 64, device="cuda")

    def run(x):
        y = x @ weights
        return y * (y.sum().item() * 0 + 1)  # no capture may wait for the device

    graphs, x = Graphs(run, "cuda:0"), torch.randn(4, 64, device="cuda")
    before = torch.cuda.current_stream()
    assert torch.equal(graphs(x), run(x))
    assert torch.cuda.current_stream() == before
    assert len(graphs) == 0
    told = graphs.recall()
    assert told.right is False
    assert "without CUDA graphs" in told.note
    torch.cuda.synchronize()
    RangeDriver(0).trim()  # torch refuses it while it believes that a capture goes on
    fine = Graphs(lambda x: x @ weights, "cuda:0")
    assert torch.equal(fine(x), x @ weights)
    assert (len(fine), fine.recall().right) == (1, True)


def test_captures_and_waits_for_the_device_by_other_threads_do_not_break_each_other():
    weights, driver = torch.randn(256, 256, device="cuda"), RangeDriver(0)
    ended, errors = threading.Event(), []

    def wait():
        try:
            while not ended.is_set():
                synchronize("cuda:0")
                driver.enter()
                driver.trim()
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        with torch.inference_mode():
            for _ in range(5):
                graphs = Graphs(lambda x: (x @ weights).relu() @ weights, "cuda:0")
                for rows in range(1, 9):
                    graphs(torch.randn(rows, 256, device="cuda"))
                assert len(graphs) == 8
                graphs.forget()
                assert graphs.recall().right is True
    finally:
        ended.set()
        waiting.join()
    assert errors == []


@torch.inference_mode()
def test_captures_again_and_again_hold_no_more_than_the_first():
    weights, driver = torch.randn(256, 256, device="cuda"), RangeDriver(0)
    graphs, left = Graphs(lambda x: x @ weights, "cuda:0"), []
    for _ in range(40):
        for rows in (1, 2, 3):
            graphs(torch.randn(rows, 256, device="cuda"))
        graphs.forget()
        driver.trim()
        left.append(torch.cuda.memory_reserved())
    assert len(set(left[1:])) == 1
