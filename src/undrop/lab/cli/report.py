"""Summarize the records of experiments as figures, tables and verdicts, in HTML, Markdown and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undrop.errors import OptionError, RunError
from undrop.files import near_path
from undrop.lab.cli import COMMANDS
from undrop.lab.cli._names import experiments, one_of
from undrop.lab.cli._output import status_line
from undrop.lab.cli.reproduce import SCOREBOARD
from undrop.lab.reproduce.tables import SCALES, experiments_at


@COMMANDS.register("report")
def report(
    results: Annotated[Path, typer.Argument(help="A folder that `undrop reproduce` wrote.")] = Path(
        "results/small"
    ),
    scale: Annotated[
        str | None,
        typer.Option(
            help="smoke, small, medium or paper.",
            show_default="the folder's name",
            **one_of("scale", SCALES),
        ),
    ] = None,
    experiment: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this experiment; repeatable.",
            show_default="all",
            **one_of("experiment", experiments),
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="The number of seeds to use.", show_default="all")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write to.", show_default="RESULTS")
    ] = None,
) -> None:
    """Write report.html, report.md, figures/ and claims.json."""
    if scale is None and results.absolute().name == SCOREBOARD:
        from undrop.lab.scoreboard.report import write_board

        if experiment:
            raise OptionError("the scoreboard is one page: leave out --experiment.")
        typer.echo(str(write_board(results, out or results, seeds)))
        return
    scale = scale or _scale_of(results)
    from undrop.lab.reproduce.report import write_report

    with status_line(f"drawing the figures of {results}"):
        written = write_report(results, experiment or experiments_at(scale), scale, seeds, out)
    for path in written:
        typer.echo(str(path))


def _scale_of(results: Path) -> str:
    """Return the scale that a folder of results is named after."""
    if not results.is_dir():
        near = near_path(results)
        guess = f"did you mean {near}? " if near else ""
        raise RunError(f"there is no folder {results}: {guess}`undrop reproduce` writes one.")
    name = results.absolute().name
    if name not in SCALES:
        scales = ", ".join(SCALES)
        raise OptionError(f"{results} is not named after a scale: add --scale ({scales}).")
    return name
