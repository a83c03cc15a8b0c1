"""Every verb on an engine that a server runs: connect and stop, the verbs between, and whose memory it all is."""

from __future__ import annotations

import json
import math
import os
import re
import time
from typing import TYPE_CHECKING, Any

import pytest

import omni_notebook as omni
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.engine.remote.client import RemoteOmni
from omni_notebook.errors import (
    ArgumentError,
    AsleepError,
    ConfigError,
    EngineClosedError,
    OmniError,
    ServerLostError,
    SleepError,
    StageBusyError,
    UnsupportedError,
)
from omni_notebook.notebook.dashboard import parts
from omni_notebook.notebook.dashboard.devices import ELSEWHERE, DeviceProbe
from omni_notebook.notebook.dashboard.sampler import Sampler
from omni_notebook.notebook.formatters import remote_bundle
from omni_notebook.protocol import EngineStatus
from omni_notebook.verbs.auditing.elsewhere import result_of
from omni_notebook.verbs.completion import candidates
from omni_notebook.verbs.interrupts import InterruptedVerb
from omni_notebook.verbs.registry import execute
from omni_notebook.verbs.session import Session
from tests.engine.engine_helpers import rank_fault
from tests.pressing import ctrl_c_once
from tests.remote.screen import Screen
from tests.remote.served import Contract, rude, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


STEPS = (
    "before the first cycle",
    "warming up",
    "output before the sleep",
    "falling asleep",
    "waking",
    "output after the wake",
)


@pytest.fixture(scope="module", params=["mp"])
def shared_engine(request: pytest.FixtureRequest) -> Iterator[Contract]:
    with (
        AsyncOmni("demo", executor=request.param, ballast_bytes="8MiB") as embedded,
        serving(embedded) as server,
        Contract(server.url, embedded) as engine,
    ):
        yield engine


@pytest.fixture
def session(engine: Contract) -> Iterator[Session]:
    """Connected to the server."""
    session = Session(Screen())
    execute(session, f"connect {engine.url}")
    yield session
    execute(session, "stop")


def wrote(session: Session) -> str:
    screen: Any = session.frontend
    text, screen.text = screen.text, ""
    return str(text)


# --------------------------------------------------------------------------------- there and back


def test_connect_returns_the_engine_and_stop_says_that_it_runs_on(engine: Contract) -> None:
    session = Session(Screen())
    known = execute(session, f"connect {engine.url}")
    assert isinstance(known, RemoteOmni)
    assert session.engine is known
    assert wrote(session) == f"connected to {engine.url}: demo; %omni stop disconnects\n"
    for line in ("start", f"connect {engine.url}"):
        with pytest.raises(ArgumentError, match=rf"connected to {engine.url}; %omni \w+ … --replace disconnects first"):
            execute(session, line)
    again = execute(session, f"connect {engine.url} --replace")
    assert (known.status().closed, session.engine is again) == (True, True)
    wrote(session)
    execute(session, "stop")
    told = f"disconnected: the engine at {engine.url} was left as it is, %omni connect {engine.url} connects again"
    assert wrote(session) == f"{told}; %omni start starts one here\n"
    assert session.running is None
    assert engine.status().stages[0].state == "AWAKE"


def test_a_connection_that_fails_leaves_the_engine_that_is_there(session: Session) -> None:
    before = session.engine
    with pytest.raises(ServerLostError):
        execute(session, "connect http://127.0.0.1:1 --replace")
    assert session.engine is before


