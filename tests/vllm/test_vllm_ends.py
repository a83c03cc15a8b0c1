"""How vLLM's processes end, by someone's hand or their own: the cause is named, nothing is left, others go on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

from omni_notebook.config import DEMO_FOLDER
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import ConfigError, StageFailedError, WorkerDiedError
from omni_notebook.worker.vllm import leftovers
from omni_notebook.worker.vllm.versions import UntestedVersionWarning, warn_if_untested
from tests.engine.engine_helpers import collect, until
from tests.vllm.conftest import NOTHING, SMALL, Left

if TYPE_CHECKING:
    from collections.abc import Iterator

THINKER = str(DEMO_FOLDER / "thinker")


@pytest.fixture
def before() -> Left:
    return Left.now()


@pytest.fixture(scope="module")
def pair() -> Iterator[AsyncOmni]:
    """The demo, its thinker on vLLM with two ranks."""
    thinker = {"runtime": "vllm", "tensor_parallel_size": 2, "engine_args": SMALL}
    with AsyncOmni("demo", stage_overrides={0: thinker}) as pair:
        yield pair


def _host(engine: AsyncOmni) -> int:
    """The process id of the host."""
    return psutil.Process(_core(engine)).ppid()


def _core(engine: AsyncOmni) -> int:
    """The process id of vLLM's engine core: the parent of the ranks' processes."""
    return psutil.Process(engine.status().stages[0].ranks[0].pid).ppid()


@pytest.mark.parametrize("victim", ["rank 1", "vLLM's engine core"])
def test_a_process_that_is_killed_fails_the_stage_by_name_and_a_restart_serves_again(
    pair: AsyncOmni, before: Left, victim: str
) -> None:
    async def scenario() -> None:
        golden = (await collect(pair, output_modalities="text"))[-1].text
        pid = pair.status().stages[0].ranks[1].pid if victim == "rank 1" else _core(pair)
        os.kill(pid, signal.SIGSTOP)
        running = asyncio.create_task(collect(pair, output_modalities="text"))
        executor = pair._core.stages[0].replicas[0].executor
        asking = asyncio.wrap_future(pair.submit(executor.ask_host("order", "ping", msgspec.msgpack.encode(()), None)))
        await until(lambda: pair.status().stages[0].running == 1)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: str(pair.status().stages[0].state) == "FAILED")
        with pytest.raises(StageFailedError, match=re.escape(f"{victim} (pid {pid}) ended")):
            await running
        with pytest.raises(WorkerDiedError, match=re.escape(f"{victim} (pid {pid}) ended")):
            await asking
        stage = pair.status().stages[0]
        assert f"{victim} (pid {pid}) ended" in stage.last_error
        assert "restart(0)" in stage.last_error
        assert [rank.alive for rank in stage.ranks] == [False, False]
        with pytest.raises(StageFailedError):
            await pair.sleep([0], level=1)
        picture = await pair.sleep([1], level=1)
        assert [ack.status for ack in picture] == ["SUCCESS"]
        await pair.wake_up([1])
        await pair.restart(0)
        assert (await collect(pair, output_modalities="text"))[-1].text == golden

    asyncio.run(scenario())


def test_a_host_that_is_killed_leaves_nothing_and_a_restart_serves_again(pair: AsyncOmni) -> None:
    async def scenario() -> None:
        golden = (await collect(pair, output_modalities="text"))[-1].text
        core = psutil.Process(_core(pair))
        host = core.parent()
        memory = [Path(one.path) for one in core.memory_maps() if one.path.startswith("/dev/shm/psm_")]
        folders = [Path(one.laddr).parent for one in host.net_connections("unix") if one.laddr.endswith("/ranks")]
        assert memory
        assert folders
        host.kill()
        await until(lambda: str(pair.status().stages[0].state) == "FAILED")
        assert "the host process of vLLM of stage 0 was killed by SIGKILL" in pair.status().stages[0].last_error
        await until(lambda: not any(path.exists() for path in (*memory, *folders)), seconds=5)
        await pair.restart(0)
        assert (await collect(pair, output_modalities="text"))[-1].text == golden

    asyncio.run(scenario())


SOMEBODY = """
import mmap, sys
from multiprocessing import get_context, shared_memory
sys.stdin.readline()
files = [open(path, "r+b") for path in sys.argv[1:]]
theirs = [mmap.mmap(file.fileno(), 0) for file in files]
mine = shared_memory.SharedMemory(create=True, size=4096)
lock = get_context("spawn").Lock()
print(mine.name, lock._semlock.name, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_group_made_is_removed_and_no_file_of_the_user_s_that_it_had_mapped(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as theirs, tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        checkpoint = Path(theirs) / "model.safetensors"
        for path in (checkpoint, Path(file.name)):
            path.write_bytes(b"x" * 4096)
        command = [sys.executable, "-c", SOMEBODY, checkpoint, file.name]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        folder = tmp_path / "folder"
        folder.mkdir()
        with subprocess.Popen(command, process_group=0, **pipes) as group:
            left = leftovers.Leftovers(group.pid, folder)
            group.stdin.write("go\n")
            group.stdin.flush()
            made = [Path("/dev/shm") / name for name in _named(group.stdout.readline())]
            assert all(path.exists() for path in made)
            left.look()
            os.killpg(group.pid, signal.SIGKILL)
        left.clean()
        assert not any(path.exists() for path in (*made, folder))
        assert checkpoint.exists()
        assert Path(file.name).exists()


def _named(line: str) -> list[str]:
    """The files of a shared memory and a semaphore with these names."""
    memory, semaphore = line.split()
    return [memory, f"sem.{semaphore.removeprefix('/')}"]


def _broken(folder: Path) -> str:
    shutil.copytree(THINKER, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return str(folder)


FAIL: dict[str, tuple[dict[str, Any], bool, str]] = {
    "unknown option": ({"no_such_option": 1}, False, "unexpected keyword argument 'no_such_option'"),
    "no room for the cache": (
        {"kv_cache_memory_bytes": 1024},
        False,
        "vailable memory for the cache|available KV cache memory",
    ),
    "half a checkpoint": ({}, True, r"model\.safetensors: not a whole safetensors file: .*Nothing was started"),
}


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each start of `FAIL` said; most of a start is imports, which take one processor, so all begin at once."""
    half = _broken(tmp_path_factory.mktemp("half") / "thinker")
    before = Left.now()

    def start(what: str) -> str:
        arguments, broken, _ = FAIL[what]
        with pytest.raises(ConfigError) as caught:
            AsyncOmni(half if broken else THINKER, runtime="vllm", engine_args={**SMALL, **arguments})
        return str(caught.value)

    with ThreadPoolExecutor() as pool:
        said = dict(zip(FAIL, pool.map(start, FAIL), strict=True))
    asyncio.run(until(lambda: before.since() == NOTHING))
    return said


@pytest.mark.parametrize("what", FAIL)
def test_a_start_that_fails_says_the_root_cause_and_leaves_nothing(failed: dict[str, str], what: str) -> None:
    *_, message = FAIL[what]
    assert re.search(message, failed[what])


class Enough(Exception):  # noqa: N818  (a wish, not an error)
    """Raised by whoever no longer wants a start."""


def test_a_start_that_is_called_off_ends_long_before_vllm_is_ready_and_leaves_nothing(before: Left) -> None:
    children = set(psutil.Process().children())

    def progress(_label: str, _fraction: float) -> None:
        if set(psutil.Process().children()) - children:
            raise Enough

    began_s = time.perf_counter()
    with pytest.raises(Enough):
        AsyncOmni(THINKER, runtime="vllm", engine_args=SMALL, progress=progress)
    assert time.perf_counter() - began_s < 8
    assert set(psutil.Process().children()) <= children
    asyncio.run(until(lambda: before.since() == NOTHING))


KERNEL = f"""
from omni_notebook import AsyncOmni
engine = AsyncOmni({THINKER!r}, runtime="vllm", engine_args={SMALL!r})
"""
SHUTS_DOWN = f"""
{KERNEL}
import json, logging, sys, time
handlers = [len(logging.getLogger(name).handlers) for name in (None, "vllm")]
logs = engine.logs(0)
began_s = time.perf_counter()
engine.shutdown()
print(json.dumps(["vllm" in sys.modules, handlers, logs, time.perf_counter() - began_s]), flush=True)
sys.stdin.read()
"""


def test_a_kernel_s_process_stays_as_it_was_and_a_shutdown_is_quick_and_leaves_nothing(before: Left) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SHUTS_DOWN], **pipes) as kernel:
        try:
            line = kernel.stdout.readline()
            if not line:
                pytest.fail(kernel.communicate(timeout=20)[1])
            vllm, handlers, logs, shutdown_s = json.loads(line)
            asyncio.run(until(lambda: before.since() == NOTHING))  # while the kernel goes on
            _, errors = kernel.communicate(timeout=20)
        finally:
            kernel.kill()
    assert kernel.returncode == 0
    assert not vllm
    assert handlers == [0, 0]
    assert any("vllm" in line.lower() for line in logs)
    assert errors == ""
    assert shutdown_s < 5


SLEEPS = f"""
{KERNEL}
print("ready", flush=True)
import time
time.sleep(600)
"""


@pytest.mark.parametrize("moment", ["while it starts", "when it is ready"])
def test_nothing_outlives_a_kernel_that_is_killed(before: Left, moment: str) -> None:
    kernel = subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with kernel:
        kernel.stdin.write(SLEEPS)
        kernel.stdin.close()
        if moment == "when it is ready":
            assert kernel.stdout.readline() == "ready\n"
        else:
            asyncio.run(until(lambda: before.since().pids, seconds=60))
        kernel.kill()
    asyncio.run(until(lambda: not before.since().pids, seconds=10))
    if moment == "when it is ready":
        asyncio.run(until(lambda: not before.since().memory, seconds=10))


@pytest.mark.parametrize(("version", "warned"), [("0.23.1", True), ("0.24.0", False), ("0.32.0", False), ("1.0", True)])
def test_an_untested_version_warns_once(version: str, warned: bool) -> None:
    warn_if_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_untested(version)
        warn_if_untested(version)
    assert [one.category for one in caught] == [UntestedVersionWarning] * warned
