"""What engine tests share: requests, golden outputs, faults, waiting."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.protocol import OmniRequestOutput

PROMPT = "a red star above a blue circle"
PARAMS = {"seed": 42, "num_inference_steps": 6}


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


@contextlib.contextmanager
def fault(
    engine: AsyncOmni, stage_id: int, method: str, error: BaseException, *, after: bool = False
) -> Iterator[None]:
    """Make one rank raise in one order, at the seam between the executor and the worker; `after` doing it if so."""
    worker = engine._core.stages[stage_id].replicas[0].executor._worker
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
def slow(engine: AsyncOmni, stage_id: int, seconds: float) -> Iterator[None]:
    """Make every batch of a stage take longer by `seconds`, as a big model would."""
    worker = engine._core.stages[stage_id].replicas[0].executor._worker
    execute = worker.execute

    def slower(batch: Any) -> Any:
        time.sleep(seconds)
        return execute(batch)

    worker.execute = slower
    try:
        yield
    finally:
        del worker.execute


async def reset(engine: AsyncOmni) -> None:
    """All stages AWAKE with their shipped weights, nothing paused, no request left."""
    await engine.resume_generation()
    for stage in engine.status().stages:
        if stage.state != "AWAKE" or stage.model != engine._core.stages[stage.stage_id].config.model:
            await engine.restart(stage.stage_id)
    for request_id in list(engine._core._flows):
        await engine.abort(request_id)
    await until(lambda: all(s.running == s.queued == 0 for s in engine.status().stages))
