"""Engines for tests: the shipped demo, on real threads and real memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from tests.engine.engine_helpers import reset

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[AsyncOmni]:
    """One engine for a module's tests; each test begins with all stages awake and nothing paused."""
    with AsyncOmni(model="demo", enable_sleep_mode=True) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: AsyncOmni) -> Iterator[AsyncOmni]:
    """The module's engine, brought back to all AWAKE and open before and after."""
    asyncio.run(reset(shared_engine))
    yield shared_engine
    asyncio.run(reset(shared_engine))
