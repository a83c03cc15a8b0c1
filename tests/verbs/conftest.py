"""Engines whose workers can lie, on real threads and processes; and a session that uses one."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import omni_notebook.worker.worker
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.executors.mp import executor as mp_executor
from omni_notebook.protocol import MIB
from omni_notebook.verbs.session import Session
from tests.engine.engine_helpers import reset
from tests.verbs.lying_worker import LYING, LyingWorker

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def lying_engine(**options: object) -> Iterator[AsyncOmni]:
    """The demo with a little ballast and workers that can be told to lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mp_executor, "WORKER", LYING)
        patch.setattr(omni_notebook.worker.worker, "Worker", LyingWorker)
        with AsyncOmni("demo", ballast_bytes=16 * MIB, **options) as engine:
            yield engine


@pytest.fixture(scope="module", params=["uni", "mp"])
def shared_engine(request: pytest.FixtureRequest) -> Iterator[AsyncOmni]:
    with lying_engine(executor=request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[AsyncOmni]:
    with lying_engine(tensor_parallel_size=2) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: AsyncOmni) -> Iterator[AsyncOmni]:
    """All stages awake and open, before and after; once in this process, once in processes of its own."""
    asyncio.run(reset(shared_engine))
    yield shared_engine
    asyncio.run(reset(shared_engine))


@pytest.fixture
def pair(shared_pair: AsyncOmni) -> Iterator[AsyncOmni]:
    """Two ranks a stage, all awake."""
    asyncio.run(reset(shared_pair))
    yield shared_pair
    asyncio.run(reset(shared_pair))


@pytest.fixture
def session(engine: AsyncOmni) -> Session:
    """A session of its own that works on `engine`."""
    made = Session()
    made.use(engine)
    return made
