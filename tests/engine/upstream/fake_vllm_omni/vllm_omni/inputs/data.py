from dataclasses import dataclass, field


class SamplingParams:
    """vLLM's: no dataclass, attributes that are set."""

    def __init__(self) -> None:
        self.seed = None
        self.max_tokens = 4
        self.temperature = 1.0
        self.top_p = 0.9
        self.top_k = 5
        self.stop_token_ids: list[int] = []


@dataclass
class OmniDiffusionSamplingParams:
    seed: int | None = None
    num_inference_steps: int = 2
    guidance_scale: float = 1.0
    height: int | None = None
    width: int | None = None
    extra_args: dict = field(default_factory=dict)
