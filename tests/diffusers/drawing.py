"""Requests to an engine with one pipeline, and what plain diffusers makes of the same."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.engine.engine_helpers import until

if TYPE_CHECKING:
    from pathlib import Path

    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.protocol import OmniRequestOutput

PROMPT = "a red star"
PARAMS = {"seed": 5, "num_inference_steps": 4, "guidance_scale": 3.0}
LONG = {**PARAMS, "num_inference_steps": 400}


async def outputs(engine: AsyncOmni, prompt: Any = PROMPT, **known: Any) -> list[OmniRequestOutput]:
    """All outputs of one request."""
    params = {**PARAMS, **known.pop("params", {})}
    return [out async for out in engine.generate(prompt, sampling_params=params, **known)]


async def picture(engine: AsyncOmni, prompt: Any = PROMPT, **known: Any) -> bytes:
    """The pixels of one request."""
    return (await outputs(engine, prompt, **known))[-1].images[0].tobytes()


@functools.cache
def plain(folder: Path, prompt: str = PROMPT, adapter: Path | None = None, **changes: Any) -> bytes:
    """The pixels that plain diffusers draws.

    Its parameters are moved to even addresses first: mapped from a file they lie at odd ones, where some of torch's
    kernels round otherwise.
    """
    import torch
    from diffusers import DiffusionPipeline
    from torch import nn

    known = {**PARAMS, **changes}
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    absent = {name: None for name, value in index.items() if value == [None, None]}
    pipe = DiffusionPipeline.from_pretrained(folder, **absent)
    pipe.set_progress_bar_config(disable=True)
    for parameter in [
        one for part in pipe.components.values() if isinstance(part, nn.Module) for one in part.parameters()
    ]:
        parameter.data = parameter.data.clone()
    if adapter is not None:
        pipe.load_lora_weights(adapter, weight_name="pytorch_lora_weights.safetensors")
    if "negative_prompt" in known:
        known["negative_prompt"] = [known["negative_prompt"]]
    generator = torch.Generator("cpu").manual_seed(known.pop("seed"))
    return np.asarray(pipe(prompt=[prompt], generator=[generator], **known).images[0]).tobytes()


async def running(engine: AsyncOmni, **known: Any) -> asyncio.Task[list[OmniRequestOutput]]:
    """A long request that has begun."""
    task = asyncio.create_task(outputs(engine, params=LONG, **known))
    await until(lambda: engine.status().stages[0].running == 1)
    return task


async def reset(engine: AsyncOmni, folder: Path) -> None:
    """AWAKE, open, no request, no adapter, the weights of `folder`."""
    await engine.resume_generation()
    for request_id in list(engine._core._flows):
        await engine.abort(request_id)
    stage = engine.status().stages[0]
    if stage.state == "FAILED":
        await engine.restart(0)
    elif stage.state != "AWAKE":
        await engine.wake_up([0])
    await until(lambda: engine.status().stages[0].running == engine.status().stages[0].queued == 0)
    if engine._core.stages[0].source not in {None, str(folder)}:
        await engine.load_weights(0, str(folder))
    for lora_id in await engine.list_loras():
        await engine.remove_lora(lora_id)
