"""What a scheduler hands to a runner and gets back; plain types that may cross a process border."""

from __future__ import annotations

from typing import Any

import msgspec

from omni_notebook.errors import ArgumentError, OmniError

BATCH_PREFIX = "batch-"
"""What tells a batch's id from an order's."""


class BatchCancelledError(OmniError):
    """A batch stopped between two steps because all its requests were aborted."""

    error_code = "CANCELLED"


class RequestRefusedError(ArgumentError):
    """A model can not follow a request's parameters, on all ranks alike; the next batch is not concerned."""

    error_code = "REFUSED"


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


class ImageCondition(msgspec.Struct, frozen=True, kw_only=True):
    """What one image is drawn from; `hidden`: float32 array (plan length, hidden size) or None."""

    plan_ids: tuple[int, ...]
    hidden: Any | None


class ImageStep(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a diffusion batch; `condition` None: it was prefetched under `key`."""

    key: int
    seed: int
    condition: ImageCondition | None
    lora_id: int = 0


class Prefetch(msgspec.Struct, frozen=True, kw_only=True):
    """Conditioning to move to the device now; of what was prefetched before only `keep` is still wanted."""

    conditions: dict[int, ImageCondition]
    keep: tuple[int, ...]


class DiffusionBatch(msgspec.Struct, frozen=True, kw_only=True, tag="diffusion"):
    """Images that are denoised together: same size, steps and guidance; `batch_id` cancels it between steps."""

    batch_id: str
    images: tuple[ImageStep, ...]
    num_inference_steps: int
    guidance_scale: float


class PromptImage(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a pipeline's batch."""

    prompt: str
    negative_prompt: str | None
    seed: int


class PipelineBatch(msgspec.Struct, frozen=True, kw_only=True, tag="pipeline"):
    """Images that a diffusers pipeline draws together; `batch_id` cancels it between steps.

    All have a negative prompt or none has. `width`, `height`: pixels, None = the pipeline's own. `lora_id`: 0 = none.
    """

    batch_id: str
    images: tuple[PromptImage, ...]
    num_inference_steps: int
    guidance_scale: float
    width: int | None
    height: int | None
    lora_id: int = 0


class DenoiseStep(msgspec.Struct, frozen=True, kw_only=True):
    """One image's part of a turn: its step `index` of `num_inference_steps`; `start` comes with the first."""

    key: int
    index: int
    num_inference_steps: int
    start: ImageStep | None

    @property
    def last(self) -> bool:
        """Whether the image is complete after it."""
        return self.index + 1 == self.num_inference_steps


class StepBatch(msgspec.Struct, frozen=True, kw_only=True, tag="steps"):
    """One denoise step of each image, all with one adapter (0 = none).

    The ranks forget what they began of images that `keep` does not name.
    """

    batch_id: str
    images: tuple[DenoiseStep, ...]
    guidance_scale: float
    lora_id: int
    keep: tuple[int, ...]


class Executed(msgspec.Struct, frozen=True, kw_only=True, tag="executed"):
    """A batch has left the device's queue; `collect` gives its outputs when they are copied and encoded.

    `step_versions`: the weight version that each denoise step ran on, as (version, steps) in order.
    """

    step_versions: tuple[tuple[str, int], ...]


class ImageAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="image"):
    """One image: uint8 array (height, width, 3), and the same as PNG; a preview is not encoded."""

    pixels: Any
    png: bytes
