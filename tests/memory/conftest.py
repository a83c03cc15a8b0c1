"""Pools that are closed again, and scripts run in processes of their own."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from omni_notebook.memory.cpu import CpuPool
from omni_notebook.memory.device import tensors
from tests.memory.fake_cuda import Rig
from tests.memory.fake_ranges import OwnMachine, OwnRig
from tests.memory.machines import MACHINES

OF_VLLM_ALONE = {
    "test_vllms_own_books_say_asleep_where_its_version_has_such_books",
    "test_tags_that_are_neither_weights_nor_cache_are_kept_whole_and_workspaces_dropped",
    "test_level_1_becomes_level_2_but_for_what_is_kept",
    "test_freeing_while_asleep_leaves_no_trace_and_the_rest_wakes",
    "test_freeing_while_asleep_on_a_full_device_does_not_spoil_the_next_wake",
    "test_a_free_while_its_copy_is_on_the_way_waits_for_the_copy",
    "test_freeing_while_awake_is_vllms_alone",
    "test_a_segment_that_was_woken_is_freed_with_its_pages",
    "test_a_segment_that_comes_between_prepare_and_commit_stays_as_it_is",
    "test_a_later_memory_pool_of_vllm_keeps_our_guard",
    "test_vllms_own_sleep_underneath_is_seen_and_ours_refused",
    "test_vllms_own_wake_underneath_is_seen_and_ours_leaks_nothing",
    "test_closing_gives_device_and_host_memory_back_and_freeing_after_is_clean",
}
"""Tests of the contract that are about vLLM's allocator: who frees, and tags that only vLLM has."""


def pytest_collection_modifyitems(config, items):
    """A pool of our own segments has no part in what is vLLM's."""
    gone = [
        item
        for item in items
        if getattr(item, "originalname", "") in OF_VLLM_ALONE and item.callspec.params.get("rig") is OwnMachine
    ]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """On a busy machine two threads of torch's wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _a_heap_of_its_own(request, monkeypatch):
    """Who looks for living tensors finds a test's own: a whole run's frozen heap is left as it is."""
    if request.node.get_closest_marker("whole_heap") is None:
        monkeypatch.setattr(tensors, "gc", SimpleNamespace(**{**vars(gc), "unfreeze": _nothing, "freeze": _nothing}))


def _nothing():
    pass


@pytest.fixture(params=["auto", "checksum"])
def tracking(request):
    """Both ways of finding unchanged chunks; they must give the same results."""
    return request.param


@pytest.fixture
def make_pool(tmp_path):
    pools = []

    def make(**options):
        pool = CpuPool(**{"spill_dir": str(tmp_path), **options})
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(make_pool, tracking):
    return make_pool(tracking=tracking)


@pytest.fixture(params=MACHINES.values(), ids=MACHINES)
def rig(request):
    """A model and a cache on a fake machine of every platform, and a pool that knows them."""
    return OwnRig() if request.param is OwnMachine else Rig(machine=request.param())


@pytest.fixture
def own():
    """The same on ranges of our own."""
    return OwnRig()


@pytest.fixture
def run_script(tmp_path):
    """Run a script in a fresh interpreter; its CompletedProcess."""

    def run(body: str, *args: str):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(body), encoding="utf-8")
        return subprocess.run(
            [sys.executable, str(path), *args], capture_output=True, text=True, timeout=60, check=False
        )

    return run
