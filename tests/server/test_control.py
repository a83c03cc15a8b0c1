"""The orders of the cockpit over HTTP: what they answer, what they refuse, that the state is the engine's."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import struct
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.config import DEMO_FOLDER
from omni_notebook.errors import ArgumentError
from omni_notebook.server.stages import numbers
from tests.engine.engine_helpers import collect, until
from tests.server.conftest import STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.server.serving import Server

ACK_FIELDS = {"task_id", "status", "stage_id", "rank", "freed_bytes", "metadata", "error_msg"}


def state(engine: AsyncOmni, stage_id: int) -> str:
    return str(engine.status().stages[stage_id].state)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_answers_one_measured_ack_a_rank_and_a_wake_brings_the_picture_back(
    http: httpx.Client, level: int
) -> None:
    body = {"prompt": "a red star", **STEPS}
    before = http.post("/v1/images/generations", json=body).json()["data"][0]["b64_json"]
    slept = http.post("/v1/omni/sleep", json={"stage_ids": [0, 1], "level": level})
    assert slept.status_code == 200
    answer = slept.json()
    assert answer["status"] == "SUCCESS"
    assert [(ack["stage_id"], ack["rank"], ack["status"]) for ack in answer["acks"]] == [
        (0, 0, "SUCCESS"),
        (1, 0, "SUCCESS"),
        (1, 1, "SUCCESS"),
    ]
    for ack in answer["acks"]:
        assert set(ack) == ACK_FIELDS
        assert ack["freed_bytes"] == ack["metadata"]["observed_bytes"] > 0
    woken = http.post("/v1/omni/wakeup", json={"stage_ids": [0, 1]}).json()
    assert woken["status"] == "SUCCESS"
    assert all(ack["metadata"]["mapped_bytes"] > 0 for ack in woken["acks"])
    assert http.post("/v1/images/generations", json=body).json()["data"][0]["b64_json"] == before


def test_no_request_waits_for_a_thread_before_it_is_begun(server: Server) -> None:
    """FastAPI calls plain functions on another thread, which on a busy machine is milliseconds away."""
    routes = [route for route in server._app.routes if hasattr(route, "dependant")]
    calls = [dependant.call for route in routes for dependant in _depends_on(route.dependant)]
    assert {"wakeup", "known_query", "engine_of"} <= {call.__name__ for call in calls}
    assert [call for call in calls if not inspect.iscoroutinefunction(call)] == []


def _depends_on(dependant: Any) -> Iterator[Any]:
    yield dependant
    for one in dependant.dependencies:
        yield from _depends_on(one)


def test_what_is_so_already_is_skipped_and_a_mix_is_a_success(http: httpx.Client) -> None:
    assert http.post("/v1/omni/wakeup", json={}).json()["status"] == "SKIPPED"
    assert http.post("/v1/omni/sleep", json={"stage_ids": [0]}).json()["status"] == "SUCCESS"
    assert http.post("/v1/omni/sleep", json={"stage_ids": [0]}).json()["status"] == "SKIPPED"
    assert http.post("/v1/omni/sleep", json={}).json()["status"] == "SUCCESS"
    assert http.post("/v1/omni/sleep", json={}).json()["status"] == "SKIPPED"


def test_the_state_is_the_engines_whoever_orders(http: httpx.Client, engine: AsyncOmni) -> None:
    asyncio.run(engine.sleep([1], level=2))
    assert http.get("/v1/omni/status").json()["stages"][1]["state"] == "ASLEEP"
    http.post("/v1/omni/wakeup", json={"stage_ids": [1]})
    assert state(engine, 1) == "AWAKE"
    http.post("/v1/omni/sleep", json={"stage_ids": [1], "level": 1})
    assert state(engine, 1) == "ASLEEP"
    asyncio.run(engine.wake_up([1]))
    assert http.get("/v1/omni/status").json()["stages"][1]["state"] == "AWAKE"


def test_a_number_in_quotes_is_no_name_though_a_models_folder_is_called_so() -> None:
    stages = [SimpleNamespace(stage_id=0, name="1"), SimpleNamespace(stage_id=1, name="painter")]
    engine: Any = SimpleNamespace(status=lambda: SimpleNamespace(stages=stages))
    assert numbers(engine, ["painter", 1, 0]) == [1, 1, 0]
    with pytest.raises(ArgumentError, match=r"there is no stage '1'; this engine has 0 \(1\), 1 \(painter\)"):
        numbers(engine, ["1"])


def test_stages_go_by_number_or_by_name(http: httpx.Client, engine: AsyncOmni) -> None:
    def acked(order: str, *stages: int | str) -> list[int]:
        return [ack["stage_id"] for ack in http.post(f"/v1/omni/{order}", json={"stage_ids": stages}).json()["acks"]]

    assert acked("sleep", "painter") == [1, 1]
    assert acked("wakeup", "thinker", 1, "painter") == [0, 1, 1]
    assert http.post("/v1/omni/pause", json={"mode": "keep", "stage_ids": ["painter"]}).status_code == 200
    assert [str(stage.pause_state) for stage in engine.status().stages] == ["OPEN", "PAUSED"]
    assert http.post("/v1/omni/resume", json={"stage_ids": ["painter"]}).status_code == 200
    folder = {"path": str(DEMO_FOLDER / "thinker"), "version": "by-name"}
    assert http.post("/v1/omni/weights", json={"stage_id": "thinker", **folder}).json()["weight_version"] == "by-name"
    by_name = http.get("/v1/omni/logs", params={"stage_id": "painter"})
    assert by_name.json() == http.get("/v1/omni/logs", params={"stage_id": 1}).json()
    assert http.get("/v1/omni/logs", params={"stage_id": "nobody"}).status_code == 422


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("sleep", {"level": 3}, "body.level: Input should be 1 or 2"),
        ("sleep", {"level": "1"}, "body.level: Input should be 1 or 2"),
        ("sleep", {"stages": [0]}, "body.stages: there is no such field"),
        ("sleep", {"stage_ids": [7]}, "there is no stage 7"),
        ("sleep", {"stage_ids": ["thinkr"]}, "there is no stage 'thinkr'; this engine has 0 (thinker), 1 (painter)"),
        ("wakeup", {"stage_ids": [0, "1"]}, "there is no stage '1'; this engine has 0 (thinker), 1 (painter)"),
        ("restart", {"stage_id": "all"}, "there is no stage 'all'; this engine has 0 (thinker), 1 (painter)"),
        ("sleep", {"stage_ids": [True]}, "body.stage_ids.0: Input should be a number or a name"),
        (
            "sleep",
            {"stage_ids": [0, 1.0, None]},
            "body.stage_ids.1: Input should be a number or a name",
        ),
        ("sleep", {"stage_ids": "thinker"}, "body.stage_ids: Input should be a valid list"),
        ("sleep", {"stage_ids": []}, "body.stage_ids: List should have at least 1 item"),
        ("sleep", {"timeout": 0}, "body.timeout: Input should be greater than or equal to 0.001"),
        ("sleep", {"mode": "now"}, "body.mode: Input should be 'abort', 'wait' or 'keep'"),
        ("wakeup", {"tags": ["wings"]}, "there is no tag 'wings'"),
        ("weights", {"stage_id": 0, "path": "/nowhere"}, "/nowhere"),
        ("weights", {"stage_id": 0, "path": "a\0b"}, "holds a NUL"),
        ("loras", {"lora_name": "a", "lora_int_id": 1, "lora_path": "a\0b"}, "holds a NUL"),
        ("pause", {"mode": "stop"}, "body.mode"),
        ("restart", {}, "body.stage_id: Field required"),
    ],
)
def test_what_can_not_be_meant_is_422_that_names_it_and_changes_nothing(
    http: httpx.Client, engine: AsyncOmni, path: str, body: dict[str, Any], words: str
) -> None:
    answer = http.post(f"/v1/omni/{path}", json=body)
    assert answer.status_code == 422
    assert words in answer.json()["error"]["message"]
    assert [state(engine, n) for n in (0, 1)] == ["AWAKE", "AWAKE"]


def test_a_body_that_is_no_json_object_is_422(http: httpx.Client) -> None:
    for content in (b"", b"[]", b"{", b"\xff"):
        answer = http.post("/v1/omni/sleep", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code in {400, 422}, content
        assert answer.json()["status"] == "ERROR"
    assert http.post("/v1/omni/sleep", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 422


def test_a_busy_stage_is_409_and_a_mode_quiesces_it(http: httpx.Client, engine: AsyncOmni) -> None:
    async def scenario() -> None:
        request = asyncio.create_task(collect(engine, sampling_params={"num_inference_steps": 400}))
        await until(lambda: engine.status().stages[1].running)
        busy = await asyncio.to_thread(http.post, "/v1/omni/sleep", json={"stage_ids": [1]})
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "BUSY")
        slept = await asyncio.to_thread(http.post, "/v1/omni/sleep", json={"stage_ids": [1], "mode": "wait"})
        assert slept.json()["status"] == "SUCCESS"
        assert (await request)[-1].finished

    asyncio.run(scenario())


def test_ranks_that_fail_answer_500_with_every_ack(http: httpx.Client, engine: AsyncOmni) -> None:
    import os
    import signal

    victim = engine.status().stages[1].ranks[1].pid
    os.kill(victim, signal.SIGSTOP)
    try:
        answer = http.post("/v1/omni/sleep", json={"stage_ids": [1], "timeout": 1})
    finally:
        os.kill(victim, signal.SIGCONT)
    assert answer.status_code in {500, 504}
    assert answer.json()["status"] == "ERROR"
    assert len(answer.json()["acks"]) == 2
    assert "rank" in answer.json()["error"]["message"]


def test_a_closed_gate_is_503_with_the_request_that_opens_it(http: httpx.Client) -> None:
    http.post("/v1/omni/sleep", json={"stage_ids": [0]})
    http.post("/v1/omni/pause", json={"mode": "keep", "stage_ids": [1]})
    answer = http.post("/v1/images/generations", json={"prompt": "a red star"})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    for request in answer.json()["help"]:
        assert http.request(request["method"], request["path"], json=request["body"]).status_code == 200
    assert http.post("/v1/images/generations", json={"prompt": "a red star", **STEPS}).status_code == 200


def test_an_order_that_the_state_forbids_is_409_with_the_request_that_helps(http: httpx.Client) -> None:
    http.post("/v1/omni/sleep", json={"stage_ids": [0], "level": 2})
    answer = http.post("/v1/omni/sleep", json={"stage_ids": [0], "level": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "ASLEEP")
    assert answer.json()["help"][0]["path"] == "/v1/omni/wakeup"


def test_a_request_may_wait_for_the_gate(http: httpx.Client, engine: AsyncOmni) -> None:
    asyncio.run(engine.sleep([0]))
    opening = threading.Timer(0.3, lambda: asyncio.run(engine.wake_up([0])))
    opening.start()
    answer = http.post("/v1/images/generations?wait=20", json={"prompt": "a red star", **STEPS})
    opening.join()
    assert answer.status_code == 200


def test_pause_resume_abort_restart_weights_and_loras_do_what_the_engines_calls_do(
    http: httpx.Client, engine: AsyncOmni
) -> None:
    assert http.post("/v1/omni/pause", json={"mode": "wait"}).json() == {"status": "SUCCESS"}
    assert engine.status().paused
    assert http.post("/v1/omni/resume", json={}).json() == {"status": "SUCCESS"}
    assert not engine.status().paused
    assert http.post("/v1/omni/abort", json={"request_id": "nobody"}).json() == {"status": "SUCCESS", "found": False}
    folder = str(DEMO_FOLDER / "thinker")
    loaded = http.post("/v1/omni/weights", json={"stage_id": 0, "path": folder, "version": "again"}).json()
    assert loaded == {"status": "SUCCESS", "weight_version": "again"}
    assert http.get("/v1/omni/loras").json()["stages"][0] == {"stage_id": 0, "loras": []}
    assert http.delete("/v1/omni/loras/5").json() == {"status": "SUCCESS", "removed": False}
    before = engine.status().stages[1].ranks[0].pid
    assert http.post("/v1/omni/restart", json={"stage_id": 1}).json() == {"status": "SUCCESS"}
    assert engine.status().stages[1].ranks[0].pid != before
    assert http.get("/health").json() == {"status": "ok"}


def test_events_begin_with_the_status_and_tell_what_happens(http: httpx.Client) -> None:
    seen: list[tuple[str, Any]] = []
    sleeping = threading.Thread(target=lambda: http.post("/v1/omni/sleep", json={"stage_ids": [0]}))
    with http.stream("GET", "/v1/omni/events") as stream:
        lines = stream.iter_lines()
        for line in lines:
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
                seen.append((kind, json.loads(next(lines).removeprefix("data: "))))
                if kind == "status":
                    sleeping.start()
                if kind == "ack":
                    break
    sleeping.join()
    assert seen[0][0] == "status"
    states = [event["state"] for kind, event in seen if kind == "state" and event["stage_id"] == 0]
    assert states[0] == "FALLING_ASLEEP"
    assert seen[-1][1]["ack"]["status"] == "SUCCESS"


def test_nothing_is_written_to_listeners_that_have_left(
    server: Server, engine: AsyncOmni, caplog: pytest.LogCaptureFixture
) -> None:
    """Each write to a closed connection would be a line in the server's log, of nothing but a client's leaving."""
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as listener:
            listener.sendall(b"GET /v1/omni/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in listener.recv(100)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # gone without a goodbye
            orders = [engine.submit(engine.wake_up()) for _ in range(4)]
        for order in orders:
            order.result(30)
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_whoever_leaves_the_events_is_forgotten(http: httpx.Client, engine: AsyncOmni) -> None:
    hub = engine._core.hub
    asyncio.run(until(lambda: len(hub._everyone()) == 1))  # the metrics; those of the tests before have gone
    with http.stream("GET", "/v1/omni/events") as stream:
        lines = stream.iter_lines()  # dropped, it would close the stream
        next(lines)
        assert len(hub._everyone()) == 2
    asyncio.run(until(lambda: len(hub._everyone()) == 1))
