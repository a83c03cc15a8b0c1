"""Another stage of the same process takes and gives back torch's memory while a pool falls asleep."""

from __future__ import annotations

import logging
import threading

import pytest

from omni_notebook.memory.writeahead import WriteAhead
from tests.memory.fake_cuda import MIB
from tests.memory.pools import sleep, wake


def torch_holds(machine, n_bytes):
    """What torch's allocator says that it holds, and what it holds."""
    machine.gpu.torch_bytes = n_bytes
    machine.torch_device.segments = [
        {"device": 0, "address": 1, "total_size": n_bytes, "segment_pool_id": (0, 0)},
    ]


@pytest.mark.parametrize("hidden", [False, True], ids=["process", "device"])
@pytest.mark.parametrize("change", [64 * MIB, -64 * MIB, 0], ids=["takes", "gives_back", "does_nothing"])
@pytest.mark.parametrize("level", [1, 2])
def test_what_left_is_this_pools_whatever_torch_does_meanwhile(rig, monkeypatch, level, change, hidden):
    machine, table = rig.machine, rig.pool._core.table
    machine.gpu.capacity = 1024 * MIB
    torch_holds(machine, 128 * MIB)
    if hidden:
        machine.hide_process()
    unmap = table.unmap

    def unmapping(segment):
        torch_holds(machine, 128 * MIB + change)
        return unmap(segment)

    monkeypatch.setattr(table, "unmap", unmapping)
    _, unmapped = sleep(rig.pool, level)
    assert unmapped.scope == ("device" if hidden else "process")
    assert unmapped.observed_bytes == unmapped.expected_bytes == sum(unmapped.freed.values()) == 16 * MIB
    wake(rig.pool)


def test_torchs_figures_are_there_though_another_thread_forgets_them_meanwhile(rig):
    """A no-op order is answered on a thread of its own, beside whatever the worker does."""

    class Forgetful(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            self.clear()

    torch_holds(rig.machine, 5 * MIB)
    driver = rig.pool._core.driver
    driver._reserved = Forgetful()
    assert driver.reserved().untagged_bytes == 5 * MIB


def test_host_memory_ahead_of_a_sleep_that_ends_with_the_process_is_a_line_in_the_log(caplog, monkeypatch):
    """Python starts no thread any more once the main one has ended."""
    broken = []
    monkeypatch.setattr(threading, "excepthook", broken.append)

    def copy(_stop):
        msg = "cannot schedule new futures after interpreter shutdown"
        raise RuntimeError(msg)

    ahead = WriteAhead()
    with caplog.at_level(logging.WARNING):
        ahead.start(copy)
        assert ahead.wait(10)
    assert broken == []
    assert "cannot schedule new futures" in caplog.text


def test_a_pool_that_is_closed_gives_back_what_torch_caches_too(rig):
    """In the notebook's own process nobody else does."""
    rig.gpu.torch_bytes = rig.machine.torch_device.cached_bytes = 3 * MIB
    rig.pool.close()
    assert rig.gpu.torch_bytes == 0
