"""A whole audit in a few lines, each with who measured its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook import units
from omni_notebook.verbs.auditing.judging import GROWTH_CYCLES, trend

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_notebook.verbs.auditing.record import Cycle, ProbeLine, ProcessLine, Record


def trainer_line(record: Record) -> str | None:
    """Whether a trainer may take what the probe asked for; None where none asked."""
    probes = [cycle.probe for cycle in record.cycles if cycle.probe is not None]
    if not probes:
        return None
    worst = min(probes, key=lambda probe: probe.taken_bytes)
    asked, last = units.size(worst.asked_bytes), record.cycles[-1]
    if not worst.taken:
        return f"A trainer may NOT take {asked} while these stages sleep: {_why_not(worst)}. {_now(last)}"
    freed = sum(process.freed_bytes for process in last.processes)
    rest = ", the rest was free" if freed < worst.asked_bytes else ""
    return (
        f"A trainer may take {asked} while these stages sleep ({units.size(freed)} from the sleep{rest}). {_now(last)}"
    )


def _why_not(probe: ProbeLine) -> str:
    if probe.asked_bytes > probe.available_bytes:
        return f"{units.size(probe.available_bytes)} are free, beside a reserve that keeps the machine alive"
    return probe.outcome


def _now(cycle: Cycle) -> str:
    """What must be done before a trainer starts."""
    awake = all(rank.wake_status == "SUCCESS" for rank in cycle.ranks)
    return "The stages are AWAKE again: sleep them first." if awake else "Not all stages woke: %omni status."


def summary(record: Record) -> list[str]:
    """What the audit saw, whatever its verdict: memory going and coming, outputs, the probe, growth."""
    if not record.cycles:
        return ["no cycle was run"]
    return [*_memory(record.cycles), *_outputs(record), *_probes(record.cycles), *_growth(record.cycles)]


def not_judged(record: Record) -> list[str]:
    """What nobody asked it to judge."""
    said = [
        (
            len(record.cycles) < GROWTH_CYCLES,
            f"whether the residual grows was not judged: that takes {GROWTH_CYCLES} cycles",
        ),
        (trainer_line(record) is None, "whether a trainer may start was not tried: --probe SIZE does"),
    ]
    return [words for missing, words in said if missing]


def _memory(cycles: Sequence[Cycle]) -> Iterator[str]:
    last = cycles[-1]
    ranks = units.count(len(last.ranks), "rank")
    seen = [process for cycle in cycles for process in cycle.processes if process.source is not None]
    sources = ", ".join(sorted({str(process.source) for process in seen})) or "not available"
    freed, mapped = (sum(getattr(p, name) for p in last.processes) for name in ("freed_bytes", "mapped_bytes"))
    left, back = (_total(last.processes, name) for name in ("left_bytes", "came_back_bytes"))
    gone = max((abs(p.left_bytes - p.freed_bytes) for p in seen if p.left_bytes is not None), default=None)
    come = max((abs(p.came_back_bytes - p.mapped_bytes) for p in seen if p.came_back_bytes is not None), default=None)
    yield f"asleep: {ranks} freed {units.size(freed)} [ack], {left} gone, as seen from outside [{sources}]{_off(gone)}"
    yield f"awake again: {ranks} mapped {units.size(mapped)} [ack], {back} came back [{sources}]{_off(come)}"


def _total(processes: Sequence[ProcessLine], name: str) -> str:
    """The sum over the processes that could be seen, and how many they are if not all."""
    values = [value for process in processes if (value := getattr(process, name)) is not None]
    some = "" if len(values) == len(processes) else f" ({len(values)} of {len(processes)} processes)"
    return f"{units.size(sum(values))}{some}" if values else "nobody knows what"


def _off(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"; no process was off by more than {units.size(n_bytes)}"


def _outputs(record: Record) -> Iterator[str]:
    made = [cycle.output for cycle in record.cycles if cycle.output is not None]
    golden = record.golden
    if golden is None or not made:
        yield "outputs were not compared"
        return
    parts = []
    if golden.tokens_sha256 is not None:
        same = sum(line.same_tokens is True for line in made)
        parts.append(f"{units.count(golden.tokens, 'token')} the same in {same} of {len(made)}")
    if golden.images_sha256 is not None:
        same = sum(line.same_images is True for line in made)
        parts.append(f"{units.count(golden.images, 'image')} the same in {same} of {len(made)}")
    yield f"outputs after the wake: {', '.join(parts)} [output]"


def _probes(cycles: Sequence[Cycle]) -> Iterator[str]:
    probes = [cycle.probe for cycle in cycles if cycle.probe is not None]
    if probes:
        taken = sum(probe.taken for probe in probes)
        asked = units.size(probes[0].asked_bytes)
        yield f"a trainer could have taken {asked} in {taken} of {units.count(len(probes), 'sleep')} [probe]"


def _growth(cycles: Sequence[Cycle]) -> Iterator[str]:
    by_pid: dict[int | None, list[int]] = {}
    for process in (process for cycle in cycles for process in cycle.processes):
        if process.asleep_bytes is not None:
            by_pid.setdefault(process.pid, []).append(process.asleep_bytes)
    slopes = [trend(held[1:])[0] for held in by_pid.values() if len(held) >= GROWTH_CYCLES]
    if slopes:
        most = units.size(round(max(slopes)))
        yield f"what a process holds while asleep rises by {most} a cycle at most, over {len(cycles)} cycles [smaps]"
