"""The specification's Python example, with the import and the model changed and nothing else, in every way to run it.

It never calls shutdown: the interpreter's end does, soon, and nothing stays behind.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MIB = 1024**2
EXIT_S = 5.0
EXAMPLE = """
import asyncio
from omni_notebook import AsyncOmni

async def run_sleep_demo():
    # 1. initialization
    engine = AsyncOmni(
        model="demo",
        enable_sleep_mode=True
    )

    # 2. sleep mode level2
    acks = await engine.sleep(stage_ids=[0], level=2)
    print(f"Freed {acks[0].freed_bytes / 1024**3:.2f} GiB on Stage 0")

    # 3. wake up
    await engine.wake_up(stage_ids=[0])

"""
GUARDED = EXAMPLE + 'if __name__ == "__main__":\n    asyncio.run(run_sleep_demo())\n'
BARE = EXAMPLE + "asyncio.run(run_sleep_demo())\n"
LAST_LINE = '\nimport time\nprint("last line", time.monotonic(), flush=True)\n'


@dataclass
class Run:
    status: int
    out: str
    err: str
    exit_s: float
    left_in_tmp: list[str]
    left_in_shm: set[str]
    left_processes: list[int]


def shared_memory():
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(".org.chromium")}


def processes_of_session(session_id):
    return [pid for pid in psutil.pids() if _session_of(pid) == session_id]


def _session_of(pid):
    try:
        return os.getsid(pid)
    except OSError:
        return None


def start(command, tmp_path, **options):
    """A process in a session of its own, whose children can be told, with a temporary folder of its own."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    (tmp_path / "shm before").write_text("\n".join(shared_memory()), encoding="utf-8")
    env = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(
        command,
        cwd=tmp_path,
        env=env,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process, tmp_path, stdin=""):
    before = set((tmp_path / "shm before").read_text(encoding="utf-8").splitlines())
    out, err = process.communicate(stdin, timeout=120)
    ended = time.monotonic()
    last_line = re.search(r"^last line ([\d.]+)$", out, re.MULTILINE)
    return Run(
        status=process.returncode,
        out=out,
        err=err,
        exit_s=ended - float(last_line[1]) if last_line else float("inf"),
        left_in_tmp=[str(path) for path in (tmp_path / "tmp").rglob("*") if not path.is_dir()],
        left_in_shm=shared_memory() - before,
        left_processes=processes_of_session(process.pid),
    )


def by_script(text, folder):
    (folder / "example.py").write_text(text, encoding="utf-8")
    return [sys.executable, "example.py"], ""


def by_option(text, folder):
    return [sys.executable, "-c", text], ""


def by_stdin(text, folder):
    return [sys.executable, "-"], text


def check_clean(run):
    assert run.err == ""
    assert run.status == 0
    assert run.left_in_tmp == []
    assert run.left_in_shm == set()
    assert run.left_processes == []


@pytest.mark.quiet
@pytest.mark.parametrize(
    ("how", "text"),
    [(by_script, GUARDED), (by_script, BARE), (by_option, BARE), (by_stdin, BARE)],
    ids=["script with a guard", "script without a guard", "python -c", "stdin"],
)
def test_the_example_ends_by_itself_and_leaves_nothing(tmp_path, how, text):
    command, stdin = how(text + LAST_LINE, tmp_path)
    run = finish(start(command, tmp_path), tmp_path, stdin)
    check_clean(run)
    assert re.match(r"Freed 0\.01 GiB on Stage 0\n", run.out)
    assert run.exit_s < EXIT_S


def test_the_example_is_the_specifications_but_for_import_and_model():
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"```python\n(import asyncio.*?)```", readme, re.DOTALL)[1]
    assert _bones(shown) == _bones(GUARDED)


def _bones(code):
    """Code without comments, blank lines and the way it is broken into lines."""
    return re.sub(r"\s+", "", re.sub(r"(?m)^\s*#.*$", "", code))


# ------------------------------------------------------------------------- other ways to make and lose one

DROPPED = """
import gc
from omni_notebook import AsyncOmni
engine = AsyncOmni("demo", ballast_bytes=256 * 1024**2)
print("ready", flush=True)
input()
del engine
gc.collect()
print("dropped", flush=True)
input()
"""


def say(process, line="\n"):
    process.stdin.write(line)
    process.stdin.flush()


def test_an_engine_that_is_dropped_gives_its_memory_back(tmp_path):
    process = start([sys.executable, "-c", DROPPED], tmp_path)
    assert process.stdout.readline() == "ready\n"
    outside = psutil.Process(process.pid)
    held = outside.memory_info().rss
    say(process)
    assert process.stdout.readline() == "dropped\n"
    left = outside.memory_info().rss
    assert held - left > 500 * MIB
    assert outside.num_threads() <= 1 + len(os.sched_getaffinity(0))  # torch's own may stay
    check_clean(finish(process, tmp_path, "\n"))


IN_A_LOOP = """
import asyncio
from omni_notebook import AsyncOmni

async def main():
    engine = AsyncOmni("demo")
    ticks = []
    async def tick():
        while True:
            ticks.append(1)
            await asyncio.sleep(0.001)
    ticking = asyncio.create_task(tick())
    acks = await engine.sleep()
    await engine.wake_up()
    ticking.cancel()
    print(len(acks), [ack.ok for ack in acks], len(ticks) > 1)

asyncio.run(main())
"""


@pytest.mark.quiet
def test_an_engine_made_inside_a_running_loop_works_and_lets_the_loop_run(tmp_path):
    run = finish(start([sys.executable, "-c", IN_A_LOOP + LAST_LINE], tmp_path), tmp_path)
    check_clean(run)
    assert run.out.startswith("2 [True, True] True\n")
    assert run.exit_s < EXIT_S


INTERRUPTED = """
import os, signal, threading
from omni_notebook import AsyncOmni

def once(what, fraction):
    if fraction >= FRACTION:
        os.kill(os.getpid(), signal.SIGINT)

AsyncOmni("demo").shutdown()
print("warm", flush=True)
input()
try:
    AsyncOmni("demo", ballast_bytes=256 * 1024**2, progress=once)
except KeyboardInterrupt:
    print("interrupted", [t.name for t in threading.enumerate() if t.name != "MainThread"], flush=True)
input()
"""


@pytest.mark.parametrize("fraction", [0.0, 0.5], ids=["before the first stage", "between the stages"])
def test_an_interrupt_while_constructing_leaves_nothing(tmp_path, fraction):
    process = start([sys.executable, "-c", f"FRACTION = {fraction}\n{INTERRUPTED}"], tmp_path)
    assert process.stdout.readline() == "warm\n"
    outside = psutil.Process(process.pid)
    before = outside.memory_info().rss
    say(process)
    assert process.stdout.readline() == "interrupted []\n"
    assert outside.memory_info().rss - before < 64 * MIB
    check_clean(finish(process, tmp_path, "\n"))
