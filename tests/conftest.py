"""What every test gets: private homes for Jupyter, IPython and ledger, a turn; and that a whole run lets none skip.

A run that is not about GPUs (tests/gpu, tests/vllm, `-m gpu`) sees none.
Under OMNI_TEST_ALL=1 a skip is a failure, but for tests marked `gpu`: a machine that claims to have run everything has.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings

from tests import alone, turns

TEST_ALL = os.environ.get("OMNI_TEST_ALL") == "1"
HOME = pytest.StashKey[Path]()
TURNS = pytest.StashKey[turns.Turns | None]()


def wants_gpus(args, marks):
    """Whether a run is about GPUs, by its paths and its `-m`."""
    named = any(f"tests/{folder}" in arg for arg in args for folder in ("gpu", "vllm"))
    return named or ("gpu" in marks and "not gpu" not in marks)


def pytest_configure(config):
    """Keep IPython, Jupyter, matplotlib and engines out of the person's own files; set before a test imports them."""
    home = tempfile.mkdtemp(prefix="omni-tests-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)  # first in, last out: IPython still writes its history
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        os.environ[name] = f"{home}/{name.lower()}"
    os.environ["OMNI_NOTEBOOK_LEDGER"] = f"{home}/ledger/ledger.db"
    config.stash[HOME] = Path(home)
    config.stash[TURNS] = turns.Turns(Path(config.workerinput["turns"])) if hasattr(config, "workerinput") else None
    os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")
    os.environ["MPLBACKEND"] = "agg"
    if not wants_gpus(config.args, config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # device="auto" is a CPU for tests that measure one
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and its children do
    settings.register_profile("ci", derandomize=True, deadline=None)  # a landing must not depend on luck
    if TEST_ALL:
        settings.load_profile("ci")


def pytest_configure_node(node):
    """Each of several processes learns where they take turns."""
    node.workerinput["turns"] = str(node.config.stash[HOME])


def pytest_xdist_make_scheduler(config, log):
    return turns.ByModule(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Waiting for a turn is outside a test's time limit."""
    if item.config.stash[TURNS] is None:
        return (yield)
    quiet = any(item.get_closest_marker(name) for name in ("quiet", "vllm"))  # vLLM's ranks take every processor
    with item.config.stash[TURNS].turn(quiet=quiet):
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Tests marked `alone` run in a child."""
    if not alone.is_child():
        alone.replace(items)


def pytest_runtest_logreport(report):
    """A child says what it found."""
    if alone.is_child():
        alone.tell(report)


@pytest.fixture(scope="module", autouse=True)
def _a_small_heap():
    """What a run has made so far stays out of the collector's sight: looking through it took a second each time.

    A module's own garbage goes at its end, so that what it forgot to close is its own finding.
    """
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _every_thread_of_ours_has_ended():
    """What a module leaves running would be another's finding, in an order that comes once in many runs."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 10
    while left := [t.name for t in set(threading.enumerate()) - before if t.name.startswith("omni-")]:
        assert time.monotonic() < deadline, f"threads of this module go on: {', '.join(sorted(left))}"
        time.sleep(0.02)


def _forbid(report):
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: under OMNI_TEST_ALL=1 only tests marked `gpu` may skip. {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    expected_failure = hasattr(report, "wasxfail")
    if TEST_ALL and report.skipped and not expected_failure and item.get_closest_marker("gpu") is None:
        _forbid(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector):
    report = yield
    if TEST_ALL and report.skipped:  # `pytest.skip(allow_module_level=True)` or `importorskip`: no marker to ask for
        _forbid(report)
    return report
