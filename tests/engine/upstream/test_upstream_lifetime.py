"""Starting and ending an upstream engine: nothing is left, whatever upstream does."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from omni_notebook.engine.upstream import core, seats
from omni_notebook.engine.upstream import package as upstream_package
from omni_notebook.engine.upstream.engine import UpstreamOmni
from omni_notebook.engine.upstream.outside import Outside
from omni_notebook.engine.upstream.package import UntestedUpstreamWarning
from omni_notebook.errors import EngineClosedError, UnsupportedError, UpstreamError
from tests.engine.upstream.conftest import FAKE
from tests.engine.upstream.upstream_helpers import left_after, lies, runs, started


def test_a_start_that_fails_says_why_in_one_line_and_leaves_no_process(package):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(UpstreamError, match="did not start broken: RuntimeError: no such architecture"):
        UpstreamOmni("broken")
    assert left_after(before) == set()


def test_a_start_that_fails_without_a_word_says_where(package):
    where = r"NotImplementedError in __init__ \(vllm_omni/entrypoints/async_omni.py\); nothing is running"
    with pytest.raises(UpstreamError, match=where):
        UpstreamOmni("wordless")


def test_this_process_writes_its_lines_as_before(package, capsys):
    with started():
        print("mine")
    assert "mine" in capsys.readouterr().out.splitlines()


def test_a_shutdown_that_upstream_fails_still_ends_its_processes(package):
    before = set(psutil.Process().children(recursive=True))
    engine = UpstreamOmni("some/model", tensor_parallel_size=2)
    assert len(set(psutil.Process().children(recursive=True)) - before) == 4
    lies(engine).add("shutdown")
    engine.shutdown()
    assert left_after(before, 0.5) == set()
    assert engine.status().closed
    with pytest.raises(EngineClosedError):
        asyncio.run(engine.sleep())


def test_a_shutdown_that_hangs_in_upstream_is_ended_from_here(package, monkeypatch):
    monkeypatch.setattr(core, "UPSTREAM_SHUTDOWN_S", 0.5)
    monkeypatch.setattr(core, "END_GRACE_S", 0.5)
    before = set(psutil.Process().children(recursive=True))
    engine = UpstreamOmni("some/model", tensor_parallel_size=2)
    lies(engine).add("hang:shutdown")
    began_s = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - began_s < 8
    assert left_after(before, 0.5) == set()


def test_a_shutdown_in_the_middle_of_a_hung_sleep_ends_in_time(package):
    before = set(psutil.Process().children(recursive=True))
    engine = UpstreamOmni("some/model")
    lies(engine).add("hang:sleep")
    sleeping = engine.submit(engine.sleep([0], timeout=60))
    while not engine._core.upstream.calls:
        time.sleep(0.01)
    began_s = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - began_s < 15
    assert sleeping.done()
    assert left_after(before) == set()


def test_a_shutdown_ends_no_process_of_the_persons_own(package):
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    mine = [subprocess.Popen(words)]
    try:
        engine = UpstreamOmni("some/model")
        mine.append(subprocess.Popen(words))
        engine.shutdown()
        assert [one.poll() for one in mine] == [None, None]
    finally:
        for one in mine:
            one.kill()
            one.wait()


def test_a_diffusion_stage_in_this_process_is_measured_as_this_process_and_never_ended(package):
    client = SimpleNamespace(_engine=SimpleNamespace(executor=SimpleNamespace()))
    upstream = SimpleNamespace(engine=SimpleNamespace(stage_pools=[SimpleNamespace(clients=[client])]))
    (seat,) = seats.find(upstream, 0, Outside("cpu"))
    assert (seat.pid, seat.alive) == (os.getpid(), True)
    assert seats.family(upstream, 1) == []


def test_replicas_that_share_a_process_manager_keep_their_own_processes():
    held = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    try:
        handles = [
            SimpleNamespace(pid=one.pid, name=f"StageEngineCoreProc_stage0_replica{n}") for n, one in enumerate(held)
        ]
        resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=handles))
        clients = [SimpleNamespace(resources=resources, replica_id=n) for n in range(2)]
        upstream = SimpleNamespace(engine=SimpleNamespace(stage_pools=[SimpleNamespace(clients=clients)]))
        found = seats.find(upstream, 0, Outside("cpu"))
        assert [(seat.replica, seat.rank, seat.pid) for seat in found] == [(0, 0, held[0].pid), (1, 0, held[1].pid)]
    finally:
        for one in held:
            one.kill()
            one.wait()


def test_an_engine_that_is_dropped_leaves_no_process(package):
    before = set(psutil.Process().children(recursive=True))
    engine = UpstreamOmni("some/model")
    del engine
    gc.collect()
    assert left_after(before, 15) == set()


def test_sleep_mode_off_is_passed_on_and_refuses(package):
    with started(enable_sleep_mode=False) as engine:
        assert engine._core.upstream.options["enable_sleep_mode"] is False
        with pytest.raises(UnsupportedError, match="enable_sleep_mode"):
            asyncio.run(engine.sleep())


@pytest.mark.parametrize("version", ["0.31.1", "0.29.0", "dev"])
def test_a_version_that_was_not_tested_warns_once(version):
    upstream_package.warn_if_untested.cache_clear()
    with pytest.warns(UntestedUpstreamWarning, match=f"{version} is untested"):
        upstream_package.warn_if_untested(version)
    upstream_package.warn_if_untested(version)
    upstream_package.warn_if_untested("0.30.4")


def test_a_script_that_never_shuts_down_exits_and_leaves_nothing():
    script = f"""
import sys
sys.path.insert(0, {str(FAKE)!r})
from omni_notebook.engine.upstream import core, seats
from omni_notebook.engine.upstream.engine import UpstreamOmni
from omni_notebook.engine.upstream.outside import Outside
engine = UpstreamOmni("some/model", tensor_parallel_size=2)
engine._core.upstream.lies.add("hang:sleep")
engine.submit(engine.sleep([0], timeout=60))
print(*(rank.pid for stage in engine.status().stages for rank in stage.ranks))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.split()) == 3
    deadline = time.monotonic() + 5
    while (left := [pid for pid in map(int, done.stdout.split()) if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []
