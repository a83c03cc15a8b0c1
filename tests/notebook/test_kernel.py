"""A real kernel, spoken to as a notebook does."""

import asyncio
import contextlib
import math
import re
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel
from jupyter_core.utils import ensure_event_loop

from tests.engine.weights_helpers import FILE, FOLDERS

START = "%load_ext omni_notebook\nengine = %omni start"
HOLD = """
async def paint():
    async for out in engine.generate("a red star", sampling_params={"num_inference_steps": 300, "seed": 1}):
        pass
import time
request = engine.submit(paint())
while not any(stage.running and stage.stage_id == 1 for stage in engine.status().stages):
    time.sleep(0.02)
"""
WATCH = """
import pathlib, sys, threading
watching = threading.Event()
def watch():
    while not watching.wait(0.002):
        if {seen}:
            return pathlib.Path({path!r}).touch()
threading.Thread(target=watch, daemon=True).start()
"""
IDLE = """
import time
while any(stage.running or stage.queued for stage in engine.status().stages):
    time.sleep(0.01)
"""
WAITING = "engine.status().stages[1].state != 'AWAKE'"


@dataclass
class Reply:
    status: str
    text: str = ""
    error: list[str] = field(default_factory=list)
    shown: list[dict] = field(default_factory=list)
    updates: list[dict] = field(default_factory=list)
    seconds: float = 0.0


class Kernel:
    def __init__(self):
        self.manager, self.client = start_new_kernel(kernel_name="python3", startup_timeout=60)

    def run(self, code, interrupt_once=None, timeout=60):
        """Execute; once the expression `interrupt_once` is true in the kernel, interrupt it and begin to time it."""
        with contextlib.ExitStack() as stack:
            pressed = stack.enter_context(self._interrupted(interrupt_once)) if interrupt_once else [time.monotonic()]
            reply = self._execute(code, timeout)
            reply.seconds = time.monotonic() - pressed[-1] if pressed else math.inf
        return reply

    def _execute(self, code, timeout=60):
        reply = Reply("")
        got = self.client.execute_interactive(
            code, timeout=timeout, allow_stdin=False, output_hook=lambda message: self.note(message, reply)
        )
        reply.status = got["content"]["status"]
        return reply

    @contextlib.contextmanager
    def _interrupted(self, seen):
        pressed, over = [], threading.Event()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "seen")
            assert self._execute(WATCH.format(seen=seen, path=str(path))).status == "ok"

            def press():
                while not over.wait(0.002):
                    if path.exists():
                        pressed.append(time.monotonic())
                        self.interrupt()
                        return

            thread = threading.Thread(target=press)
            thread.start()
            try:
                yield pressed
            finally:
                over.set()
                thread.join()
                self._execute("watching.set()")

    def interrupt(self):
        """What a notebook's stop button does; in a loop of its own, because it runs in a thread of its own."""
        asyncio.run(self.manager._async_interrupt_kernel())

    @staticmethod
    def note(message, reply):
        content = message["content"]
        if message["msg_type"] == "stream":
            reply.text += content["text"]
        elif message["msg_type"] == "error":
            reply.error += content["traceback"]
        elif message["msg_type"] == "update_display_data":
            reply.updates.append(content["data"])
        elif "data" in content and not message["msg_type"].startswith("comm_"):
            reply.shown.append(content["data"])

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture(scope="module", autouse=True)
def _loop():
    yield
    ensure_event_loop().close()  # jupyter_client made it for this thread


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    started = kernel.run(START)
    assert (started.status, started.error) == ("ok", [])
    yield kernel
    kernel.close()


@pytest.fixture(autouse=True)
def _awake(request):
    """Whatever a test did, the next one finds the stages awake, open and idle."""
    yield
    if "kernel" in request.fixturenames:
        request.getfixturevalue("kernel").run("%omni wake\n%omni resume\n" + IDLE)


def test_a_cell_sleeps_and_wakes_a_stage(kernel):
    asleep = kernel.run("%omni sleep 0 --level 2 --out acks")
    assert asleep.status == "ok"
    data = asleep.shown[-1]
    assert {"text/plain", "text/html", "image/png"} <= set(data)
    assert "✓ SUCCESS" in data["text/plain"]
    said = kernel.run("print(acks[0].freed_bytes > 0, acks[0].ok, engine.status().stages[0].state)")
    assert said.text == "True True ASLEEP\n"
    assert kernel.run("%omni wake 0").status == "ok"
    assert kernel.run("print(engine.status().stages[0].state)").text == "AWAKE\n"


def test_a_prompt_in_a_cell_gives_text_and_a_picture(kernel):
    made = kernel.run("%%omni generate --seed 42 --steps 4\na red star above a blue circle")
    assert made.status == "ok"
    assert re.search(r"seed 42 · 4 steps · guidance 2 · \d+\.\d\d s\n$", made.text)
    assert "image/png" in made.shown[-1]


