"""Bounds that a server takes: those that a caller gave, within its own."""

from __future__ import annotations

from typing import Any

from omni_notebook.engine.arguments import check_timeout

_SHORTEST_S = 0.001
_LONGEST_S = 86_400.0
_LONGEST_AT_GATES_S = 3600.0


def bound(timeout: Any) -> float | None:
    """Seconds of an order or a request; None is the server's default.

    Raises:
        ArgumentError: not a number of seconds ≥ 0.
    """
    checked = check_timeout(timeout)
    return None if checked is None else min(max(checked, _SHORTEST_S), _LONGEST_S)


def bound_at_gates(timeout: Any) -> float | None:
    """Seconds to wait at closed gates; 0 refuses at once.

    Raises:
        ArgumentError: not a number of seconds ≥ 0.
    """
    checked = check_timeout(timeout, "admission_timeout")
    return None if checked is None else min(checked, _LONGEST_AT_GATES_S)
