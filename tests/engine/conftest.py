"""Engines for tests: the shipped demo, on real threads or processes and real memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.executors.mp import executor as mp_executor
from tests.engine.engine_helpers import reset
from tests.engine.faulty_worker import FAULTY

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def faulty_workers() -> Iterator[None]:
    """Children of these tests can be told to fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mp_executor, "WORKER", FAULTY)
        yield


@pytest.fixture(scope="module", params=["uni", "mp"])
def shared_engine(request: pytest.FixtureRequest) -> Iterator[AsyncOmni]:
    """One engine for a module's tests; each test begins with all stages awake and nothing paused."""
    with AsyncOmni(model="demo", enable_sleep_mode=True, executor=request.param) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: AsyncOmni) -> Iterator[AsyncOmni]:
    """The module's engine, brought back to all AWAKE and open before and after."""
    asyncio.run(reset(shared_engine))
    yield shared_engine
    asyncio.run(reset(shared_engine))
