"""Tables as HTML: every text escaped, no script, readable on light and dark pages."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from omni_notebook.notebook import charts, tables

if TYPE_CHECKING:
    from omni_notebook.notebook.tables import Row, Table

_LINE = "1px solid rgba(128,128,128,.45)"
_CELL = "padding:3px 6px;text-align:left;vertical-align:top;white-space:pre-line"
_FIXED = "white-space:nowrap"
_SPACES = {"note": "", tables.MEMORY: "white-space:pre"}


def as_html(table: Table) -> str:
    """The table with its title, bars and notes."""
    head = "".join(f'<th scope="col" style="{_CELL};{_FIXED}">{escape(column)}</th>' for column in table.columns)
    body = "".join(_row(table, row) for row in table.rows)
    notes = "".join(f'<div style="opacity:.8">{escape(note)}</div>' for note in table.notes)
    grid = (
        f'<table style="border-collapse:collapse;color:inherit;font-variant-numeric:tabular-nums">'
        f'<thead><tr style="border-bottom:{_LINE}">{head}</tr></thead><tbody>{body}</tbody></table>'
    )
    title = f'<div style="font-weight:600">{escape(table.title)}</div>'
    return f'<div style="overflow-x:auto;color:inherit">{title}{grid if table.rows else ""}{notes}</div>'


def _row(table: Table, row: Row) -> str:
    cells = "".join(
        f'<td style="{_style(column, text, row)}">{_content(table, row, column, text)}</td>'
        for column, text in zip(table.columns, row.cells, strict=True)
    )
    edge = f";border-left:4px solid {charts.RED}" if not row.ok else ""
    return f'<tr style="border-bottom:{_LINE}{edge}">{cells}</tr>'


def _style(column: str, text: str, row: Row) -> str:
    width = "min-width:12em" if column == "note" and text else _SPACES.get(column, _FIXED)
    ink = ""
    if text.startswith(("✓", "✗")):
        ink = f";font-weight:600;color:{charts.GREEN if row.ok else charts.RED}"
    return f"{_CELL};{width}{ink}"


def _content(table: Table, row: Row, column: str, text: str) -> str:
    if column == tables.BAR and row.bar is not None:
        return charts.svg_bar(row.bar, table.full_bytes)
    return escape(text)
