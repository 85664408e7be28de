"""List runs with their best perplexity."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from undrop.lab.cli import COMMANDS, Answer
from undrop.report import Table, duration


@COMMANDS.register("runs")
def runs(
    folder: Annotated[Path, typer.Argument(help="A folder of runs, at any depth.")] = Path("runs"),
) -> Answer:
    """List every run in a folder with its perplexities, the best first.

    A second line shows the status of a run that is not finished.
    """
    from undrop.lab.train.runs import describe_run, find_runs

    rows = [describe_run(run) for run in find_runs(folder)]
    rows.sort(key=lambda row: (row.get("best_valid_ppl") is None, row.get("best_valid_ppl")))
    headings = ("run", "objective", "data", "seed", "epochs", "valid", "test", "time")
    return Answer(rows, Table(headings, [_cells(row) for row in rows], numbers=headings[3:]))


def _cells(row: dict[str, Any]) -> list[str]:
    name = row["path"] if row["status"] == "finished" else f"{row['path']}\n{row['status']}"
    if "model" not in row:
        return [name, *[""] * 7]
    return [
        name,
        row["objective"],
        row["data"],
        str(row["seed"]),
        f"{row['epochs']}/{row['planned_epochs']}",
        _format_perplexity(row["best_valid_ppl"]),
        _format_perplexity(row["test_ppl"]),
        duration(row["seconds"]),
    ]


def _format_perplexity(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
