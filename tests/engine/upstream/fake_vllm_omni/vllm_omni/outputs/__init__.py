from dataclasses import dataclass, field
from typing import Any


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


@dataclass
class OmniRequestOutput:
    request_id: str = ""
    prompt: Any = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    metrics: Any = field(default_factory=dict)
    stage_id: int | None = None
    final_output_type: str = "text"
    images: list[Any] = field(default_factory=list)
    error: str | None = None
