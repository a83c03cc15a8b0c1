"""OpenAI's endpoints, with its own client; clients that leave; names that are not served."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
import socket
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from omni_notebook.config import DEMO_FOLDER
from omni_notebook.engine.async_omni import AsyncOmni
from tests.engine.engine_helpers import collect, until
from tests.remote.served import serving
from tests.server.conftest import STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx
    import openai

    from omni_notebook.server.serving import Server

PROMPT = "a red star above a blue circle"


@pytest.fixture
def client(server: Server, engine: AsyncOmni) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def picture(b64: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def test_images_are_the_engines_pixel_for_pixel(client: openai.OpenAI, engine: AsyncOmni) -> None:
    expected = asyncio.run(collect(engine, PROMPT, sampling_params=STEPS))[-1].images[0]
    found = client.images.generate(
        model="demo", prompt=PROMPT, response_format="b64_json", extra_body={"sampling_params": STEPS}
    )
    assert picture(found.data[0].b64_json).tobytes() == expected.tobytes()


def test_several_images_have_seeds_one_after_the_other(http: httpx.Client, engine: AsyncOmni) -> None:
    found = http.post("/v1/images/generations", json={"prompt": PROMPT, "n": 2, **STEPS}).json()["data"]
    assert [one["metrics"]["seed"] for one in found] == [42, 43]
    expected = asyncio.run(collect(engine, PROMPT, sampling_params={**STEPS, "seed": 43}))[-1].images[0]
    assert picture(found[1]["b64_json"]).tobytes() == expected.tobytes()


def test_sampling_parameters_may_stand_where_the_specification_or_openai_puts_them(http: httpx.Client) -> None:
    bodies: list[dict[str, Any]] = [STEPS, {"sampling_params": STEPS}, {"extra_body": {"sampling_params": STEPS}}]
    answers = [http.post("/v1/images/generations", json={"prompt": PROMPT, **body}).json() for body in bodies]
    assert len({answer["data"][0]["b64_json"] for answer in answers}) == 1


def test_a_chat_is_the_thinkers_text_whole_and_streamed(client: openai.OpenAI, engine: AsyncOmni) -> None:
    expected = asyncio.run(collect(engine, PROMPT, output_modalities="text", sampling_params={}))[-1]
    messages = [{"role": "user", "content": PROMPT}]
    whole = client.chat.completions.create(model="demo", messages=messages)
    assert whole.choices[0].message.content == expected.text
    assert whole.usage.completion_tokens == len(expected.outputs[0].token_ids)
    stream = client.chat.completions.create(
        model="demo", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    parts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(parts) == expected.text
    assert len([part for part in parts if part]) > 1
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.fixture
def spelled(tmp_path: Path) -> Path:
    """The thinker, with a decoder for which a word of a plan is a byte or two of a character."""
    folder = tmp_path / "thinker"
    shutil.copytree(DEMO_FOLDER / "thinker", folder)
    file = folder / "tokenizer.json"
    read = json.loads(file.read_text(encoding="utf-8"))
    halves = {"Ġred": "ca", "Ġstar": "fÃ", "Ġtop": "©ð", "Ġcenter": "ŁĺĢ"}
    halves |= {"Ġblue": "Ã", "Ġcircle": "©Ġð", "Ġbottom": "ŁĺĢð"}
    replaced = [{"type": "Replace", "pattern": {"String": word}, "content": half} for word, half in halves.items()]
    read["decoder"] = {"type": "Sequence", "decoders": [*replaced, read["decoder"]]}
    file.write_text(json.dumps(read), encoding="utf-8")
    return folder


def test_a_streamed_character_of_several_tokens_comes_whole(spelled: Path) -> None:
    import openai

    messages = [{"role": "user", "content": PROMPT}]
    with (
        AsyncOmni(spelled) as engine,
        serving(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        whole = client.chat.completions.create(model="thinker", messages=messages)
        chunks = list(client.chat.completions.create(model="thinker", messages=messages, stream=True))
    parts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert whole.choices[0].message.content == "café😀;é 😀😀"
    assert "".join(parts) == "café😀;é 😀😀"
    assert len([part for part in parts if part]) > 1


@pytest.mark.parametrize(
    ("folder", "path", "body", "gives"),
    [
        ("thinker", "images/generations", {"prompt": PROMPT}, "text"),
        ("dit", "chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}, "image"),
    ],
)
@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_what_a_pipeline_does_not_make_is_refused_at_once(
    folder: str, path: str, body: dict[str, Any], gives: str, asleep: bool
) -> None:
    import httpx

    with AsyncOmni(DEMO_FOLDER / folder) as engine, serving(engine) as server:
        if asleep:
            asyncio.run(engine.sleep())
        answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 422
    assert f"this pipeline gives {gives}. Nothing was started" in answer.json()["error"]["message"]


def test_images_of_several_painters_are_the_firsts_and_need_no_later_one(tmp_path: Path) -> None:
    import httpx

    file = tmp_path / "two.yaml"
    file.write_text("stages: [{model: demo/thinker}, {model: demo/dit}, {model: demo/dit, name: second}]")
    with AsyncOmni(file) as engine, serving(engine) as server:
        expected = asyncio.run(collect(engine, PROMPT, sampling_params=STEPS, output_modalities=["image"]))[-1]
        asyncio.run(engine.sleep([2]))
        found = httpx.post(f"{server.url}/v1/images/generations", json={"prompt": PROMPT, **STEPS}, timeout=60).json()
    assert expected.stage_id == 1
    assert picture(found["data"][0]["b64_json"]).tobytes() == expected.images[0].tobytes()


def test_a_name_that_is_not_served_is_404(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match=r"no model 'other' here; served are: demo"):
        client.images.generate(model="other", prompt=PROMPT)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": PROMPT}])
    assert [model.id for model in client.models.list()] == ["demo"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("images/generations", {"prompt": ""}, "body.prompt"),
        ("images/generations", {"prompt": PROMPT, "colour": "red"}, "body.colour: there is no such field"),
        ("images/generations", {"prompt": PROMPT, "response_format": "url"}, "body.response_format"),
        ("images/generations", {"prompt": PROMPT, "size": "0x1"}, "body.size"),
        ("images/generations", {"prompt": PROMPT, "num_inference_steps": 0}, "num_inference_steps=0"),
        ("images/generations", {"prompt": PROMPT, "n": 99}, "body.n"),
        ("images/generations", {"prompt": PROMPT, "seed": 2**63 - 1, "n": 2}, "seed"),
        ("images/generations?wait=-1", {"prompt": PROMPT}, "query.wait"),
        ("chat/completions", {"messages": []}, "body.messages"),
        ("chat/completions", {"messages": [{"role": "cat", "content": "x"}]}, "body.messages.0.role"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}, "body.n"),
    ],
)
def test_what_can_not_be_meant_is_422(http: httpx.Client, path: str, body: dict[str, Any], words: str) -> None:
    answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 422
    assert words in answer.json()["error"]["message"]


def test_a_stream_that_may_not_begin_has_a_status_of_its_own(http: httpx.Client) -> None:
    http.post("/v1/omni/sleep", json={"stage_ids": [0]})
    body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True}
    assert http.post("/v1/chat/completions", json=body).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(server: Server, engine: AsyncOmni, stream: bool) -> None:
    path, said = "/v1/images/generations", {"prompt": PROMPT, "num_inference_steps": 1000}
    if stream:
        path = "/v1/chat/completions"
        said = {"messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": 500}
    content = json.dumps(said).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        leaving.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        asyncio.run(until(lambda: sum(stage.running for stage in engine.status().stages)))
    asyncio.run(until(lambda: not sum(stage.running + stage.queued for stage in engine.status().stages), seconds=10))
