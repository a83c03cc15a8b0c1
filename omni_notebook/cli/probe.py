"""`python -m omni_notebook.cli.probe`: load torch, say what it and the platforms say, as one line of JSON.

A process of its own, because a torch build that does not fit the processor ends the process that loads it.
"""

from __future__ import annotations

import sys

import msgspec

from omni_notebook.memory.device.support import PlatformInfo
from omni_notebook.memory.platforms import describe_platforms


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """torch's build ("CPU", "CUDA 13.0"), the GPUs that it sees, its threads, and every platform."""

    built_for: str
    gpus: int
    threads: int
    platforms: list[PlatformInfo]


def probe() -> Probe:
    """Look.

    Raises:
        ImportError: torch does not load.
    """
    import torch  # noqa: PLC0415  (what this process is for)

    return Probe(
        built_for=_built_for(torch.version.cuda, torch.version.hip),
        gpus=torch.cuda.device_count(),
        threads=torch.get_num_threads(),
        platforms=describe_platforms(),
    )


def _built_for(cuda: str | None, hip: str | None) -> str:
    if cuda:
        return f"CUDA {cuda}"
    return f"ROCm {hip}" if hip else "CPU"


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(probe()).decode() + "\n")
