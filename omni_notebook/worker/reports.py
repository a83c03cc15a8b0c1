"""What a worker is made from and what it reports; plain types that may cross a process border, no torch."""

from __future__ import annotations

import msgspec

from omni_notebook.config import StageConfig
from omni_notebook.protocol import RankId


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is made from; `source` overrides the configured checkpoint (restart after load_weights).

    `tensor_parallel_size`: ranks that hold the model together; None = the config's. `where.rank` counts within them.
    `load_weights` False builds the model without weights (restart after weights that no path reproduces).
    `collective_timeout_s`: how long a forward pass waits for another rank before it gives up.
    """

    where: RankId
    config: StageConfig
    source: str | None = None
    version: str | None = None
    load_weights: bool = True
    tensor_parallel_size: int | None = None
    collective_timeout_s: float = 30.0


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded worker says; `tags` are the bytes that its mappings span.

    `arrives`: whether batches here can begin while a wake still copies.
    """

    pid: int
    device: str
    device_name: str
    weight_version: str
    tags: dict[str, int]
    arrives: bool = False


class LoRAReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank found in an adapter's folder: the digest of its files, the largest rank of its matrices."""

    digest: str
    rank: int


class WakeOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """What a prepared wake leads to: the tags that will be awake, whether that is all, whether weights are valid.

    `arriving`: contents are still being copied. Batches may begin; nothing of them may be seen before the commit.
    """

    awake_tags: tuple[str, ...]
    all_awake: bool
    weights_valid: bool
    arriving: bool = False
