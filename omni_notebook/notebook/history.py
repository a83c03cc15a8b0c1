"""How a cell shows a history: a table in text and in HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_notebook.engine import history_export
from omni_notebook.notebook import html, tables

if TYPE_CHECKING:
    from omni_notebook.engine.history import History


def history_table(history: History) -> tables.Table:
    """A row an ACK, newest first; the file stands below."""
    columns, rows = history_export.table(history.newest)
    shown = [tables.Row(cells, ok=ack.ok) for cells, ack in zip(rows, history.newest, strict=True)]
    return tables.Table(history.title, columns, tuple(shown), (f"ledger: {history.place}",) if shown else ())


def history_bundle(history: History) -> dict[str, Any]:
    """A history as text and HTML."""
    table = history_table(history)
    return {"text/plain": tables.as_text(table), "text/html": html.as_html(table)}
