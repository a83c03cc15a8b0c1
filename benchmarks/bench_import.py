"""`import omni_notebook`, against an import that loads nothing but what Python itself does."""

from __future__ import annotations

import subprocess
import sys

from benchmarks import Figure

BAR_S = 0.3
ROUNDS = 5


def _seconds(module: str) -> float:
    """Seconds that `import module` takes inside a fresh interpreter, best of `ROUNDS`."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    return min(float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(ROUNDS))


def measure() -> list[Figure]:
    """The import's seconds; the floor is an empty package of the standard library."""
    _seconds("omni_notebook")  # the first one compiles
    value = _seconds("omni_notebook")
    return [
        Figure(
            what="import omni_notebook, best of 5",
            value=value * 1e3,
            unit="ms",
            floor=_seconds("xmlrpc") * 1e3,
            floor_is="an empty package",
            bar=f"≤ {BAR_S} s",
            met=value <= BAR_S,
        )
    ]
