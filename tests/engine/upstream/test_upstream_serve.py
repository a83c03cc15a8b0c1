"""`omni-notebook serve --engine vllm-omni`: the upstream engine over HTTP, as a process."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest

from omni_notebook.engine.remote.client import RemoteOmni
from omni_notebook.errors import UnsupportedError
from tests.engine.engine_helpers import collect, until
from tests.engine.upstream.conftest import FAKE
from tests.engine.upstream.upstream_helpers import HELD, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_notebook.engine.upstream.engine import UpstreamOmni

SERVE = [sys.executable, "-m", "omni_notebook", "serve"]
UPSTREAM = ["some/model", "--engine", "vllm-omni", "--enable-sleep-mode", "--tp", "2", "--port", "0"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(FAKE), *sys.path])}


@contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server over the stand-in, and where it answers."""
    process = subprocess.Popen(
        [*SERVE, *UPSTREAM, "--engine-args", '{"log_stats": true}'],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    said = process.stdout.readline()
    found = re.search(r"some/model is served on (http://\S+)", said)
    if found is None:
        process.kill()
        raise AssertionError(said + process.communicate()[1])
    try:
        yield process, found[1]
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One for the module."""
    with serving() as server:
        yield server


def test_it_sleeps_wakes_and_draws_and_its_end_leaves_no_process(served: tuple[subprocess.Popen[str], str]) -> None:
    import httpx

    process, url = served
    with httpx.Client(base_url=url, timeout=60) as http:
        slept = http.post("/v1/omni/sleep", json={"stage_ids": ["dit"]}).json()
        assert (slept["status"], [ack["rank"] for ack in slept["acks"]]) == ("SUCCESS", [0, 1])
        assert all(ack["freed_bytes"] == pytest.approx(HELD, abs=MIB) for ack in slept["acks"])
        stages = http.get("/v1/omni/status").json()["stages"]
        assert [(one["runtime"], one["state"]) for one in stages] == [("vllm-omni", "AWAKE"), ("vllm-omni", "ASLEEP")]
        closed = http.post("/v1/images/generations", json={"prompt": "a star"})
        assert (closed.status_code, closed.json()["help"][0]["path"]) == (503, "/v1/omni/wakeup")
        assert http.post("/v1/omni/wakeup", json={}).json()["status"] == "SUCCESS"
        drawn = http.post("/v1/images/generations", json={"prompt": "a star", "seed": 3}).json()
        assert base64.b64decode(drawn["data"][0]["b64_json"]).startswith(b"\x89PNG")
        refused = http.post("/v1/omni/sleep", json={"level": 2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, UnsupportedError.error_code)
    with RemoteOmni(url) as engine:
        assert engine.status().stages[1].runtime == "vllm-omni"
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 3
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out == "ending: requests in progress may finish\n"
    assert not psutil.wait_procs(ranks, timeout=5)[1]


def test_a_stage_that_has_failed_names_no_request_that_this_engine_refuses() -> None:
    import httpx

    with serving() as (_, url), httpx.Client(base_url=url, timeout=60) as http:
        rank = http.get("/v1/omni/status").json()["stages"][1]["ranks"][1]["pid"]
        os.kill(rank, signal.SIGKILL)
        assert http.post("/v1/omni/sleep", json={"stage_ids": [1]}).status_code >= 500
        for path, body in (("/v1/omni/wakeup", {}), ("/v1/images/generations", {"prompt": "a star"})):
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) in {(409, "FAILED"), (503, "FAILED")}
            assert "end the server and start it anew" in answer.json()["error"]["message"]
            assert "help" not in answer.json()
        assert http.post("/v1/omni/restart", json={"stage_id": 1}).status_code == 501


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["demo", "--engine", "vllm-omni"], 2, "no demo pipeline: name a model"),
        (["some/model", "--engine", "vllm-omni", "--ballast", "1MiB"], 2, "--ballast-bytes: for the embedded engine"),
        (["some/model", "--engine", "vllm"], 2, "invalid choice: 'vllm'"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], status: int, message: str) -> None:
    done = subprocess.run([*SERVE, *words], capture_output=True, text=True, timeout=60, env=environment(), check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_its_metrics_count_requests_in_progress_which_are_on_their_way_on_every_stage(engine: UpstreamOmni) -> None:
    from omni_notebook.server.metrics import Metrics

    figures = Metrics(engine)

    def counted() -> set[str]:
        lines = figures.text().decode().splitlines()
        return {line for line in lines if line.startswith("omni_requests{") and not line.endswith(" 0.0")}

    async def run() -> None:
        engine._core.upstream.token_s = 0.05
        request = asyncio.create_task(collect(engine, sampling_params={"max_tokens": 1000}))
        await until(lambda: engine.status().stages[0].in_transit)
        assert counted() == {f'omni_requests{{stage="{number}",where="transit"}} 1.0' for number in (0, 1)}
        request.cancel()
        await until(lambda: not engine.status().stages[0].in_transit)
        assert counted() == set()

    asyncio.run(run())
