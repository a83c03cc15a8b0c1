"""What errors say: one line, our form, what is wrong, and requests where a curl user needs requests."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.errors import ConfigError
from omni_notebook.protocol import PauseState
from omni_notebook.server.answers import LONGEST
from omni_notebook.server.helping import in_requests
from omni_notebook.server.settings import ServerSettings
from tests.engine.engine_helpers import until
from tests.server.conftest import STEPS

if TYPE_CHECKING:
    import httpx

    from omni_notebook.engine.async_omni import AsyncOmni

JSON = {"Content-Type": "application/json"}
PYTHON = re.compile(
    r"wake_up|generation\(|restart\(|load_weights|sleep\(\.|(add|remove)_lora|abort\(|admission_timeout|discard=True|mode="
)
SLEEP = "/v1/omni/sleep"
IMAGES = "/v1/images/generations"
LONG_DRAW = {"prompt": "a star", "num_inference_steps": 1000}


def message(answer: httpx.Response) -> str:
    said: str = answer.json()["error"]["message"]
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        ({"content": b"{}"}, 422, "send 'Content-Type: application/json'"),
        ({"data": {"level": 2}}, 422, "send 'Content-Type: application/json'"),
        ({"content": gzip.compress(b"{}"), "headers": {**JSON, "Content-Encoding": "gzip"}}, 415, "gzip"),
        ({"content": b'{"stage_ids":' + b"[" * 100_000, "headers": JSON}, 400, "nested too deeply"),
        ({"content": b'{"stage_ids":[' + b"9" * 5000 + b"]}", "headers": JSON}, 400, "too many digits"),
        ({"content": b'{"mode": "\xff"}', "headers": JSON}, 400, "not UTF-8 text"),
        ({"content": b'{"timeout": NaN}', "headers": JSON}, 422, "body.timeout: Input should be a finite number"),
    ],
)
def test_a_body_that_can_not_be_read_is_told_why(
    http: httpx.Client, engine: AsyncOmni, sent: dict[str, Any], status: int, words: str
) -> None:
    answer = http.post(SLEEP, **sent)
    assert answer.status_code == status
    assert words in message(answer)
    assert engine.status().stages[0].state == "AWAKE"


def test_paths_and_methods_that_are_not_there_are_named(http: httpx.Client) -> None:
    assert message(http.get("/v1/omni/slep")) == "there is no /v1/omni/slep here; GET /openapi.json lists what there is"
    wrong = http.get(SLEEP)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert message(wrong) == "/v1/omni/sleep takes POST, not GET"
    assert http.head("/health").status_code == 200


@pytest.mark.parametrize("path", [f"{SLEEP}?level=2", f"{IMAGES}?wiat=3", "/v1/chat/completions?n=2"])
def test_a_parameter_that_no_order_takes_is_named_and_nothing_begins(
    http: httpx.Client, engine: AsyncOmni, path: str
) -> None:
    body = {"prompt": "a"} if "images" in path else {}
    body = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else body
    answer = http.post(path, json=body)
    assert answer.status_code == 422
    assert re.search(r"query\.(level|wiat|n): there is no such parameter", message(answer))
    assert engine.status().stages[0].state == "AWAKE"


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.", "localhost:x", "localhost@evil", "[::1].evil", "", "0:0"]
)
def test_a_host_that_is_not_ours_is_told_how_to_be(http: httpx.Client, host: str) -> None:
    answer = http.get("/v1/omni/status", headers={"Host": host})
    assert answer.status_code == 400
    assert "--allowed-host" in message(answer)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]", "[::1]:8000"])
def test_a_host_that_is_ours_is_answered_with_any_port(http: httpx.Client, host: str) -> None:
    assert http.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("key", ["a b", "abc\n", " abc", "schlüssel", "a\udcffb"])
def test_a_key_that_no_header_carries_is_refused_at_the_start(key: str) -> None:
    with pytest.raises(ConfigError, match="Nothing was started"):
        ServerSettings(api_key=key)


def test_what_the_client_sent_is_not_repeated_at_any_length(http: httpx.Client) -> None:
    for body in ({"model": "m" * 100_000, "prompt": "a"}, {"f" * 100_000: 1, "prompt": "a"}):
        assert len(message(http.post(IMAGES, json=body))) < LONGEST + 50


def test_refusals_name_requests_and_no_python(http: httpx.Client, engine: AsyncOmni) -> None:
    said = []
    drawing = threading.Thread(target=lambda: http.post(IMAGES, json=LONG_DRAW))
    drawing.start()
    asyncio.run(until(lambda: engine.status().stages[1].running))
    said.append(message(http.post(SLEEP, json={"stage_ids": [1]})))
    http.post(SLEEP, json={"stage_ids": [1], "mode": "abort", "level": 2})
    drawing.join()
    said += [message(http.post(path, json=body)) for path, body in ((SLEEP, {"level": 1}), (IMAGES, {"prompt": "a"}))]
    said.append(message(http.post(f"{IMAGES}?wait=0.05", json={"prompt": "a"})))
    http.post("/v1/omni/wakeup", json={"reload": False})
    said += [message(http.post(path, json=body)) for path, body in ((SLEEP, {"level": 1}), (IMAGES, {"prompt": "a"}))]
    http.post("/v1/omni/wakeup", json={})
    http.post("/v1/omni/pause", json={})
    said.append(message(http.post(IMAGES, json={"prompt": "a"})))
    assert [line for line in said if PYTHON.search(line)] == []
    assert 'POST /v1/omni/wakeup {"stage_ids": [1]}' in said[2]
    assert said[3].endswith("The request waited 0.05 s (?wait=SECONDS)")


@pytest.mark.parametrize(
    ("engines", "ours"),
    [
        ("call restart(1), then generate again", 'send POST /v1/omni/restart {"stage_id": 1}, then generate again'),
        (
            "call load_weights(0, path) or wake_up([0])",
            'send POST /v1/omni/weights {"stage_id": 0, "path": "FOLDER"} or POST /v1/omni/wakeup {"stage_ids": [0]}',
        ),
        (
            "call pause_generation(mode='keep', stage_ids=[1]) again, or resume_generation(). Nothing",
            'send POST /v1/omni/pause {"mode": "keep", "stage_ids": [1]} again, or POST /v1/omni/resume. Nothing',
        ),
        ("call sleep(..., mode='wait' | 'abort'), or", "send POST /v1/omni/sleep with \"mode\": 'wait' | 'abort', or"),
        ("call remove_lora(3) first", "send DELETE /v1/omni/loras/3 first"),
    ],
)
def test_calls_become_requests(engines: str, ours: str) -> None:
    assert in_requests(engines) == ours


def test_a_stage_that_falls_asleep_has_a_request_that_helps(http: httpx.Client, engine: AsyncOmni) -> None:
    import msgspec

    from omni_notebook.protocol import MemoryState
    from omni_notebook.server.helping import requests_that_help

    status = engine.status()
    falling = msgspec.structs.replace(status.stages[1], state=MemoryState.FALLING_ASLEEP)
    helping = requests_that_help(msgspec.structs.replace(status, stages=(status.stages[0], falling)))
    assert helping == [{"method": "POST", "path": "/v1/omni/wakeup", "body": {"stage_ids": [1]}}]
    assert falling.pause_state is PauseState.OPEN


def test_a_request_is_aborted_by_the_name_its_client_gave_it(http: httpx.Client, engine: AsyncOmni) -> None:
    found: list[httpx.Response] = []
    named = {"X-Request-Id": "mine-1"}
    drawing = threading.Thread(target=lambda: found.append(http.post(IMAGES, json=LONG_DRAW, headers=named)))
    drawing.start()
    asyncio.run(until(lambda: engine.status().stages[1].running))
    taken = http.post(IMAGES, json=LONG_DRAW, headers=named)
    assert (taken.status_code, "already in progress" in message(taken)) == (422, True)
    assert http.post("/v1/omni/abort", json={"request_id": "mine-1"}).json()["found"] is True
    drawing.join()
    assert (found[0].status_code, found[0].json()["error"]["code"]) == (409, "ABORTED")
    assert found[0].headers["x-should-retry"] == "false"


def test_an_answer_says_what_its_request_is_called(http: httpx.Client) -> None:
    drawn = http.post(IMAGES, json={"prompt": "a", "n": 2, **STEPS})
    assert drawn.json()["data"][0]["request_id"] == drawn.headers["x-request-id"]
    body = {"messages": [{"role": "user", "content": "a"}]}
    told = http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"})
    assert told.json()["id"] == told.headers["x-request-id"] == "mine"
    streamed = http.post("/v1/chat/completions", json={**body, "stream": True})
    assert f'"id":"{streamed.headers["x-request-id"]}"' in streamed.text
    assert http.post(IMAGES, json={"prompt": "a"}, headers={"X-Request-Id": "a b"}).status_code == 422


@pytest.mark.parametrize("content", ["a\\ud800b", [{"type": "text", "text": "\\udc00"}]])
def test_half_a_surrogate_pair_is_422_in_a_chat_as_in_a_prompt(http: httpx.Client, content: Any) -> None:
    chat = json.dumps({"messages": [{"role": "user", "content": content}]}).replace("\\\\u", "\\u")
    for path, body in (("/v1/chat/completions", chat), (IMAGES, '{"prompt": "\\ud800"}')):
        answer = http.post(path, content=body, headers=JSON)
        assert answer.status_code == 422
        assert "body.messages.0.content" in message(answer) or "body.prompt" in message(answer)


def test_a_chat_is_helped_by_the_stages_on_its_way_alone(http: httpx.Client) -> None:
    http.post(SLEEP, json={})
    chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    drawn = http.post(IMAGES, json={"prompt": "a"})
    assert chat.json()["help"][0]["body"] == {"stage_ids": [0]}
    assert drawn.json()["help"][0]["body"] == {"stage_ids": [0, 1]}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (
            SLEEP,
            {"stage_ids": [None] * 1000},
            r"body\.stage_ids\.0: Input should be a number or a name",
        ),
        (
            SLEEP,
            {"stage_ids": ["x"] * 1000},
            r"there is no stage 'x'; this engine has 0 \(thinker\), 1 .*",
        ),
        ("/v1/omni/wakeup", {"tags": [1] * 1000}, r"body\.tags\.0: Input should be a valid string"),
        (
            IMAGES,
            {"prompt": "a", "stop_token_ids": ["x"] * 1000},
            r"body\.stop_token_ids\.0: Input should be a valid.*",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "cat"}] * 1000}, r"body\.messages\.0\.role: .*content: .*"),
        (SLEEP, {f"f{n}": 0 for n in range(1000)}, r"(body\.f\d: there is no such field; ){10}and 990 more"),
    ],
)
def test_of_many_mistakes_the_first_are_named(http: httpx.Client, path: str, body: dict[str, Any], words: str) -> None:
    said = message(http.post(path, json=body))
    assert re.fullmatch(words, said)
    assert ".1:" not in said
    assert len(said) < 500
