"""How vLLM's processes end, by someone's hand or their own: the cause is named, nothing is left, others go on."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest

from omni_notebook.config import DEMO_FOLDER
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import ConfigError, StageFailedError, WorkerDiedError
from omni_notebook.worker.vllm import leftovers
from omni_notebook.worker.vllm.versions import UntestedVersionWarning, warn_if_untested
from tests.engine.engine_helpers import collect, until
from tests.vllm import falling
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


def test_a_step_that_raises_fails_the_stage_and_everybody_hears_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falling.install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    engine = AsyncOmni(THINKER, runtime="vllm", engine_args=SMALL)

    async def scenario() -> None:
        golden = (await collect(engine))[-1].text
        with pytest.raises(StageFailedError, match=rf"ended, .*{falling.WORDS}'\); .*restart\(0\)"):
            await collect(engine, falling.FALLS)
        await until(lambda: str(engine.status().stages[0].state) == "FAILED")
        assert falling.WORDS in engine.status().stages[0].last_error
        await engine.restart(0)
        assert (await collect(engine))[-1].text == golden

    with engine:
        asyncio.run(scenario())


def test_an_engine_core_of_one_rank_that_hangs_is_replaced_at_the_deadline_and_its_request_goes_on(
    before: Left, llama: Path
) -> None:
    engine = AsyncOmni(str(llama), runtime="vllm", engine_args=SMALL)

    async def scenario() -> None:
        asked = {"prompt": {"prompt_token_ids": [5] * 40}, "sampling_params": {"max_tokens": 600}}
        golden = (await collect(engine, **asked))[-1].outputs[0].token_ids
        running = asyncio.create_task(collect(engine, **asked))
        await until(lambda: engine.status().stages[0].running == 1)
        os.kill(engine.status().stages[0].ranks[0].pid, signal.SIGSTOP)
        await engine.restart(0, timeout=2)
        assert (await running)[-1].outputs[0].token_ids == golden

    with engine:
        asyncio.run(scenario())
    asyncio.run(until(lambda: before.since() == NOTHING))


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


def test_a_long_temporary_folder_is_no_obstacle(before: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with pytest.raises(ConfigError, match="unexpected keyword argument 'no_such_option'"):  # it got that far
        AsyncOmni(THINKER, runtime="vllm", engine_args={**SMALL, "no_such_option": 1})
    asyncio.run(until(lambda: before.since() == NOTHING))


def _broken(folder: Path) -> str:
    shutil.copytree(THINKER, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "broken", "message"),
    [
        ({"no_such_option": 1}, False, "unexpected keyword argument 'no_such_option'"),
        (
            {"kv_cache_memory_bytes": 1024},
            False,
            "vailable memory for the cache|available KV cache memory",
        ),
        ({}, True, "SafetensorError: .*file not fully covered"),
    ],
    ids=["unknown option", "no room for the cache", "half a checkpoint"],
)
def test_a_start_that_fails_says_the_root_cause_and_leaves_nothing(
    before: Left, tmp_path: Path, arguments: dict, broken: bool, message: str
) -> None:
    model = _broken(tmp_path / "half") if broken else THINKER
    with pytest.raises(ConfigError, match=message):
        AsyncOmni(model, runtime="vllm", engine_args={**SMALL, **arguments})
    asyncio.run(until(lambda: before.since() == NOTHING))


def test_a_restart_that_fails_leaves_nothing_and_the_next_one_serves(before: Left, tmp_path: Path) -> None:
    engine = AsyncOmni(THINKER, runtime="vllm", engine_args=SMALL)

    async def scenario() -> None:
        golden = (await collect(engine))[-1].text
        folder = shutil.copytree(THINKER, tmp_path / "gone")
        await engine.load_weights(0, str(folder))
        shutil.rmtree(folder)
        with pytest.raises(ConfigError, match="gone"):
            await engine.restart(0)
        await until(lambda: before.since() == NOTHING)
        assert str(engine.status().stages[0].state) == "FAILED"
        shutil.copytree(THINKER, folder)
        await engine.restart(0)
        assert (await collect(engine))[-1].text == golden

    with engine:
        asyncio.run(scenario())


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
print("ready", flush=True)
import time
time.sleep(600)
"""


@pytest.mark.parametrize("moment", ["while it starts", "when it is ready"])
def test_nothing_outlives_a_kernel_that_is_killed(before: Left, moment: str) -> None:
    kernel = subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with kernel:
        kernel.stdin.write(KERNEL)
        kernel.stdin.close()
        if moment == "when it is ready":
            assert kernel.stdout.readline() == "ready\n"
        else:
            asyncio.run(until(lambda: before.since().pids, seconds=60))
        kernel.kill()
    asyncio.run(until(lambda: not before.since().pids, seconds=10))
    if moment == "when it is ready":
        asyncio.run(until(lambda: not before.since().memory, seconds=10))


def test_a_shutdown_is_quick_and_leaves_nothing(before: Left) -> None:
    engine = AsyncOmni(THINKER, runtime="vllm", engine_args=SMALL)
    began_s = time.perf_counter()
    engine.shutdown()
    assert time.perf_counter() - began_s < 5
    asyncio.run(until(lambda: before.since() == NOTHING))


@pytest.mark.parametrize(("version", "warned"), [("0.23.1", True), ("0.24.0", False), ("0.32.0", False), ("1.0", True)])
def test_an_untested_version_warns_once(version: str, warned: bool) -> None:
    warn_if_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_untested(version)
        warn_if_untested(version)
    assert [one.category for one in caught] == [UntestedVersionWarning] * warned
