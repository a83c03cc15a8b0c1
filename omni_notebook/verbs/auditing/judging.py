"""From what was measured to findings and a verdict; pure functions, every rule of the audit is here.

A cycle's findings are made when it ends (`judge_cycle`), those of the whole audit at its end (`judge_growth`).
"""

from __future__ import annotations

from itertools import combinations, pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from omni_notebook import units
from omni_notebook.protocol import MIB
from omni_notebook.verbs import hints
from omni_notebook.verbs.auditing.record import Finding, Source, Verdict
from omni_notebook.worker.ack import TOLERANCE_FLOOR_BYTES, tolerance_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_notebook.verbs.auditing.record import Cycle, OutputLine, ProcessLine, RankLine

FIRST_WAKE_BYTES = 4 * MIB
"""What a process may hold more after its first wake than it mapped: the code and tables that read a checkpoint."""
GROWTH_CYCLES = 4
"""Cycles that a judgement on growth needs: the first one warms up and is left out, a line needs three points."""
_GROWTH_SHARE = 0.001
_NOISE_FACTOR = 4.0
_MAD_TO_SIGMA = 1.4826

RULES = (
    (
        "An ACK and the look from outside agree if they lie within min(max(2 %, 1 MiB), a quarter) of what the ranks "
        "of the process say together (64 MiB instead of 1 MiB on CUDA). After the first wake 4 MiB more are allowed: "
        "the code and tables that read a checkpoint."
    ),
    (
        "The residual grows if what a process holds while asleep rises by more than 1 MiB (64 MiB on CUDA) and 0.1 % "
        "of what it frees a cycle, as the median slope over all pairs of cycles but the first one (Theil-Sen), and if "
        f"that rise is more than {_NOISE_FACTOR:g} times the scatter around it, and if it went up in more cycles than "
        f"down, by two and by a quarter of them. At least {GROWTH_CYCLES} cycles."
    ),
    (
        "Outputs are the same if token ids and pixels are. Pixels that differ by 1 of 255 at most are a WARN where "
        "other requests ran meanwhile, so that a batch may have been composed differently."
    ),
)

_ACK, _OUTPUT = (Source.ACK,), (Source.OUTPUT,)


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """The worst severity."""
    found = {finding.severity for finding in findings}
    return next((v for v in (Verdict.FAIL, Verdict.WARN) if v in found), Verdict.PASS)


def judge_cycle(cycle: Cycle) -> list[Finding]:
    """Everything that one cycle shows."""
    return [
        *_ranks(cycle),
        *(finding for process in cycle.processes for finding in _process(cycle, process)),
        *_probe(cycle),
        *([] if cycle.output is None else _output(cycle.number, cycle.output)),
    ]


def _finding(severity: Verdict, text: str, sources: tuple[Source, ...], cycle: int | None) -> Finding:
    return Finding(severity=severity, text=text, sources=sources, cycle=cycle)


# -------------------------------------------------------------------------------------------- ranks


def _ranks(cycle: Cycle) -> Iterator[Finding]:
    for rank in cycle.ranks:
        for order, status, error in (
            ("sleep", rank.sleep_status, rank.sleep_error),
            ("wake", rank.wake_status, rank.wake_error),
        ):
            if status == "ERROR":
                yield _finding(Verdict.FAIL, _error_text(rank, order, error), _ACK, cycle.number)
    yield from _missing(cycle)


def _error_text(rank: RankLine, order: str, error: str | None) -> str:
    error = hints.in_verbs(error or "it did not say why")
    if order == "sleep" and rank.sleep_error_code == "UNRECOVERABLE":
        return f"{rank.place} refused the sleep, nothing was lost: {error}"
    return f"{rank.place} answered ERROR to the {order}: {error}"


def _missing(cycle: Cycle) -> Iterator[Finding]:
    """Ranks that did not answer; a stage of which nobody answered the wake was not asked, because it has failed."""
    woken = {rank.stage_id for rank in cycle.ranks if rank.wake_status is not None}
    for order, absent in (
        ("sleep", [rank.place for rank in cycle.ranks if rank.sleep_status is None]),
        ("wake", [rank.place for rank in cycle.ranks if rank.wake_status is None and rank.stage_id in woken]),
    ):
        if absent:
            yield _finding(Verdict.FAIL, f"no answer to the {order} from {', '.join(absent)}", _ACK, cycle.number)


# ---------------------------------------------------------------------------------------- processes


def tolerance(n_bytes: int, device: str) -> int:
    """How far a look from outside may lie from what ACKs say (`worker.ack.tolerance_bytes`); of nothing, the floor."""
    platform = device.partition(":")[0]
    known = platform if platform in TOLERANCE_FLOOR_BYTES else "cuda"
    return int(tolerance_bytes(n_bytes, known)) if n_bytes else TOLERANCE_FLOOR_BYTES[known]


def _process(cycle: Cycle, process: ProcessLine) -> Iterator[Finding]:
    who = f"process {process.pid} ({', '.join(process.ranks)})"
    if process.source is None:
        text = f"{who} was not looked at from outside: not available ({process.why_not})"
        yield _finding(Verdict.WARN, text, (Source.STATUS,), cycle.number)
        return
    if not process.freed_bytes and _has_error(cycle, process):
        return  # a rank that did not sleep says nothing about memory
    yield from _agreement(cycle, process, Told(process.freed_bytes, process.left_bytes, "were freed", "were gone"))
    if process.mapped_bytes:
        back = Told(process.mapped_bytes, process.came_back_bytes, "were mapped", "came back")
        first = FIRST_WAKE_BYTES if cycle.number == 1 else 0
        yield from _agreement(cycle, process, back, more=first)


