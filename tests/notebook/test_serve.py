"""`%omni serve`: the notebook's own engine over HTTP, from its first answer to the kernel's end."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import socket
import subprocess
import sys
import threading

import pytest

import omni_notebook as omni
from omni_notebook.verbs import serving
from omni_notebook.verbs.session import session
from tests.engine.engine_helpers import until

httpx = pytest.importorskip("httpx")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="the server is not installed")

START = "engine = get_ipython().run_line_magic('omni', 'start --executor uni')"


def served(shown: str) -> str:
    """The address in the one line that is shown."""
    assert shown.count("\n") == 1, shown
    return re.match(r"http://127\.0\.0\.1:\d+", shown)[0]


def listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


def state(url: str, stage_id: int) -> str:
    return httpx.get(f"{url}/v1/omni/status").json()["stages"][stage_id]["state"]


@pytest.fixture
def url(cell):
    cell(START)
    return served(cell("%omni serve --port 0")[1])


def test_what_sleeps_here_is_woken_over_http_and_the_other_way_round(cell, url):
    cell("%omni sleep 0 --level 2")
    assert state(url, 0) == "ASLEEP"
    assert httpx.post(f"{url}/v1/omni/wakeup", json={"stage_ids": [0]}, timeout=30).json()["status"] == "SUCCESS"
    assert session().engine.status().stages[0].state == "AWAKE"
    httpx.post(f"{url}/v1/omni/sleep", json={"stage_ids": [1]}, timeout=30)
    assert session().engine.status().stages[1].state == "ASLEEP"
    cell("%omni wake 1")
    assert state(url, 1) == "AWAKE"


def test_it_says_where_it_listens_for_whom_and_that_another_address_needs_a_key(cell):
    cell(START)
    shown = cell("%omni serve --port 0")[1]
    url = served(shown)
    assert shown == (
        f"{url} serves demo to this machine only, another --host needs --api-key; %omni serve --stop ends it\n"
    )
    assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["demo"]


def test_names_key_and_hosts_are_the_servers(cell):
    cell(START)
    words = "--served-model-name a b --api-key s3cret --allowed-host box"
    shown = cell(f"%omni serve --port 0 {words}")[1]
    url = served(shown)
    assert "to whoever sends 'Authorization: Bearer KEY'" in shown
    assert "s3cret" not in shown
    assert httpx.get(f"{url}/v1/models").status_code == 401
    found = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer s3cret", "Host": "box"}).json()
    assert [model["id"] for model in found["data"]] == ["a", "b"]


def test_a_second_serve_is_refused_and_names_the_address(cell, url):
    result, _ = cell("%omni serve --port 0")
    assert f"the engine is served already, on {url}; %omni serve --stop ends that" in str(result.error_in_exec)
    assert listens(url)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--host 0.0.0.0", "can be reached from other machines: give --api-key KEY"),
        ("--port 99999", "port 99999 is none"),
        ("--prot 1", "did you mean '--port'"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_listens(cell, monkeypatch, words, said):
    monkeypatch.delenv("OMNI_NOTEBOOK_API_KEY", raising=False)
    cell(START)
    result, _ = cell(f"%omni serve {words}")
    assert said in str(result.error_in_exec)
    assert "\n" not in str(result.error_in_exec)
    assert serving.server_of(session().engine) is None


def test_a_port_that_is_taken_is_named(cell, url):
    other = omni.AsyncOmni("demo", executor="uni")
    try:
        with pytest.raises(omni.errors.ConfigError, match=r"can not listen on 127\.0\.0\.1:\d+"):
            omni.serve(other, port=int(url.rpartition(":")[2]))
    finally:
        other.shutdown()


def test_without_an_engine_it_names_start(cell):
    assert "no engine is running; %omni start" in str(cell("%omni serve")[0].error_in_exec)
    assert "no engine is running; %omni start" in str(cell("%omni serve --stop")[0].error_in_exec)


def test_stop_ends_it_and_the_engine_goes_on(cell, url):
    assert cell("%omni serve --stop")[1] == f"nothing listens on {url} any more; the engine goes on\n"
    assert not listens(url)
    assert session().engine.status().stages[0].state == "AWAKE"
    assert "is not served; %omni serve serves it" in cell("%omni serve --stop")[1]
    again = served(cell("%omni serve --port 0")[1])
    assert state(again, 0) == "AWAKE"


@pytest.mark.parametrize("line", ["stop", "start --replace --executor uni"])
def test_what_ends_the_engine_has_ended_the_server_when_it_returns_and_its_requests_are_answered(cell, url, line):
    engine = session().engine
    answers = []
    body = {"prompt": "a red star", "num_inference_steps": 1000}
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/v1/images/generations", json=body, timeout=60))
    )
    asking.start()
    asyncio.run(until(lambda: engine.status().stages[1].running))
    result, wrote = cell(f"%omni {line}")
    assert result.success
    assert f"nothing listens on {url} any more\n" in wrote
    assert not listens(url)
    asking.join(20)
    assert answers[0].json()["status"] == "ERROR"
    assert answers[0].status_code in {409, 503}
    assert not [thread.name for thread in threading.enumerate() if thread.name == "omni-server"]


def test_an_engine_that_python_shuts_down_takes_its_server_along(cell, url):
    cell("engine.shutdown()")
    asyncio.run(until(lambda: not listens(url)))


def test_python_serves_any_engine_and_stops_it(cell, url):
    with omni.AsyncOmni("demo", executor="uni") as other:
        server = omni.serve(other, port=0)
        assert server.url != url
        httpx.post(f"{server.url}/v1/omni/sleep", json={"stage_ids": [0]}, timeout=30)
        assert [e.status().stages[0].state for e in (other, session().engine)] == ["ASLEEP", "AWAKE"]
        server.stop()
        assert not listens(server.url)
    with pytest.raises(omni.errors.EngineClosedError, match="the engine was shut down"):
        omni.serve(other, port=0)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with a request in progress"])
def test_the_end_of_the_process_is_the_servers_too(busy):
    lines = [
        "import sys, threading, time, httpx",
        "from omni_notebook.verbs.registry import execute",
        "from omni_notebook.verbs.session import session",
        "engine = execute(session(), 'start --executor mp')",
        "execute(session(), 'serve --port 0')",
        "from omni_notebook.verbs import serving",
        "url = serving.server_of(engine).url",
        "body = {'prompt': 'a star', 'num_inference_steps': 1000}",
        "def ask():",
        "    try: httpx.post(url + '/v1/images/generations', json=body, timeout=60)",
        "    except Exception: pass",
        *(["threading.Thread(target=ask, daemon=True).start()"] if busy else []),
        *(["while not engine.status().stages[1].running: time.sleep(0.01)"] if busy else []),
        "print('ready', flush=True)",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while "ready" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")


def test_without_the_extra_it_says_what_to_install():
    lines = [
        "import sys; sys.modules['uvicorn'] = None",
        "from omni_notebook.verbs.registry import execute",
        "from omni_notebook.verbs.session import session",
        "status = lambda self: type('Status', (), {'closed': False})",
        "session().use(type('Engine', (), {'url': None, 'status': status})())",
        "try: execute(session(), 'serve')",
        "except Exception as error: print(type(error).__name__, error)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.stdout == (
        "UnsupportedError the server needs uvicorn: pip install 'omni-notebook[server]'. Nothing listens\n"
    ), done.stderr
