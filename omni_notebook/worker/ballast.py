"""Ballast: a real, tagged tensor a rank that makes memory visible beside small models; labelled as such everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from omni_notebook.memory.base import BALLAST

if TYPE_CHECKING:
    from omni_notebook.memory.base import MemoryPool

_STRIDE = 2_654_435_761  # Knuth's multiplicative hash: neighbouring words differ in all bytes


class Ballast:
    """`n_bytes` of non-zero content that can be made again from nothing; 0 bytes = no ballast."""

    def __init__(self, pool: MemoryPool, n_bytes: int) -> None:
        self._pool = pool
        self._words = n_bytes // 8

    def allocate(self) -> None:
        """Take the memory, once."""
        if self._words:
            self._tensor = self._pool.empty((self._words,), torch.int64, BALLAST, recomputable=False)

    def fill(self) -> None:
        """Write the content."""
        if self._words:
            torch.arange(1, self._words + 1, out=self._tensor).mul_(_STRIDE)
