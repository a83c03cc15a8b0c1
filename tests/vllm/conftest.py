"""Engines whose thinker is vLLM. A start takes a quarter of a minute, so tests share them and leave them as found."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.executors import hosted
from tests.engine.engine_helpers import reset
from tests.vllm.asking_host import ASKING
from tests.vllm.models import random_llama

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = {"enforce_eager": True, "kv_cache_memory_bytes": 64 * 1024 * 1024}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/vllm/" in item.nodeid:
            item.add_marker("vllm")
            item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(scope="session", autouse=True)
def vllm_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; `make test-all` installs it")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama without a tokenizer, long enough to be interrupted."""
    return random_llama(tmp_path_factory.mktemp("llama"), seed=1)


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape, other weights."""
    return random_llama(tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture(scope="module")
def shared_two(llama: Path) -> Iterator[AsyncOmni]:
    """The random Llama on two ranks, with adapters; its vLLM can be asked behind its stage's back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosted, "HOST", ASKING)
        with AsyncOmni(
            str(llama), runtime="vllm", tensor_parallel_size=2, engine_args={**SMALL, "enable_lora": True}
        ) as two:
            yield two


@pytest.fixture
def two(shared_two: AsyncOmni) -> Iterator[AsyncOmni]:
    yield shared_two
    asyncio.run(reset(shared_two))


@pytest.fixture(scope="module")
def shared_demo() -> Iterator[AsyncOmni]:
    """The demo, its thinker on vLLM."""
    thinker = {"runtime": "vllm", "engine_args": SMALL}
    with AsyncOmni("demo", stage_overrides={0: thinker}) as demo:
        yield demo


@pytest.fixture
def demo(shared_demo: AsyncOmni) -> Iterator[AsyncOmni]:
    yield shared_demo
    asyncio.run(reset(shared_demo))


class Left(NamedTuple):
    """vLLM's processes that are alive, and the machine's named shared memory."""

    pids: frozenset[int]
    memory: frozenset[str]

    def since(self) -> Left:
        """What there is now and was not then."""
        now = Left.now()
        return Left(now.pids - self.pids, now.memory - self.memory)

    def both(self, other: Left) -> Left:
        """What is in this and in the other."""
        return Left(self.pids & other.pids, self.memory & other.memory)

    @classmethod
    def now(cls) -> Left:
        """What there is."""
        pids = frozenset(one.pid for one in psutil.process_iter() if _is_vllm(one))
        return cls(pids, frozenset(file.name for file in Path("/dev/shm").iterdir()))


NOTHING = Left(frozenset(), frozenset())


def _is_vllm(process: psutil.Process) -> bool:
    try:
        return "VLLM::" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
