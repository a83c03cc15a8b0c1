"""Pools that are closed again, and scripts run in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from omni_notebook.memory.cpu import CpuPool
from tests.memory.fake_cuda import Rig
from tests.memory.machines import MACHINES


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
    return Rig(machine=request.param())


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
