"""`omni-notebook serve` as a process: the specification's lines by curl, signals, mistakes, what is left."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
SERVE = [sys.executable, "-m", "omni_notebook", "serve", "demo", "--enable-sleep-mode"]
BAGEL = "ByteDance-Seed/BAGEL-7B-MoT"


def started(*words: str) -> subprocess.Popen[str]:
    """A server that answers."""
    process = subprocess.Popen([*SERVE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    if "is served on" not in line:
        process.kill()
        raise AssertionError(line + process.communicate()[1])
    return process


def ended(process: subprocess.Popen[str], number: int) -> tuple[int, str, str]:
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def curl() -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")


@pytest.fixture
def free_port() -> int:
    """8000, which the specification's lines name; whoever has it ends this test."""
    taken = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == 8000]
    assert not taken, f"port 8000 is taken by {taken}"
    return 8000


@pytest.fixture
def server(free_port: int) -> Iterator[subprocess.Popen[str]]:
    """What the page starts: the specification's options, two ranks a stage in processes, the page's model name."""
    process = started("--tp", "2", "--executor", "mp", "--omni", "--served-model-name", "demo", BAGEL)
    yield process
    ended(process, signal.SIGTERM)


def scenarios() -> list[tuple[str, str]]:
    """The curl lines of the page, each with the heading above it."""
    found, heading = [], ""
    for block in re.split(r"(?m)^(?=## |```)", PAGE.read_text(encoding="utf-8")):
        if block.startswith("## "):
            heading = block.splitlines()[0].removeprefix("## ")
        if block.startswith("```console\ncurl"):
            found.append((heading, block.removeprefix("```console\n").strip()))
    return found


def test_the_pages_curl_lines_do_what_the_page_says(curl: None, server: subprocess.Popen[str], tmp_path: Path) -> None:
    lines = scenarios()
    assert len([heading for heading, _ in lines if heading.startswith("Scenario")]) >= 8
    for heading, line in lines:
        done = subprocess.run(
            ["bash", "-euc", line], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )
        answer = json.loads(done.stdout or (tmp_path / "post.json").read_text(encoding="utf-8"))
        if "/v1/omni/" in line and "status" in answer:
            assert answer["status"] == "SUCCESS", (heading, answer)
            stages = json.loads(re.search(r"\[[\d, ]+\]", line)[0])
            assert [(ack["stage_id"], ack["rank"]) for ack in answer["acks"]] == [
                (s, r) for s in stages for r in (0, 1)
            ]
        elif "/v1/images/" in line:
            assert base64.b64decode(answer["data"][0]["b64_json"]).startswith(b"\x89PNG")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_in_order_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = started("--port", "0", "--executor", "mp")
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    began_s = time.monotonic()
    assert ended(process, number)[0] == status
    assert time.monotonic() - began_s < 10
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("moment", ["loading its libraries", "starting its ranks"])
def test_a_signal_before_it_is_ready_ends_it_with_a_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int, moment: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = [*SERVE, "--port", "0", "--executor", "mp"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found, watched = psutil.Process(process.pid), []
    reached = (
        (lambda: any("fastapi" in one.path or "pydantic" in one.path for one in found.memory_maps()))
        if moment.startswith("loading")
        else (lambda: watched.extend(found.children(recursive=True)) or watched)
    )
    deadline_s = time.monotonic() + 30
    while not reached() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    code, out, err = ended(process, number)
    assert (code, out, err) == (
        status,
        "ended before the engine was ready; what was started has been stopped\n",
        "",
    )
    assert not psutil.wait_procs(watched, timeout=5)[1]
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_the_module_takes_the_specifications_form_too() -> None:
    words = ["--model", "demo", "--omni", "--enable-sleep-mode", "--gpu-memory-utilization", "0.7", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "omni_notebook.server", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "demo is served on http://127.0.0.1:" in process.stdout.readline()
    assert ended(process, signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["serve"], 2, "no model was named"),
        (["serve", "demo", "--model", "demo"], 2, "two models were named"),
        (["serve", "demo", "--host", "0.0.0.0"], 1, "can be reached from other machines: give --api-key KEY"),
        (["serve", "demo", "--prot", "1"], 2, "unknown argument '--prot' (did you mean '--port'?)"),
        (["serve", "/nowhere"], 1, "/nowhere"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], status: int, message: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMNI_NOTEBOOK_API_KEY"}
    done = subprocess.run(
        [sys.executable, "-m", "omni_notebook", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert done.returncode in {status, 2}
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_the_flag_sleep_is_refused_by_name() -> None:
    import httpx

    process = subprocess.Popen(
        [sys.executable, "-m", "omni_notebook", "serve", "demo", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    url = re.search(r"http://\S+", process.stdout.readline())[0]
    answer = httpx.post(f"{url}/v1/omni/sleep", json={}, timeout=20)
    ended(process, signal.SIGTERM)
    assert answer.status_code == 501
    assert answer.json()["error"]["message"] == (
        "sleep is off: the server was started without --enable-sleep-mode; start it with that. Nothing changed"
    )
