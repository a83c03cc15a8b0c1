"""A plain vLLM-Omni server: what it has works, what it lacks is said. The fake has the routes of vllm_omni 0.30."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from omni_notebook.engine.remote.client import RemoteOmni
from omni_notebook.engine.remote.decoding import NOT_TOLD
from omni_notebook.errors import ArgumentError, ConfigError, OmniError, SleepError, UnsupportedError
from omni_notebook.protocol import AckMetadata, LoRARequest, OmniSamplingParams
from omni_notebook.verbs.registry import execute
from omni_notebook.verbs.session import Session
from tests.engine.engine_helpers import collect
from tests.remote.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request
    from starlette.responses import Response

MODEL = "ByteDance-Seed/BAGEL-7B-MoT"


def answer(body: dict[str, Any], status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(body, status)


class Fake:
    """Stage 0 is autoregressive, stage 1 a diffusion stage of two ranks that reports once."""

    def __init__(self) -> None:
        self.asleep: set[int] = set()
        self.bodies: list[dict[str, Any]] = []
        self.fails = self.only_models = False
        self.url = ""

    def ack(self, stage_id: int, task: str) -> dict[str, Any]:
        if stage_id == 0:
            metadata: dict[str, Any] = {"path": "engine_core", "tags": ["weights", "kv_cache"]}
            return {
                "task_id": task,
                "status": "SUCCESS",
                "stage_id": 0,
                "rank": 0,
                "freed_bytes": 0,
                "metadata": metadata,
            }
        metadata = {"source": "Platform_AMD_Instinct_MI300X", "total_freed_gib": "78.57", "rank_residual_gib": "2.07"}
        status = "ERROR" if self.fails else "SUCCESS"
        told = {"task_id": task, "status": status, "stage_id": None, "rank": None, "freed_bytes": 84363902976}
        return {**told, "metadata": metadata, "error_msg": "no room" if self.fails else None}

    def app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        orders = {
            "/v1/omni/sleep": self.sleep,
            "/v1/omni/wakeup": self.wakeup,
            "/v1/images/generations": self.images,
            "/v1/chat/completions": self.chat,
        }
        looks = {"/v1/models": self.models, "/openapi.json": self.paths}
        routes = [Route(path, order, methods=["POST"]) for path, order in orders.items()]
        return Starlette(routes=[*routes, *(Route(path, look) for path, look in looks.items())])

    async def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.bodies.append(body)
        return body

    async def models(self, _request: Request) -> Response:
        return answer({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def paths(self, _request: Request) -> Response:
        return answer({"paths": {"/v1/models": {}} if self.only_models else {"/v1/omni/sleep": {}}})

    async def sleep(self, request: Request) -> Response:
        body = await self._body(request)
        self.asleep |= set(body["stage_ids"])
        return answer({"status": "SUCCESS", "acks": [self.ack(one, "s1") for one in body["stage_ids"]]})

    async def wakeup(self, request: Request) -> Response:
        body = await self._body(request)
        if not self.asleep & set(body["stage_ids"]):
            return answer({"status": "SKIPPED", "reason": "Target stages are not sleeping."})
        if self.fails:
            told = "wake_up() after sleep(level=2) is not yet implemented"
            return answer({"detail": told}, 500)
        self.asleep -= set(body["stage_ids"])
        return answer({"status": "SUCCESS", "acks": [self.ack(one, "w1") for one in body["stage_ids"]]})

    async def images(self, request: Request) -> Response:
        await self._body(request)
        png = io.BytesIO()
        Image.new("RGB", (8, 8), "red").save(png, "PNG")
        return answer({"created": 1, "data": [{"b64_json": base64.b64encode(png.getvalue()).decode()}]})

    async def chat(self, request: Request) -> Response:
        await self._body(request)
        said = {"message": {"role": "assistant", "content": "a plan"}, "finish_reason": "stop"}
        return answer({"choices": [said]})


@pytest.fixture(scope="module")
def shared_fake() -> Iterator[Fake]:
    import socket

    import uvicorn

    fake = Fake()
    listening = socket.create_server(("127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(fake.app(), log_level="warning", ws="none"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    yield fake
    server.should_exit = True
    thread.join()
    listening.close()


@pytest.fixture
def fake(shared_fake: Fake) -> Fake:
    shared_fake.asleep.clear()
    shared_fake.bodies.clear()
    shared_fake.fails = shared_fake.only_models = False
    return shared_fake


@pytest.fixture
def engine(fake: Fake) -> Iterator[RemoteOmni]:
    with RemoteOmni(fake.url) as engine:
        yield engine


def test_a_server_of_models_without_a_sleep_is_none(fake: Fake) -> None:
    fake.only_models = True
    with pytest.raises(ConfigError, match="neither a server of omni_notebook nor of vLLM-Omni"):
        RemoteOmni(fake.url)


def test_sleep_and_wake_send_the_specifications_bodies_and_give_acks_with_every_key(
    engine: RemoteOmni, fake: Fake
) -> None:
    acks = asyncio.run(engine.sleep([1], level=1))
    woken = asyncio.run(engine.wake_up([1]))
    assert fake.bodies == [{"stage_ids": [1], "level": 1}, {"stage_ids": [1]}]
    (ack,) = acks
    assert (ack.stage_id, ack.rank, ack.freed_bytes, ack.ok) == (1, -1, 84363902976, True)
    assert set(AckMetadata.__struct_fields__) <= set(ack.metadata)
    assert (ack.metadata["source"], ack.metadata["total_freed_gib"]) == ("Platform_AMD_Instinct_MI300X", "78.57")
    assert (ack.metadata["observed_bytes"], ack.metadata["latency_ms"], ack.metadata["note"]) == (None, None, NOT_TOLD)
    assert [one.task_id for one in woken] == ["w1"]


def test_an_answer_whose_tags_are_a_list_is_kept_as_it_was_told(engine: RemoteOmni) -> None:
    (ack,) = asyncio.run(engine.sleep([0], level=1))
    assert (ack.freed_bytes, ack.metadata["tags"], ack.metadata["total_freed_gib"]) == (0, {}, None)
    assert ack.metadata["told"]["tags"] == ["weights", "kv_cache"]


def test_a_stage_is_listed_with_the_state_that_an_order_of_ours_led_to(engine: RemoteOmni) -> None:
    status = engine.status()
    assert (status.model, status.stages) == (MODEL, ())
    assert "tells no states, memory, requests or events" in status.notes[0]
    asyncio.run(engine.sleep([0, 1], level=1))
    assert [(stage.stage_id, stage.state) for stage in engine.status().stages] == [(0, "ASLEEP")]  # 1 was not named
    asyncio.run(engine.wake_up([0]))
    assert [(stage.stage_id, stage.state) for stage in engine.status().stages] == [(0, "AWAKE")]
    assert asyncio.run(engine.wake_up([1])) != []
    assert asyncio.run(engine.wake_up([1])) == []  # skipped: nothing slept


def test_what_can_not_be_undone_there_is_refused_unless_it_may_be_lost(engine: RemoteOmni, fake: Fake) -> None:
    with pytest.raises(UnsupportedError, match=r"no way back from level 2.*discard=True.*Nothing changed"):
        asyncio.run(engine.sleep([1], level=2, discard=False))
    assert fake.bodies == []
    assert asyncio.run(engine.sleep([1], level=2))[0].ok
    fake.fails = True
    with pytest.raises(OmniError, match=r"500: wake_up\(\) after sleep\(level=2\) is not yet implemented"):
        asyncio.run(engine.wake_up([1]))


def test_a_rank_that_answers_error_raises_with_its_answers(engine: RemoteOmni, fake: Fake) -> None:
    fake.fails = True
    with pytest.raises(SleepError, match="sleep failed: stage 1 no room") as caught:
        asyncio.run(engine.sleep([1]))
    assert [ack.error_msg for ack in caught.value.acks] == ["no room"]
    assert [ack.ok for ack in asyncio.run(engine.sleep([1], raise_on_error=False))] == [False]


def test_what_it_lacks_is_refused_in_one_line_and_nothing_is_sent(engine: RemoteOmni, fake: Fake) -> None:
    lora = LoRARequest("style", 1, "/loras/style")
    calls = [
        engine.pause_generation,
        engine.resume_generation,
        engine.is_paused,
        lambda: engine.load_weights(1, "/weights"),
        lambda: engine.restart(1),
        lambda: engine.abort("x"),
        lambda: engine.add_lora(lora),
        engine.list_loras,
        lambda: engine.audit_there({}),
        lambda: engine.sleep([1], mode="keep"),
        lambda: engine.wake_up([1], tags=["weights"]),
        lambda: collect(engine, {"prompt_token_ids": [1]}),
    ]
    for call in calls:
        with pytest.raises(UnsupportedError, match=r"a plain vLLM-Omni server has no .* over HTTP") as caught:
            asyncio.run(call())
        assert "\n" not in str(caught.value)
    with pytest.raises(UnsupportedError, match="has no logs"):
        engine.logs(0)
    with pytest.raises(ArgumentError, match="does not tell which stages it has: name them"):
        asyncio.run(engine.sleep())
    assert fake.bodies == []


def test_it_generates_images_and_text(engine: RemoteOmni, fake: Fake) -> None:
    (drawn,) = asyncio.run(collect(engine, "a star", sampling_params={"seed": 3, "width": 8, "height": 8}))
    assert (drawn.images[0].size, drawn.finished, drawn.final_output_type) == ((8, 8), True, "image")
    (said,) = asyncio.run(collect(engine, "a star", output_modalities=["text"]))
    assert (said.text, said.outputs[0].finish_reason) == ("a plan", "stop")
    assert fake.bodies[0] == {"prompt": "a star", "response_format": "b64_json", "size": "8x8", "seed": 3}
    asyncio.run(collect(engine, {"prompt": "a star", "negative_prompt": "a moon"}, sampling_params=None))
    assert fake.bodies[2] == {"prompt": "a star", "negative_prompt": "a moon", "response_format": "b64_json"}
    assert fake.bodies[1]["messages"] == [{"role": "user", "content": "a star"}]
    asyncio.run(collect(engine, "a star", sampling_params=OmniSamplingParams(seed=3)))
    assert fake.bodies[3] == {"prompt": "a star", "response_format": "b64_json", "seed": 3}


def test_verbs_work_with_what_is_there_and_say_what_is_not(fake: Fake) -> None:
    screen = Screen()
    session = Session(screen)
    execute(session, f"connect {fake.url}")
    try:
        assert "tells no states, memory, requests or events" in screen.text
        acks = execute(session, "sleep 1 --level 1")
        assert acks[0].freed_bytes == 84363902976
        assert execute(session, "status").stages[0].state == "ASLEEP"
        with pytest.raises(UnsupportedError, match=r"%omni sleep \S+ --discard"):
            execute(session, "sleep 1 --level 2")
        with pytest.raises(UnsupportedError, match=r"has no .*pause"):
            execute(session, "pause")
        assert execute(session, "generate a star").images[0].size == (8, 8)
        with pytest.raises(OmniError):
            execute(session, "audit 1 --level 1")
    finally:
        execute(session, "stop")
    assert "was left as it is" in screen.text
