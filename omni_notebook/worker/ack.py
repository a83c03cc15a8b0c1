"""Builds ACKs from what was measured; nothing here guesses."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import OmniError
from omni_notebook.protocol import MIB, AckMetadata, AckStatus, OmniACK, PhasesMs, TagBytes, gib

if TYPE_CHECKING:
    from omni_notebook.memory.base import Held, PrepareReport, UnmapReport
    from omni_notebook.protocol import RankId

TOLERANCE_SHARE = 0.02
TOLERANCE_FLOOR_BYTES = {"cpu": 1 * MIB, "cuda": 64 * MIB, "xpu": 64 * MIB, "npu": 64 * MIB}
NOT_OBSERVED = "NOT_OBSERVED"


def tolerance_bytes(expected_bytes: int, device: str) -> float:
    """How far observed may lie from expected: min(max(2 %, 64 MiB, on a CPU 1 MiB), expected / 4)."""
    floor = TOLERANCE_FLOOR_BYTES[device.split(":", maxsplit=1)[0]]
    return min(max(TOLERANCE_SHARE * expected_bytes, floor), expected_bytes / 4)


def source_of(device_name: str) -> str:
    """The specification's `source`: "Platform_" + the device's name, spaces as underscores."""
    return "Platform_" + "_".join(device_name.split())


class AckBuilder:
    """Makes one rank's ACKs."""

    def __init__(self, where: RankId, *, device: str, device_name: str) -> None:
        self._where = where
        self._device = device
        self._source = source_of(device_name)

    def sleep(self, task_id: str, prepared: PrepareReport, unmapped: UnmapReport, after: Held, **known: Any) -> OmniACK:
        """The answer to a sleep: SUCCESS only if the expected pages were seen to leave."""
        freed = sum(unmapped.freed.values())
        off = abs(unmapped.observed_bytes - unmapped.expected_bytes)
        seen = freed > 0 and off <= tolerance_bytes(unmapped.expected_bytes, self._device)
        phases: PhasesMs = known.pop("phases_ms")
        copied = prepared.copied_bytes + unmapped.copied_bytes
        metadata = self._base(
            total_freed_gib=gib(freed),
            state="COLD",
            tags={tag: TagBytes(n, prepared.backup.get(tag)) for tag, n in unmapped.freed.items()},
            expected_bytes=unmapped.expected_bytes,
            observed_bytes=unmapped.observed_bytes,
            observed_scope=unmapped.scope,
            backup_location=prepared.backup_location,
            host_backup_bytes=prepared.host_backup_bytes,
            copied_bytes=copied,
            skipped_clean_bytes=prepared.skipped_clean_bytes + unmapped.skipped_clean_bytes,
            copy_gib_per_s=rate_gib_per_s(copied, phases.copy),
            phases_ms=phases,
            error_code=None if seen else NOT_OBSERVED,
            note=unmapped.note,
            **self._left(after),
            **known,
        )
        message = None if seen else _not_observed(unmapped)
        return self._ack(task_id, AckStatus.SUCCESS if seen else AckStatus.ERROR, freed, metadata, message)

    def wake(self, task_id: str, after: Held, **known: Any) -> OmniACK:
        """The answer to a wake: freed 0, `mapped_bytes` as measured."""
        metadata = self._base(current_vram_gib=gib(after.total_bytes), **known)
        return self._ack(task_id, AckStatus.SUCCESS, 0, metadata)

    def noop(self, task_id: str, held_bytes: int, **known: Any) -> OmniACK:
        """The answer to an order that had nothing to do."""
        metadata = self._base(noop=True, expected_bytes=0, observed_bytes=0, current_vram_gib=gib(held_bytes), **known)
        return self._ack(task_id, AckStatus.SUCCESS, 0, metadata)

    def dropped(self, task_id: str, host_freed_bytes: int, after: Held, **known: Any) -> OmniACK:
        """The answer to a level 2 on a stage asleep at level 1: the backup went, no device memory did."""
        metadata = self._base(
            state="COLD",
            expected_bytes=0,
            observed_bytes=0,
            host_freed_bytes=host_freed_bytes,
            **self._left(after),
            **known,
        )
        return self._ack(task_id, AckStatus.SUCCESS, 0, metadata)

    def _base(self, **known: Any) -> AckMetadata:
        return AckMetadata(
            source=self._source, replica=self._where.replica, pid=os.getpid(), device=self._device, **known
        )

    def _left(self, after: Held) -> dict[str, Any]:
        return {
            "rank_residual_gib": gib(after.total_bytes),
            "residual_bytes": after.total_bytes,
            "residual": after.parts,
            "current_vram_gib": gib(after.total_bytes),
        }

    def _ack(
        self, task_id: str, status: AckStatus, freed: int, metadata: AckMetadata, message: str | None = None
    ) -> OmniACK:
        return OmniACK(
            task_id=task_id,
            status=str(status),
            stage_id=self._where.stage_id,
            rank=self._where.rank,
            freed_bytes=freed,
            metadata=metadata.to_dict(),
            error_msg=message,
        )


def rate_gib_per_s(n_bytes: int, ms: float | None) -> float | None:
    """GiB a second, or None where too little was copied (under 1 MiB) to speak of a rate."""
    if n_bytes < MIB or not ms:
        return None
    return n_bytes / 1024**3 / (ms / 1000)


def _not_observed(report: UnmapReport) -> str:
    return (
        f"the pages were given up, but {report.observed_bytes:,} bytes were seen to leave instead of "
        f"{report.expected_bytes:,}; do not start a trainer on this. The stage is asleep; wake_up works"
    )


def error_ack(task_id: str, where: RankId, error: BaseException, **known: Any) -> OmniACK:
    """The answer of a rank that raised, or that did not answer: freed 0, the cause in `error_msg`."""
    code = error.error_code if isinstance(error, OmniError) else type(error).__name__
    known.setdefault("source", "unknown")
    metadata = AckMetadata(replica=where.replica, error_code=code, **known)
    return OmniACK(
        task_id=task_id,
        status=str(AckStatus.ERROR),
        stage_id=where.stage_id,
        rank=where.rank,
        freed_bytes=0,
        metadata=metadata.to_dict(),
        error_msg=f"{where.title}: {str(error) or type(error).__name__}",
    )
