"""What a hostile tester found; each test is the kind, not the case."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from omni_notebook.config import DEMO_FOLDER
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import ArgumentError, ConfigError, EngineClosedError, SleepError, WakeError
from omni_notebook.memory.spill import Spill
from omni_notebook.protocol import LoRARequest, OmniSamplingParams
from omni_notebook.stages.waiting import CancelToken, Deadline, OrderCancelled, acquire
from tests.engine.engine_helpers import PROMPT, collect, golden, slow, until

if TYPE_CHECKING:
    from pathlib import Path


def test_a_cancelled_restart_leaves_the_stage_open(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 0.5):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            order = asyncio.create_task(engine.restart(1))
            await asyncio.sleep(0.05)
            order.cancel()
            with pytest.raises(asyncio.CancelledError):
                await order
        await request
        await golden(engine, timeout=20)

    asyncio.run(run())


@pytest.mark.parametrize("order", ["restart", "load_weights", "sleep", "wake_up"])
def test_an_order_cancelled_while_it_waits_for_another_never_runs(engine: AsyncOmni, order: str) -> None:
    async def run() -> None:
        stage = engine._core.stages[0]
        version = engine.status().stages[0].weight_version
        engine._loop.submit(stage.order_lock.acquire()).result(5)
        calls = {
            "restart": lambda: engine.restart(0),
            "load_weights": lambda: engine.load_weights(0, stage.config.model, version="CANCELLED"),
            "sleep": lambda: engine.sleep([0]),
            "wake_up": lambda: engine.wake_up([0]),
        }
        task = asyncio.create_task(calls[order]())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait({task})
        replicas = list(stage.replicas)
        engine._loop.loop.call_soon_threadsafe(stage.order_lock.release)
        await engine.wake_up([0])  # comes after it in the queue for the lock
        after = engine.status().stages[0]
        assert (after.state, after.weight_version, stage.replicas) == ("AWAKE", version, replicas)

    asyncio.run(run())


@pytest.mark.quiet
def test_a_lock_that_is_promised_to_another_is_waited_for_within_the_bound() -> None:
    async def run() -> None:
        lock = asyncio.Lock()
        await lock.acquire()

        async def other() -> None:
            await lock.acquire()
            await asyncio.sleep(1.0)
            lock.release()

        task = asyncio.create_task(other())
        await asyncio.sleep(0)
        lock.release()  # the other is chosen, and the lock says that it is free
        started = time.monotonic()
        assert not await acquire(lock, Deadline(0.2), CancelToken())
        assert time.monotonic() - started < 0.8
        await task
        token = CancelToken()
        token.cancel()
        with pytest.raises(OrderCancelled):
            await acquire(lock, Deadline(0.2), token)
        assert not lock.locked()

    asyncio.run(run())


def test_a_wake_that_times_out_on_a_slow_disk_leaves_the_stage_asleep_and_nothing_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = Spill.read

    def slow_read(self: Spill, *args: Any) -> Any:
        time.sleep(0.4)
        return read(self, *args)

    async def run(engine: AsyncOmni) -> None:
        before = await golden(engine)
        await engine.sleep([1], level=1)
        monkeypatch.setattr(Spill, "read", slow_read)
        with pytest.raises(WakeError, match="did not answer"):
            await engine.wake_up([1], timeout=0.2)
        assert engine.status().stages[1].state == "ASLEEP"
        monkeypatch.undo()
        await engine.wake_up([1])
        assert await golden(engine) == before

    with AsyncOmni("demo") as engine:  # in this process, where the disk can be made slow
        asyncio.run(run(engine))


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 100.0])
def test_no_temperature_fails_a_batch(engine: AsyncOmni, temperature: float) -> None:
    async def run() -> None:
        odd = collect(engine, sampling_params={"temperature": temperature, "seed": 1}, output_modalities="text")
        plain = collect(engine, output_modalities="text")
        outputs = await asyncio.gather(odd, plain)
        assert all(o[-1].text for o in outputs)

    asyncio.run(run())


BAD_PARAMS = [
    OmniSamplingParams(stop_token_ids=None),  # type: ignore[arg-type]
    OmniSamplingParams(top_k=1.5),  # type: ignore[arg-type]
    OmniSamplingParams(seed=1.5),  # type: ignore[arg-type]
    5,
    {1: 2, "a": 3},
]


@pytest.mark.parametrize("params", BAD_PARAMS, ids=repr)
def test_wrong_types_of_parameters_are_refused_before_anything_starts(engine: AsyncOmni, params: Any) -> None:
    with pytest.raises(ArgumentError):
        asyncio.run(collect(engine, sampling_params=params))
    assert not engine._core._flows


@pytest.mark.parametrize("what", ["weights", "lora", "model"])
def test_a_path_with_a_nul_is_refused_as_an_argument(engine: AsyncOmni, what: str) -> None:
    async def order() -> None:
        if what == "weights":
            await engine.load_weights(0, "a\0b")
        elif what == "lora":
            await engine.add_lora(LoRARequest("a", 1, "a\0b"))
        else:
            AsyncOmni("a\0b")

    with pytest.raises(ArgumentError, match="holds a NUL"):
        asyncio.run(order())


@pytest.mark.parametrize("timeout", ["5", float("nan"), -1, True])
def test_a_wrong_timeout_of_a_request_is_refused_before_it_starts(engine: AsyncOmni, timeout: Any) -> None:
    with pytest.raises(ArgumentError, match="timeout"):
        asyncio.run(collect(engine, timeout=timeout))
    assert not engine._core._flows


def test_a_request_whose_client_left_during_admission_is_ended(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 0, 0.05):
            for _ in range(10):
                outputs = engine.generate(PROMPT)
                first = asyncio.create_task(anext(outputs))
                await asyncio.sleep(0)
                time.sleep(0.005)  # noqa: ASYNC251  (the caller's loop is busy while the engine admits)
                first.cancel()
                await asyncio.wait({first})
                await outputs.aclose()
            await until(lambda: not engine._core._flows)

    asyncio.run(run())


def _remove(file: Path) -> None:
    file.unlink()


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _scribble(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-4096:] = bytes(4096)
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("harm", [_remove, _truncate, _scribble])
def test_level_2_knows_that_the_checkpoint_is_gone_or_changed_before_it_sleeps(tmp_path: Path, harm: Any) -> None:
    shutil.copytree(DEMO_FOLDER / "dit", tmp_path / "dit")

    async def run(engine: AsyncOmni) -> None:
        harm(tmp_path / "dit" / "model.safetensors")
        with pytest.raises(SleepError) as caught:
            await engine.sleep([0], level=2, discard=False)
        assert caught.value.acks[0].metadata["error_code"] == "UNRECOVERABLE"
        assert engine.status().stages[0].state == "AWAKE"
        acks = await engine.sleep([0], level=2)
        assert acks[0].metadata["recoverable"] is False

    with AsyncOmni(tmp_path / "dit") as engine:
        asyncio.run(run(engine))


def test_a_change_of_folder_loses_no_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(DEMO_FOLDER / "dit", tmp_path / "dit")
    monkeypatch.chdir(tmp_path)

    async def run(engine: AsyncOmni) -> None:
        await engine.load_weights(0, "dit")
        monkeypatch.chdir("/")
        await engine.restart(0)
        assert engine.status().stages[0].state == "AWAKE"

    with AsyncOmni("dit") as engine:
        asyncio.run(run(engine))


def test_two_equal_pauses_at_once_are_one(engine: AsyncOmni) -> None:
    async def run() -> None:
        with slow(engine, 1, 0.3):
            request = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running)
            await asyncio.gather(*(engine.pause_generation(mode="keep") for _ in range(3)))
            assert {s.pause_state for s in engine.status().stages} == {"PAUSED"}
            await engine.resume_generation()
        await request

    asyncio.run(run())


def test_a_forked_child_neither_waits_for_nor_ends_its_parents_engine() -> None:
    with AsyncOmni("demo") as engine:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(engine.sleep())
            except EngineClosedError:
                engine.shutdown()
                os._exit(7)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert time.monotonic() - started < 5
        asyncio.run(golden(engine))


def test_every_caller_of_shutdown_returns_after_it_is_done() -> None:
    engine = AsyncOmni("demo", ballast_bytes="64MiB")
    pool = engine._core.stages[0].replicas[0].executor._worker._pool
    seen: list[int] = []

    def end() -> None:
        engine.shutdown()
        seen.append(sum(tag.resident_bytes for tag in pool.memory().values()))

    threads = [threading.Thread(target=end) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [0, 0, 0]
    assert not engine._loop._thread.is_alive()


@pytest.mark.parametrize("ids", ["0", 1.5, {"a": 1}, [None], [[0]]])
def test_ids_of_a_wrong_type_are_refused(engine: AsyncOmni, ids: Any) -> None:
    with pytest.raises(ArgumentError):
        asyncio.run(engine.sleep(ids))


def test_numpy_numbers_are_numbers(engine: AsyncOmni) -> None:
    async def run() -> None:
        acks = await engine.sleep([np.int64(0)])
        assert acks[0].stage_id == 0
        await engine.wake_up(np.int64(0))
        params = {"seed": np.int64(3), "num_inference_steps": np.int32(2)}
        assert (await collect(engine, sampling_params=params))[-1].metrics["seed"] == 3

    asyncio.run(run())


@pytest.mark.parametrize(
    "bad",
    [
        {"default_timeout": "5"},
        {"default_timeout": float("nan")},
        {"stage_overrides": {"0": {}}},
        {"stage_overrides": [1]},
        {"ballast_bytes": None},
        {"ballast_bytes": 1.5},
        {"ballast_bytes": "9" * 400},
        {"model": "x" * 5000},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_wrong_options_of_the_constructor_are_one_line(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        AsyncOmni(**{"model": "demo", **bad})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
