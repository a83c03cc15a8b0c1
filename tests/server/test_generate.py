"""`/v1/omni/generate` gives what the engine's own call gives; what is refused, fails half-way or is left."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.engine_helpers import PROMPT, collect, until
from tests.server.conftest import STEPS

if TYPE_CHECKING:
    from collections.abc import Iterable

    import httpx

    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.server.serving import Server

PATH = "/v1/omni/generate"
FIELDS = {"request_id", "stage_id", "finished", "final_output_type", "state", "text", "outputs", "png"}
LONG = {"num_inference_steps": 1000}


def events(lines: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """Each event's name and data."""
    found, kind = [], ""
    for line in lines:
        name, _, value = line.partition(": ")
        kind = value if name == "event" else kind
        if name == "data":
            found.append((kind, json.loads(value)))
    return found


def generated(http: httpx.Client, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    with http.stream("POST", PATH, json=body) as stream:
        assert stream.status_code == 200, stream.read()
        assert stream.headers["content-type"].startswith("text/event-stream")
        return events(stream.iter_lines())


def test_outputs_are_the_engines_token_for_token_and_file_for_file(http: httpx.Client, engine: AsyncOmni) -> None:
    expected = asyncio.run(collect(engine, sampling_params=STEPS))
    found = generated(http, prompt=PROMPT, sampling_params=STEPS, request_id="mine")
    assert {kind for kind, _ in found} == {"output"}
    told = [output for _, output in found]
    assert [output["finished"] for output in told] == [False] * (len(told) - 1) + [True]
    assert set(told[0]) == FIELDS | {"weight_version", "metrics"}
    assert {output["request_id"] for output in told} == {"mine"}
    text = [output for output in told if output["stage_id"] == 0][-1]
    whole = [output for output in expected if output.stage_id == 0][-1]
    assert text["text"] == whole.text
    assert text["outputs"][0]["token_ids"] == whole.outputs[0].token_ids
    last = told[-1]
    assert [base64.b64decode(one) for one in last["png"]] == expected[-1].png
    assert last["weight_version"] == expected[-1].weight_version
    assert last["metrics"]["seed"] == STEPS["seed"]


def test_no_character_of_an_output_or_an_event_breaks_a_line_of_its_stream(http: httpx.Client) -> None:
    name = "a\x85b\u2028c\u2029d\n"
    seen: list[str] = []
    with http.stream("GET", "/v1/omni/events") as stream:
        lines = stream.iter_lines()
        next(lines)
        found = generated(http, prompt=PROMPT, sampling_params=STEPS, request_id=name)
        for line in lines:
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                seen += [event["state"]] if event.get("request_id") == name else []
            if "finished" in seen:
                break
    assert {output["request_id"] for _, output in found} == {name}


def test_a_pipelines_prompt_of_two_texts_is_passed_on(http: httpx.Client) -> None:
    answer = http.post(PATH, json={"prompt": {"prompt": "a star", "negative_prompt": "a circle"}})
    assert answer.status_code == 422
    assert 'a prompt is a string or {"prompt_token_ids": [ints]}' in answer.json()["error"]["message"]


def test_a_prompt_may_be_token_ids_and_the_way_may_end_with_the_text(http: httpx.Client, engine: AsyncOmni) -> None:
    prompt = {"prompt_token_ids": [5, 6, 7]}
    known = {"output_modalities": ["text"], "sampling_params": {"max_tokens": 5}}
    expected = asyncio.run(collect(engine, prompt, **known))[-1]
    last = generated(http, prompt=prompt, **known)[-1][1]
    assert last["final_output_type"] == "text"
    assert last["outputs"][0]["token_ids"] == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "body.prompt: Field required"),
        ({"prompt": 5}, "body.prompt.str: Input should be a valid string"),
        ({"prompt": "\ud800"}, "body.prompt: Value error, it is not Unicode text"),
        ({"prompt": {"prompt_token_ids": [10**9]}}, "1000000000"),
        ({"prompt": PROMPT, "colour": "red"}, "body.colour: there is no such field"),
        ({"prompt": PROMPT, "sampling_params": {"steps": 4}}, "body.sampling_params.steps: there is no such field"),
        ({"prompt": PROMPT, "output_modalities": ["sound"]}, "output_modalities=['sound']"),
        ({"prompt": PROMPT, "lora_request": 7}, "7"),
        ({"prompt": PROMPT, "admission_timeout": 4000}, "body.admission_timeout"),
        ({"prompt": PROMPT, "request_id": ""}, "body.request_id"),
    ],
)
def test_what_can_not_be_meant_is_422_that_names_it(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    content = json.dumps(body)
    answer = http.post(PATH, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert words in answer.json()["error"]["message"]


def test_a_closed_gate_refuses_at_once_or_is_waited_for(http: httpx.Client, engine: AsyncOmni) -> None:
    asyncio.run(engine.sleep([1]))
    refused = http.post(PATH, json={"prompt": PROMPT})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "ASLEEP")
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["help"] == [{"method": "POST", "path": "/v1/omni/wakeup", "body": {"stage_ids": [1]}}]
    only_text = generated(http, prompt=PROMPT, output_modalities=["text"])
    assert only_text[-1][1]["finished"]

    async def scenario() -> list[tuple[str, dict[str, Any]]]:
        body = {"prompt": PROMPT, "sampling_params": STEPS, "admission_timeout": 20}
        waiting = asyncio.create_task(asyncio.to_thread(generated, http, **body))
        await until(lambda: engine.status().stages[1].waiting_at_gate)
        await engine.wake_up()
        return await waiting

    assert asyncio.run(scenario())[-1][1]["png"]


def test_what_fails_half_way_is_an_event_with_the_body_of_a_refusal(http: httpx.Client, engine: AsyncOmni) -> None:
    victim = engine.status().stages[1].ranks[0].pid
    os.kill(victim, signal.SIGSTOP)  # the text comes, no picture does
    try:
        found = generated(http, prompt=PROMPT, sampling_params=LONG, timeout=4, request_id="late")
    finally:
        os.kill(victim, signal.SIGCONT)
    assert found[0][0] == "output"
    kind, body = found[-1]
    assert kind == "error"
    assert (body["status"], body["error"]["code"]) == ("ERROR", "DEADLINE")
    assert "request late had not ended after 4 s; it is in stage 1" in body["error"]["message"]


@pytest.mark.parametrize("said", [{}, {"timeout": 3000}])
def test_the_servers_own_limit_bounds_every_request(engine: AsyncOmni, said: dict[str, int]) -> None:
    import httpx

    from omni_notebook.server.serving import Server
    from omni_notebook.server.settings import ServerSettings

    server = Server(engine, ServerSettings(port=0, request_s=0.5))
    server.start()
    try:
        answer = httpx.post(f"{server.url}{PATH}", json={"prompt": PROMPT, "sampling_params": LONG, **said}, timeout=60)
    finally:
        server.stop()
    assert "had not ended after 0.5 s" in answer.text


@pytest.mark.parametrize("closed", [False, True], ids=["running", "at a gate"])
def test_a_client_that_leaves_ends_its_request(server: Server, engine: AsyncOmni, closed: bool) -> None:
    if closed:
        asyncio.run(engine.sleep([0]))
    stages = engine.status
    content = json.dumps({"prompt": PROMPT, "sampling_params": LONG, "admission_timeout": 60}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        leaving.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        asyncio.run(until(lambda: sum(stage.running + stage.waiting_at_gate for stage in stages().stages)))
    asyncio.run(
        until(
            lambda: not sum(stage.running + stage.queued + stage.waiting_at_gate for stage in stages().stages),
            seconds=10,
        )
    )


def test_an_abort_ends_what_waits_at_a_gate_whatever_asked_for_it(http: httpx.Client, engine: AsyncOmni) -> None:
    asyncio.run(engine.sleep([0]))
    chat = {"messages": [{"role": "user", "content": PROMPT}]}

    async def scenario() -> list[Any]:
        asks = [
            asyncio.to_thread(generated, http, prompt=PROMPT, admission_timeout=60, request_id="a"),
            asyncio.to_thread(
                http.post,
                "/v1/images/generations?wait=60",
                json={"prompt": PROMPT, "n": 2},
                headers={"X-Request-Id": "b"},
            ),
            asyncio.to_thread(http.post, "/v1/chat/completions?wait=60", json=chat, headers={"X-Request-Id": "c"}),
        ]
        asking = [asyncio.create_task(one) for one in asks]
        await until(lambda: engine.status().stages[0].waiting_at_gate == 3)
        for name in "abc":
            answer = await asyncio.to_thread(http.post, "/v1/omni/abort", json={"request_id": name})
            assert answer.json() == {"status": "SUCCESS", "found": True}
        return [await one for one in asking]

    ours, images, text = asyncio.run(scenario())
    assert [(kind, output["state"], output["finished"]) for kind, output in ours] == [("output", "aborted", True)]
    assert (images.status_code, images.json()["error"]["code"]) == (409, "ABORTED")
    assert (text.status_code, text.json()["choices"][0]["finish_reason"]) == (200, "abort")
    assert engine.status().stages[0].waiting_at_gate == 0


def test_an_abort_is_the_last_output(http: httpx.Client, engine: AsyncOmni) -> None:
    async def scenario() -> list[tuple[str, dict[str, Any]]]:
        body = {"prompt": PROMPT, "sampling_params": LONG, "request_id": "ended"}
        running = asyncio.create_task(asyncio.to_thread(generated, http, **body))
        await until(lambda: engine.status().stages[1].running)
        answer = await asyncio.to_thread(http.post, "/v1/omni/abort", json={"request_id": "ended"})
        assert answer.json()["found"]
        return await running

    kind, last = asyncio.run(scenario())[-1]
    assert (kind, last["state"], last["finished"]) == ("output", "aborted", True)
