"""Many requests and many orders at once: every request gets its picture, whatever sleeps in between."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from tests.engine.engine_helpers import collect

if TYPE_CHECKING:
    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.server.serving import Server

REQUESTS, SEEDS, SLEEPS = 100, 5, 6


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)), dtype=np.int16)


@pytest.mark.slow
def test_a_hundred_requests_with_sleeps_in_between_lose_nothing(server: Server, engine: AsyncOmni) -> None:
    import httpx

    async def scenario() -> None:
        known = {"num_inference_steps": 2}
        alone = [(await collect(engine, sampling_params={**known, "seed": seed}))[-1] for seed in range(SEEDS)]
        golden = [pixels(one.png[0]) for one in alone]
        limits = httpx.Limits(max_connections=REQUESTS + 1)
        async with httpx.AsyncClient(base_url=server.url, timeout=90, limits=limits) as http:

            async def draw(number: int) -> bytes:
                body = {"prompt": "a red star above a blue circle", **known, "seed": number % SEEDS}
                answer = await http.post("/v1/images/generations?wait=60", json=body)
                assert answer.status_code == 200, answer.text
                picture: str = answer.json()["data"][0]["b64_json"]
                return base64.b64decode(picture)

            async def sleep_and_wake() -> list[str]:
                said = []
                for number in range(SLEEPS):
                    order = {"stage_ids": [number % 2], "level": 1 + number % 2, "mode": "keep"}
                    said.append((await http.post("/v1/omni/sleep", json=order)).json()["status"])
                    said.append((await http.post("/v1/omni/wakeup", json={})).json()["status"])
                return said

            drawn, said = await asyncio.gather(asyncio.gather(*map(draw, range(REQUESTS))), sleep_and_wake())
        assert said == ["SUCCESS"] * (2 * SLEEPS)
        for number, one in enumerate(drawn):  # another batch may round a pixel to the next of 256 values
            assert int(np.abs(pixels(one) - golden[number % SEEDS]).max()) <= 1, number

    asyncio.run(scenario())
