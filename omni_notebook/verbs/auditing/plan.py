"""What an audit is asked to do, checked before anything happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_notebook.config import parse_size
from omni_notebook.errors import ArgumentError, AsleepError, OmniError, PausedError, StageBusyError
from omni_notebook.protocol import MemoryState, PauseState, sampling_params_from
from omni_notebook.verbs import hints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.protocol import EngineStatus, StageStatus

PROMPT = "a red star above a blue circle"
SEED = 42
MAX_CYCLES = 10_000
_NOTHING = "nothing was changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One audit's wishes; `stage_ids` None = all, `probe_bytes` 0 = no probe."""

    stage_ids: tuple[int, ...] | None = None
    level: int = 2
    prompt: Any = PROMPT
    seed: int = SEED
    cycles: Any = 1
    probe_bytes: int = 0
    sampling: dict[str, Any] | None = None

    @property
    def params(self) -> dict[str, Any]:
        """The sampling parameters, the seed among them."""
        return {**(self.sampling or {}), "seed": self.seed}

    def checked(self) -> Plan:
        """Itself, if every value is one.

        Raises:
            ArgumentError: one is not; nothing was changed.
        """
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            msg = f"audit: the prompt is empty; {_NOTHING}"
            raise ArgumentError(msg)
        if self.level not in {1, 2} or isinstance(self.level, bool):
            msg = f"audit: level={self.level!r} is neither 1 nor 2; {_NOTHING}"
            raise ArgumentError(msg)
        if isinstance(self.cycles, bool) or not isinstance(self.cycles, int) or not 1 <= self.cycles <= MAX_CYCLES:
            msg = f"audit: cycles={self.cycles!r} is not a number from 1 to {MAX_CYCLES}; {_NOTHING}"
            raise ArgumentError(msg)
        sampling_params_from(self.params)
        return self

    def stages(self, status: EngineStatus) -> list[StageStatus]:
        """The stages to be audited, if they can be now.

        Raises:
            ArgumentError: there is no such stage, or none is named.
            AsleepError, PausedError, StageBusyError: a stage sleeps, is paused or has requests; nothing was changed.
        """
        picked = pick_known(status, self.stage_ids)
        refuse_paused(status)
        refuse_absent(picked)
        refuse_busy(status)
        return picked


def plan_from(stage_ids: Sequence[int] | int | None, probe: int | str | None, **known: Any) -> Plan:
    """A plan from what a caller gave: one stage or several, a probe as bytes or as "256MiB".

    Raises:
        ArgumentError: something is wrong; nothing was changed.
    """
    ids = None if stage_ids is None else tuple([stage_ids] if isinstance(stage_ids, int) else stage_ids)
    n_bytes = 0 if probe is None else parse_size(probe)
    if n_bytes < 0:
        msg = f"audit: probe={probe!r} is not a size; {_NOTHING}"
        raise ArgumentError(msg)
    return Plan(stage_ids=ids, probe_bytes=n_bytes, **known).checked()


def pick_known(status: EngineStatus, stage_ids: Sequence[int] | None) -> list[StageStatus]:
    """The stages with these ids; None = all.

    Raises:
        ArgumentError: an id is unknown, or the list is empty.
    """
    known = {stage.stage_id: stage.name for stage in status.stages}
    wrong = [] if stage_ids is None else [one for one in stage_ids if one not in known or isinstance(one, bool)]
    if wrong or (stage_ids is not None and not stage_ids):
        what = f"there is no stage {wrong[0]!r}" if wrong else "no stage is named"
        have = ", ".join(f"{number} ({name})" for number, name in known.items())
        msg = f"{what}; this engine has {have}; {_NOTHING}"
        raise ArgumentError(msg)
    return hints.pick(status, stage_ids)


def refuse_paused(status: EngineStatus) -> None:
    """Raise PausedError while any stage is paused: no golden output could be made."""
    paused = [stage for stage in status.stages if stage.pause_state is not PauseState.OPEN]
    if paused:
        msg = f"an audit generates, and admission is closed: {hints.describe(paused)}; {_NOTHING}"
        raise PausedError(msg)


def refuse_absent(stages: Sequence[StageStatus]) -> None:
    """Raise AsleepError if one of the stages is not awake: there would be no baseline."""
    absent = [stage for stage in stages if stage.state is not MemoryState.AWAKE]
    if absent:
        msg = f"an audit begins awake, and {hints.describe(absent)}; {_NOTHING}"
        raise AsleepError(msg)


def refuse_busy(status: EngineStatus) -> None:
    """Raise StageBusyError if any stage has requests: they would be mixed into what is measured."""
    for stage in status.stages:
        if stage.running or stage.queued or stage.in_transit or stage.waiting_at_gate:
            counts = (
                f"{stage.running} running, {stage.queued} queued, {stage.in_transit} in transit, "
                f"{stage.waiting_at_gate} at the gate"
            )
            msg = (
                f"stage {stage.stage_id} is busy: {counts}; an audit needs an idle engine: let them end, or "
                f"%omni abort them; {_NOTHING}"
            )
            raise StageBusyError(
                msg,
                stage_id=stage.stage_id,
                running=stage.running,
                queued=stage.queued,
                in_transit=stage.in_transit,
            )


def is_awake(stages: Sequence[StageStatus]) -> bool:
    """Whether all of them are."""
    return all(stage.state is MemoryState.AWAKE for stage in stages)


def why(error: OmniError) -> str:
    """An error's message in the words of verbs."""
    return hints.in_verbs(str(error))
