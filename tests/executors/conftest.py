"""Executors under one contract: in this process, in child processes, simulated."""

from __future__ import annotations

import asyncio
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.executors.mp.executor import MpExecutor
from omni_notebook.executors.simulated import SimulatedExecutor
from omni_notebook.executors.uni import UniExecutor
from tests.executors.echo_worker import ECHO, AsyncEchoWorker, EchoWorker
from tests.executors.executor_helpers import make_specs, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary folder of a test and its processes is its own: what lies there after is theirs."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)


RANKS = {"uni": 1, "mp": 3, "simulated": 5}


class Run:
    """Makes executors inside a test's event loop, and ends them after it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.n_ranks = RANKS[kind]
        self.made: list[Any] = []

    def make(self, n_ranks: int | None = None, *, version: str | None = None, on_death: Any = None) -> Any:
        specs = make_specs(n_ranks or self.n_ranks, version=version)
        if self.kind == "uni":
            executor: Any = UniExecutor(specs, on_death, make_worker=EchoWorker)
        elif self.kind == "mp":
            executor = MpExecutor(specs, on_death, worker=ECHO)
        else:
            executor = SimulatedExecutor(specs, on_death, make_worker=AsyncEchoWorker)
        self.made.append(executor)
        return executor

    def __call__(self, test: Callable[[], Any]) -> None:
        async def run() -> None:
            try:
                await asyncio.wait_for(test(), 60)
            finally:
                for executor in self.made:
                    executor.shutdown()
                for executor in self.made:
                    await until(lambda executor=executor: executor.ended, 10)

        asyncio.run(run())


@pytest.fixture(params=list(RANKS))
def run(request: pytest.FixtureRequest) -> Run:
    """All three."""
    return Run(request.param)


@pytest.fixture
def mp() -> Run:
    """Child processes only."""
    return Run("mp")
