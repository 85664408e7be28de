"""What commands print: JSON for programs, tables for people, and a sign of life meanwhile."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import typer

__all__ = ["print_json", "print_table", "working"]


def working(what: str) -> AbstractContextManager[object]:
    """Say on stderr, where that is a terminal, what is being done until it is done."""
    from rich.console import Console
    from rich.text import Text

    return Console(stderr=True).status(Text(what))


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout, with nothing around it that a program would trip over."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    numbers: Collection[str] = (),
) -> None:
    """Print a table on stdout.

    Args:
        columns: the headings.
        rows: the cells, as plain text.
        title: a line above it.
        numbers: the columns to align at the right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if title is not None:
        console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in numbers else "left"
        table.add_column(Text(column), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
