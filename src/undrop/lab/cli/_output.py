"""What commands print and where they may write."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from undrop.report import Table, as_json, terminal_width, wrap


def check_outputs(
    *, files: Iterable[Path | None] = (), pictures: Iterable[Path | None] = ()
) -> None:
    """Refuse, before any work is done, a path that could not be written at its end.

    Args:
        files: paths to write to; None is one that was not asked for.
        pictures: paths of figures, whose suffix must name a kind of picture.

    Raises:
        RunError: if a file can't be written there.
        OptionError: if a suffix names no kind of picture.
        MissingExtraError: if there are pictures and matplotlib is not installed.
    """
    from undrop.files import check_writable
    from undrop.report.figures import check_picture

    for picture in pictures:
        if picture is not None:
            check_picture(picture)
            check_writable(picture)
    for file in files:
        if file is not None:
            check_writable(file)


def write_outputs(*outputs: tuple[Path | None, Callable[[Path], None]]) -> None:
    """Write the files that were asked for, and name each on stderr.

    Args:
        outputs: a path, None for one that was not asked for, and what writes it.
    """
    for path, write in outputs:
        if path is not None:
            write(path)
            typer.echo(f"written: {path}", err=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on stderr what is being done while a ``with`` block runs, if stderr is a terminal."""
    from undrop.report import Progress

    with Progress() as progress:
        progress.bar(f"{what} …")
        yield


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout."""
    typer.echo(json.dumps(as_json(value), indent=2, ensure_ascii=False))


def print_text(text: str) -> None:
    """Print prose on stdout, broken between words on a terminal."""
    typer.echo("\n".join(wrap(text, terminal_width())))


def print_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    numbers: Collection[str] = (),
) -> None:
    """Print a table that fits the terminal on stdout.

    Args:
        heads: the headings.
        rows: the cells, as plain text.
        title: a line above the table.
        numbers: the headings of columns of figures, which are aligned right and never broken.
    """
    head, body = Table(heads, rows, numbers).lines(terminal_width())
    for line in [*([title] if title else []), *head]:
        typer.secho(line, bold=True)
    for line in body:
        typer.echo(line)


def print_names(names: Mapping[str, str], *, json: bool) -> None:
    """Print names with a line about each."""
    if json:
        print_json([{"name": name, "about": line} for name, line in names.items()])
    else:
        print_table(["name", "what it is"], list(names.items()))
