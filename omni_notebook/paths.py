"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path whose `~` is a person's folder; as it stands where there is no such person."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  (Path's raises there)
