"""ACKs and statuses as engines give them, for tests of what only shows them."""

from omni_notebook.protocol import (
    MIB,
    AckMetadata,
    EngineStatus,
    MemoryState,
    OmniACK,
    PauseState,
    RankStatus,
    StageStatus,
    TagMemory,
)


def ack(stage_id=0, rank=0, freed_bytes=256 * MIB, error_msg=None, **facts):
    given = {"source": "Platform_CPU", "state": "COLD", "level": 2, "pid": 100, "device": "cpu", **facts}
    return OmniACK(
        task_id="t",
        status="ERROR" if error_msg else "SUCCESS",
        stage_id=stage_id,
        rank=rank,
        freed_bytes=freed_bytes,
        metadata=AckMetadata(**given).to_dict(),
        error_msg=error_msg,
    )


def rank(**facts):
    tags = {
        "weights": TagMemory(mapped_bytes=3 * MIB, resident_bytes=3 * MIB),
        "ballast": TagMemory(mapped_bytes=256 * MIB, resident_bytes=64 * MIB),
    }
    given = {"rank": 0, "replica": 0, "pid": 100, "device": "cpu", "alive": True, "tags": tags}
    return RankStatus(**{**given, "host_backup_bytes": 3 * MIB, "process_bytes": 500 * MIB, **facts})


def stage(stage_id=0, **facts):
    given = {
        "stage_id": stage_id,
        "name": "thinker",
        "kind": "ar",
        "runtime": "torch",
        "model": "demo/thinker",
        "state": MemoryState.AWAKE,
        "level": None,
        "awake_tags": (),
        "pause_state": PauseState.OPEN,
        "pause_mode": None,
        "weight_version": "v1",
        "recoverable": True,
        "running": 1,
        "queued": 2,
        "in_transit": 3,
        "waiting_at_gate": 4,
        "ballast_bytes": 256 * MIB,
        "ranks": (rank(),),
        "last_error": None,
    }
    return StageStatus(**{**given, **facts})


def status(*stages, **facts):
    return EngineStatus(
        **{"model": "demo", "closed": False, "paused": False, "uptime_s": 12.0, "stages": stages, **facts}
    )
