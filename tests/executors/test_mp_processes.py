"""Real parents: every way to start, every way to be killed, and what the machine looks like after."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from jupyter_core.utils import ensure_event_loop

from tests.executors.executor_helpers import gone, runs, shared_files, wait_until, workers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
RANKS = """
import asyncio, os, sys
import numpy
from omni_notebook.executors.mp.executor import MpExecutor
from tests.executors.executor_helpers import make_specs

async def main(order=None, *args):
    executor = MpExecutor(make_specs(2), worker="tests.executors.echo_worker:EchoWorker")
    ranks = [a.value for a in await executor.call("rank")]
    sums = [a.value.sum() for a in await executor.call("echo", numpy.ones(50_000))]
    print([ranks, [r.pid for r in executor.memory()], [int(s) for s in sums]], flush=True)
    if order:
        task = asyncio.create_task(executor.call(order, *args))
        await asyncio.sleep(0.3)
        print("ordered", flush=True)
        await asyncio.sleep(600)
    executor.shutdown()
    while not executor.ended:
        await asyncio.sleep(0.005)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def python(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=60, check=False, env=environment(), **options
    )


def as_script(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "plain script.py"
    path.write_text(RANKS + "\nasyncio.run(main())\n", encoding="utf-8")
    return python(str(path), cwd=tmp_path)


def as_guarded_script(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "guarded.py"
    path.write_text(RANKS + "\nif __name__ == '__main__':\n    asyncio.run(main())\n", encoding="utf-8")
    return python(str(path), cwd=tmp_path)


def as_command(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return python("-c", RANKS + "\nasyncio.run(main())", cwd=tmp_path)


def as_stdin(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return python("-", input=RANKS + "\nasyncio.run(main())\n", cwd=tmp_path)


def as_module_beside_traps(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """A folder whose files are called like modules that a child imports."""
    (tmp_path / "socket.py").write_text("raise RuntimeError('imported the wrong socket')", encoding="utf-8")
    return python("-P", "-c", RANKS + "\nasyncio.run(main())", cwd=tmp_path)


STARTS = [as_script, as_guarded_script, as_command, as_stdin, as_module_beside_traps]


@pytest.mark.quiet
@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)
def test_ranks_start_from_anywhere_and_leave_nothing(start: Callable[[Path], Any], tmp_path: Path) -> None:
    before = shared_files()
    done = start(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    ranks, pids, sums = ast.literal_eval(done.stdout)
    assert (ranks, sums) == ([0, 1], [50_000, 50_000])
    assert gone(pids)
    wait_until(lambda: shared_files() <= before)


class Parent:
    """A parent process with two ranks, in the middle of an order."""

    def __init__(self, body: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANKS + textwrap.dedent(body)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.ranks: list[int] = ast.literal_eval(self.process.stdout.readline())[1]
        assert self.process.stdout.readline() == "ordered\n"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def parent() -> Iterator[Callable[[str], Parent]]:
    made = []

    def start(body: str) -> Parent:
        made.append(Parent(body))
        return made[-1]

    yield start
    for one in made:
        one.close()


BUSY = {
    "idle": "asyncio.run(main('rank'))",
    "waiting": "asyncio.run(main('wait', 600.0))",
    "C code that keeps the interpreter": "asyncio.run(main('hog', 600))",
    "stopped": "asyncio.run(main('stop_self'))",
    "grandchildren": "asyncio.run(main('spawn'))",
}


@pytest.mark.quiet
@pytest.mark.parametrize("body", BUSY.values(), ids=BUSY.keys())
def test_ranks_end_within_a_second_of_a_killed_parent(parent: Callable[[str], Parent], body: str) -> None:
    before = shared_files()
    one = parent(body)
    assert all(runs(pid) for pid in one.ranks)
    one.process.kill()
    started = time.monotonic()
    wait_until(lambda: gone(one.ranks), 5)
    assert time.monotonic() - started < 1
    wait_until(lambda: shared_files() <= before)


def test_a_forked_copy_of_the_parent_does_not_keep_the_ranks(parent: Callable[[str], Parent]) -> None:
    body = """
    async def forked():
        task = asyncio.create_task(main("wait", 600.0))
        await asyncio.sleep(1.0)
        if os.fork() == 0:
            import time
            time.sleep(600)
        await task
    asyncio.run(forked())
    """
    one = parent(body)
    wait_until(lambda: len(psutil.Process(one.process.pid).children()) == 3, 5)
    copies = [p for p in psutil.Process(one.process.pid).children() if p.pid not in one.ranks]
    try:
        one.process.kill()
        wait_until(lambda: gone(one.ranks), 1)
    finally:
        for copy in copies:
            copy.kill()


def test_ctrl_c_at_the_parent_does_not_reach_the_ranks(parent: Callable[[str], Parent]) -> None:
    body = """
    import signal
    async def listening():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: print("interrupted", flush=True))  # wakes the loop for sure
        await main("wait", 600.0)
    asyncio.run(listening())
    """
    one = parent(body)
    os.killpg(one.process.pid, signal.SIGINT)
    assert one.process.stdout is not None
    assert one.process.stdout.readline() == "interrupted\n"
    time.sleep(0.2)
    assert all(runs(pid) for pid in one.ranks)
    os.kill(one.ranks[0], signal.SIGINT)
    time.sleep(0.2)
    assert runs(one.ranks[0])


def test_ranks_share_the_scheduling_group_of_their_parent(parent: Callable[[str], Parent]) -> None:
    """A session of their own would be an autogroup of their own: beside ranks that compute, the kernel then let a
    parent that mostly waits stand runnable for a second and a half, and tokens came in one lump at the end."""
    one = parent("asyncio.run(main('wait', 600.0))")
    assert {os.getsid(pid) for pid in one.ranks} == {os.getsid(one.process.pid)}
    assert os.getpgid(one.process.pid) not in {os.getpgid(pid) for pid in one.ranks}
    group = Path(f"/proc/{one.process.pid}/autogroup")
    if group.exists():
        assert {Path(f"/proc/{pid}/autogroup").read_text() for pid in one.ranks} == {group.read_text()}


def test_a_parent_that_ends_by_an_exception_leaves_nothing(parent: Callable[[str], Parent]) -> None:
    one = parent("""
    async def failing():
        task = asyncio.create_task(main("wait", 600.0))
        await asyncio.sleep(1.5)
        raise SystemExit(5)
    asyncio.run(failing())
    """)
    assert one.process.wait(10) == 5
    wait_until(lambda: gone(one.ranks), 1)


ENGINE = """
import asyncio
from omni_notebook import AsyncOmni
engine = AsyncOmni("demo", executor="mp")
async def main():
    acks = await engine.sleep(level=1)
    await engine.wake_up()
    outputs = [o async for o in engine.generate("a red star", sampling_params={"num_inference_steps": 4})]
    print([[a.status for a in acks], [a.metadata["pid"] for a in acks], len(outputs[-1].images)])
asyncio.run(main())
"""


@pytest.mark.quiet
def test_an_engine_that_nobody_shuts_down_exits_cleanly(tmp_path: Path) -> None:
    path = tmp_path / "careless.py"
    path.write_text(ENGINE, encoding="utf-8")
    before = shared_files()
    done = python(str(path))
    assert (done.returncode, done.stderr) == (0, "")
    status, pids, n_images = ast.literal_eval(done.stdout)
    assert (status, n_images) == (["SUCCESS", "SUCCESS"], 1)
    assert gone(pids)
    wait_until(lambda: shared_files() <= before)


# ------------------------------------------------------------------------------------------ a notebook


class Kernel:
    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3", startup_timeout=60, env=environment())

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)  # type: ignore[union-attr]

    def run(self, code: str) -> str:
        """What a cell prints; its error fails the test."""
        text: list[str] = []

        def note(message: Any) -> None:
            if message["msg_type"] == "stream":
                text.append(message["content"]["text"])
            assert message["msg_type"] != "error", "\n".join(message["content"]["traceback"])

        self.client.execute_interactive(code, timeout=60, allow_stdin=False, output_hook=note)
        return "".join(text)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture(scope="module")
def loop() -> Iterator[None]:
    yield
    ensure_event_loop().close()  # jupyter_client made it for this thread


@pytest.fixture
def kernel(loop: None) -> Iterator[Kernel]:
    one = Kernel()
    yield one
    one.close()


START = """
from omni_notebook import AsyncOmni
engine = AsyncOmni("demo", executor="mp")
print([rank.pid for stage in engine.status().stages for rank in stage.ranks])
"""
USE = """
outputs = [o async for o in engine.generate("a red star", sampling_params={"num_inference_steps": 4})]
acks = await engine.sleep(level=2), await engine.wake_up()
print(len(outputs[-1].images), *[[a.status for a in each] for each in acks])
"""


@pytest.mark.quiet
def test_a_cell_starts_ranks_that_bear_an_interrupt_and_end_with_the_kernel(kernel: Kernel) -> None:
    before = shared_files()
    pids = ast.literal_eval(kernel.run(START))
    assert sorted(workers_of(kernel.pid)) == sorted(pids)
    kernel.manager.interrupt_kernel()
    time.sleep(0.3)
    assert kernel.run(USE) == "1 ['SUCCESS', 'SUCCESS'] ['SUCCESS', 'SUCCESS']\n"
    assert all(runs(pid) for pid in pids)
    os.kill(kernel.pid, signal.SIGKILL)
    started = time.monotonic()
    wait_until(lambda: gone(pids), 5)
    assert time.monotonic() - started < 1
    wait_until(lambda: shared_files() <= before)


def test_a_restarted_kernel_leaves_no_rank(kernel: Kernel) -> None:
    pids = ast.literal_eval(kernel.run(START))
    kernel.manager.restart_kernel(now=False)
    wait_until(lambda: gone(pids), 5)
