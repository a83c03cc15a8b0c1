"""ACKs of ranks that upstream does not ask: built from looks from outside; pure functions, nothing here guesses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_notebook import units
from omni_notebook.protocol import AckMetadata, AckStatus, OmniACK, gib
from omni_notebook.worker.ack import NOT_OBSERVED, source_of, tolerance_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_notebook.engine.upstream.outside import Seen
    from omni_notebook.engine.upstream.seats import Seat

UNSEEN_CODE = "WORKER_DIED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What upstream answered for a stage.

    Attributes:
        freed_bytes: the sum of what its ACKs claim; None where they claim nothing.
        answers: how many ACKs there were.
        source: an ACK's own `source`.
        error: what went wrong, in its words.
        error_code: what to call that.
    """

    freed_bytes: int | None = None
    answers: int = 0
    source: str | None = None
    error: str | None = None
    error_code: str = "UPSTREAM"

    @property
    def words(self) -> str:
        """`upstream said 3.00 GiB (3221225472 bytes)`."""
        if self.error is not None:
            return f"upstream said {self.error}"
        if self.freed_bytes is None:
            return "upstream gave no number"
        return f"upstream said {units.size(self.freed_bytes)} ({self.freed_bytes} bytes)"


def said(answers: Sequence[Any]) -> Said:
    """What a stage's answers come to: `OmniACK`s of upstream's, or the mappings in which it wraps an error."""
    claims = [_get(one, "freed_bytes") for one in answers if _claims(one)]
    errors = [words for one in answers if (words := _error(one)) is not None]
    sources = [str(name) for one in answers if (name := (_get(one, "metadata") or {}).get("source"))]
    return Said(
        freed_bytes=sum(map(int, claims)) if claims else None,
        answers=len(answers),
        source=sources[0] if sources else None,
        error="; ".join(errors) or (None if answers else "nothing at all: no rank answered"),
    )


def _get(answer: Any, name: str) -> Any:
    return answer.get(name) if isinstance(answer, dict) else getattr(answer, name, None)


def _claims(answer: Any) -> bool:
    """A stage marker of an engine core has a default of 0 bytes, which nobody measured."""
    metadata = _get(answer, "metadata") or {}
    return bool(_get(answer, "freed_bytes")) or "total_freed_gib" in metadata


