"""What tests of pauses share: requests told apart, and what the ranks' journals say."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from omni_notebook.config import DEMO_FOLDER
from tests.engine.engine_helpers import collect, held, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.engine.async_omni import AsyncOmni

THINKER, PAINTER = 0, 1
MODES = ["keep", "wait", "abort"]
BATCH_S = 0.4
"""A batch that takes its time."""
SHIPPED = DEMO_FOLDER / "dit"
Entry = tuple[float, str, Any]


def stage(engine: AsyncOmni, stage_id: int = PAINTER) -> Any:
    """A stage's status now."""
    return engine.status().stages[stage_id]


def replicas(engine: AsyncOmni, stage_id: int = PAINTER) -> list[Any]:
    return list(engine._core.stages[stage_id].replicas)


def executing(engine: AsyncOmni) -> bool:
    """Whether a batch is on a painter's device."""
    return any(replica._executing for replica in replicas(engine))


def draw(engine: AsyncOmni, steps: int = 4, seed: int = 5, **known: Any) -> asyncio.Task[list[Any]]:
    """A request for an image; one batch holds requests of one number of steps."""
    return asyncio.create_task(collect(engine, sampling_params={"seed": seed, "num_inference_steps": steps}, **known))


def write(engine: AsyncOmni, prompt: Any = "a red star above a blue circle", **known: Any) -> asyncio.Task[list[Any]]:
    """A request for text."""
    return asyncio.create_task(collect(engine, prompt, output_modalities="text", **known))


async def picture(engine: AsyncOmni, steps: int = 4, seed: int = 5) -> bytes:
    """What such a request draws by itself."""
    image: bytes = (await draw(engine, steps, seed))[-1].images[0].tobytes()
    return image


async def tokens(engine: AsyncOmni, **known: Any) -> list[int]:
    """What a request for text writes by itself."""
    return list((await write(engine, **known))[-1].outputs[0].token_ids)


async def one_running_and(engine: AsyncOmni, *queued: str, steps: int = 4) -> list[asyncio.Task[list[Any]]]:
    """A batch of one that has just begun on the painter's device, and requests behind it that can not join it."""
    with held(engine, PAINTER):
        running = draw(engine, steps - 1, request_id="running")
        await until(lambda: executing(engine))
        behind = []
        for name in queued:
            behind.append(draw(engine, steps, request_id=name))
            await until(lambda: stage(engine).queued == len(behind))
    return [running, *behind]


async def journals(engine: AsyncOmni, stage_id: int = PAINTER) -> list[list[Entry]]:
    """What each rank of a stage did since it was last asked, in the order of replicas and ranks."""
    found = []
    for replica in replicas(engine, stage_id):
        answers = await asyncio.wrap_future(engine.submit(replica.executor.call("journal", timeout_s=20.0)))
        found += [[tuple(entry) for entry in answer.unwrap()] for answer in answers]
    return found


async def journal(engine: AsyncOmni, stage_id: int = PAINTER) -> list[Entry]:
    """The first rank's."""
    return (await journals(engine, stage_id))[0]


def places(entries: Sequence[Entry], what: str) -> list[int]:
    """Where an entry stands in a journal."""
    return [n for n, (_, name, _) in enumerate(entries) if name == what]


def pauses(engine: AsyncOmni) -> list[tuple[str, str | None]]:
    """Each stage's pause state and mode."""
    return [(str(s.pause_state), s.pause_mode) for s in engine.status().stages]


async def pausing_behind(
    engine: AsyncOmni, *queued: str, steps: int = 4, **known: Any
) -> tuple[list[asyncio.Task[list[Any]]], asyncio.Task[None]]:
    """The same, and a keep pause in progress before the batch can end."""
    with held(engine, PAINTER):
        requests = await one_running_and(engine, *queued, steps=steps)
        return requests, await pausing(engine, **known)


async def paused_behind(engine: AsyncOmni, *queued: str, **known: Any) -> list[asyncio.Task[list[Any]]]:
    """The same, when the pause has returned."""
    requests, pause = await pausing_behind(engine, *queued, **known)
    await pause
    return requests


async def pausing(
    engine: AsyncOmni, mode: str = "keep", stage_id: int | None = PAINTER, **known: Any
) -> asyncio.Task[None]:
    """A pause that has begun and goes on while a batch is held; of all stages if `stage_id` is None."""
    task = asyncio.create_task(engine.pause_generation(mode, stage_id, **known))
    last = PAINTER if stage_id is None else stage_id
    await until(lambda: pauses(engine)[last] in {("PAUSING", mode), ("PAUSED", mode)})
    return task
