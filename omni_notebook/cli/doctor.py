"""`omni-notebook doctor`: what this machine can run, and why not. Loads torch only in a process of its own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
from rich.text import Text

from omni_notebook.cli import facts, screen
from omni_notebook.units import size

if TYPE_CHECKING:
    from argparse import Namespace

    from rich.table import Table

    from omni_notebook.cli.facts import Facts

_GOOD, _BAD, _NEUTRAL = ("✓", "green"), ("✗", "red"), ("–", "dim")


def run(args: Namespace) -> int:
    """Show the facts; 0 if the demo can run here, else 1."""
    found = facts.gather()
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    else:
        show(found)
    return 0 if found.demo.can_run else 1


def show(found: Facts) -> None:
    """Write the facts for a person."""
    out = screen.console()
    for title, rows in (
        ("This machine", _machine(found)),
        ("Packages", _packages(found)),
        ("Platforms", [_supported(row) for row in found.platforms]),
        ("Runtimes", [_supported(row) for row in found.runtimes]),
        ("Executors", [_supported(row) for row in found.executors]),
    ):
        out.print(title, style="bold")
        out.print(_table(rows))
    for reason in found.demo.reasons:
        out.print(Text(f"The demo can not run: {reason}", style="bold red"), soft_wrap=True)
    if found.demo.can_run:
        out.print("The demo can run here: omni-notebook demo", style="bold green")


Row = tuple[tuple[str, str], str, str]


def _table(rows: list[Row]) -> Table:
    table = screen.plain_grid()
    for (mark, style), name, text in rows:
        table.add_row(Text(f"  {mark}", style=style), name, text)
    return table


def _machine(found: Facts) -> list[Row]:
    memory, spill = found.memory, found.spill
    limit = "a cgroup's limit" if memory.limited_by_cgroup else "all of the machine's"
    room = "no room that can be written" if spill.free_bytes is None else f"{size(spill.free_bytes)} free"
    copies = "; an awake stage keeps a copy of its weights and ballast there (the demo: 0.5 GiB)"
    return [
        (_NEUTRAL, "omni_notebook", f"{found.version}, Python {found.python}"),
        (_NEUTRAL, "system", f"{found.system}, kernel {found.kernel}"),
        (_NEUTRAL, "processor", f"{found.processor}, {found.usable_cpus} usable"),
        (
            _NEUTRAL,
            "memory",
            f"{size(memory.available_bytes)} free of {size(memory.limit_bytes)} ({limit})",
        ),
        (
            _BAD if spill.free_bytes is None else _GOOD,
            "spill folder",
            f"{spill.folder}: {room}" + (", and it is memory, not disk" if spill.in_ram else "") + copies,
        ),
        (_NEUTRAL, "huge pages", found.huge_pages or "not told by this kernel"),
    ]


def _packages(found: Facts) -> list[Row]:
    rows: list[Row] = []
    for name, version in found.packages.items():
        missing = _BAD if name in facts.NEEDED else _NEUTRAL
        absent = "not installed" + (" (make lab installs it)" if name == "jupyterlab" else "")
        rows.append((missing if version is None else _GOOD, name, version or absent))
    if found.probe is not None:
        gpus = f"sees {found.probe.gpus} GPUs" if found.probe.gpus else "sees no GPU"
        rows.insert(1, (_GOOD, "", f"built for {found.probe.built_for}, {gpus}, {found.probe.threads} threads"))
    return rows


def _supported(row: facts.Support) -> Row:
    return (_GOOD if row.supported else _NEUTRAL, row.name, row.reason)
