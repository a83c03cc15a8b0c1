"""A request as one stage sees it, and what the stage makes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omni_notebook.protocol import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.protocol import LoRARequest, OmniSamplingParams


@dataclass(slots=True, kw_only=True)
class StageOutput:
    """What a stage made of a request so far; `final` ends the request's time in this stage.

    `hidden`: float32 array (tokens, hidden size) of the generated tokens or None. `pixels`: uint8 arrays (H, W, 3);
    `png`: the same, encoded. `progress`: 0 … 1 where it is known.
    """

    state: RequestState
    final: bool
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    hidden: Any | None = None
    pixels: list[Any] = field(default_factory=list)
    png: list[bytes] = field(default_factory=list)
    error: BaseException | None = None
    progress: float | None = None
    weight_version: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False, kw_only=True)
class StageRequest:
    """One request in one stage.

    `payload` is what the stage's scheduler understands; `deliver` takes outputs, `progress` what share is done (0 … 1),
    on the engine's loop. `lora`: its adapter in this stage.
    """

    request_id: str
    seed: int
    params: OmniSamplingParams
    payload: Any
    deliver: Callable[[StageOutput], None]
    progress: Callable[[float], None] = lambda _share: None
    feeds_next: bool = False
    lora: LoRARequest | None = None
    aborted: bool = False
    arrived_s: float = field(default_factory=time.perf_counter)
    started_s: float | None = None
    weight_version: str | None = None

    @property
    def lora_id(self) -> int:
        """Its adapter's id, 0 = none."""
        return 0 if self.lora is None else self.lora.lora_int_id

    def timings_ms(self) -> dict[str, Any]:
        """Milliseconds queued and running, as measured until now."""
        now = time.perf_counter()
        started = self.started_s if self.started_s is not None else now
        return {"queue_ms": (started - self.arrived_s) * 1000, "run_ms": (now - started) * 1000}

    def end(self, state: RequestState, error: BaseException | None = None, **known: Any) -> None:
        """Deliver the terminal output of a request that did not finish."""
        self.deliver(
            StageOutput(
                state=state,
                final=True,
                finish_reason="abort" if state == RequestState.ABORTED else None,
                error=error,
                weight_version=self.weight_version,
                metrics={"seed": self.seed, **self.timings_ms()},
                **known,
            )
        )
