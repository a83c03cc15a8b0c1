"""Bytes, seconds and places, written for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.protocol import GIB, MIB

if TYPE_CHECKING:
    from omni_notebook.protocol import OmniACK

KIB = 1024
NONE = "–"
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def size(n_bytes: int | None) -> str:
    """`1.50 GiB`, `256.0 MiB`, `12.0 KiB`, `0 B`; a dash for None. A value that is not 0 never reads as 0."""
    if n_bytes is None:
        return NONE
    for unit, name, digits in ((GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if abs(n_bytes) >= unit:
            return f"{n_bytes / unit:.{digits}f} {name}"
    return f"{n_bytes} B"


def scale(largest: int) -> tuple[int, str]:
    """The unit for an axis that reaches `largest` bytes."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if largest >= unit:
            return unit, name
    return 1, "bytes"


def milliseconds(value: float | None) -> str:
    """`850 ms`, `1.25 s`; a dash for None."""
    if value is None:
        return NONE
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def count(number: int, what: str) -> str:
    """`1 image`, `2 images`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def place(ack: OmniACK) -> str:
    """`stage 0 · rank 1`, and the replica where it is not the first."""
    replica = ack.metadata.get("replica") or 0
    return f"stage {ack.stage_id} · rank {ack.rank}" + (f" · replica {replica}" if replica else "")


def spreadsheet_cell(value: object) -> object:
    """A cell of a CSV file; an apostrophe goes before text that a spreadsheet would run as a formula (OWASP)."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
