"""A request as one stage sees it, and what the stage makes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omni_notebook.protocol import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.protocol import OmniSamplingParams


@dataclass(slots=True, kw_only=True)
class StageOutput:
    """What a stage made of a request so far; `final` ends the request's time in this stage.

    `hidden`: float32 array (tokens, hidden size) of the generated tokens or None. `pixels`: uint8 array (H, W, 3).
    """

    state: RequestState
    final: bool
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    hidden: Any | None = None
    pixels: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    weight_version: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False, kw_only=True)
class StageRequest:
    """One request in one stage.

    `payload` is what the stage's scheduler understands; `deliver` takes outputs, on the engine's loop.
    """

    request_id: str
    seed: int
    params: OmniSamplingParams
    payload: Any
    deliver: Callable[[StageOutput], None]
    feeds_next: bool = False
    aborted: bool = False
    arrived_s: float = field(default_factory=time.perf_counter)
    started_s: float | None = None
    weight_versions: list[str] = field(default_factory=list)

    @property
    def weight_version(self) -> str | None:
        """The version of the weights that it ran on last."""
        return self.weight_versions[-1] if self.weight_versions else None

    def ran_on(self, version: str) -> None:
        """Remember which weights a step ran on; a frozen sequence may go on with others than it began with."""
        if version != self.weight_version:
            self.weight_versions.append(version)

    def mixture(self) -> dict[str, Any]:
        """For `metrics`: all versions that it ran on, oldest first, where they are several."""
        return {"weight_versions": list(self.weight_versions)} if len(self.weight_versions) > 1 else {}

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
                metrics={"seed": self.seed, **self.mixture(), **self.timings_ms()},
                **known,
            )
        )
