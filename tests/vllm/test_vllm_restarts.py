"""Restarts of a vLLM of one rank, after a step that raised, a hang, a start that failed: all serve the same again.

They share an engine, which each of them restarts anyway. Its temporary folder has a long name all the time.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import ConfigError, StageFailedError
from tests.engine.engine_helpers import collect, reset, until
from tests.vllm import falling
from tests.vllm.conftest import NOTHING, SMALL, Left

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONGEST_OF_A_SOCKET = 107
PROMPT = {"prompt_token_ids": [5] * 40}


@pytest.fixture(scope="module")
def before() -> Left:
    return Left.now()


@pytest.fixture(scope="module")
def shared_one(before: Left, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    """The random Llama on one rank, which falls over `falling.FALLS`; nothing is left after its end."""
    folder = tmp_path_factory.mktemp("plugin")
    falling.install(folder)
    long = folder / ("x" * LONGEST_OF_A_SOCKET)
    long.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("TMPDIR", str(long))
        with AsyncOmni(str(llama), runtime="vllm", engine_args=SMALL) as one:
            yield one
    asyncio.run(until(lambda: before.since() == NOTHING))


@pytest.fixture
def one(shared_one: AsyncOmni) -> Iterator[AsyncOmni]:
    yield shared_one
    asyncio.run(reset(shared_one))


def rank(engine: AsyncOmni) -> psutil.Process:
    return psutil.Process(engine.status().stages[0].ranks[0].pid)


async def tokens(engine: AsyncOmni, count: int = 24) -> list[int]:
    found: Any = (await collect(engine, PROMPT, sampling_params={"max_tokens": count}))[-1]
    return found.outputs[0].token_ids


def test_a_long_temporary_folder_is_no_obstacle(one: AsyncOmni) -> None:
    host = psutil.Process(os.getpgid(rank(one).pid))
    assert len(host.environ()["TMPDIR"]) > LONGEST_OF_A_SOCKET
    assert len(asyncio.run(tokens(one))) == 24


def test_a_step_that_raises_fails_the_stage_and_everybody_hears_why(one: AsyncOmni) -> None:
    async def scenario() -> None:
        golden = await tokens(one)
        with pytest.raises(StageFailedError, match=rf"ended, .*{falling.WORDS}'\); .*restart\(0\)"):
            await collect(one, falling.FALLS)
        await until(lambda: str(one.status().stages[0].state) == "FAILED")
        assert falling.WORDS in one.status().stages[0].last_error
        await one.restart(0)
        assert await tokens(one) == golden

    asyncio.run(scenario())


def test_an_engine_core_of_one_rank_that_hangs_is_replaced_at_the_deadline_and_its_request_goes_on(
    one: AsyncOmni, before: Left
) -> None:
    async def scenario() -> None:
        golden = await tokens(one, 250)
        replaced, hanging = before.since(), rank(one)
        assert hanging.pid in replaced.pids
        running = asyncio.create_task(tokens(one, 250))
        await until(lambda: one.status().stages[0].running == 1)
        hanging.suspend()
        assert not running.done()
        try:
            await one.restart(0, timeout=2)
        finally:
            if hanging.is_running():
                hanging.resume()
        assert await running == golden
        await until(lambda: before.since().both(replaced) == NOTHING)

    asyncio.run(scenario())


def test_a_restart_that_fails_leaves_nothing_and_the_next_one_serves(
    one: AsyncOmni, before: Left, llama: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        golden = await tokens(one)
        folder = shutil.copytree(llama, tmp_path / "gone")
        await one.load_weights(0, str(folder))
        shutil.rmtree(folder)
        try:
            with pytest.raises(ConfigError, match="gone"):
                await one.restart(0)
            await until(lambda: before.since() == NOTHING)
            assert str(one.status().stages[0].state) == "FAILED"
        finally:
            shutil.copytree(llama, folder)
        await one.restart(0)
        assert await tokens(one) == golden
        await one.load_weights(0, str(llama))  # the one that is not about to go

    asyncio.run(scenario())
