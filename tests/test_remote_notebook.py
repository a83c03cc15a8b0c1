"""The notebook of an engine on another machine: as it is committed, and as a real kernel runs it."""

from __future__ import annotations

import base64
import importlib.util
import json
import re

import nbformat
import psutil
import pytest

import run_notebooks
from omni_notebook.engine.remote.line import UNCHANGED
from tests.executed_notebooks import NOTEBOOKS, cells, data, execute_copy, picture, read, text

COMMITTED = NOTEBOOKS / "07_remote.ipynb"
CONNECT, BOARD, CURL = "engine = %omni connect {url}", "board = %omni dashboard", "%%sh"
DRAWN = [f"%%omni generate --seed 42 --out {name}" for name in ("before", "after")]
LOST = ["await job", "%omni sleep 0"]
STATES = "print([str(stage.state) for stage in engine.status().stages])"
SVG = re.compile(r'<img alt="[^"]+" src="data:image/svg\+xml;base64,([^"]+)"')
BALLAST_BYTES = 96 * 2**20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    missing = [name for name in ("fastapi", "uvicorn", "sse_starlette") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return execute_copy(COMMITTED, tmp_path_factory.mktemp("notebook"))


@pytest.fixture(scope="module", params=["committed", "executed"])
def notebook(request):
    return read(COMMITTED) if request.param == "committed" else request.getfixturevalue("executed")


@pytest.fixture(scope="module")
def found(notebook):
    return cells(notebook)


@pytest.fixture(scope="module")
def url(found):
    (said,) = text(found["import subprocess"]).splitlines()
    return re.fullmatch(r"demo is served on (http://127\.0\.0\.1:\d+) \(Ctrl-C ends it\)", said)[1]


def test_every_cell_ran_in_order_and_only_those_after_the_kill_failed(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = [
        (output.output_type, output.get("name", "stdout"), cell.source) for cell in code for output in cell.outputs
    ]
    assert [source for kind, _, source in kinds if kind == "error"] == LOST
    assert {name for _, name, _ in kinds} == {"stdout"}


def test_it_holds_no_widget_and_no_path_of_a_machine(notebook):
    raw = nbformat.writes(notebook)
    assert run_notebooks.WIDGET not in raw
    assert run_notebooks.machine_paths(notebook) == []
    assert re.findall(r"/(?:home|root|Users|work|tmp)/\S+", raw) == []


def test_its_server_is_gone(executed):
    pid = json.loads(text(cells(executed)[CURL]))["acks"][0]["metadata"]["pid"]
    lines = [one.info["cmdline"] or [] for one in psutil.process_iter(["pid", "cmdline"]) if one.info["pid"] == pid]
    assert [line for line in lines if "omni_notebook" in line] == []


# ------------------------------------------------------------------------------------ the server's engine


def test_it_connects_to_where_the_server_said_and_loads_no_torch_here(found, url):
    assert text(found[CONNECT]) == f"connected to {url}: demo; %omni stop disconnects\n"
    assert text(found['print("torch is loaded here:", "torch" in sys.modules)']) == "torch is loaded here: False\n"
    (table,) = data(found["%omni status"], "text/plain")
    assert table.count("ballast (filler, no model) 96.0 MiB / 96.0 MiB") == 2


def test_the_thinker_sleeps_there_and_a_script_wakes_it(found, notebook):
    (slept,) = data(found["%omni sleep 0 --level 2"], "text/plain")
    (freed,) = re.findall(r"✓ SUCCESS +ASLEEP \(level 2\) +([\d.]+) MiB", slept)
    assert float(freed) * 2**20 > BALLAST_BYTES
    answer = json.loads(text(found[CURL]))
    (ack,) = answer["acks"]
    assert (answer["status"], ack["status"], ack["stage_id"]) == ("SUCCESS", "SUCCESS", 0)
    assert ack["metadata"]["mapped_bytes"] > BALLAST_BYTES
    said = [text(cell) for cell in notebook.cells if cell.source == STATES]
    assert said == ["['AWAKE', 'AWAKE']\n"] * 2  # after the wake, and after the lease


def test_the_audit_there_passes_and_its_report_is_here(found):
    assert text(found["%omni audit 1 --level 1"]).startswith("audit PASS · level 1 · 1 of 1 cycle · stage 1 (painter)")
    (report,) = data(found["%omni audit 1 --level 1"], "text/plain")
    assert "1 image the same in 1 of 1 [output]" in report
    gone = re.search(r"1 rank freed ([\d.]+) MiB \[ack\], ([\d.]+) MiB gone, as seen from outside", report)
    assert all(float(mib) * 2**20 > BALLAST_BYTES for mib in gone.groups())


def test_the_cell_runs_while_the_stages_there_sleep(found):
    during, after = text(found["%%omni borrow 0 1 --level 1 --out lease"]).splitlines()
    assert during == "while the cell runs: ['ASLEEP', 'ASLEEP']"
    freed, peak = re.search(r"^borrowed ([\d.]+) MiB of stage 0, 1 · .* own peak ([\d.]+) MiB", after).groups()
    assert float(freed) * 2**20 > 2 * BALLAST_BYTES
    assert 50 < float(peak) < 100


def test_the_same_seed_draws_the_same_picture_after_all_that_and_over_http(found):
    before, after = (picture(found[line]) for line in DRAWN)
    assert before.tobytes() == after.tobytes()
    assert len(before.getcolors(before.width * before.height)) > 50
    assert text(found["import base64"]) == "200 the same picture: True\n"
    assert picture(found["import base64"]).size == (256, 256)


def test_the_still_dashboard_shows_the_engine_there_and_what_was_ordered(found):
    (page,) = data(found[BOARD], "text/html")
    drawn = base64.b64decode(SVG.search(page)[1]).decode()
    assert "demo: 0 thinker AWAKE · 1 painter AWAKE" in drawn
    assert re.search(r"sleep L1 −1\d\d\.\d MiB", drawn)
    assert page.count("SUCCESS") == 2
    shown = picture(found[BOARD])
    assert len(shown.getcolors(shown.width * shown.height)) > 50


# --------------------------------------------------------------------------------------- the server is gone


def test_a_server_that_is_killed_is_one_line_for_who_waits_and_for_who_asks(found, url):
    assert text(found["job = %omni generate a red star --steps 900 --bg"]) == "exit status -9\n"
    (waited,), (asked,) = (found[line].outputs for line in LOST)
    assert waited.ename == asked.ename == "ServerLostError"
    assert waited.evalue.startswith(f"the connection to {url} was lost during the request nb-")
    assert "it ends there with its client, and was not sent again" in waited.evalue
    assert asked.evalue == f"{url} does not answer (Connection refused); {UNCHANGED}"
    assert all(len(output.traceback) == 1 and "\n" not in output.traceback[0] for output in (waited, asked))


def test_stop_leaves_the_server_and_the_next_one_stops_the_kernels_own_engine(notebook, url):
    left, stopped = (text(cell) for cell in notebook.cells if cell.source == "%omni stop")
    assert left.startswith(f"disconnected: the engine at {url} was left as it is, %omni connect {url} connects again")
    assert stopped.startswith("the engine was stopped: 24.0 MiB of stage memory given back")


# ------------------------------------------------------------------------------------- the notebook's own


def test_the_notebooks_engine_is_served_used_over_http_and_served_no_more(found, url):
    assert text(found['port = url.rpartition(":")[2]']).startswith(f"{url} serves demo to this machine only")
    slept, states = text(
        found['answer = httpx.post(f"{url}/v1/omni/sleep", json={"stage_ids": [1], "level": 1}, timeout=60)']
    ).splitlines()
    assert re.fullmatch(r"SUCCESS \[1048\d{4}\]", slept)
    assert states == "['AWAKE', 'ASLEEP']"
    (woken,) = data(found["%omni wake 1"], "text/plain")
    assert re.search(r"✓ SUCCESS +AWAKE +10\.0 MiB", woken)
    assert text(found["%omni serve --stop"]) == f"nothing listens on {url} any more; the engine goes on\n"
