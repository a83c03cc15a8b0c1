"""What an audit measured, as plain data: the shape of its JSON file, whose schema lies beside this module."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

SCHEMA_VERSION = 1


class Verdict(StrEnum):
    """What an audit, or one of its findings, comes to."""

    PASS = "PASS"  # noqa: S105  (a verdict)
    WARN = "WARN"
    FAIL = "FAIL"


class Source(StrEnum):
    """Who measured a number."""

    ACK = "ack"
    SMAPS = "smaps"
    NVML = "nvml"
    PROBE = "probe"
    OUTPUT = "output"
    STATUS = "status"


MEANING = {
    Source.ACK: "the rank's own answer to the order",
    Source.SMAPS: "anonymous memory in /proc/PID/smaps_rollup, read by another process than the rank's",
    Source.NVML: "device memory of the process, as NVIDIA's driver reports it",
    Source.PROBE: "a process of its own that took the memory, touched every page and gave it back",
    Source.OUTPUT: "what the pipeline generated for the same prompt and seed",
    Source.STATUS: "the engine's status, which asks no rank",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the audit found out; `cycle` counts from 1, None = of the whole audit."""

    severity: Verdict
    text: str
    sources: tuple[Source, ...]
    cycle: int | None = None

    def __str__(self) -> str:
        """The text with its sources, and the cycle that it is about."""
        where = "" if self.cycle is None else f"cycle {self.cycle}: "
        return f"{where}{self.text} [{', '.join(self.sources)}]"


class RankLine(msgspec.Struct, frozen=True, kw_only=True):
    """One rank in one cycle: what its ACKs say (source: ack); null where it did not answer."""

    stage_id: int
    replica: int
    rank: int
    pid: int | None
    device: str
    sleep_status: str | None = None
    freed_bytes: int | None = None
    expected_bytes: int | None = None
    residual_bytes: int | None = None
    host_backup_bytes: int | None = None
    sleep_ms: float | None = None
    sleep_error: str | None = None
    sleep_error_code: str | None = None
    wake_status: str | None = None
    mapped_bytes: int | None = None
    wake_ms: float | None = None
    wake_error: str | None = None

    @property
    def place(self) -> str:
        """`stage 0 · rank 1`, and the replica where it is not the first."""
        return f"stage {self.stage_id} · rank {self.rank}" + (f" · replica {self.replica}" if self.replica else "")


class ProcessLine(msgspec.Struct, frozen=True, kw_only=True):
    """One process of ranks in one cycle, as seen from outside (`source`; null where nobody could look, `why_not`).

    `freed_bytes` and `mapped_bytes` are the sums of its ranks' ACKs, `left_bytes` and `came_back_bytes` what was seen
    from outside to leave at the sleep and to come back at the wake, `tolerance_bytes` how far the two may lie apart.
    """

    pid: int | None
    device: str
    ranks: tuple[str, ...]
    source: Source | None
    why_not: str | None = None
    before_bytes: int | None = None
    asleep_bytes: int | None = None
    awake_bytes: int | None = None
    freed_bytes: int = 0
    mapped_bytes: int = 0
    tolerance_bytes: int = 0

    @property
    def left_bytes(self) -> int | None:
        """What left between the looks before and after the sleep."""
        return _difference(self.before_bytes, self.asleep_bytes)

    @property
    def came_back_bytes(self) -> int | None:
        """What came back between the looks before and after the wake."""
        return _difference(self.awake_bytes, self.asleep_bytes)


def _difference(more: int | None, less: int | None) -> int | None:
    return None if more is None or less is None else more - less


class ProbeLine(msgspec.Struct, frozen=True, kw_only=True):
    """Whether `asked_bytes` could be taken while the stages slept; `taken_bytes` is how far it got (source: probe)."""

    asked_bytes: int
    taken_bytes: int
    available_bytes: int
    pid: int | None
    ms: float
    outcome: str

    @property
    def taken(self) -> bool:
        """Whether all of it was there to be taken."""
        return self.taken_bytes >= self.asked_bytes


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """What one generation gave; hashes are SHA-256 over token ids and over pixels (source: output).

    `covers` are the stages that had a part in it. `others` = other requests ran meanwhile, so that a batch may have
    been composed differently. `max_difference` (0 … 255) is the largest difference of a pixel to the golden images.
    """

    covers: tuple[int, ...]
    tokens: int
    tokens_sha256: str | None
    images: int
    images_sha256: str | None
    weight_versions: dict[str, str]
    others: bool
    ms: float
    same_tokens: bool | None = None
    same_images: bool | None = None
    same_weights: bool | None = None
    max_difference: int | None = None


class Cycle(msgspec.Struct, frozen=True, kw_only=True):
    """One sleep and wake with everything that was looked at."""

    number: int
    ranks: tuple[RankLine, ...]
    processes: tuple[ProcessLine, ...]
    probe: ProbeLine | None = None
    output: OutputLine | None = None
    sleep_ms: float | None = None
    wake_ms: float | None = None


class StageLine(msgspec.Struct, frozen=True, kw_only=True):
    """A stage that was audited."""

    stage_id: int
    name: str
    kind: str
    model: str
    weight_version: str | None
    ranks: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A whole audit."""

    verdict: Verdict
    model: str
    stages: tuple[StageLine, ...]
    level: int
    prompt: str
    seed: int
    sampling_params: dict[str, Any]
    cycles_asked: int
    started: str
    elapsed_s: float
    version: str
    golden: OutputLine | None
    cycles: tuple[Cycle, ...]
    findings: tuple[Finding, ...]
    sources: dict[str, str]
    rules: tuple[str, ...]
    schema_version: int = SCHEMA_VERSION
