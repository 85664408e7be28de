"""What commands print and write: JSON, tables, a sign of life meanwhile, and where files may go."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["check_drawable", "check_outputs", "print_json", "print_table", "working"]

_LEAST = 7  # the width down to which a column of text gives way
_GAP = 2  # between columns


def check_outputs(
    *, files: Iterable[Path | None] = (), pictures: Iterable[Path | None] = ()
) -> None:
    """Refuse, before any work is done, what could not be written when it is done.

    Args:
        files: paths to write to; None is one that was not asked for.
        pictures: likewise, of plots: their suffix must be that of a kind of picture.

    Raises:
        RunError: if a file can't be written there.
        OptionError: if a suffix is not that of a kind of picture.
        MissingExtraError: if there are pictures and matplotlib is not installed.
    """
    from undrop.files import check_writable

    for picture in pictures:
        if picture is not None:
            _check_suffix(picture)
            check_writable(picture)
    for file in files:
        if file is not None:
            check_writable(file)


def check_drawable() -> None:
    """Refuse to go on where a picture is to be drawn in the end and can't be.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    import importlib.util

    from undrop.errors import MissingExtraError

    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("a picture", "matplotlib", "plot")


def _check_suffix(picture: Path) -> None:
    check_drawable()
    from matplotlib.backend_bases import FigureCanvasBase

    from undrop.errors import OptionError

    suffix = picture.suffix.removeprefix(".").lower()
    if suffix not in FigureCanvasBase.get_supported_filetypes():
        kind = f"{picture.suffix} is no kind of picture" if suffix else "it has no suffix"
        raise OptionError(f"{picture} can't be drawn: {kind}, use .png, .pdf or .svg.")


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
    """Print a table on stdout; where its numbers would not fit, a block of lines for each row.

    Args:
        columns: the headings.
        rows: the cells, as plain text.
        title: a line above it.
        numbers: the columns to align at the right, whose cells are never broken.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if title is not None:
        console.print(Text(title, style="bold"), soft_wrap=True)
    widths = _fitting(columns, rows, numbers, console.width)
    if widths is not None:
        console.print(_table(columns, rows, widths))
        return
    for place, row in enumerate(rows):
        if place:
            console.print()
        console.print(_block(columns, row))


def _fitting(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str], room: int
) -> dict[str, int] | None:
    """The width of each column of numbers, its heading broken if need be; None where none fits."""
    from rich.cells import cell_len

    cells = {
        name: max((cell_len(row[i]) for row in rows), default=0) for i, name in enumerate(columns)
    }
    whole = {name: max(cells[name], cell_len(name)) for name in columns}
    broken = {name: max([cells[name], *map(cell_len, name.split())]) for name in columns}
    text = sum(min(whole[name], _LEAST) for name in columns if name not in numbers)
    gaps = _GAP * (len(columns) - 1)
    for widths in (whole, broken):
        chosen = {name: widths[name] for name in columns if name in numbers}
        if sum(chosen.values()) + text + gaps <= room:
            return chosen
    return None


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Mapping[str, int]
) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in widths else "left"
        width = widths.get(column)
        table.add_column(Text(column), justify=justify, overflow="fold", width=width)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _block(columns: Sequence[str], row: Sequence[str]) -> Table:
    """The cells of one row below each other, each behind its heading."""
    from rich.table import Table
    from rich.text import Text

    block = Table(box=None, pad_edge=False, show_header=False)
    block.add_column(no_wrap=True)
    block.add_column(overflow="fold")
    for column, cell in zip(columns, row, strict=True):
        if cell:
            block.add_row(Text(column, style="bold"), Text(cell))
    return block
