from dataclasses import dataclass, field
from typing import Any


@dataclass
class OmniACK:
    task_id: str
    status: str
    stage_id: int | None = None
    rank: int | None = None
    freed_bytes: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    error_msg: str | None = None
