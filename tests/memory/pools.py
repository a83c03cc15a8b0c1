"""Steps that most tests of the pool take."""

from __future__ import annotations

import torch

MIB = 1024**2


def filled(pool, n_bytes, *, tag="weights", seed=1):
    """A tensor of random bytes that a sleep must back up."""
    tensor = pool.empty((n_bytes,), torch.uint8, tag, recomputable=False)
    tensor.random_(1, 256, generator=torch.Generator().manual_seed(seed))
    return tensor


def sleep(pool, level=1, tags=None):
    """Both steps of a sleep."""
    prepared = pool.prepare_sleep(level, tags)
    return prepared, pool.commit_sleep()


def late(pool, level=1, tags=None):
    """The same, the copies left to the second."""
    prepared = pool.prepare_sleep(level, tags, late_copy=True)
    return prepared, pool.commit_sleep()


def saved(prepared, unmapped):
    """Bytes that a sleep copied, and those that its copies had already."""
    copied = prepared.copied_bytes + unmapped.copied_bytes
    return copied, prepared.skipped_clean_bytes + unmapped.skipped_clean_bytes


def wake(pool, tags=None):
    """All steps of a wake."""
    mapped, restored = pool.map(tags), pool.restore(tags)
    pool.commit_wake()
    return mapped, restored
