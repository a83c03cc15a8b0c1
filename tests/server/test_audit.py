"""Audits over HTTP: made beside the ranks, one at a time, ended with their client or their server."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from omni_notebook.verbs.auditing.result import SCHEMA
from tests.engine.engine_helpers import PROMPT, collect, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import httpx

    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.server.serving import Server

PATH = "/v1/omni/audit"
QUICK: dict[str, Any] = {"stage_ids": [1], "sampling_params": {"num_inference_steps": 3}}
LONG = {**QUICK, "cycles": 1000}
MIB = 1024**2


def states(engine: AsyncOmni) -> list[str]:
    return [str(stage.state) for stage in engine.status().stages]


def auditing(server: Server) -> bool:
    return bool(server._app.state.audits.running)


async def asleep(engine: AsyncOmni) -> None:
    await until(lambda: states(engine)[1] == "ASLEEP")


def test_an_audit_gives_its_verdict_its_record_and_its_pictures(http: httpx.Client, engine: AsyncOmni) -> None:
    answer = http.post(PATH, json={**QUICK, "level": 2, "prompt": PROMPT, "seed": 7, "probe_bytes": 8 * MIB})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    report = body["report"]
    jsonschema.validate(report, json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert (body["status"], body["verdict"], report["verdict"]) == ("SUCCESS", "PASS", "PASS"), report["findings"]
    assert (report["level"], report["seed"], report["prompt"]) == (2, 7, PROMPT)
    (cycle,) = report["cycles"]
    assert [(rank["stage_id"], rank["rank"], rank["sleep_status"]) for rank in cycle["ranks"]] == [
        (1, 0, "SUCCESS"),
        (1, 1, "SUCCESS"),
    ]
    assert {process["source"] for process in cycle["processes"]} == {"smaps"}
    assert cycle["probe"]["taken_bytes"] == 8 * MIB
    sampling = {"num_inference_steps": 3, "seed": 7}
    expected = asyncio.run(collect(engine, PROMPT, sampling_params=sampling))[-1]
    for name in ("before the sleep", "after the wake"):
        assert [base64.b64decode(one) for one in body["pictures"][name]] == expected.png
    assert states(engine) == ["AWAKE", "AWAKE"]


def test_an_audit_sleeps_at_level_1_unless_it_is_told_otherwise_and_takes_the_seed_from_either_place(
    http: httpx.Client,
) -> None:
    body = {"stage_ids": ["painter"], "sampling_params": {"num_inference_steps": 3, "seed": 5}}
    report = http.post(PATH, json=body).json()["report"]
    assert (report["level"], report["seed"], report["cycles_asked"]) == (1, 5, 1)
    assert {rank["stage_id"] for rank in report["cycles"][0]["ranks"]} == {1}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"level": 3}, "body.level"),
        ({"cycles": 0}, "body.cycles"),
        ({"cycles": 10**9}, "body.cycles"),
        ({"prompt": " "}, "the prompt is empty"),
        ({"stage_ids": [9]}, "there is no stage 9"),
        ({"probe_bytes": -1}, "body.probe_bytes"),
        ({"seed": -1}, "body.seed"),
        ({"sampling_params": {"num_inference_steps": 0}}, "num_inference_steps=0"),
        ({"html": "x"}, "body.html: there is no such field"),
    ],
)
def test_what_can_not_be_meant_is_422(http: httpx.Client, engine: AsyncOmni, body: dict[str, Any], words: str) -> None:
    answer = http.post(PATH, json=body)
    assert answer.status_code == 422
    assert words in answer.json()["error"]["message"]
    assert states(engine) == ["AWAKE", "AWAKE"]


def test_a_stage_that_sleeps_is_not_audited(http: httpx.Client, engine: AsyncOmni) -> None:
    asyncio.run(engine.sleep([1]))
    answer = http.post(PATH, json=QUICK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "ASLEEP")
    said = 'stage 1 (painter) is ASLEEP (level 1): POST /v1/omni/wakeup {"stage_ids": [1]} wakes it'
    assert said in answer.json()["error"]["message"]
    assert answer.json()["help"][0]["path"] == "/v1/omni/wakeup"


def test_a_paused_or_busy_engine_is_not_audited(http: httpx.Client, engine: AsyncOmni) -> None:
    http.post("/v1/omni/pause", json={"mode": "keep"})
    paused = http.post(PATH, json=QUICK)
    assert (paused.status_code, paused.json()["error"]["code"]) == (409, "PAUSED")
    assert "POST /v1/omni/resume opens" in paused.json()["error"]["message"]
    http.post("/v1/omni/resume", json={})

    async def scenario() -> None:
        request = asyncio.create_task(collect(engine, sampling_params={"num_inference_steps": 400}, request_id="long"))
        await until(lambda: engine.status().stages[1].running)
        busy = await asyncio.to_thread(http.post, PATH, json=QUICK)
        await engine.abort("long")
        await request
        assert (busy.status_code, busy.json()["error"]["details"]["running"]) == (409, 1)
        assert "end them with POST /v1/omni/abort" in busy.json()["error"]["message"]

    asyncio.run(scenario())


def test_the_server_answers_meanwhile_a_second_audit_is_refused_and_a_client_that_leaves_ends_the_first(
    http: httpx.Client, server: Server, engine: AsyncOmni
) -> None:
    content = json.dumps(LONG).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        leaving.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        asyncio.run(until(lambda: auditing(server)))
        asyncio.run(until(lambda: http.get("/v1/omni/status").json()["stages"][1]["state"] == "ASLEEP"))
        second = http.post(PATH, json=QUICK)
        assert (second.status_code, second.json()["error"]["code"]) == (409, "BUSY")
        assert "another audit is on its way" in second.json()["error"]["message"]
        assert auditing(server)
        asyncio.run(asleep(engine))
    asyncio.run(until(lambda: not auditing(server)))
    assert states(engine) == ["AWAKE", "AWAKE"]
    assert http.post(PATH, json=QUICK).json()["verdict"] == "PASS"


def test_the_servers_end_ends_an_audit_with_its_stages_awake(engine: AsyncOmni) -> None:
    import httpx

    from omni_notebook.server.serving import Server
    from omni_notebook.server.settings import ServerSettings

    server = Server(engine, ServerSettings(port=0))
    server.start()

    async def scenario() -> httpx.Response:
        asking = asyncio.create_task(asyncio.to_thread(httpx.post, f"{server.url}{PATH}", json=LONG, timeout=60))
        await asleep(engine)
        await asyncio.to_thread(server.stop)
        return await asking

    answer = asyncio.run(scenario())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ENDED")
    assert "the server ends: the audit ended early; the stages are awake as before" in answer.json()["error"]["message"]
    assert states(engine) == ["AWAKE", "AWAKE"]
    assert not auditing(server)


# ------------------------------------------------------------------------------------ as it goes on

EVENTS = {"Accept": "text/event-stream"}


def test_an_audit_tells_how_far_it_is_and_ends_with_the_answer_of_one_that_does_not(http: httpx.Client) -> None:
    from httpx_sse import connect_sse

    with connect_sse(http, "POST", PATH, json={**QUICK, "cycles": 2}) as source:
        assert source.response.status_code == 200
        heard = [(event.event, json.loads(event.data)) for event in source.iter_sse()]
    kinds = [kind for kind, _ in heard]
    assert kinds == ["progress"] * (len(heard) - 1) + ["result"]
    told = [data for kind, data in heard if kind == "progress"]
    assert "cycle 2 of 2: falling asleep" in {data["label"] for data in told}
    assert all(one != another for one, another in pairwise(told))  # only what changed
    shares = [data["fraction"] for data in told]
    assert shares == sorted(shares)
    assert {0.0, 0.5} <= set(shares) <= {0.0, 0.5, 1.0}
    result = heard[-1][1]
    assert result.keys() == http.post(PATH, json=QUICK).json().keys()
    assert (result["verdict"], result["report"]["cycles_asked"]) == ("PASS", 2)


def test_what_is_refused_has_its_status_though_events_were_asked_for(http: httpx.Client, engine: AsyncOmni) -> None:
    asyncio.run(engine.sleep([1]))
    answer = http.post(PATH, json=QUICK, headers=EVENTS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "ASLEEP")
    assert http.post(PATH, json={**QUICK, "level": 3}, headers=EVENTS).status_code == 422


def test_who_leaves_the_events_ends_the_audit_with_its_stages_awake(
    http: httpx.Client, server: Server, engine: AsyncOmni
) -> None:
    with http.stream("POST", PATH, json=LONG, headers=EVENTS) as response:
        lines = response.iter_lines()  # its end would be the response's
        assert next(lines) == "event: progress"
        asyncio.run(asleep(engine))
    asyncio.run(until(lambda: not auditing(server)))
    assert states(engine) == ["AWAKE", "AWAKE"]


def test_an_audit_that_fails_half_way_ends_with_an_error_event(http: httpx.Client, engine: AsyncOmni) -> None:
    from httpx_sse import connect_sse

    with connect_sse(http, "POST", PATH, json=LONG) as source:
        heard = source.iter_sse()
        assert next(heard).event == "progress"
        asyncio.run(until(lambda: states(engine)[1] == "AWAKE"))
        engine._loop.call(lambda: engine._core.stages[1].fail(RuntimeError("for this test")))
        last = [event for event in heard if event.event != "progress"]
    assert [event.event for event in last] == ["error"]
    assert json.loads(last[0].data)["status"] == "ERROR"
    assert "stage 1" in json.loads(last[0].data)["error"]["message"]


def test_an_audit_that_meets_an_error_of_no_kind_of_ours_ends_with_it_in_an_event(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from httpx_sse import connect_sse

    from omni_notebook.verbs.auditing.auditor import Auditor

    goes_on = threading.Event()

    def fails(_auditor: Auditor, _outside: object) -> None:
        goes_on.wait(20)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Auditor, "_run_cycles", fails)
    with connect_sse(http, "POST", PATH, json=QUICK) as source:
        heard = source.iter_sse()
        assert next(heard).event == "progress"
        goes_on.set()
        last = [event for event in heard if event.event != "progress"]
    assert [event.event for event in last] == ["error"]
    error = json.loads(last[0].data)["error"]
    assert (error["code"], error["message"]) == ("BUG", "an error of the server's own: OSError; its log says more")
    assert "No space left on device" in caplog.text


def test_who_leaves_before_the_first_event_ends_the_audit_too() -> None:
    from omni_notebook.server.auditing import _Streamed

    async def events() -> AsyncGenerator[bytes]:
        yield b"never asked for"

    async def left() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def scenario() -> bool:
        async def send(_message: object) -> None:
            await asyncio.sleep(0)

        running: Any = asyncio.create_task(asyncio.Event().wait())
        await _Streamed(events(), running)({"type": "http", "asgi": {"spec_version": "2.3"}}, left, send)
        await asyncio.wait({running}, timeout=5)
        return bool(running.cancelled())

    assert asyncio.run(scenario())


def test_the_servers_end_is_the_last_event_of_an_audit(engine: AsyncOmni) -> None:
    import httpx
    from httpx_sse import connect_sse

    from omni_notebook.server.serving import Server
    from omni_notebook.server.settings import ServerSettings

    server = Server(engine, ServerSettings(port=0))
    server.start()
    with httpx.Client(timeout=60) as http, connect_sse(http, "POST", f"{server.url}{PATH}", json=LONG) as source:
        heard = source.iter_sse()
        next(heard)
        asyncio.run(asleep(engine))
        server.stop()
        last = list(heard)[-1]
    error = json.loads(last.data)["error"]
    assert (last.event, error["code"]) == ("error", "ENDED")
    assert error["message"].startswith("the server ends: the audit ended early; ")
    assert states(engine) == ["AWAKE", "AWAKE"]
