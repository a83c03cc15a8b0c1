"""What a scheduler hands to a runner and gets back; plain types that may cross a process border."""

from __future__ import annotations

from typing import Any

import msgspec

from omni_notebook.errors import OmniError

BATCH_PREFIX = "batch-"
"""What tells a batch's id from an order's."""


class BatchCancelledError(OmniError):
    """A batch stopped between two steps because all its requests were aborted."""

    error_code = "CANCELLED"


class SequenceStep(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's part of one AR step.

    `token_ids` are fed at positions `start …`: the whole sequence for a prefill (start 0), one token for a decode.
    The first `prompt_len` positions of the sequence are the prompt. `want_hidden` asks for the last hidden states
    that wrote a token: a token's state is the one at the position before it. `lora_id`: its adapter, 0 = none.
    """

    slot: int
    token_ids: tuple[int, ...]
    start: int
    prompt_len: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    want_hidden: bool
    lora_id: int = 0


class ArBatch(msgspec.Struct, frozen=True, tag="ar"):
    """One AR step over several sequences."""

    sequences: tuple[SequenceStep, ...]


class SequenceAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="sequence"):
    """The next token of one sequence; `hidden`: float32 array (tokens written, hidden size) or None."""

    token_id: int
    hidden: Any | None


class ImageStep(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a diffusion batch; `hidden`: float32 (plan length, hidden size) or None; `lora_id`: 0 = none."""

    plan_ids: tuple[int, ...]
    hidden: Any | None
    seed: int
    lora_id: int = 0


class DiffusionBatch(msgspec.Struct, frozen=True, kw_only=True, tag="diffusion"):
    """Images that are denoised together: same size, steps and guidance; `batch_id` cancels it between steps."""

    batch_id: str
    images: tuple[ImageStep, ...]
    num_inference_steps: int
    guidance_scale: float


class ImageAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="image"):
    """One finished image: uint8 array (height, width, 3)."""

    pixels: Any