def test_the_key_may_be_in_the_environment(engine: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(Screen())
    with serving(engine.embedded, api_key="secret") as server:
        with pytest.raises(ConfigError, match=r"wants a key.*OMNI_NOTEBOOK_API_KEY"):
            execute(session, f"connect {server.url}")
        monkeypatch.setenv("OMNI_NOTEBOOK_API_KEY", "secret")
        execute(session, f"connect {server.url}")
        execute(session, "stop")
        execute(session, f"connect {server.url} --api-key secret")
        execute(session, "stop")


def test_a_server_that_has_gone_can_be_left(engine: Contract) -> None:
    session = Session(Screen())
    with serving(engine.embedded) as server:
        known = execute(session, f"connect {server.url}")
    with pytest.raises(ServerLostError, match="does not answer"):
        execute(session, "status")
    with pytest.raises(ServerLostError, match="does not answer"):
        execute(session, "sleep 0")
    assert candidates(session, "sleep ").words[:1] != ["0"]
    assert "does not answer" in remote_bundle(known)["text/plain"]
    execute(session, "stop")
    assert session.running is None
    assert "was left as it is" in wrote(session)  # whether it still runs is not known


# ---------------------------------------------------------------------------------------- verbs


def test_verbs_do_what_they_do_here(session: Session, engine: Contract, other_weights: Path) -> None:
    acks = execute(session, "sleep 0 --level 2 --out acks")
    assert acks == session.frontend.variables["acks"] == session.acks
    assert acks[0].freed_bytes > 8 * 1024**2
    with pytest.raises(
        AsleepError, match=r"stage 0 \(thinker\) is ASLEEP \(level 2\): %omni wake 0; nothing was started"
    ):
        execute(session, "generate a star")
    with pytest.raises(AsleepError, match="%omni wake 0"):
        execute(session, "sleep 0 --level 1")
    assert [ack.ok for ack in execute(session, "wake 0")] == [True]
    assert execute(session, "generate a star --seed 3 --steps 2").images[0].size == (64, 64)
    execute(session, "pause 1 --mode keep")
    assert execute(session, "status").paused
    execute(session, "resume")
    execute(session, f"weights 1 {other_weights} --version other")
    assert engine.status().stages[1].weight_version == "other"
    execute(session, "restart 1")
    execute(session, "lora list")
    wrote(session)
    execute(session, "logs 1")
    assert (
        wrote(session)
        == "\n".join(engine.embedded.logs(1) or ["stage 1 · rank 0 · replica 0 has written nothing"]) + "\n"
    )
    with pytest.raises(UnsupportedError, match=f"served at {engine.url} already"):
        execute(session, "serve --port 0")
    assert candidates(session, "sleep ").words[:2] == ["0", "1"]


def test_a_sleep_behind_the_notebook_begins_and_its_job_has_the_answers(session: Session) -> None:
    job = execute(session, "sleep 1 --bg")
    assert [ack.ok for ack in job.result()] == [True]
    execute(session, "wake 1")


def test_a_rank_that_fails_is_told_as_it_is_here(session: Session, engine: Contract) -> None:
    with (
        rank_fault(engine, 1, (0, 0), "prepare_sleep", error="RuntimeError", args=("no",)),
        pytest.raises(SleepError, match=r"sleep failed: stage 1 .*no.*Now: stage 1 is AWAKE; all answers are in omni_"),
    ):
        execute(session, "sleep 1")
    assert [ack.ok for ack in session.acks] == [False]


def test_ctrl_c_calls_a_sleep_off_that_waits_for_requests(session: Session, engine: Contract) -> None:
    job = execute(session, "generate a star --steps 900 --bg")
    deadline = time.monotonic() + 20
    while not engine.status().stages[1].running and time.monotonic() < deadline:
        time.sleep(0.01)
    with (
        ctrl_c_once(lambda: engine.status().stages[1].state != "AWAKE"),
        pytest.raises(InterruptedVerb, match="interrupted"),
    ):
        execute(session, "sleep 1 --mode wait")
    job.cancel()
    deadline = time.monotonic() + 20
    while engine.status().stages[1].running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.status().stages[1].state == "AWAKE"


def test_the_history_is_the_servers_and_this_machines_is_there_too(
    session: Session, engine: Contract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acks = execute(session, "sleep 1")
    execute(session, "wake 1")
    wrote(session)
    found = execute(session, f"history --stage painter --session this --limit 2 --json {tmp_path / 'past.json'}")
    assert [(ack.order, ack.stage_id, ack.pid) for ack in found] == [
        ("wake", 1, os.getpid()),
        ("sleep", 1, os.getpid()),
    ]
    assert found.newest[1].task_id == acks[0].task_id
    assert [one["task_id"] for one in json.loads((tmp_path / "past.json").read_text())] == [
        ack.task_id for ack in found
    ]
    assert f"the history of the server at {engine.url}; %omni history --here shows this machine's" in wrote(session)
    assert "2 ACKs" in repr(found)
    assert not execute(session, "history --limit 1").complete
    wrote(session)
    every = session.engine.history(since="2h")
    assert len(list(every)) == len(every) >= 2
    assert f" at {engine.url}" in session.engine.history(since=2e9).title
    with pytest.raises(ArgumentError, match="rank=-1 is not a whole number"):
        session.engine.history(rank=-1)
    monkeypatch.setenv("OMNI_NOTEBOOK_LEDGER", str(tmp_path / "empty.db"))
    here = execute(session, "history --here")
    assert "no history yet" in here.title
    assert wrote(session) == ""


def test_where_a_server_tells_no_history_this_machines_is_shown_and_said_to_be_that() -> None:
    with rude() as old:
        session = Session(Screen())
        execute(session, f"connect {old.url}")
        wrote(session)
        execute(session, "history --limit 1")
        assert wrote(session) == (
            f"this machine's history, not that of the engine at {old.url}: GET {old.url}/v1/omni/history answered 404: "
            "the server has no such call (an older version?); nothing was changed there\n"
        )
        execute(session, "stop")


# ---------------------------------------------------------------------------------------- audits


def test_an_audit_runs_beside_the_ranks_and_its_result_is_here(session: Session, tmp_path: Path) -> None:
    result = execute(
        session, f"audit 0 1 --level 1 --steps 4 --json {tmp_path / 'a.json'} --html {tmp_path / 'a.html'}"
    )
    assert result.verdict == "PASS", result
    assert [rank.stage_id for rank in result.cycles[0].ranks] == [0, 1]
    assert result.cycles[0].processes[0].left_bytes is not None  # seen from outside
    assert result.pictures["before the sleep"][0] == result.pictures["after the wake"][0]
    assert json.loads((tmp_path / "a.json").read_text())["verdict"] == "PASS"
    assert "Audit PASS" in (tmp_path / "a.html").read_text()
    assert "audit PASS" in wrote(session)


def test_an_audit_there_shows_the_steps_that_one_here_shows(session: Session, engine: Contract) -> None:
    told: list[tuple[str, float | None]] = []
    body = {"stage_ids": [0], "level": 1, "cycles": 2, "sampling_params": {"num_inference_steps": 1}}
    answer = session.engine.submit(session.engine.audit_there(body, lambda *now: told.append(now))).result(60)
    assert answer["verdict"] == "PASS"
    assert {label for label, _ in told} <= {f"cycle {cycle} of 2: {step}" for cycle in (1, 2) for step in STEPS}, told
    assert [share for _, share in told if share == 0.5]
    job = execute(session, "audit 0 --level 1 --steps 1 --cycles 300 --bg")
    deadline = time.monotonic() + 20
    while not re.search(r"cycle [2-9] of 300: ", job.progress.label) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert job.progress.fraction > 0
    job.cancel()


def test_an_audit_is_refused_there_as_it_is_here(session: Session) -> None:
    with pytest.raises(ArgumentError, match="there is no stage 7"):
        omni.audit(session.engine, 7)
    execute(session, "sleep 0")
    with pytest.raises(AsleepError, match="an audit begins awake"):
        execute(session, "audit 0")
    execute(session, "wake 0")


def test_ctrl_c_ends_an_audit_there_and_the_stages_are_awake(session: Session, engine: Contract) -> None:
    with (
        ctrl_c_once(lambda: engine.status().stages[0].state != "AWAKE"),
        pytest.raises(
            InterruptedVerb, match=r"interrupted: the audit there ends early.*now stage 0 \(thinker\) is AWAKE"
        ),
    ):
        execute(session, "audit 0 1 --level 1 --cycles 500")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            result = execute(session, "audit 0 --level 1 --steps 1")
        except StageBusyError:
            time.sleep(0.05)  # the one before is on its way out
            continue
        break
    assert result.verdict == "PASS"


def test_a_report_of_another_version_is_said_to_be_one() -> None:
    with pytest.raises(OmniError, match="is the server another version"):
        result_of({"status": "SUCCESS", "report": {"verdict": "PASS"}})


# ----------------------------------------------------------------------------------- whose memory


def test_a_borrow_on_this_machine_says_what_it_says_here(session: Session, engine: Contract) -> None:
    execute(session, "borrow 0 --level 1", "x = 1")
    assert wrote(session).partition(" · ")[0].endswith("of stage 0")
    assert engine.status().stages[0].state == "AWAKE"


def test_a_borrow_whose_engine_went_meanwhile_wakes_nothing_of_the_next_one(session: Session, engine: Contract) -> None:
    remote: Any = session.engine
    borrowed = omni.borrowed([0], engine=remote, of=session)
    told = r"another engine answers .*; what was borrowed went with it: .* Nothing was woken here$"
    with pytest.raises(ServerLostError, match=told), borrowed as lease:
        remote._peer.name = "1.aa@here"  # what answers from now on is another one than before
    assert (lease.woken, lease.wake_ms) == ([], None)
    assert engine.status().stages[0].state == "ASLEEP"
    execute(session, "wake 0")
    assert "another engine" not in wrote(session)


@pytest.mark.alone
def test_a_borrow_on_another_machine_claims_no_memory_for_this_one(
    session: Session, engine: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.engine, "host", "gpu-7")
    wrote(session)
    execute(session, "borrow 0", "x = bytearray(64 * 1024**2)")
    said = wrote(session)
    assert "of stage 0, all of it on gpu-7, not here · " in said
    assert "the code's own peak here 6" in said
    assert "MORE than was borrowed" not in said


def test_a_folder_of_another_machine_is_not_looked_for_here(
    session: Session, engine: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.engine, "host", "gpu-7")
    with pytest.raises(OmniError) as caught:
        execute(session, "weights 1 runs/none")
    assert "runs/none" in str(caught.value)


def test_the_dashboard_tells_whose_machine_it_is(engine: Contract) -> None:
    here = DeviceProbe().look(engine.status())
    assert (here[0].name, len(here[0].holders)) == ("host RAM", 3)
    (there,) = DeviceProbe().look(engine.status(), "gpu-7")
    assert (there.name, there.used_bytes, there.note) == ("gpu-7, another machine", None, ELSEWHERE)
    pids = [stage.ranks[0].pid for stage in engine.status().stages]
    assert [holder.who for holder in there.holders] == [f"stage {n} rank 0 (pid {pid})" for n, pid in enumerate(pids)]
    assert ELSEWHERE in parts.devices((there,)).replace("&#x27;", "'")


def test_a_dashboard_that_is_disconnected_says_so_and_draws_no_memory_as_given_back(engine: Contract) -> None:
    known = RemoteOmni(engine.url)
    sampler = Sampler(known)
    frames: list[Any] = []
    sampler.attach(frames.append)
    deadline = time.monotonic() + 20
    while len(frames) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    known.shutdown()
    sampler.join()
    while sampler.running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert f"disconnected · the engine there was left as it is; %omni connect {engine.url}" in frames[-1].head
    values = sampler._timeline.window().values
    assert (values[:, 0] > 0).any()
    assert math.isnan(values[:, -1].max())  # not seen any more, which is not 0


def test_a_lost_server_is_seen_on_the_dashboard(engine: Contract) -> None:
    with serving(engine.embedded) as server:
        known = RemoteOmni(server.url)
        sampler = Sampler(known)
    deadline = time.monotonic() + 20
    while "no status since then" not in sampler.frame.head and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "no status since then: ServerLostError" in sampler.frame.head
    known.shutdown()
    sampler.end()
    sampler.join()


def test_an_engine_here_is_nowhere_else(engine: Contract) -> None:
    assert (engine.embedded.url, engine.embedded.host, engine.host) == (None, None, None)
    assert EngineStatus(model="", closed=True, paused=False, uptime_s=0, stages=()).left_at is None
    with pytest.raises(EngineClosedError):
        _ = Session(Screen()).engine
