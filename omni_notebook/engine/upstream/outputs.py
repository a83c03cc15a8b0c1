"""Prompts, sampling parameters and outputs between this package's form and upstream's."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from typing import TYPE_CHECKING, Any

from omni_notebook.engine.upstream.package import first_line
from omni_notebook.errors import ArgumentError, UpstreamError
from omni_notebook.protocol import CompletionOutput, OmniRequestOutput, RequestState, said_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_AR = ("seed", "max_tokens", "temperature", "top_p", "top_k", "stop_token_ids")
_DIFFUSION = ("seed", "num_inference_steps", "guidance_scale", "width", "height")
_DERIVED = frozenset({"output_text_buffer_length"})


def checked_prompt(prompt: Any) -> Any:
    """A prompt that upstream takes.

    Raises:
        ArgumentError: neither a non-empty string nor `{"prompt_token_ids": [...]}`.
    """
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) and len(prompt) == 1 else None
    if isinstance(ids, list | tuple) and ids and all(type(one) is int and one >= 0 for one in ids):
        return {"prompt_token_ids": list(ids)}
    msg = f"prompt={prompt!r} is neither a non-empty string nor {{'prompt_token_ids': [...]}}; nothing was started"
    raise ArgumentError(msg)


def params_for(defaults: Sequence[Any], given: Any) -> list[Any]:
    """One set of parameters a stage: its own defaults, and what the caller named of what concerns it.

    `given` was checked by `sampling_params_from`. A stage's class decides what concerns it: one with `max_tokens` makes
    text, and is asked for all of it, not for what is new. vLLM's class is a msgspec Struct, the other a dataclass.

    Raises:
        ArgumentError: a stage's class refuses them, its own words.
    """
    named = said_of(given)
    try:
        return [_changed(default, named) for default in defaults]
    except (ValueError, TypeError) as error:
        msg = f"sampling_params={named!r}: vllm_omni refuses them: {first_line(error)}. Nothing was started"
        raise ArgumentError(msg) from error


def _changed(default: Any, named: dict[str, Any]) -> Any:
    is_ar = hasattr(default, "max_tokens")
    values = {name: named[name] for name in (_AR if is_ar else _DIFFUSION) if name in named}
    kind: Any = getattr(default, "output_kind", None)
    if getattr(kind, "name", "") == "DELTA":
        values["output_kind"] = type(kind).CUMULATIVE
    if "stop_token_ids" in values:
        values["stop_token_ids"] = list(values["stop_token_ids"])
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        return dataclasses.replace(default, **values)
    names = [name for name in getattr(default, "__struct_fields__", ()) if not name.startswith("_")]
    kept = {name: getattr(default, name) for name in names if name not in _DERIVED}
    return type(default)(**{**kept, **values})  # anew, because the class computes more from what it is given


async def converted(output: Any, request_id: str, final_type: str) -> OmniRequestOutput:
    """One of upstream's outputs as ours, not finished; its images also as PNG files, encoded on a thread.

    Raises:
        UpstreamError: it carries an error.
    """
    error = getattr(output, "error", None)
    if error:
        msg = f"request {request_id} failed in stage {output.stage_id}: {error}"
        raise UpstreamError(msg)
    if any(one.finish_reason == "error" for one in output.outputs or ()):
        where = "" if output.stage_id is None else f" in stage {output.stage_id}"
        msg = (
            f"request {request_id}: vllm_omni's vLLM ended it{where} with an error, "
            "the log of vllm_omni says why; generate again"
        )
        raise UpstreamError(msg)
    sequences = [
        CompletionOutput(
            text=one.text or "",
            token_ids=list(one.token_ids or ()),
            finish_reason=one.finish_reason,
            index=one.index,
        )
        for one in output.outputs or ()
    ]
    images = list(output.images or ())
    metrics = output.metrics if isinstance(output.metrics, dict) else {}
    return OmniRequestOutput(
        request_id=request_id,
        stage_id=output.stage_id or 0,
        finished=False,
        final_output_type=final_type,
        state=RequestState.RUNNING,
        text=sequences[0].text if sequences else "",
        outputs=sequences,
        images=images,
        png=await asyncio.to_thread(_encoded, images) if images else [],
        metrics=dict(metrics),
    )


def was_aborted(output: OmniRequestOutput) -> bool:
    """Whether a request's last output says that it was."""
    return any(one.finish_reason == "abort" for one in output.outputs)


def _encoded(images: Sequence[Any]) -> list[bytes]:
    return [_png(image) for image in images]


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