def test_an_interrupt_ends_a_waiting_sleep_and_names_the_state(kernel):
    kernel.run(HOLD)
    broken = kernel.run("%omni sleep 1 --mode wait", interrupt_once=WAITING)
    assert broken.status == "error"
    assert len(broken.error) == 1
    assert "interrupted" in broken.error[0]
    assert "interrupted and rolled back; now stage 1 (painter) is AWAKE" in broken.error[0]
    assert broken.seconds < 2.0
    assert kernel.run("%omni traceback").text.startswith("from: %omni sleep 1 --mode wait\nTraceback")
    assert kernel.run("request.cancel()\nprint(engine.status().stages[1].state)").text == "AWAKE\n"


INTERRUPT = """
import os, signal, time
from omni_notebook.notebook.frontend import NotebookFrontend
from omni_notebook.verbs import sleeping
from omni_notebook.verbs.session import session
"""
AT_THE_END = """
def interrupted(future, gauge, tick):
    acks = future.result()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
session().frontend.wait = interrupted
try:
    %omni sleep 0 --level 2
finally:
    del session().frontend.wait
"""
AT_THE_START = """
class Interrupting(sleeping.MemoryGauge):
    def __init__(self, *args, **options):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
kept, sleeping.MemoryGauge = sleeping.MemoryGauge, Interrupting
try:
    %omni sleep 0 --level 2
finally:
    sleeping.MemoryGauge = kept
"""
AT_THE_REPLACEMENT = """
wait = session().frontend.wait
def interrupted(future, gauge, tick):
    if gauge is not None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    return wait(future, gauge, tick)
session().frontend.wait = interrupted
try:
    %omni start --replace
finally:
    del session().frontend.wait
"""


def test_an_interrupt_that_comes_too_late_says_so_and_keeps_the_answers(kernel):
    broken = kernel.run(INTERRUPT + AT_THE_END)
    assert (
        "interrupted too late: the sleep ended (omni_notebook.last_acks() has the answers); now stage 0 (thinker) is "
        "ASLEEP (level 2): %omni wake 0 wakes it"
    ) in broken.error[0]
    assert kernel.run("import omni_notebook as omni; print(len(omni.last_acks()))").text == "1\n"


def test_an_interrupt_before_anything_happened_names_the_state_and_warns_of_nothing(kernel):
    broken = kernel.run(INTERRUPT + AT_THE_START)
    assert len(broken.error) == 1
    assert "interrupted; now stage 0 (thinker) is AWAKE" in broken.error[0]
    assert kernel.run("import gc; gc.collect()").text + broken.text == ""


def test_an_interrupt_ends_a_generate(kernel):
    broken = kernel.run("%%omni generate --steps 300\na red star", interrupt_once="engine.status().stages[1].running")
    assert broken.status == "error"
    assert len(broken.error) == 1
    assert "\n" not in broken.error[0]
    assert "interrupted: the request was aborted; now stage 0" in broken.error[0]
    assert broken.seconds < 2.0
    assert kernel.run("%%omni generate --steps 2\na red star").status == "ok"


def test_an_interrupt_works_in_a_cell_that_also_awaits(kernel):
    kernel.run(HOLD)
    code = "import asyncio\nawait asyncio.sleep(0)\n%omni sleep 1 --mode wait"
    broken = kernel.run(code, interrupt_once=WAITING)
    assert broken.status == "error"
    assert "stage 1 (painter) is AWAKE" in broken.error[0]
    kernel.run("request.cancel()")


@pytest.mark.quiet
def test_an_interrupt_ends_an_awaited_order_at_once(kernel):
    kernel.run(HOLD)
    broken = kernel.run("await engine.sleep([1], mode='wait')", interrupt_once=WAITING)
    assert (broken.status, broken.error[-1].split()[0]) == ("error", "\x1b[31mCancelledError\x1b[39m:")
    assert broken.seconds < 1.0
    assert kernel.run("request.cancel()\n%omni wake 1\nprint(engine.status().stages[1].state)").text.endswith("AWAKE\n")


def test_an_awaited_sleep_works_beside_the_magic(kernel):
    said = kernel.run("acks = await engine.sleep([0], level=1)\nprint(acks[0].ok)\n%omni wake 0")
    assert said.status == "ok"
    assert said.text.startswith("True\n")


SLOWLY = f"""
import time
from safetensors.torch import load_file
from omni_notebook.stages import tensor_source
tensor_source.CHUNK_BYTES = 65536
handed = 0
def slowly(tensors):
    global handed
    for pair in tensors.items():
        time.sleep(0.05)
        yield pair
        handed += pair[1].nbytes
tensors = load_file("{FOLDERS[1] / FILE}")
"""


def test_a_cell_gives_a_stage_weights_from_a_folder_and_from_a_model(kernel):
    loaded = kernel.run(f"%omni weights 1 {FOLDERS[1]} --version again")
    assert loaded.error == []
    assert re.fullmatch(r"stage 1 \(painter\) is AWAKE with weights again, loaded in \d+ ms\n", loaded.text)
    given = kernel.run(SLOWLY + "await engine.load_weights(1, iter(tensors.items()), version='given')\n%omni status")
    assert given.error == []
    assert "given" in given.shown[-1]["text/plain"]
    assert kernel.run(f"%omni weights 1 {FOLDERS[1]}").status == "ok"


