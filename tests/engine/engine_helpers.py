"""What engine tests share: requests, golden outputs, faults, waiting."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
from typing import TYPE_CHECKING, Any

from tests.engine import faulty_worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.protocol import OmniRequestOutput

PROMPT = "a red star above a blue circle"
PARAMS = {"seed": 42, "num_inference_steps": 6}


_standing: dict[tuple[int, int, str], dict[str, Any]] = {}
"""What each engine's ranks are told at the moment, by stage and method."""


async def collect(engine: AsyncOmni, prompt: Any = PROMPT, **known: Any) -> list[OmniRequestOutput]:
    """All outputs of one request."""
    known.setdefault("sampling_params", PARAMS)
    return [output async for output in engine.generate(prompt, **known)]


async def golden(engine: AsyncOmni, **known: Any) -> tuple[list[int], bytes]:
    """Tokens and picture bytes of a fixed-seed run."""
    outputs = await collect(engine, **known)
    tokens = next(o.outputs[0].token_ids for o in reversed(outputs) if o.outputs)
    return tokens, outputs[-1].images[0].tobytes()


async def until(predicate: Any, seconds: float = 20.0) -> None:
    """Wait until a predicate holds, at most `seconds`."""
    async with asyncio.timeout(seconds):
        while not predicate():  # noqa: ASYNC110 (an engine on another thread signals nothing here)
            await asyncio.sleep(0.002)


def in_processes(engine: AsyncOmni) -> bool:
    """Whether the engine's ranks are child processes."""
    return all(stage.config.executor_name == "mp" for stage in engine._core.stages)


def _tell(engine: AsyncOmni, stage_id: int, method: str, **fault: Any) -> None:
    for replica in engine._core.stages[stage_id].replicas:
        replica.executor.cancel(faulty_worker.words(method=method, **fault))


@contextlib.contextmanager
def _told(engine: AsyncOmni, stage_id: int, method: str, **fault: Any) -> Iterator[None]:
    """What a `FaultyWorker` is told now; afterwards what it was told before."""
    before = _standing.get((id(engine), stage_id, method), {})
    _standing[id(engine), stage_id, method] = fault
    _tell(engine, stage_id, method, **fault)
    try:
        yield
    finally:
        _standing[id(engine), stage_id, method] = before
        _tell(engine, stage_id, method, **before)


@contextlib.contextmanager
def held(engine: AsyncOmni, stage_id: int, method: str = "execute") -> Iterator[None]:
    """Every batch of a stage (or another step) waits for the end of this block, whatever the machine's load."""
    with _told(engine, stage_id, method, hold=True):
        yield


@contextlib.contextmanager
def rank_fault(engine: AsyncOmni, stage_id: int, place: tuple[int, int], method: str, **fault: Any) -> Iterator[None]:
    """A fault of one rank in a process, `place` = (replica, rank); see `faulty_worker.words`."""
    with _told(engine, stage_id, method, place=place, **fault):
        yield


@contextlib.contextmanager
def fault(
    engine: AsyncOmni, stage_id: int, method: str, error: BaseException, *, after: bool = False, **more: Any
) -> Iterator[None]:
    """Make ranks raise in one order, or in a job of their threads; `after` doing it if so."""
    known = getattr(builtins, type(error).__name__, None) is type(error)
    if in_processes(engine) or method in faulty_worker.ON_THREADS or more:
        assert known, "a rank's process makes the error by its name"
        with _told(engine, stage_id, method, error=type(error).__name__, args=error.args, after=after, **more):
            yield
        return
    executor: Any = engine._core.stages[stage_id].replicas[0].executor
    worker = executor._worker
    real = getattr(worker, method)

    def broken(*args: Any) -> None:
        if after:
            real(*args)
        raise error

    setattr(worker, method, broken)
    try:
        yield
    finally:
        delattr(worker, method)


@contextlib.contextmanager
def slow(engine: AsyncOmni, stage_id: int, seconds: float, order: str = "execute") -> Iterator[None]:
    """Make every batch of a stage (or another order, or a job of its threads) take longer, as a big model would."""
    with _told(engine, stage_id, order, seconds=seconds):
        yield


def ask(engine: AsyncOmni, stage_id: int, question: str, *args: Any) -> Any:
    """One of `faulty_worker`'s questions about a rank's model, answered where the rank is."""
    executor: Any = engine._core.stages[stage_id].replicas[0].executor
    if in_processes(engine):
        embedded = getattr(engine, "embedded", engine)  # the ranks belong to its loop
        return embedded.submit(executor.call(question, *args)).result(30)[0].unwrap()
    return getattr(faulty_worker, question)(executor._worker, *args)


def tell(engine: AsyncOmni, stage_id: int, place: tuple[int, int], method: str, **fault: Any) -> None:
    """A fault of one rank, until it is replaced."""
    _tell(engine, stage_id, method, place=place, **fault)


async def reset(engine: AsyncOmni) -> None:
    """All stages AWAKE with their shipped weights, nothing paused, no request left."""
    await engine.resume_generation()
    for stage in engine.status().stages:
        if stage.state != "AWAKE" or stage.model != engine._core.stages[stage.stage_id].config.model:
            await engine.restart(stage.stage_id)
    for request_id in list(engine._core._flows):
        await engine.abort(request_id)
    await until(lambda: all(s.running == s.queued == 0 for s in engine.status().stages))
