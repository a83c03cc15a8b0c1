"""The bodies of requests. Unknown fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from omni_notebook.protocol import OmniSamplingParams, is_unicode
from omni_notebook.verbs.auditing.plan import MAX_CYCLES, PROMPT, SEED

Seconds = Annotated[float, Field(ge=0.001, le=86_400, allow_inf_nan=False, description="seconds")]
StageId = Annotated[int | str, Field(description="a stage's number or name")]
StageIds = Annotated[
    list[int | str] | None,
    Field(min_length=1, fail_fast=True, description="stages by number or name; null: all of them"),
]
MAX_IMAGES = 16


class Body(BaseModel):
    """A request's JSON object."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SleepBody(Body):
    """`POST /v1/omni/sleep`."""

    stage_ids: StageIds = None
    level: Annotated[Literal[1, 2], Field(description="1 keeps the weights on the host, 2 discards them")] = 1
    mode: Annotated[
        Literal["abort", "wait", "keep"] | None, Field(description="quiesce first; null refuses a busy stage")
    ] = None
    timeout: Seconds | None = None
    discard: Annotated[
        bool, Field(description="level 2 also where no checkpoint has the weights: they are then lost")
    ] = False


class WakeBody(Body):
    """`POST /v1/omni/wakeup`."""

    stage_ids: StageIds = None
    tags: Annotated[
        list[str] | None, Field(min_length=1, fail_fast=True, description="a part of the memory; null: all")
    ] = None
    reload: Annotated[bool, Field(description="false maps a level-2 sleeper without loading")] = True
    timeout: Seconds | None = None


class PauseBody(Body):
    """`POST /v1/omni/pause`."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    stage_ids: StageIds = None
    wait_for_inflight_requests: bool = False
    clear_cache: bool = True
    timeout: Seconds | None = None


class ResumeBody(Body):
    """`POST /v1/omni/resume`."""

    stage_ids: StageIds = None


class WeightsBody(Body):
    """`POST /v1/omni/weights`: a checkpoint folder on the server's machine."""

    stage_id: StageId
    path: Annotated[str, Field(min_length=1)]
    version: str | None = None
    timeout: Seconds | None = None


