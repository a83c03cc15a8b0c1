"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path

from omni_notebook.errors import ArgumentError


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path whose `~` is a person's folder; as it stands where there is no such person.

    Raises:
        ArgumentError: it holds a NUL, which no path can.
    """
    if "\0" in os.fspath(path):
        msg = f"{os.fspath(path)!r} can be no path: it holds a NUL character. Nothing changed"
        raise ArgumentError(msg)
    return Path(os.path.expanduser(path))  # noqa: PTH111  (Path's raises there)
