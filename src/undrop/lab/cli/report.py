"""Sum up the records of experiments: figures, tables and verdicts as HTML, Markdown and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undrop.lab.cli._output import working

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``undrop report``."""
    app.command("report", help=__doc__)(report)


def report(
    results: Annotated[
        Path, typer.Argument(help="A folder that undrop reproduce wrote to.")
    ] = Path("results/small"),
    scale: Annotated[
        str | None, typer.Option(help="smoke, small or paper.", show_default="the folder's name")
    ] = None,
    experiment: Annotated[
        list[str] | None, typer.Option(help="Only this one; repeatable.", show_default="all")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds.", show_default="all there are")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write.", show_default="the results' folder")
    ] = None,
) -> None:
    """Write report.html, report.md, figures/ and claims.json."""
    from undrop.lab.reproduce import EXPERIMENTS
    from undrop.lab.reproduce.report import write_report

    scale = scale or _scale_of(results)
    with working(f"drawing what {results} holds"):
        written = write_report(results, experiment or EXPERIMENTS, scale, seeds, out)
    for path in written:
        typer.echo(str(path))


def _scale_of(results: Path) -> str:
    """The scale that a folder of results is named after."""
    from undrop.errors import OptionError, RunError
    from undrop.lab.reproduce.tables import SCALES

    if not results.is_dir():
        raise RunError(f"there is no folder {results}: `undrop reproduce` writes one.")
    name = results.absolute().name
    if name not in SCALES:
        raise OptionError(f"{results} is named after no scale: add --scale ({', '.join(SCALES)}).")
    return name
