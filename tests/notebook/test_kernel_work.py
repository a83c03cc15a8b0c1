"""Audits, borrowed memory and jobs in a real kernel: awaited, interrupted, shown."""

import pytest
from jupyter_core.utils import ensure_event_loop

from tests.notebook.test_kernel import IDLE, Kernel

START = "%load_ext omni_notebook\nimport omni_notebook as omni\nengine = %omni start --ballast 16MiB"
STATES = "print([str(stage.state) for stage in engine.status().stages])"
AWAKE = "['AWAKE', 'AWAKE']\n"
AUDITING = "engine.status().stages[1].state != 'AWAKE'"
HELD = "import time; holding = True; time.sleep(60)"
HOLDING = "globals().pop('holding', False)"


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
def _idle(kernel):
    """What a test cancelled has ended before the next one begins."""
    yield
    kernel.run(IDLE)


def test_an_audit_works_as_a_magic_as_a_call_and_awaited(kernel):
    shown = kernel.run("%omni audit --level 1 --steps 2").shown[-1]
    assert {"text/plain", "text/html", "image/png"} <= set(shown)
    called = "omni.audit(level=1, sampling_params={'num_inference_steps': 2})"
    assert kernel.run(f"print({called}.verdict)").text == "PASS\n"
    awaited = called.replace("audit(", "audit_async(")
    assert kernel.run(f"print((await {awaited}).verdict)").text == "PASS\n"


@pytest.mark.parametrize("code", ["%omni audit --level 1 --cycles 900", "omni.audit(level=1, cycles=900)"])
def test_an_interrupted_audit_is_one_line_and_the_stages_are_awake(kernel, code):
    broken = kernel.run(code, interrupt_once=AUDITING)
    assert broken.status == "error"
    assert broken.seconds < 2.5
    assert "the audit ended early" in broken.error[-1]
    assert kernel.run(STATES).text == AWAKE


def test_an_interrupted_await_of_an_audit_leaves_the_stages_awake(kernel):
    broken = kernel.run("await omni.audit_async(level=1, cycles=900)", interrupt_once=AUDITING)
    assert broken.status == "error"
    assert broken.seconds < 3
    assert kernel.run(STATES).text == AWAKE


def test_ctrl_c_in_a_borrowed_cell_wakes_the_stages(kernel):
    broken = kernel.run(f"%%omni borrow 0 1\n{HELD}", interrupt_once=HOLDING)
    assert broken.status == "error"
    assert broken.seconds < 3
    assert len(broken.error) == 1
    assert "interrupted: the cell ended, what it had borrowed was given back; now stage 0" in broken.error[0]
    assert kernel.run(STATES).text == AWAKE


def test_ctrl_c_in_a_with_block_wakes_the_stages(kernel):
    broken = kernel.run(f"with omni.borrowed():\n    {HELD}", interrupt_once=HOLDING)
    assert broken.status == "error"
    assert "KeyboardInterrupt" in "".join(broken.error)
    assert kernel.run(STATES).text == AWAKE


def test_a_borrowed_cell_that_awaits_is_refused_and_the_context_takes_it(kernel):
    refused = kernel.run("%%omni borrow 0\nimport asyncio\nawait asyncio.sleep(0)")
    assert len(refused.error) == 1
    assert "async with omni_notebook.borrowed(...)" in refused.error[0]
    said = kernel.run(f"import asyncio\nasync with omni.borrowed([0]):\n    await asyncio.sleep(0)\n    {STATES}")
    assert said.text == "['ASLEEP', 'AWAKE']\n"
    assert kernel.run(STATES).text == AWAKE


def test_an_error_of_a_borrowed_cell_is_one_error_after_the_wake(kernel):
    broken = kernel.run("%%omni borrow 0\ndef f():\n    raise ValueError('mine')\nf()")
    assert broken.text.startswith("borrowed ")
    assert "".join(broken.error).count("mine") == 3, "the line in two frames of the cell's own, and the message"
    assert "omni_notebook" not in "".join(broken.error)


def test_a_job_goes_on_while_the_kernel_works_and_writes_nothing(kernel):
    started = kernel.run("job = %omni generate a red star --bg --seed 1 --steps 40\njob")
    assert "running" in started.shown[-1]["text/plain"]
    assert kernel.run("print(1 + 1)").text == "2\n"
    made = kernel.run("made = await job\nmade")
    assert made.text == ""
    assert "image/png" in made.shown[-1]


def test_an_interrupt_ends_the_waiting_and_not_the_job(kernel):
    kernel.run("job = %omni generate a red star --bg --steps 600")
    for code in ("job.result()", "await job"):
        kernel.run("asked = False")
        broken = kernel.run(f"asked = True\n{code}", interrupt_once="asked")
        assert broken.status == "error"
        assert broken.seconds < 2
    assert kernel.run("print(job.cancel(), job.state)").text == "True cancelled\n"
