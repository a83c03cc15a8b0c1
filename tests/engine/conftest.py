"""Engines for tests: the shipped demo, on real threads or processes and real memory."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from typing import TYPE_CHECKING

import psutil
import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.executors.mp import executor as mp_executor
from omni_notebook.stages import replica, transitions
from omni_notebook.worker import worker
from tests.engine import faults
from tests.engine.engine_helpers import golden, reset
from tests.engine.faulty_worker import FAULTY, PATIENCE, FaultyWorker
from tests.engine.painting import PAINTER, SHIPPED, THINKER, journals
from tests.executors.executor_helpers import fds, shared_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def faulty_workers() -> Iterator[None]:
    """Ranks of these tests can be told to fail, those in children and those here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mp_executor, "WORKER", FAULTY)
        patch.setattr(worker, "Worker", FaultyWorker)
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


@pytest.fixture
def painter(engine: AsyncOmni) -> Iterator[AsyncOmni]:
    """The engine with empty journals; afterwards its painter has the shipped weights again."""
    asyncio.run(_forget(engine))
    yield engine
    asyncio.run(_shipped(engine))


async def _forget(engine: AsyncOmni) -> None:
    for stage_id in (THINKER, PAINTER):
        await journals(engine, stage_id)


async def _shipped(engine: AsyncOmni) -> None:
    await reset(engine)
    if engine._core.stages[PAINTER].source is not None:
        await engine.load_weights(PAINTER, SHIPPED)


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second checkpoint of the painter, which draws something else."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(SHIPPED, folder)
    noise = torch.Generator().manual_seed(5)
    tensors = load_file(folder / "model.safetensors")
    noisy = {k: v + 0.2 * v.std() * torch.randn(v.shape, generator=noise) for k, v in tensors.items()}
    save_file(noisy, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def shared_four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    """2 stages × 2 replicas × 2 ranks, with less patience than people have; nothing may be left of them at the end."""
    own = tmp_path_factory.mktemp("own")  # the temporary folder of this engine and its ranks: what is there is theirs
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(own))
        patch.setattr(tempfile, "tempdir", None)
        before = fds(), set(psutil.Process().children(recursive=True)), shared_files()
        patch.setenv(PATIENCE, "3")
        patch.setattr(transitions, "ABORT_S", 2.0)
        patch.setattr(transitions, "GRACE_S", 2.0)
        patch.setattr(replica, "SETTLE_S", 1.0)
        with AsyncOmni("demo", tensor_parallel_size=2, num_replicas=2) as engine:
            asyncio.run(faults.learn(engine))
            faults.goldens[id(engine)] = asyncio.run(golden(engine))
            yield engine
        assert (fds() - before[0], set(psutil.Process().children(recursive=True)) - before[1]) == (set(), set())
        assert not list(own.iterdir())
        assert not [path for path in shared_files() - before[2] if "torch" in path or "gloo" in path or "omni" in path]


@pytest.fixture
def four(shared_four: AsyncOmni) -> Iterator[AsyncOmni]:
    """All AWAKE before; after the test eight ranks, and no more files than before it."""
    asyncio.run(_ready(shared_four))
    before = _files()
    yield shared_four
    asyncio.run(_ready(shared_four))
    assert len(psutil.Process().children()) == 2 * len(faults.PLACES)
    assert _files() == before


def _files() -> int:
    """Open files, but for the ledger's, which come with its first record."""
    return sum("ledger" not in name for name in fds())


async def _ready(engine: AsyncOmni) -> None:
    await reset(engine)
    await faults.learn(engine)
