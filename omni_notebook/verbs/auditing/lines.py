"""From statuses, ACKs and looks to the lines of an audit's record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.verbs.auditing.judging import tolerance
from omni_notebook.verbs.auditing.record import Finding, ProcessLine, RankLine, Source, StageLine, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.protocol import OmniACK, RankStatus, StageStatus
    from omni_notebook.verbs.auditing.outside import Seat, Seen

Place = tuple[int, int, int]
Looks = tuple["dict[Seat, Seen]", "dict[Seat, Seen]", "dict[Seat, Seen]"]
"""What was seen from outside before the sleep, asleep, and after the wake."""


def seats(stages: Sequence[StageStatus]) -> list[Seat]:
    """The processes in which the stages' ranks live, each once, in the order of the ranks."""
    return list(dict.fromkeys((rank.pid, rank.device) for stage in stages for rank in stage.ranks))


def stage_line(stage: StageStatus) -> StageLine:
    """The record of a stage."""
    return StageLine(
        stage_id=stage.stage_id,
        name=stage.name,
        kind=stage.kind,
        model=stage.model,
        weight_version=stage.weight_version,
        ranks=len(stage.ranks),
    )


def warning(text: str) -> Finding:
    """Something that could not be checked."""
    return Finding(severity=Verdict.WARN, text=text, sources=(Source.STATUS,))


def rank_lines(
    stages: Sequence[StageStatus], slept: Sequence[OmniACK], woken: Sequence[OmniACK]
) -> tuple[RankLine, ...]:
    """A line for every rank that there was before the sleep, whether it answered or not."""
    asleep, awake = _by_place(slept), _by_place(woken)
    return tuple(
        _rank_line(stage, rank, asleep.get(place), awake.get(place))
        for stage in stages
        for rank in stage.ranks
        for place in [(stage.stage_id, rank.replica, rank.rank)]
    )


def _by_place(acks: Sequence[OmniACK]) -> dict[Place, OmniACK]:
    return {(ack.stage_id, ack.metadata.get("replica") or 0, ack.rank): ack for ack in acks}


def _rank_line(stage: StageStatus, rank: RankStatus, slept: OmniACK | None, woken: OmniACK | None) -> RankLine:
    facts = {} if slept is None else slept.metadata
    return RankLine(
        stage_id=stage.stage_id,
        replica=rank.replica,
        rank=rank.rank,
        pid=rank.pid,
        device=rank.device,
        sleep_status=None if slept is None else slept.status,
        freed_bytes=None if slept is None else slept.freed_bytes,
        expected_bytes=facts.get("expected_bytes"),
        residual_bytes=facts.get("residual_bytes"),
        host_backup_bytes=facts.get("host_backup_bytes"),
        sleep_ms=facts.get("latency_ms"),
        sleep_error=None if slept is None else slept.error_msg,
        sleep_error_code=facts.get("error_code"),
        wake_status=None if woken is None else woken.status,
        mapped_bytes=None if woken is None else woken.metadata.get("mapped_bytes"),
        wake_ms=None if woken is None else woken.metadata.get("latency_ms"),
        wake_error=None if woken is None else woken.error_msg,
    )


def process_lines(
    stages: Sequence[StageStatus], looks: Looks, slept: Sequence[OmniACK], woken: Sequence[OmniACK]
) -> tuple[ProcessLine, ...]:
    """A line for every process; what its ranks say is added up, because from outside nobody sees single ranks."""
    ranks = rank_lines(stages, slept, woken)
    return tuple(
        _process_line(seat, looks, [rank for rank in ranks if (rank.pid, rank.device) == seat])
        for seat in seats(stages)
    )


def _process_line(seat: Seat, looks: Looks, ranks: Sequence[RankLine]) -> ProcessLine:
    before, asleep, awake = (look[seat] for look in looks)
    blind = next((seen for seen in (before, asleep, awake) if seen.n_bytes is None), None)
    freed = sum(rank.freed_bytes or 0 for rank in ranks)
    return ProcessLine(
        pid=seat[0],
        device=seat[1],
        ranks=tuple(rank.place for rank in ranks),
        source=before.source if blind is None else None,
        why_not=None if blind is None else blind.why_not,
        before_bytes=before.n_bytes,
        asleep_bytes=asleep.n_bytes,
        awake_bytes=awake.n_bytes,
        freed_bytes=freed,
        mapped_bytes=sum(rank.mapped_bytes or 0 for rank in ranks),
        tolerance_bytes=tolerance(freed, seat[1]),
    )
