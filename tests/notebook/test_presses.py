"""When a kernel carries out a press: spoken to as a page does, with and without a subshell, idle and busy.

`OMNI_KERNEL_PYTHON` names another interpreter whose ipykernel is to be tried; `tools/kernel_presses.py` tries three.
"""

import os
import queue
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

from omni_notebook.notebook.dashboard.kernelwatch import WAITS

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("OMNI_KERNEL_PYTHON", sys.executable)
OPEN = """
import sys; sys.path.insert(0, {root!r})
import omni_notebook as omni
from tests.notebook.dashboard.watched import FakeEngine, two_stages
engine = FakeEngine(two_stages(2))
d = omni.dashboard(engine)
d
"""
FORGET = """
import time
d.sampler.notes.clear()
d._watch.by_subshell = False
while "done" in "".join(card.below for card in d.frame.cards):
    time.sleep(0.02)
time.sleep(0.1)
"""
CELL_S = 3.0
AT_ONCE_S = 1.0
CELLS = {"await": f"import asyncio\nawait asyncio.sleep({CELL_S})", "sync": f"import time\ntime.sleep({CELL_S})"}


@dataclass
class Seen:
    """One message of the kernel's and when it came."""

    at_s: float
    content: dict


@dataclass
class Page:
    """A kernel with a dashboard open, and the comms that a page would have."""

    manager: KernelManager
    client: object
    version: tuple
    comms: dict = field(default_factory=dict)
    seen: list = field(default_factory=list)
    subshell: str | None = None
    views: int = 0

    def run(self, code):
        """Send a cell; its message id."""
        return self.client.execute(code)

    def listen(self, until, seconds=30.0):
        """Take messages until one satisfies `until`; that message."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=0.2)
            except queue.Empty:
                continue
            if message["msg_type"] == "comm_open":
                self.comms[message["content"]["comm_id"]] = message["content"]["data"]["state"]
            self.seen.append(Seen(time.monotonic(), message))
            if until(message):
                return self.seen[-1]
        pytest.fail(f"not within {seconds} s")
        return None

    def idle(self, cell):
        """Wait for the end of a cell; when it was."""
        return self.listen(
            lambda m: (
                m["msg_type"] == "status"
                and m["content"]["execution_state"] == "idle"
                and m["parent_header"].get("msg_id") == cell
            )
        ).at_s

    def button(self, description, place=0):
        found = [name for name, state in self.comms.items() if state.get("description") == description]
        return found[place]

    def tell(self, comm_id, data, *, by_subshell=False):
        """A comm message of the page."""
        message = self.client.session.msg("comm_msg", {"comm_id": comm_id, "data": data})
        if by_subshell:
            message["header"]["subshell_id"] = self.subshell
        self.client.shell_channel.send(message)

    def click(self, description, *, by_subshell=False):
        self.tell(
            self.button(description), {"method": "custom", "content": {"event": "click"}}, by_subshell=by_subshell
        )

    def shown(self, words):
        """Wait until a widget shows words; when."""
        return self.listen(lambda m: m["msg_type"] == "comm_msg" and words in str(m["content"]["data"])).at_s

    def viewed(self, *, by_subshell=False):
        """What a page sends when it has made a view of the dashboard."""
        box = next(name for name, state in self.comms.items() if "omni-dashboard" in (state.get("_dom_classes") or ()))
        self.views += 1
        state = {"method": "update", "state": {"_view_count": self.views}, "buffer_paths": []}
        self.tell(box, state, by_subshell=by_subshell)


def version_of(python):
    code = "from importlib.metadata import version; print(version('ipykernel'))"
    text = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in text.split(".")[:2])


@pytest.fixture(scope="module", autouse=True)
def _loop():
    yield
    ensure_event_loop().close()  # jupyter_client made it for this thread


@pytest.fixture(scope="module")
def opened():
    manager = KernelManager()
    manager.kernel_spec.argv[0] = PYTHON
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    page = Page(manager, client, version_of(PYTHON))
    page.idle(page.run(OPEN.format(root=str(ROOT))))
    classes = [state.get("_dom_classes") or () for state in page.comms.values()]
    if not any("omni-dashboard" in found for found in classes):  # set after the comm was opened
        page.comms[dashboard_of(page)]["_dom_classes"] = ("omni-dashboard",)
    if page.version >= (7, 0):
        page.subshell = subshell_of(page)
    yield page
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def dashboard_of(page):
    updates = (seen.content for seen in page.seen if seen.content["msg_type"] == "comm_msg")
    return next(m["content"]["comm_id"] for m in updates if "omni-dashboard" in str(m["content"]["data"].get("state")))


def subshell_of(page):
    """What JupyterLab asks for when a kernel offers it."""
    message = page.client.session.msg("create_subshell_request", {})
    page.client.control_channel.send(message)
    return page.client.get_control_msg(timeout=10)["content"]["subshell_id"]


@pytest.fixture
def page(opened):
    """The page, at rest; a press of an earlier test is forgotten."""
    opened.idle(opened.run(FORGET))
    return opened


def at_once(version, cell, *, by_subshell):
    """What each kernel does with a press while a cell runs (ipykernel's changelogs, and measured here)."""
    if version < (7, 0):
        return False
    if version < (7, 4):
        return by_subshell
    return cell == "await"


@pytest.mark.quiet
def test_an_idle_kernel_acts_at_once(page):
    page.click("Sleep L1")
    began_s = time.monotonic()
    assert page.shown("Sleep L1: done") - began_s < AT_ONCE_S


@pytest.mark.quiet
@pytest.mark.parametrize("by_subshell", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_a_busy_kernel_acts_at_once_or_says_that_a_press_waits(page, cell, by_subshell):
    if by_subshell and page.version < (7, 0):
        by_subshell = False  # there are none: the same press again
    page.viewed(by_subshell=by_subshell)
    page.idle(page.run("1"))
    expected = at_once(page.version, cell, by_subshell=by_subshell)
    running = page.run(CELLS[cell])
    if not expected:
        page.shown(WAITS)
    else:
        time.sleep(1.0)
    began_s = time.monotonic()
    page.click("Sleep L1", by_subshell=by_subshell)
    acted_s = page.shown("Sleep L1: done")
    if expected:
        assert acted_s - began_s < AT_ONCE_S
        ended_s = page.idle(running)
        assert ended_s > acted_s + 0.3, "the cell still ran"
        assert not any(WAITS in str(seen.content["content"]) for seen in page.seen if seen.at_s > began_s - 1.0)
    else:
        ended_s = next(
            seen.at_s
            for seen in page.seen
            if seen.content["msg_type"] == "status"
            and seen.content["content"]["execution_state"] == "idle"
            and seen.content["parent_header"].get("msg_id") == running
        )
        assert began_s < ended_s <= acted_s, "after the cell"
        assert acted_s - ended_s < AT_ONCE_S


def test_charts_move_while_a_synchronous_cell_runs(page):
    began_s = time.monotonic()
    running = page.run(CELLS["sync"])
    ended_s = page.idle(running)
    moved = [
        seen.at_s
        for seen in page.seen
        if began_s + 0.3 < seen.at_s < ended_s
        and seen.content["msg_type"] == "comm_msg"
        and "s ago" in str(seen.content["content"]["data"])
    ]
    assert len(moved) >= 2
