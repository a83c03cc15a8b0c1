"""Rows of the ACK table and the status table, and their plain-text form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Any

from omni_notebook import units
from omni_notebook.notebook import charts
from omni_notebook.verbs import hints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.protocol import EngineStatus, OmniACK, StageStatus
    from omni_notebook.verbs.jobs import Job

MEMORY = "memory: resident / of"
ACK_COLUMNS = (
    "stage",
    "rank",
    "replica",
    "status",
    "state",
    "freed",
    "mapped",
    "bar",
    "expected / observed",
    "residual",
    "host backup",
    "latency",
    "note",
)
STATUS_COLUMNS = (
    "stage",
    "name",
    "kind",
    "state",
    "pause",
    "weights id",
    "requests",
    MEMORY,
    "host backup",
    "note",
)
JOB_COLUMNS = ("job", "line", "state", "took", "note")
BAR = "bar"
_SILENT = frozenset({"", units.NONE, f"{units.NONE} / {units.NONE}"})
_OF_A_SLEEP = frozenset({"freed", "expected / observed", "host backup"})  # after a wake the copy is still being written
_BAR_CELLS = 12
_INKS = {charts.FREED: "█", charts.MAPPED: "▓", charts.FAILED: "x", charts.RESIDUAL: "░"}


@dataclass(frozen=True, slots=True)
class Row:
    """Cells of text, the bar that goes into the bar column, and whether the row is fine."""

    cells: tuple[str, ...]
    bar: charts.Bar | None = None
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a line above and lines below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def full_bytes(self) -> int:
        """The longest bar."""
        return max([row.bar.total_bytes for row in self.rows if row.bar], default=0)


# --------------------------------------------------------------------------------------------- ACKs


def ack_table(acks: Sequence[OmniACK], order: str | None = None, states: dict[int, str] | None = None) -> Table:
    """A row a rank; a process that several ranks share is explained below and counted once.

    `order` is "sleep" or "wake", None where only the ACKs tell; `states` are the stages' states after it.
    """
    woken = order == "wake" if order else bool(acks) and all(_is_wake(ack) for ack in acks)
    shared = {place for process in charts.processes(acks) if len(process.ranks) > 1 for place in process.ranks}
    rows = tuple(
        Row(
            _ack_cells(ack, shared, (states or {}).get(ack.stage_id) or _ack_state(ack)),
            charts.Bar(units.place(ack), (charts.main_segment(ack),)),
            ack.ok,
        )
        for ack in acks
    )
    table = Table(_ack_title(acks, woken=woken), ACK_COLUMNS, rows, tuple(_shared_notes(acks)))
    return _without_silent(table, _OF_A_SLEEP if woken else frozenset())


def _is_wake(ack: OmniACK) -> bool:
    return ack.metadata.get("state") == "WARM" and not ack.freed_bytes


def _without_silent(table: Table, left_out: frozenset[str] = frozenset()) -> Table:
    """The table without columns in which no row says anything, and without replicas where there is one of each."""
    said = [
        column == BAR or (bool({row.cells[i] for row in table.rows} - _silent(column)) and column not in left_out)
        for i, column in enumerate(table.columns)
    ]
    rows = [replace(row, cells=tuple(compress(row.cells, said))) for row in table.rows]
    return replace(table, columns=tuple(compress(table.columns, said)), rows=tuple(rows))


def _silent(column: str) -> frozenset[str]:
    """What says nothing in a column."""
    return _SILENT | {"0"} if column == "replica" else _SILENT


def _ack_title(acks: Sequence[OmniACK], *, woken: bool) -> str:
    if not acks:
        return "no acknowledgements"
    if all(ack.ok and ack.metadata.get("noop") for ack in acks):
        return f"nothing to do: already {'awake' if woken else 'asleep'}"
    failed = sum(not ack.ok for ack in acks)
    ranks = f"{len(acks)} rank{'s' if len(acks) > 1 else ''}"
    parts = [f"{ranks} answered" + (f", {failed} with ERROR" if failed else "")]
    freed, mapped = sum(ack.freed_bytes for ack in acks), sum(map(_mapped, acks))
    if freed or not (mapped or woken):
        parts.append(f"freed {units.size(freed)}")
    if mapped:
        parts.append(f"mapped {units.size(mapped)}")
    held = charts.processes(acks)
    if held:
        total = units.size(sum(process.residual_bytes for process in held))
        parts.append(f"residual {total} in {len(held)} process{'es' if len(held) > 1 else ''}")
    return " · ".join(parts)


def _shared_notes(acks: Sequence[OmniACK]) -> list[str]:
    return [
        f"* process {process.pid} ({process.device}) holds {units.size(process.residual_bytes)} "
        f"for {', '.join(process.ranks)} together (the last one measured); counted once"
        for process in charts.processes(acks)
        if len(process.ranks) > 1
    ]


def _ack_cells(ack: OmniACK, shared: set[str], state: str) -> tuple[str, ...]:
    facts = ack.metadata
    return (
        str(ack.stage_id),
        str(ack.rank),
        str(facts.get("replica") or 0),
        ("✓ " if ack.ok else "✗ ") + ack.status,
        state,
        units.size(ack.freed_bytes) if ack.freed_bytes or not _mapped(ack) else units.NONE,
        units.size(_mapped(ack) or None),
        "",
        f"{units.size(facts.get('expected_bytes'))} / {units.size(facts.get('observed_bytes'))}",
        units.size(facts.get("residual_bytes")) + ("*" if units.place(ack) in shared else ""),
        units.size(facts.get("host_backup_bytes")),
        units.milliseconds(facts.get("latency_ms")),
        _ack_note(ack),
    )


def _ack_state(ack: OmniACK) -> str:
    """What the ACK alone tells, for a list that no verb made."""
    state, level = ack.metadata.get("state"), ack.metadata.get("level")
    if state == "COLD" and level:
        return f"ASLEEP (level {level})"
    return "AWAKE" if state == "WARM" and ack.ok else units.NONE


def _mapped(ack: OmniACK) -> int:
    return ack.metadata.get("mapped_bytes") or 0


def _ack_note(ack: OmniACK) -> str:
    facts = ack.metadata
    loaded = (facts.get("phases_ms") or {}).get("reload") is not None and not _mapped(ack)
    parts = [
        facts.get("error_code"),
        ack.error_msg,
        "no-op: it was so already" if facts.get("noop") else None,
        "weights loaded" if loaded and ack.ok else None,
        f"host freed {units.size(facts['host_freed_bytes'])}" if facts.get("host_freed_bytes") else None,
        "NOT recoverable" if facts.get("recoverable") is False else None,
        facts.get("note"),
    ]
    return hints.in_verbs("; ".join(str(part) for part in parts if part))


# ------------------------------------------------------------------------------------------- status


def status_table(status: EngineStatus) -> Table:
    """A row a stage; requests are running / queued / in transit / at the gate."""
    if status.closed:
        title = f"{status.model}: {'shut down' if status.left_at is None else 'disconnected'}"
    else:
        gate = "closed" if status.paused else "open"
        title = f"{status.model} · admission {gate} · up {status.uptime_s:.0f} s"
    calls = [] if status.closed else _calls(status)
    notes = ("requests: running / queued / in transit / at the gate", *calls, *status.notes)
    rows = tuple(_stage_row(stage, closed=status.closed) for stage in status.stages)
    return _without_silent(Table(title, STATUS_COLUMNS, rows, notes))


def _calls(status: EngineStatus) -> list[str]:
    calls = ((stage, hints.call_that_helps(stage)) for stage in status.stages)
    return [f"stage {stage.stage_id}: {call}" for stage, call in calls if call]


def _stage_row(stage: StageStatus, *, closed: bool) -> Row:
    pause = str(stage.pause_state) + (f" ({stage.pause_mode})" if stage.pause_mode else "")
    alive = closed or all(rank.alive for rank in stage.ranks)
    cells = (
        str(stage.stage_id),
        stage.name,
        f"{stage.kind} · {stage.runtime}",
        "STOPPED" if closed else hints.memory_words(stage),
        units.NONE if closed else pause,
        stage.weight_version or units.NONE,
        f"{stage.running} / {stage.queued} / {stage.in_transit} / {stage.waiting_at_gate}",
        _memory(stage),
        units.size(stage.host_backup_bytes),
        _stage_note(stage, alive=alive),
    )
    return Row(cells, ok=alive and stage.state != "FAILED" and not stage.last_error)


def _memory(stage: StageStatus) -> str:
    sums = charts.tag_sums(stage.ranks)
    return "\n".join(
        f"{charts.tag_label(tag)} {units.size(resident)} / {units.size(mapped)}"
        for tag, (resident, mapped) in sums.items()
    )


def _stage_note(stage: StageStatus, *, alive: bool) -> str:
    parts = [
        None if alive else "a worker is dead",
        f"{len(stage.ranks)} ranks" if len(stage.ranks) > 1 else None,
        None if stage.recoverable else "weights can NOT be reloaded",
        f"lora: {', '.join(lora.lora_name for lora in stage.loras)}" if stage.loras else None,
        f"last error: {hints.in_verbs(stage.last_error)}" if stage.last_error else None,
    ]
    return "; ".join(part for part in parts if part)


# --------------------------------------------------------------------------------------------- jobs


def job_table(jobs: Sequence[Job[Any]]) -> Table:
    """A row a job, oldest first."""
    rows = tuple(_job_row(job) for job in jobs)
    running = sum(not job.done for job in jobs)
    return Table(f"{len(jobs)} job{'s' if len(jobs) != 1 else ''}, {running} running", JOB_COLUMNS, rows)


def _job_row(job: Job[Any]) -> Row:
    mark = {"done": "✓ ", "failed": "✗ "}.get(job.state, "")
    took = units.milliseconds(job.elapsed_s * 1000)
    return Row(
        (str(job.number), f"%omni {job.line}", f"{mark}{job.state}", took, job.words()), ok=job.state != "failed"
    )


# --------------------------------------------------------------------------------------------- text


def as_text(table: Table) -> str:
    """The table in fixed-width text."""
    rows = [_text_cells(table, row) for row in table.rows]
    lines = [table.title]
    if rows:
        grid = [list(table.columns), *[line for row in rows for line in _split(row)]]
        widths = [max(len(cells[column]) for cells in grid) for column in range(len(table.columns))]
        lines += ["  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip() for cells in grid]
    return "\n".join([*lines, *table.notes])


def _text_cells(table: Table, row: Row) -> list[str]:
    cells = [" ".join(cell.split(" ")) for cell in row.cells]
    if row.bar is not None:
        cells[table.columns.index(BAR)] = _text_bar(row.bar, table.full_bytes)
    return cells


def _split(cells: list[str]) -> list[list[str]]:
    """One row as the lines that its tallest cell needs."""
    columns = [cell.split("\n") for cell in cells]
    tall = max(len(column) for column in columns)
    return [[column[line] if line < len(column) else "" for column in columns] for line in range(tall)]


def _text_bar(bar: charts.Bar, full_bytes: int) -> str:
    ink = "".join(
        _INKS.get(segment.look, "█") * round(_BAR_CELLS * segment.n_bytes / full_bytes)
        for segment in bar.segments
        if full_bytes
    )
    return ink.ljust(_BAR_CELLS, "·")[:_BAR_CELLS]
