"""One stage of an upstream engine as this package knows it: its states, its ranks' processes, what was seen of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_notebook.protocol import LoRAStatus, MemoryState, PauseState, RankStatus, StageStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omni_notebook.engine.upstream.outside import Seen
    from omni_notebook.engine.upstream.seats import Seat

RUNTIME = "vllm-omni"


@dataclass(frozen=True, slots=True)
class UpConfig:
    """What does not change: the stage's name, its kind ("ar", "diffusion"), its model and what it makes."""

    title: str
    kind: str
    model: str
    output_type: str


class UpStage:
    """State of one stage; belongs to the engine's loop, `status` may be read from any thread."""

    def __init__(
        self,
        stage_id: int,
        config: UpConfig,
        seats: tuple[Seat, ...],
        on_change: Callable[[UpStage, str], None],
    ) -> None:
        self.stage_id = stage_id
        self.config = config
        self.seats = seats
        self.state = MemoryState.AWAKE
        self.level: int | None = None
        self.pause_state = PauseState.OPEN
        self.pause_mode: str | None = None
        self.resumes = 0
        self.arriving = False
        self.recoverable = True
        self.last_error: str | None = None
        self.slept_bytes: dict[int, int] = {}
        self.loras: dict[int, LoRAStatus] = {}
        self._on_change = on_change

    @property
    def is_ar(self) -> bool:
        """Whether an engine core runs it, with a scheduler that upstream can close."""
        return self.config.kind == "ar"

    @property
    def pids(self) -> list[int]:
        """Its ranks' processes, as far as they are known."""
        return [seat.pid for seat in self.seats if seat.pid is not None]

    def move(self, state: MemoryState, *, level: int | None = None, reason: str) -> None:
        """Set the memory state and tell everyone."""
        self.state, self.level = state, level
        if state == MemoryState.FAILED:
            self.last_error = reason
        self._on_change(self, reason)

    def set_pause(self, state: PauseState, mode: str | None, *, reason: str) -> None:
        """Set the pause state and tell everyone."""
        self.pause_state, self.pause_mode = state, mode
        self._on_change(self, reason)

    def status(self, seen: Mapping[int, Seen], *, in_transit: int, waiting_at_gate: int) -> StageStatus:
        """A snapshot beside what its processes hold; upstream does not say where in the pipeline a request is."""
        return StageStatus(
            stage_id=self.stage_id,
            name=self.config.title,
            kind=self.config.kind,
            runtime=RUNTIME,
            model=self.config.model,
            state=self.state,
            level=self.level,
            awake_tags=(),
            pause_state=self.pause_state,
            pause_mode=self.pause_mode,
            weight_version=None,
            recoverable=self.recoverable,
            running=0,
            queued=0,
            in_transit=in_transit,
            waiting_at_gate=waiting_at_gate,
            ballast_bytes=0,
            ranks=tuple(_rank_status(seat, seen) for seat in self.seats),
            last_error=self.last_error,
            loras=tuple(self.loras.values()),
        )


def _rank_status(seat: Seat, seen: Mapping[int, Seen]) -> RankStatus:
    found = None if seat.pid is None else seen.get(seat.pid)
    return RankStatus(
        rank=seat.rank,
        replica=seat.replica,
        pid=seat.pid,
        device="unknown" if found is None else found.device,
        alive=seat.alive,
        tags={},
        host_backup_bytes=None,
        process_bytes=None if found is None else found.n_bytes,
    )


def configs(upstream: Any, model: str) -> list[UpConfig]:
    """The stages of an upstream engine.

    Source: `stage_configs` and `get_stage_metadata` (vllm_omni/engine/omni_engine_base.py, 0.30).
    """
    found = []
    for number, config in enumerate(upstream.engine.stage_configs):
        facts = upstream.engine.get_stage_metadata(number)
        kind = "diffusion" if getattr(config, "stage_type", None) == "diffusion" else "ar"
        output = str(getattr(facts, "final_output_type", None) or ("image" if kind == "diffusion" else "text"))
        title = str(getattr(facts, "model_stage", None) or getattr(config, "model_stage", None) or f"stage {number}")
        found.append(UpConfig(title, kind, model, output))
    return found


def named_states(stages: Sequence[UpStage]) -> str:
    """`stage 0 is ASLEEP (level 1), stage 1 is AWAKE`."""
    words = (f"stage {s.stage_id} is {s.state}" + (f" (level {s.level})" if s.level else "") for s in stages)
    return ", ".join(words)
