"""A rank that drops its weights and reads them again: nothing is left of a reload, and a file may go meanwhile."""

from __future__ import annotations

import gc
import shutil
import sys

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from omni_notebook.config import load_pipeline
from omni_notebook.errors import ConfigError
from omni_notebook.memory.reading import HostReader
from omni_notebook.models.loaders import SINGLE_FILE, load_into
from omni_notebook.protocol import RankId, SleepTask, WakeTask
from omni_notebook.worker.reports import WorkerSpec
from omni_notebook.worker.worker import Worker

PAINTER = 1


@pytest.fixture
def folder(tmp_path):
    """A copy of the demo's painter."""
    shutil.copytree(load_pipeline("demo").stages[PAINTER].model, tmp_path / "dit")
    return tmp_path / "dit"


@pytest.fixture
def worker(folder):
    config = msgspec.structs.replace(load_pipeline("demo").stages[PAINTER], model=str(folder))
    worker = Worker(WorkerSpec(where=RankId(PAINTER, 0, 0), config=config, tensor_parallel_size=1))
    worker.load()
    yield worker
    worker.shutdown()


def sleep(worker, task_id):
    worker.prepare_sleep(SleepTask(task_id=task_id, level=2))
    assert worker.commit_sleep(task_id).ok


def cycle(worker, number):
    sleep(worker, f"sleep {number}")
    worker.prepare_wake(WakeTask(task_id=f"wake {number}"))
    assert worker.commit_wake(f"wake {number}").ok


def kept_by(again, turns):
    """The Python objects that a turn leaves behind, once it is warm; an interpreter keeps tens itself, now and then."""
    for number in range(10):
        again(number)
    gc.collect()
    before = sys.getallocatedblocks()
    for number in range(turns):
        again(number)
    gc.collect()
    return (sys.getallocatedblocks() - before) / turns


@pytest.mark.alone
def test_level_2_wakes_leave_no_object_a_tensor_behind(worker):
    tensors = len(list(worker._runner.model.state_dict()))
    assert tensors > 50
    assert kept_by(lambda number: cycle(worker, number), 20) < tensors / 4


@pytest.mark.alone
def test_parts_of_rows_and_other_types_leave_no_object_a_tensor_behind_either(tmp_path):
    save_file({f"t{number}": torch.randn(8, 6) for number in range(100)}, tmp_path / SINGLE_FILE)
    module = nn.Module()
    for number in range(100):
        module.register_buffer(f"t{number}", torch.zeros(8, 3) if number % 2 else torch.zeros(8, 6).bfloat16())
    slices = {f"t{number}": (slice(None), slice(3)) for number in range(1, 100, 2)}
    assert kept_by(lambda _: load_into(module, tmp_path, slices, reader=HostReader()), 10) < 100 / 4


@pytest.mark.parametrize("how", ["cut short", "emptied"])
def test_a_checkpoint_that_is_cut_short_while_it_is_read_is_one_error_and_the_rank_stays_asleep(
    worker, folder, monkeypatch, how
):
    file, read = folder / SINGLE_FILE, HostReader.read
    whole = file.read_bytes()

    def cut_and_read(*args):
        with file.open("r+b") as stream:
            stream.truncate(len(whole) - 100 if how == "cut short" else 0)
        read(*args)

    sleep(worker, "sleep")
    with monkeypatch.context() as patch:
        patch.setattr(HostReader, "read", cut_and_read)
        with pytest.raises(
            ConfigError, match=r"a checkpoint cannot be read: .* ends \d+ bytes before the end"
        ) as caught:
            worker.prepare_wake(WakeTask(task_id="wake"))
    assert "\n" not in str(caught.value)
    assert worker.memory().tags["weights"].resident_bytes == 0
    file.write_bytes(whole)
    worker.prepare_wake(WakeTask(task_id="wake again"))
    assert worker.commit_wake("wake again").ok
    state = worker._runner.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in load_file(file).items())


def test_a_checkpoint_that_vanishes_while_it_is_read_is_read_all_the_same(worker, folder, monkeypatch):
    read = HostReader.read

    def remove_and_read(*args):
        (folder / SINGLE_FILE).unlink()
        read(*args)

    sleep(worker, "sleep")
    with monkeypatch.context() as patch:
        patch.setattr(HostReader, "read", remove_and_read)
        worker.prepare_wake(WakeTask(task_id="wake"))
    assert worker.commit_wake("wake").ok
