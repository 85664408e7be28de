"""Draw the curves of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undrop.lab.cli._output import check_outputs

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``undrop plot``."""
    app.command("plot", help=__doc__)(plot)


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    value: Annotated[
        str, typer.Option(help="valid_ppl, test_ppl, train_ppl, loss, explicit, implicit, …")
    ] = "valid_ppl",
    out: Annotated[Path, typer.Option(help="The picture: png, pdf or svg.")] = Path("curves.png"),
) -> None:
    """Draw a value of each epoch, one curve a run, each with its own dash and marker."""
    from undrop.lab.train import RunFolder
    from undrop.lab.train.plots import curves

    check_outputs(pictures=[out])
    records = {}
    for run in runs:
        folder = RunFolder(run)
        folder.read_config()  # says so if there is no run
        epochs = [record for record in folder.metrics.read() if record["kind"] == "epoch"]
        records[str(run)] = epochs
    curves(records, out, value=value)
    typer.echo(str(out))