class LoraBody(Body):
    """`POST /v1/omni/loras`: an adapter's folder on the server's machine."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_int_id: Annotated[int, Field(ge=1)]
    lora_path: Annotated[str, Field(min_length=1)]
    stage_ids: StageIds = None
    timeout: Seconds | None = None


class RestartBody(Body):
    """`POST /v1/omni/restart`."""

    stage_id: StageId
    timeout: Seconds | None = None


class AbortBody(Body):
    """`POST /v1/omni/abort`."""

    request_id: Annotated[str, Field(min_length=1)]


class HistoryQuery(BaseModel):
    """What `GET /v1/omni/history` takes behind its `?`."""

    stage: Annotated[str | None, Field(description="a stage's number or name")] = None
    rank: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    since: Annotated[str | None, Field(description="2h, 2026-11-29, or seconds since 1970")] = None
    session: Annotated[str | None, Field(description="an engine's run; this: those of the server's process")] = None
    errors: bool = False
    limit: Annotated[int, Field(ge=1, le=10_000)] = 50


def _unicode(text: str) -> str:
    """Refuse halves of surrogate pairs, which JSON can spell and no text holds."""
    if not is_unicode(text):
        msg = "it is not Unicode text"
        raise ValueError(msg)
    return text


Text = Annotated[str, AfterValidator(_unicode)]


class Sampling(Body):
    """`sampling_params`: the fields of `OmniSamplingParams`."""

    seed: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    width: int | None = None
    height: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_token_ids: Annotated[list[int] | None, Field(fail_fast=True)] = None

    def given(self) -> dict[str, Any]:
        """What was said, by the names of `OmniSamplingParams`."""
        said = ((name, getattr(self, name)) for name in OmniSamplingParams.__struct_fields__)
        return {name: value for name, value in said if value is not None}


class TokenPrompt(Body):
    """A prompt as token ids."""

    prompt_token_ids: Annotated[list[int], Field(fail_fast=True)]


class PairPrompt(Body):
    """What a diffusers pipeline takes beside a text."""

    prompt: Text
    negative_prompt: Text | None = None


def _unicode_prompt(prompt: str | TokenPrompt | PairPrompt) -> str | TokenPrompt | PairPrompt:
    return _unicode(prompt) if isinstance(prompt, str) else prompt


class GenerateBody(Body):
    """`POST /v1/omni/generate`: the arguments of `AsyncOmni.generate`."""

    prompt: Annotated[str | TokenPrompt | PairPrompt, AfterValidator(_unicode_prompt)]
    request_id: Annotated[str | None, Field(min_length=1)] = None
    sampling_params: Sampling | None = None
    output_modalities: Annotated[list[str] | None, Field(min_length=1, fail_fast=True)] = None
    admission_timeout: Annotated[
        float, Field(ge=0, le=3600, allow_inf_nan=False, description="seconds to wait at closed gates")
    ] = 0.0
    timeout: Seconds | None = None
    lora_request: Annotated[int | str | None, Field(description="an adapter's number or name")] = None

    def arguments(self) -> dict[str, Any]:
        """All of them but `timeout`."""
        return {
            "prompt": self.prompt if isinstance(self.prompt, str) else self.prompt.model_dump(),
            "request_id": self.request_id,
            "sampling_params": None if self.sampling_params is None else self.sampling_params.given(),
            "output_modalities": self.output_modalities,
            "admission_timeout": self.admission_timeout,
            "lora_request": self.lora_request,
        }


class AuditBody(Body):
    """`POST /v1/omni/audit`."""

    stage_ids: StageIds = None
    level: Literal[1, 2] = 1
    prompt: Text = PROMPT
    seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    sampling_params: Sampling | None = None
    cycles: Annotated[int, Field(ge=1, le=MAX_CYCLES)] = 1
    probe_bytes: Annotated[
        int | None, Field(ge=0, lt=2**63, description="memory to take while they sleep, as a trainer would")
    ] = None

    def wishes(self) -> dict[str, Any]:
        """Those of an audit's plan; the seed may stand in either place."""
        sampling = {} if self.sampling_params is None else self.sampling_params.given()
        seed = sampling.pop("seed", SEED) if self.seed is None else self.seed
        known = {"level": self.level, "prompt": self.prompt, "cycles": self.cycles}
        return {**known, "seed": seed, "sampling": sampling}


class ExtraBody(Body):
    """What OpenAI's clients send as `extra_body`, where it was put into the body as it is."""

    sampling_params: Sampling | None = None


class GenerationBody(Sampling):
    """What images and chats have in common: the sampling parameters at the top level or below."""

    model: str | None = None
    user: str | None = None
    sampling_params: Sampling | None = None
    extra_body: ExtraBody | None = None

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters; the more deeply they were said, the stronger."""
        params = self.given()
        nested = [self.sampling_params, self.extra_body.sampling_params if self.extra_body else None]
        for one in nested:
            params |= one.given() if one else {}
        return params


class ImagesBody(GenerationBody):
    """`POST /v1/images/generations`: OpenAI's fields, and the sampling parameters."""

    prompt: Annotated[str, Field(min_length=1)]
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES, description="images; each has the seed after the last one's")] = 1
    size: Annotated[str | None, Field(pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$")] = None
    response_format: Annotated[Literal["b64_json"], Field(description="no links: nothing is stored here")] = "b64_json"
    output_format: Literal["png"] = "png"

    def given(self) -> dict[str, Any]:
        """What was said at the top level; `size` in its own words counts too."""
        params = super().given()
        if self.size not in {None, "auto"}:
            width, _, height = str(self.size).partition("x")
            params |= {"width": int(width), "height": int(height)}
        return params


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    @property
    def text(self) -> str:
        """What it says."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool = False


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`: OpenAI's fields for text, and the sampling parameters."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    n: Literal[1] = 1
    modalities: Annotated[list[Literal["text"]] | None, Field(fail_fast=True)] = None

    def given(self) -> dict[str, Any]:
        """What was said at the top level; OpenAI's newer name of `max_tokens` is the stronger one."""
        params = super().given()
        if self.max_completion_tokens is not None:
            params["max_tokens"] = self.max_completion_tokens
        return params
