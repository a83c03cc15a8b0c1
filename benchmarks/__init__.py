"""Benchmarks: each `bench_*.py` has a `measure()`, `run.py` runs them and prints one table.

A figure stands beside its floor, the best that this machine could do, measured in the same run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table.

    Attributes:
        what: what was measured.
        value: the figure, in `unit`.
        unit: "s", "ms", "GiB/s", "%", …
        floor: the best possible in the same unit, measured in the same run; None = there is none.
        floor_is: what the floor is ("warm memcpy").
        bar: the budget in words ("≤ 0.3 s"), "" = none.
        met: whether the bar is met; None = there is none, or the run could not resolve it (say so in `note`).
        note: what a reader must know.
    """

    what: str
    value: float
    unit: str
    floor: float | None = None
    floor_is: str = ""
    bar: str = ""
    met: bool | None = None
    note: str = ""