class Told(NamedTuple):
    """What ACKs say and what was seen from outside, with the words for both."""

    told: int
    seen: int | None
    told_word: str
    seen_word: str


def _agreement(cycle: Cycle, process: ProcessLine, told: Told, more: int = 0) -> Iterator[Finding]:
    """Whether the two agree; `more` may be seen above what was told, where that is wider than the tolerance."""
    if told.seen is None or process.source is None:
        return
    off = told.seen - told.told
    bound = tolerance(told.told, process.device)
    bound = max(bound, more) if off > 0 else bound
    agree = abs(off) <= bound
    text = (
        f"process {process.pid} ({', '.join(process.ranks)}): by its ACKs {units.size(told.told)} {told.told_word}, by "
        f"{process.source} {units.size(told.seen)} {told.seen_word}; {units.size(abs(off))} apart, "
        f"{'within' if agree else 'MORE THAN'} {units.size(bound)}"
    )
    severity = Verdict.PASS if agree else Verdict.FAIL
    yield _finding(severity, text, (Source.ACK, process.source), cycle.number)


def _has_error(cycle: Cycle, process: ProcessLine) -> bool:
    return any(rank.place in process.ranks and rank.sleep_status == "ERROR" for rank in cycle.ranks)


# ---------------------------------------------------------------------------------- probe and output


def _probe(cycle: Cycle) -> Iterator[Finding]:
    probe = cycle.probe
    if probe is None:
        return
    text = f"a trainer could {'' if probe.taken else 'NOT '}take {units.size(probe.asked_bytes)}: {probe.outcome}"
    yield _finding(Verdict.PASS if probe.taken else Verdict.WARN, text, (Source.PROBE,), cycle.number)


def _output(number: int, line: OutputLine) -> Iterator[Finding]:
    others = "; other requests ran meanwhile" if line.others else ""
    if line.same_tokens is not None:
        text = f"the same {units.count(line.tokens, 'token')}" if line.same_tokens else f"the tokens differ{others}"
        yield _finding(Verdict.PASS if line.same_tokens else Verdict.FAIL, text, _OUTPUT, number)
    if line.same_weights is False:
        yield _finding(Verdict.FAIL, f"the weights have other versions: {line.weight_versions}", _OUTPUT, number)
    if line.same_images is None:
        return
    if line.same_images:
        sha = (line.images_sha256 or "")[:12]
        yield _finding(Verdict.PASS, f"the same {units.count(line.images, 'image')}, SHA-256 {sha}…", _OUTPUT, number)
        return
    slight = line.max_difference is not None and line.max_difference <= 1
    far = "in size or number" if line.max_difference is None else f"by up to {line.max_difference} of 255"
    text = f"the images differ {far}{others}"
    yield _finding(Verdict.WARN if slight and line.others else Verdict.FAIL, text, _OUTPUT, number)


# ------------------------------------------------------------------------------------------- growth


def judge_growth(cycles: Sequence[Cycle]) -> list[Finding]:
    """Whether what the processes hold while asleep grows from cycle to cycle; nothing with too few cycles."""
    by_seat: dict[tuple[int | None, str], list[ProcessLine]] = {}
    for cycle in cycles:
        for process in cycle.processes:
            by_seat.setdefault((process.pid, process.device), []).append(process)
    judged = (_growth(lines) for lines in by_seat.values())
    return [finding for finding in judged if finding is not None]


def _growth(lines: Sequence[ProcessLine]) -> Finding | None:
    held = [line.asleep_bytes for line in lines if line.asleep_bytes is not None]
    source = lines[0].source
    if len(held) < GROWTH_CYCLES or source is None:
        return None
    slope, scatter = trend(held[1:])
    limit = growth_limit(lines)
    rise = slope * (len(held) - 2)
    grows = slope > limit and rise > _NOISE_FACTOR * scatter and _keeps_rising(held[1:], limit)
    way = " → ".join(units.size(n_bytes) for n_bytes in (held[0], held[1], held[-1]))
    text = (
        f"process {lines[0].pid} ({', '.join(lines[0].ranks)}) {'GROWS' if grows else 'does not grow'}: while asleep "
        f"it holds {units.size(round(slope))} more a cycle, the line is {units.size(limit)} "
        f"(first, second, last of {len(held)} cycles: {way})"
    )
    return Finding(severity=Verdict.FAIL if grows else Verdict.PASS, text=text, sources=(source,))


def _keeps_rising(values: Sequence[int], limit: int) -> bool:
    """Whether it went up more often than down, by two cycles and a quarter of them: one step up is no growth."""
    steps = [b - a for a, b in pairwise(values)]
    net = sum(step > limit / 2 for step in steps) - sum(step < -limit / 2 for step in steps)
    return net >= max(2, len(steps) / 4)


def growth_limit(lines: Sequence[ProcessLine]) -> int:
    """Bytes a cycle above which a rise is a growth: the floor of the platform, or 0.1 % of what the process frees."""
    floor = TOLERANCE_FLOOR_BYTES.get(lines[0].device.partition(":")[0], TOLERANCE_FLOOR_BYTES["cuda"])
    return max(floor, int(_GROWTH_SHARE * max(line.freed_bytes for line in lines)))


def trend(values: Sequence[int]) -> tuple[float, float]:
    """Slope a step (Theil-Sen: the median over all pairs) and the scatter around it (MAD as a standard deviation)."""
    points = list(enumerate(values))
    slope = median((b - a) / (j - i) for (i, a), (j, b) in combinations(points, 2))
    level = median(value - slope * place for place, value in points)
    scatter = median(abs(value - slope * place - level) for place, value in points)
    return float(slope), _MAD_TO_SIGMA * float(scatter)