def _error(answer: Any) -> str | None:
    """An ERROR ACK's message, or the error that upstream wraps in a mapping and counts as an answer."""
    if answer is None:
        return "a rank answered nothing"
    status = _get(answer, "status")
    if status == AckStatus.SUCCESS:
        return None
    words = _get(answer, "error_msg") or _get(answer, "error")
    return str(words or f"an answer that is no ACK: {answer!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A stage's transition as it was seen: looks before and after by process id, and what upstream said.

    `devices_bytes` is what everybody held on the devices before and after.
    """

    task_id: str
    stage_id: int
    seats: Sequence[Seat]
    before: Mapping[int, Seen]
    after: Mapping[int, Seen]
    said: Said
    latency_ms: float
    means: str
    floor_bytes: int
    platform: str
    devices_bytes: tuple[int | None, int | None] = (None, None)

    def seen(self, seat: Seat) -> tuple[Seen | None, Seen | None]:
        """A rank's process before and after."""
        return (None, None) if seat.pid is None else (self.before.get(seat.pid), self.after.get(seat.pid))

    def given_back(self, seat: Seat) -> int | None:
        """Bytes that left a rank's process; negative: it took some. None: nobody could tell."""
        before, after = self.seen(seat)
        if before is None or after is None or before.n_bytes is None or after.n_bytes is None:
            return None
        return before.n_bytes - after.n_bytes

    def total(self) -> int | None:
        """Bytes that left all of them; None where one could not be seen."""
        found = [self.given_back(seat) for seat in self.seats]
        return None if None in found else sum(one for one in found if one is not None)


def sleep_acks(change: Change, device_names: Mapping[str, str]) -> list[OmniACK]:
    """One ACK a rank; SUCCESS only where memory was seen to leave, and as much as upstream claims for the stage."""
    short = _shortfall(change)
    return [_sleep_ack(change, seat, short, device_names) for seat in change.seats]


def _sleep_ack(change: Change, seat: Seat, short: str | None, device_names: Mapping[str, str]) -> OmniACK:
    gone = change.given_back(seat)
    freed = max(0, gone or 0)
    error = _general_error(change, seat)
    if error is None and gone is not None and gone < change.floor_bytes:
        error = NOT_OBSERVED, f"upstream says it slept; {change.means} saw {units.size(freed)} leave its process"
    if error is None and short is not None:
        error = NOT_OBSERVED, short
    if error is None and gone is None:
        error = NOT_OBSERVED, f"nobody could measure what it gave back: {_why_not(change, seat)}"
    return _ack(
        change,
        seat,
        error,
        device_names,
        freed_bytes=freed,
        observed_bytes=gone,
        state="COLD",
        level=1,
    )


def _shortfall(change: Change) -> str | None:
    """Upstream's claim is one number for all ranks of the stage: whether they gave back that much together."""
    claim, total = change.said.freed_bytes, change.total()
    if not claim or total is None or claim - total <= tolerance_bytes(claim, change.platform):
        return None
    return (
        f"upstream said that the stage gave back {units.size(claim)}, {change.means} saw {units.size(max(0, total))} "
        "leave its processes"
    )


def wake_acks(change: Change, device_names: Mapping[str, str], slept_bytes: Mapping[int, int]) -> list[OmniACK]:
    """One ACK a rank; `slept_bytes` is what its process was seen to give back when it slept, by process id."""
    acks = []
    for seat in change.seats:
        gone = change.given_back(seat)
        back = None if gone is None else max(0, -gone)
        expected = slept_bytes.get(seat.pid) if seat.pid is not None else None
        error = _general_error(change, seat)
        if error is None and back is not None and expected and expected - back > _wake_tolerance(expected, change):
            words = f"upstream says it woke; of {units.size(expected)} that left when it slept, {change.means} saw"
            error = NOT_OBSERVED, f"{words} {units.size(back)} come back"
        acks.append(
            _ack(
                change,
                seat,
                error,
                device_names,
                mapped_bytes=back,
                observed_bytes=back,
                expected_bytes=expected,
                state="WARM",
            )
        )
    return acks


def _wake_tolerance(expected: int, change: Change) -> float:
    return max(change.floor_bytes, tolerance_bytes(expected, change.platform))


def noop_acks(change: Change, level: int | None, device_names: Mapping[str, str]) -> list[OmniACK]:
    """The answers to an order that has nothing to do: one a rank, as measured now; SUCCESS of those that are there."""
    return [
        _ack(
            change,
            seat,
            _general_error(change, seat),
            device_names,
            noop=True,
            expected_bytes=0,
            observed_bytes=0,
            level=level,
            state="COLD" if level else "WARM",
        )
        for seat in change.seats
    ]


def _general_error(change: Change, seat: Seat) -> tuple[str, str] | None:
    """What makes a rank's answer an ERROR whatever was measured."""
    if change.said.error is not None:
        return change.said.error_code, f"vllm_omni: {change.said.error}"
    after = change.seen(seat)[1]
    if after is not None and after.gone:
        return UNSEEN_CODE, f"its {after.why_not}"
    return None


def _why_not(change: Change, seat: Seat) -> str:
    if seat.pid is None:
        return "its process is not known"
    return next((seen.why_not for seen in change.seen(seat) if seen is not None and seen.why_not), "it was not there")


def _ack(
    change: Change, seat: Seat, error: tuple[str, str] | None, device_names: Mapping[str, str], **known: Any
) -> OmniACK:
    freed: int = known.pop("freed_bytes", 0)
    after = change.seen(seat)[1]
    device = None if after is None else after.device
    held = None if after is None else after.n_bytes
    measured = known.get("observed_bytes") is not None
    metadata = AckMetadata(
        source=change.said.source or source_of(device_names.get(device or "", device or "unknown")),
        total_freed_gib=gib(freed),
        rank_residual_gib=None if held is None else gib(held),
        current_vram_gib=None if held is None else gib(held),
        residual_bytes=held,
        observed_scope="process" if measured else None,
        recoverable=True,
        latency_ms=change.latency_ms,
        replica=seat.replica,
        pid=seat.pid,
        device=device,
        error_code=None if error is None else error[0],
        note=_note(change, seat, measured=measured, noop=bool(known.get("noop"))),
        **known,
    )
    return OmniACK(
        task_id=change.task_id,
        status=AckStatus.SUCCESS if error is None else AckStatus.ERROR,
        stage_id=change.stage_id,
        rank=seat.rank,
        freed_bytes=freed,
        metadata=metadata.to_dict(),
        error_msg=None if error is None else error[1],
    )


def _by_everybody(change: Change) -> str:
    """What all holders together gave up or took: no rank's bytes, but better than nothing where ids are hidden."""
    before, after = change.devices_bytes
    if before is None or after is None:
        return ""
    word = "fewer" if before >= after else "more"
    return f"; all holders together have {units.size(abs(before - after))} {word} on the devices than before"


def _note(change: Change, seat: Seat, *, measured: bool, noop: bool) -> str:
    if noop:
        return "there was nothing to do; upstream was not asked"
    how = f"measured from outside by {change.means}"
    if not measured:
        how = f"not measured ({_why_not(change, seat)}{_by_everybody(change)})"
    ranks = len(change.seats)
    together = f" for the stage's {ranks} ranks together" if change.said.freed_bytes is not None and ranks > 1 else ""
    return f"{how}; {change.said.words}{together}"
