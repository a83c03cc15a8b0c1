"""One rank's orders over several tags of weights: taken back, called off, and what a level 2 may discard."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_notebook.memory.base import TransitionCancelledError
from omni_notebook.protocol import SleepTask, WakeTask
from omni_notebook.worker.sleeping import UnrecoverableError
from tests.diffusers.drawing import picture
from tests.diffusers.pipelines import COMPONENTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.worker.worker import Worker


@pytest.fixture
def worker(in_process: AsyncOmni) -> Iterator[Worker]:
    """The rank of an engine that asks nothing of it meanwhile; afterwards it draws as before."""
    golden = asyncio.run(picture(in_process))
    executor: Any = in_process._core.stages[0].replicas[0].executor
    worker: Worker = executor._worker
    yield worker
    if resident(worker) != set(COMPONENTS) or not worker._weights.valid:
        wake(worker, "last")
    assert asyncio.run(picture(in_process)) == golden


def resident(worker: Worker) -> set[str]:
    return {tag for tag, held in worker.memory().tags.items() if held.resident_bytes}


def sleep(worker: Worker, task: str, level: int, **known: Any) -> None:
    worker.prepare_sleep(SleepTask(task_id=task, level=level, **known))
    assert worker.commit_sleep(task).status == "SUCCESS"


def wake(worker: Worker, task: str, **known: Any) -> None:
    worker.prepare_wake(WakeTask(task_id=task, **known))
    assert worker.commit_wake(task).status == "SUCCESS"


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_another_rank_did_not_commit_is_taken_back_whole(worker: Worker, level: int) -> None:
    sleep(worker, "s", level)
    assert resident(worker) == set()
    worker.undo("s")
    assert (resident(worker), worker._weights.missing) == (set(COMPONENTS), frozenset())


@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_by_tags_is_taken_back_to_the_tags_from_before(worker: Worker, level: int) -> None:
    sleep(worker, "s", level)
    wake(worker, "first", tags=("vae",))
    wake(worker, "second", tags=("unet",))
    missing = frozenset() if level == 1 else frozenset({"text_encoder"})
    assert worker._weights.missing == missing
    worker.undo("second")
    assert resident(worker) == {"vae"}
    assert worker._weights.missing == (missing if level == 1 else frozenset({"text_encoder", "unet"}))


def test_a_sleep_of_what_was_awake_is_taken_back_and_the_rest_sleeps_on(worker: Worker) -> None:
    sleep(worker, "s", 2)
    wake(worker, "w", tags=("unet", "vae"))
    sleep(worker, "again", 2)
    worker.undo("again")
    assert (resident(worker), worker._weights.missing) == ({"unet", "vae"}, frozenset({"text_encoder"}))


def test_a_wake_that_is_called_off_while_it_reads_leaves_every_tag_asleep(worker: Worker) -> None:
    sleep(worker, "s", 2)
    wake(worker, "w", tags=("vae",))
    calls = 0
    real = worker._runner.load_weights

    def load(folder: Any, between: Any, tags: Any) -> None:
        def stop_at_the_tenth() -> None:
            nonlocal calls
            calls += 1
            if calls == 10:
                worker.cancel("w2")
            between()

        real(folder, stop_at_the_tenth, tags)

    worker._runner.load_weights = load  # type: ignore[method-assign]
    try:
        with pytest.raises(TransitionCancelledError):
            worker.prepare_wake(WakeTask(task_id="w2"))
    finally:
        del worker._runner.load_weights
    worker.abort_wake("w2")
    assert calls == 10
    assert (resident(worker), worker._weights.missing) == ({"vae"}, frozenset({"text_encoder", "unet"}))


def test_level_2_without_discard_sees_a_change_in_any_component_awake_or_backed_up(worker: Worker) -> None:
    tensor = worker._runner._parts["text_encoder"].tensors()[0]  # type: ignore[attr-defined]
    before = tensor.detach().clone()
    with torch.no_grad():
        tensor.add_(1.0)
    with pytest.raises(UnrecoverableError, match="changed in memory"):
        worker.prepare_sleep(SleepTask(task_id="s", level=2, discard=False))
    assert resident(worker) == set(COMPONENTS)
    sleep(worker, "one", 1)
    with pytest.raises(UnrecoverableError, match="changed in memory"):
        worker.drop_backup(SleepTask(task_id="drop", level=2, discard=False))
    wake(worker, "w")
    assert torch.equal(tensor, before + 1.0)  # level 1 loses nothing
    with torch.no_grad():
        tensor.copy_(before)
    worker.prepare_sleep(SleepTask(task_id="s", level=2, discard=False))
    worker.abort_sleep("s")


def test_level_2_of_changed_weights_says_so_and_its_wake_asks_for_weights(worker: Worker) -> None:
    tensor = worker._runner._parts["vae"].tensors()[0]  # type: ignore[attr-defined]
    with torch.no_grad():
        tensor.add_(1.0)
    worker.prepare_sleep(SleepTask(task_id="s", level=2))
    assert worker.commit_sleep("s").metadata["recoverable"] is False
    outlook = worker.prepare_wake(WakeTask(task_id="w"))
    ack = worker.commit_wake("w")
    assert (outlook.all_awake, outlook.weights_valid, ack.metadata["state"]) == (True, False, "COLD")
    assert "no path reproduces" in ack.metadata["note"]
