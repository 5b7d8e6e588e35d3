"""The terminal: lines and tables, and peers' text made safe to look at."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Lines are never broken by us: a log or a pipe keeps them whole, a terminal wraps them itself.
console = Console(highlight=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)


def say(line: str) -> None:
    console.print(escape(visible(line)))


def visible(text: str) -> str:
    """Text from anyone, with everything a terminal might obey turned into its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A plain table; text first, numbers to the right."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], (int, float)) for row in rows) and bool(rows)
        grid.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(escape(visible(_cell(value))) for value in row))
    console.print(grid)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
