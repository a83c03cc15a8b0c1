"""What an audit gives back: a verdict, its reasons, the numbers, and ways to take them along."""

from __future__ import annotations

import csv
import importlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from omni_notebook import units
from omni_notebook.engine.ledger_file import ledger_path, refuse_ledger
from omni_notebook.errors import UnsupportedError
from omni_notebook.verbs.auditing.record import Verdict
from omni_notebook.verbs.auditing.summary import not_judged, summary, trainer_line

if TYPE_CHECKING:
    import os

    from omni_notebook.verbs.auditing.record import Cycle, Finding, ProcessLine, RankLine, Record

SCHEMA = Path(__file__).with_name("audit.schema.json")


class AuditResult:
    """An audit that has ended.

    Attributes:
        record: everything that was measured, as plain data.
        pictures: `{"before the sleep": [...], "after the wake": [...]}`, PNG files as bytes.
    """

    def __init__(self, record: Record, pictures: dict[str, list[bytes]] | None = None) -> None:
        self.record = record
        self.pictures = pictures or {}

    @property
    def verdict(self) -> str:
        """One of the words PASS, WARN and FAIL."""
        return str(self.record.verdict)

    @property
    def ok(self) -> bool:
        """Whether nothing failed; a WARN is ok, but not everything was checked."""
        return self.record.verdict is not Verdict.FAIL

    @property
    def cycles(self) -> tuple[Cycle, ...]:
        """One entry a cycle that was run, with its ranks, processes, probe and output."""
        return self.record.cycles

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that was found out, good or bad, in the order in which it was."""
        return self.record.findings

    @property
    def reasons(self) -> list[str]:
        """Why the verdict is what it is: failures, then warnings; of a PASS, what was seen."""
        bad = [f for kind in (Verdict.FAIL, Verdict.WARN) for f in self.findings if f.severity is kind]
        return [f"{finding.severity}: {finding}" for finding in bad] or [
            *summary(self.record),
            *not_judged(self.record),
        ]

    def __repr__(self) -> str:
        """Whether a trainer may start, if that was asked, the verdict, its reasons, and what was seen."""
        seen = [] if self.record.verdict is Verdict.PASS else ["seen:", *(f"  {line}" for line in summary(self.record))]
        return "\n".join([*self.first_lines(), *(f"  {reason}" for reason in self.reasons), *seen])

    def first_lines(self) -> list[str]:
        """Whether a trainer may take what --probe asked for, and the headline; of a FAIL the headline comes first."""
        answer = trainer_line(self.record)
        said = [self.headline()] if answer is None else [answer, self.headline()]
        return said if self.ok else said[::-1]

    def headline(self) -> str:
        """`audit PASS · level 2 · 10 of 10 cycles · stage 0 (thinker), stage 1 (painter) · 3.2 s`."""
        record = self.record
        stages = ", ".join(f"stage {stage.stage_id} ({stage.name})" for stage in record.stages)
        cycles = f"{len(record.cycles)} of {units.count(record.cycles_asked, 'cycle')}"
        return f"audit {self.verdict} · level {record.level} · {cycles} · {stages} · {record.elapsed_s:.1f} s"

    # --------------------------------------------------------------------------------- exports

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; what `to_json` writes."""
        built: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self.record))
        return built

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the record; its schema is `omni_notebook/verbs/auditing/audit.schema.json`.

        Raises:
            OSError: the file can not be written.
            ArgumentError: it is the ledger.
        """
        _place(path).write_bytes(msgspec.json.format(msgspec.json.encode(self.record), indent=2) + b"\n")

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs nothing else: verdict, reasons, chart, tables, pictures.

        Raises:
            OSError: the file can not be written.
            ArgumentError: it is the ledger.
        """
        from omni_notebook.verbs.auditing import report  # noqa: PLC0415  (made when asked for)

        _place(path).write_text(report.page(self), encoding="utf-8")

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write `rows()`, with a line of names above.

        Raises:
            OSError: the file can not be written.
            ArgumentError: it is the ledger.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: units.spreadsheet_cell(cell) for name, cell in row.items()} for row in self.rows())
        _place(path).write_text(text.getvalue(), encoding="utf-8")

    def to_dataframe(self) -> Any:
        """`rows()` as a pandas DataFrame.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        try:
            pandas: Any = importlib.import_module("pandas")  # no dependency: only who asks for a frame needs it
        except ImportError:
            msg = (
                "to_dataframe needs pandas, which is not installed here; rows() and to_csv(path) have the same numbers"
            )
            raise UnsupportedError(msg) from None
        return pandas.DataFrame(self.rows(), columns=list(COLUMNS))

    def rows(self) -> list[dict[str, Any]]:
        """A row a cycle and rank; what is known of its process only is in columns that begin with `process_`.

        Ranks that share a process repeat its numbers: `process_ranks` says how many do.
        """
        return [_row(cycle, rank) for cycle in self.cycles for rank in cycle.ranks]


def _place(path: str | os.PathLike[str]) -> Path:
    refuse_ledger(Path(path), ledger_path())
    return Path(path)


def _row(cycle: Cycle, rank: RankLine) -> dict[str, Any]:
    process = next(p for p in cycle.processes if (p.pid, p.device) == (rank.pid, rank.device))
    return {
        "cycle": cycle.number,
        **{f"{'' if name in _PLAIN else 'ack_'}{name}": getattr(rank, name) for name in rank.__struct_fields__},
        **_process_cells(process),
        **_shared_cells(cycle),
    }


_PLAIN = frozenset({"stage_id", "replica", "rank", "pid", "device"})


def _process_cells(process: ProcessLine) -> dict[str, Any]:
    return {
        "process_ranks": len(process.ranks),
        "process_source": None if process.source is None else str(process.source),
        "process_before_bytes": process.before_bytes,
        "process_asleep_bytes": process.asleep_bytes,
        "process_awake_bytes": process.awake_bytes,
        "process_left_bytes": process.left_bytes,
        "process_came_back_bytes": process.came_back_bytes,
        "process_tolerance_bytes": process.tolerance_bytes,
    }


def _shared_cells(cycle: Cycle) -> dict[str, Any]:
    """What a cycle has once: the probe and the output."""
    probe, output = cycle.probe, cycle.output
    return {
        "probe_asked_bytes": None if probe is None else probe.asked_bytes,
        "probe_taken_bytes": None if probe is None else probe.taken_bytes,
        "output_same_tokens": None if output is None else output.same_tokens,
        "output_same_images": None if output is None else output.same_images,
        "output_max_difference": None if output is None else output.max_difference,
    }


COLUMNS = (
    "cycle",
    "stage_id",
    "replica",
    "rank",
    "pid",
    "device",
    "ack_sleep_status",
    "ack_freed_bytes",
    "ack_expected_bytes",
    "ack_residual_bytes",
    "ack_host_backup_bytes",
    "ack_sleep_ms",
    "ack_sleep_error",
    "ack_sleep_error_code",
    "ack_wake_status",
    "ack_mapped_bytes",
    "ack_wake_ms",
    "ack_wake_error",
    "process_ranks",
    "process_source",
    "process_before_bytes",
    "process_asleep_bytes",
    "process_awake_bytes",
    "process_left_bytes",
    "process_came_back_bytes",
    "process_tolerance_bytes",
    "probe_asked_bytes",
    "probe_taken_bytes",
    "output_same_tokens",
    "output_same_images",
    "output_max_difference",
)
