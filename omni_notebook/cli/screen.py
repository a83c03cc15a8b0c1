"""What commands show: a rich console, tables of ACKs and of stages, sizes in words."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from omni_notebook.units import NONE, size
from omni_notebook.verbs import hints
from omni_notebook.verbs.frontend import PlainFrontend, poll

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from omni_notebook.protocol import EngineStatus, OmniACK, StageStatus
    from omni_notebook.verbs.frontend import Progress

_T = TypeVar("_T")

PIPE_WIDTH = 120


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `main`, which knows the exit status for it."""
        raise BrokenPipeError


def console() -> Console:
    """A console on stdout; without colours and of a fixed width where that is no terminal."""
    return _Screen(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, markup=False)


class TerminalFrontend(PlainFrontend):
    """A verb's front end: text as it comes, and one line of progress where there is a terminal."""

    def __init__(self, screen: Console) -> None:
        super().__init__()
        self._screen = screen

    def write(self, text: str) -> None:
        """Show plain text at once, no markup."""
        self._screen.print(Text(text, style="dim"), end="", soft_wrap=True)
        self._screen.file.flush()

    def wait(self, future: Future[_T], gauge: Callable[[], Progress] | None, tick: Callable[[], None] | None) -> _T:
        """Wait; what is measured shows beside a spinner, and goes when it is over."""
        if gauge is None or not self._screen.is_terminal:
            return super().wait(future, None, tick)
        with self._screen.status("") as shown:
            return poll(future, lambda: shown.update(Text(gauge().label)))


def grid(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table with a head and no other lines; columns in `right` hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def plain_grid() -> Table:
    """A mark, a name, a text: no lines."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, min_width=13)
    table.add_column(overflow="fold")
    return table


def ack_table(acks: Sequence[OmniACK], names: dict[int, str]) -> Table:
    """A row a rank: what it answered, what it freed (or mapped), and how that was checked."""
    slept = any(ack.metadata.get("state") == "COLD" for ack in acks) or not all(ack.ok for ack in acks)
    moved = "freed" if slept else "mapped"
    numbers = (moved, "expected / observed", "residual", "latency")
    columns = ("stage", "rank", "answer", *numbers) if slept else ("stage", "rank", "answer", moved, "latency")
    table = grid(*columns, right=numbers)
    for ack in acks:
        table.add_row(*_ack_cells(ack, names, slept=slept))
    return table


def _ack_cells(ack: OmniACK, names: dict[int, str], *, slept: bool) -> list[Text | str]:
    facts = ack.metadata
    latency = facts.get("latency_ms")
    checked = f"{size(facts.get('expected_bytes'))} / {size(facts.get('observed_bytes'))}"
    return [
        f"{ack.stage_id} {names.get(ack.stage_id, '')}",
        str(ack.rank),
        Text(ack.status, style="green" if ack.ok else "bold red"),
        size(ack.freed_bytes if slept else facts.get("mapped_bytes")),
        *([checked, size(facts.get("residual_bytes"))] if slept else []),
        NONE if latency is None else f"{latency:.0f} ms",
    ]


def shared_residual(acks: Sequence[OmniACK]) -> str | None:
    """What to know when ranks live in one process: its residual counts once, as the last rank measured it."""
    held = [ack.metadata["residual_bytes"] for ack in acks if ack.metadata.get("residual_bytes") is not None]
    pids = {ack.metadata.get("pid") for ack in acks}
    if len(held) < 2 or len(held) < len(acks) or len(pids) > 1:
        return None
    return f"residual: one process ({pids.pop()}) holds all ranks; {size(min(held))} were left after the last one"


def status_table(status: EngineStatus) -> Table:
    """A row a stage and kind of memory: what is there of what is mapped."""
    numbers = ("resident", "of", "host copy")
    table = grid("stage", "state", "memory", *numbers, right=numbers)
    for stage in status.stages:
        first, copy = [f"{stage.stage_id} {stage.name}", hints.state_words(stage)], _host_copy(stage)
        for rank in stage.ranks:
            for tag, memory in rank.tags.items():
                word = f"{tag} (filler)" if tag == "ballast" else tag
                table.add_row(*first, word, size(memory.resident_bytes), size(memory.mapped_bytes), copy)
                first, copy = ["", ""], ""
    return table


def _host_copy(stage: StageStatus) -> str:
    return size(stage.host_backup_bytes)
