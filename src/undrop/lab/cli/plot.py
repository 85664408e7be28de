"""Plot runs over their epochs: perplexities, losses, or the parts of the objective."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undrop.lab.cli import COMMANDS
from undrop.lab.cli._output import check_outputs


@COMMANDS.register("plot")
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="The folders of runs.")],
    value: Annotated[
        str,
        typer.Option(help="The value: valid_ppl, test_ppl, train_ppl, loss, explicit, implicit, …"),
    ] = "valid_ppl",
    out: Annotated[Path, typer.Option(help="The figure: png, pdf or svg.")] = Path("curves.png"),
) -> None:
    """Plot a value over the epochs, with one curve for each run."""
    from undrop.lab.train import RunFolder
    from undrop.lab.train.runs import plot_curves

    check_outputs(pictures=[out])
    records = {}
    for run in runs:
        folder = RunFolder(run)
        folder.read_config()  # refuses a folder without a run
        records[str(run)] = folder.metrics.epochs()
    plot_curves(records, out, value=value)
    typer.echo(str(out))
