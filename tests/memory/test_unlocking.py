"""Locked host memory that the driver will not unlock: it still counts, orders go on, and it goes the next time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from omni_notebook.memory.base import DeviceError
from omni_notebook.memory.device import libcuda
from omni_notebook.memory.device.libhip import HipRuntime
from tests.memory.fake_cuda import MIB, Rig
from tests.memory.fake_ranges import OwnMachine, OwnRig
from tests.memory.machines import MACHINES, all_equal
from tests.memory.pools import sleep, wake

PLATFORMS = ("cuda-own", "cuda", "rocm")
"""Those that lock host memory."""


@pytest.fixture(params=[MACHINES[name] for name in PLATFORMS], ids=PLATFORMS)
def rig(request):
    rig = OwnRig() if request.param is OwnMachine else Rig(machine=request.param())
    yield rig
    rig.pool.close()


def held(rig):
    """Bytes that the books say copies take, which are those that are locked."""
    n_bytes = rig.pool._core.copies.held_bytes()
    assert n_bytes == sum(rig.machine.pinned.values())
    return n_bytes


def assert_works(rig):
    before = rig.copies()
    sleep(rig.pool)
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_what_is_dropped_on_request_and_stays_locked_is_told_and_counts_and_the_rest_goes(rig, number):
    sleep(rig.pool)
    wake(rig.pool)
    rig.machine.fail("unpin", number)
    with pytest.raises(DeviceError, match="HostUnregister"):
        rig.pool.drop_copies()
    left = held(rig)
    assert 0 < left < 12 * MIB
    assert rig.pool.host_backup_bytes() == left
    assert rig.pool.drop_copies() == left
    assert held(rig) == 0
    assert_works(rig)


def test_any_thread_may_drop_copies():
    rig = OwnRig()
    sleep(rig.pool)
    wake(rig.pool)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(rig.pool.drop_copies).result(10) == 12 * MIB
    assert rig.machine.pinned == {}


def test_a_host_that_runs_short_gets_what_can_be_unlocked_is_told_of_the_rest_and_gets_that_at_the_next_look(rig):
    sleep(rig.pool)
    wake(rig.pool)
    ahead = rig.pool._ahead
    ahead.low = lambda room: room.available_bytes + 1
    rig.machine.fail("unpin", 1)
    with pytest.raises(DeviceError, match="HostUnregister"):
        ahead.look()
    assert 0 < held(rig) < 12 * MIB
    ahead.look()
    assert held(rig) == 0
    assert_works(rig)


def drop_backup(rig):
    sleep(rig.pool)
    rig.machine.fail("unpin", 2)
    before = rig.pool.host_backup_bytes()
    freed = rig.pool.drop_backup()
    assert freed == before - rig.pool.host_backup_bytes()
    wake(rig.pool)
    rig.fill()


def level_2(rig):
    sleep(rig.pool)
    wake(rig.pool)
    rig.machine.host_bytes = 40 * MIB  # too little to let locked memory lie
    rig.pool.prepare_sleep(2)
    rig.machine.fail("unpin", 2)
    unmapped = rig.pool.commit_sleep()
    assert unmapped.freed == {"weights": 12 * MIB, "kv_cache": 4 * MIB}
    assert "stays locked: cu" in unmapped.note.replace("hip", "cu")
    wake(rig.pool)
    rig.fill()


def abort(rig):
    rig.pool.prepare_sleep(1)
    rig.machine.fail("unpin", 2)
    rig.pool.abort_sleep()


def prepare(rig):
    rig.machine.fail("unpin", 2)
    rig.machine.fail("wait", 1)
    with pytest.raises(DeviceError, match=r"wait|Synchronize|copy"):
        rig.pool.prepare_sleep(1)


@pytest.mark.parametrize("order", [drop_backup, level_2, abort, prepare])
def test_an_order_that_drops_copies_on_its_way_is_carried_out_and_what_stays_locked_counts(rig, order):
    order(rig)
    assert 0 < held(rig) < 12 * MIB
    assert_works(rig)
    assert rig.pool.drop_copies() == 12 * MIB


def test_memory_of_a_tensor_that_is_gone_goes_with_the_next_one_or_with_the_pool():
    rig = OwnRig()
    for name in ("one", "other", "third"):
        rig.machine.tensor(name, (MIB,), torch.uint8).fill_(4)
    sleep(rig.pool)
    wake(rig.pool)
    rig.machine.fail("unpin", 1)
    rig.pool.discard("one")
    assert set(rig.pool.tags()) == {"weights", "kv_cache", "other", "third"}
    assert held(rig) == 18 * MIB
    rig.pool.discard("other")
    assert held(rig) == 14 * MIB
    rig.machine.fail("unpin", 1)
    rig.pool.discard("third")
    assert held(rig) == 14 * MIB
    rig.pool.close()
    assert held(rig) == 0


def test_a_pool_ends_whatever_the_driver_will_not_unlock(rig):
    sleep(rig.pool)
    rig.machine.fail("unpin", 2)
    rig.pool.close()
    assert 0 < held(rig) < 12 * MIB
    assert rig.gpu.pool_bytes == 0


def test_both_libraries_say_what_was_refused(monkeypatch):
    answers = [201, 0]
    library = SimpleNamespace(
        cuMemHostUnregister=lambda _address: answers[0],
        hipHostUnregister=lambda _address: answers[0],
        hipGetLastError=lambda: 0,
    )
    monkeypatch.setattr(libcuda, "_driver", lambda: library)
    for unpin, words in ((libcuda.unpin, "cuMemHostUnregister"), (HipRuntime(library).unpin, "hipHostUnregister")):
        answers.sort(reverse=True)
        with pytest.raises(DeviceError, match=rf"{words}: .* error 201"):
            unpin(4096)
        answers.sort()
        unpin(4096)
