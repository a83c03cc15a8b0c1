"""Random pipelines on disk and engines that run them; tests share engines and leave them as found."""

from __future__ import annotations

import asyncio
import importlib.util
import warnings
from typing import TYPE_CHECKING

import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from tests.diffusers.drawing import reset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INSTALLED = importlib.util.find_spec("diffusers") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/diffusers/" in item.nodeid:
            item.add_marker("diffusers")


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    """Skips what needs the libraries; they warn while they are imported."""
    if not INSTALLED:
        pytest.skip("diffusers is not installed; `make test-all` installs it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from diffusers import StableDiffusionPipeline

        assert StableDiffusionPipeline.__name__


@pytest.fixture(scope="module", autouse=True)
def one_thread(installed: None) -> Iterator[None]:
    """One thread an operator, here and in children.

    Operators this small gain nothing by a second thread, and wait long for it where cores are busy.
    """
    import torch

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Stable Diffusion."""
    from tests.diffusers.pipelines import stable_diffusion

    return stable_diffusion(tmp_path_factory.mktemp("first") / "pipeline", seed=1)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shapes, other weights."""
    from tests.diffusers.pipelines import stable_diffusion

    return stable_diffusion(tmp_path_factory.mktemp("second") / "other", seed=2)


@pytest.fixture(scope="module")
def shared_uni(folder: Path) -> Iterator[AsyncOmni]:
    with AsyncOmni(str(folder), executor="uni") as engine:
        yield engine


@pytest.fixture(scope="module")
def shared_mp(folder: Path) -> Iterator[AsyncOmni]:
    with AsyncOmni(str(folder), executor="mp") as engine:
        yield engine


@pytest.fixture(params=["uni", "mp"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[AsyncOmni]:
    """An engine of this module's tests; awake and open with the first weights, before and after."""
    engine = request.getfixturevalue(f"shared_{request.param}")
    yield engine
    asyncio.run(reset(engine, folder))


@pytest.fixture
def in_process(shared_uni: AsyncOmni, folder: Path) -> Iterator[AsyncOmni]:
    """The one whose rank is in this process."""
    yield shared_uni
    asyncio.run(reset(shared_uni, folder))


@pytest.fixture
def child(shared_mp: AsyncOmni, folder: Path) -> Iterator[AsyncOmni]:
    """The one whose rank is a child."""
    yield shared_mp
    asyncio.run(reset(shared_mp, folder))