def test_an_interrupt_ends_an_awaited_load_in_a_named_state(kernel):
    kernel.run(SLOWLY)
    broken = kernel.run(
        "await engine.load_weights(1, slowly(tensors))",
        interrupt_once="handed > 3 * tensor_source.CHUNK_BYTES",  # the first of them is written while the next is made
    )
    assert broken.status == "error"
    assert broken.seconds < 2.0
    refused = kernel.run("%omni generate a red star")
    assert "stage 1 (painter) is NEEDS_WEIGHTS: %omni wake 1" in refused.error[0]
    assert kernel.run("%omni wake 1\nprint(engine.status().stages[1].state)").text.endswith("AWAKE\n")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("%omni sl", ["sleep"]),
        ("%omni sleep ", ["0", "1"]),
        ("%omni wake 0 --tags we", ["weights"]),
        ("x = 1\nacks = %omni sleep 0 --level ", ["1", "2"]),
        ("%%omni generate --gui", ["--guidance"]),
        ("%omni weights ", ["0", "1"]),
    ],
)
def test_complete_request_knows_the_magic(kernel, code, expected):
    content = kernel.client.complete(code, reply=True, timeout=30)["content"]
    matches = [match for match in content["matches"] if not match.startswith("--") or expected[0].startswith("--")]
    assert matches == expected
    assert code[: content["cursor_start"]] + matches[0] == code[: content["cursor_start"]] + expected[0]


def test_progress_shows_after_a_second_and_leaves_nothing(kernel):
    slow = """
import concurrent.futures, time
from omni_notebook.verbs.frontend import Progress
from omni_notebook.verbs.session import session
pool = concurrent.futures.ThreadPoolExecutor(1)
session().frontend.wait(pool.submit(time.sleep, {}), lambda: Progress("stage 0 WAKING", 0.5), None)
"""
    assert kernel.run(slow.format(0.3)).shown == []
    said = kernel.run(slow.format(1.5))
    assert said.shown == [{"text/plain": "stage 0 WAKING · 50% · 1 s"}]
    assert said.updates[-1] == {"text/plain": ""}
    assert said.text == ""


def test_reloading_the_extension_keeps_the_engine(kernel):
    said = kernel.run("%reload_ext omni_notebook\nimport omni_notebook as omni\nprint(omni.current() is engine)")
    assert said.text == "True\n"
    assert kernel.run("%omni").status == "ok"


def test_a_second_start_is_refused_and_names_replace(kernel):
    refused = kernel.run("%omni start")
    assert refused.status == "error"
    assert len(refused.error) == 1
    assert "--replace" in refused.error[0]


def test_a_mistake_stops_a_run_of_all_cells(kernel):
    refused = kernel.run("%omni sleep 7")
    assert refused.status == "error"
    assert len(refused.error) == 1
    assert "7" in refused.error[0]


def test_an_interrupted_start_is_undone_and_a_new_one_works():
    kernel = Kernel()
    try:
        kernel.run("%load_ext omni_notebook")
        broken = kernel.run("engine = %omni start", interrupt_once="'torch' in sys.modules")
        assert broken.status == "error"
        assert len(broken.error) == 1
        assert "no engine is running; %omni start starts again" in broken.error[0]
        assert broken.seconds < 2.0
        assert kernel.run(START).status == "ok"
        assert kernel.run("%omni").status == "ok"
        broken = kernel.run(INTERRUPT + AT_THE_REPLACEMENT)
        assert (
            "interrupted: the start was undone, the engine before it is stopped, no engine is running; %omni start "
            "starts again"
        ) in broken.error[0]
    finally:
        kernel.close()


def test_an_image_of_a_step_level_stage_sharpens_in_place(kernel):
    assert kernel.run("engine = %omni start --replace --step-execution").status == "ok"
    drawn = kernel.run("made = %omni generate a red star --steps 300 --seed 1")
    assert drawn.status == "ok"
    shown = [bundle for bundle in (*drawn.shown, *drawn.updates) if "image/png" in bundle]
    steps = [int(re.fullmatch(r"step (\d+) of 300", bundle["text/plain"])[1]) for bundle in shown]
    assert len(steps) >= 2
    assert steps == sorted(set(steps))
    assert len({bundle["image/png"] for bundle in shown}) == len(shown)
    assert len(drawn.shown) == 1, "the later pictures take the place of the first"
    assert drawn.updates[-1] == {"text/plain": ""}, "a saved notebook keeps the result, not the previews"
    refused = kernel.run("%omni pause 1 --mode keep")
    assert refused.status == "error"
    assert "runs single steps (--step-execution)" in refused.error[0]
    assert "call %omni sleep 1 --mode wait (or abort)" in refused.error[0]
    assert kernel.run("engine = %omni start --replace").status == "ok"
