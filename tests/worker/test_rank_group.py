"""How ranks on GPUs meet: what torch's own group for nccl is made with."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed

from omni_notebook.worker.group import RankGroup


class FakeNccl:
    """`ProcessGroupNCCL`, which reads the environment when it is made."""

    made: list[FakeNccl] = []  # noqa: RUF012

    class Options(SimpleNamespace):
        pass

    def __init__(self, store, rank, size, options):
        self.size, self.rank, self.options = size, rank, options
        self.blocks = os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        self.made.append(self)


@pytest.mark.parametrize("was", [None, "0", "1"])
def test_exchanges_between_gpus_block_until_their_timeout_whatever_the_environment_said(monkeypatch, was):
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", was or "")
    if was is None:
        monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    group = RankGroup(2, 0, 7.5, "cuda:0")
    try:
        group.join(group.open())
        made = FakeNccl.made[-1]
        assert (made.size, made.rank, made.options._timeout) == (2, 0, timedelta(seconds=7.5))
        assert made.blocks == "1"
    finally:
        group.close()
