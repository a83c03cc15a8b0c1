"""The demo behind a real server on a real socket, and a client of it; tests leave the engine as they found it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from typing import TYPE_CHECKING

import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from tests.engine.conftest import faulty_workers, other_weights
from tests.engine.engine_helpers import reset
from tests.remote.served import Contract, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["faulty_workers", "other_weights"]


@pytest.fixture(scope="session", autouse=True)
def server_installed() -> None:
    missing = [name for name in ("fastapi", "uvicorn", "sse_starlette") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module", params=["uni", "mp"])
def shared_engine(request: pytest.FixtureRequest) -> Iterator[Contract]:
    with contextlib.ExitStack() as stack:
        embedded = stack.enter_context(AsyncOmni("demo", executor=request.param))
        server = stack.enter_context(serving(embedded))
        yield stack.enter_context(Contract(server.url, embedded))


@pytest.fixture
def engine(shared_engine: Contract) -> Iterator[Contract]:
    """The client, with all AWAKE and open and no adapters before and after."""
    asyncio.run(_as_new(shared_engine.embedded))
    yield shared_engine
    asyncio.run(_as_new(shared_engine.embedded))


async def _as_new(embedded: AsyncOmni) -> None:
    await reset(embedded)
    for lora_id in await embedded.list_loras():
        await embedded.remove_lora(lora_id)
