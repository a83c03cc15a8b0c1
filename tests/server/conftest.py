"""A server over the demo on a real socket; tests leave the engine as they found it."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import TYPE_CHECKING

import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from tests.engine.engine_helpers import reset

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from omni_notebook.server.serving import Server

NEEDED = ("fastapi", "uvicorn", "sse_starlette", "httpx", "openai")
STEPS = {"num_inference_steps": 4, "seed": 42}


@pytest.fixture(scope="session", autouse=True)
def server_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[AsyncOmni]:
    """The demo; stage 1 has two ranks in processes of their own."""
    with AsyncOmni("demo", stage_overrides={1: {"executor": "mp", "tensor_parallel_size": 2}}) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: AsyncOmni) -> Iterator[AsyncOmni]:
    asyncio.run(reset(shared_engine))
    yield shared_engine
    asyncio.run(reset(shared_engine))


@pytest.fixture(scope="module")
def server(shared_engine: AsyncOmni) -> Iterator[Server]:
    from omni_notebook.server.serving import Server
    from omni_notebook.server.settings import ServerSettings

    server = Server(shared_engine, ServerSettings(port=0))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def http(server: Server, engine: AsyncOmni) -> Iterator[httpx.Client]:
    import httpx

    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
