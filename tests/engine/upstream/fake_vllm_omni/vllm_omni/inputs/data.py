import enum
from dataclasses import dataclass, field

import msgspec


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1


class SamplingParams(msgspec.Struct):
    """vLLM's: a Struct that computes more from what it is given."""

    seed: int | None = None
    max_tokens: int = 4
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 0.9
    top_k: int = 5
    stop_token_ids: list[int] = []
    output_kind: RequestOutputKind = RequestOutputKind.DELTA
    output_text_buffer_length: int = 0
    _all_stop_token_ids: set[int] = set()

    def __post_init__(self):
        if self.min_tokens > self.max_tokens:
            msg = f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}."
            raise ValueError(msg)
        self._all_stop_token_ids = set(self.stop_token_ids)
        if self.temperature == 0:
            self.top_p, self.top_k = 1.0, 0


@dataclass
class OmniDiffusionSamplingParams:
    seed: int | None = None
    num_inference_steps: int = 2
    guidance_scale: float = 1.0
    height: int | None = None
    width: int | None = None
    extra_args: dict = field(default_factory=dict)
