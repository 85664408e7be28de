"""What the commands that look into a model have in common: which model, on which data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from undrop.lab.cli._sources import Source

__all__ = [
    "Batches",
    "DataDir",
    "DataName",
    "Json",
    "LossName",
    "ModelName",
    "Progress",
    "RunFolderOrNone",
    "subject",
]

RunFolderOrNone = Annotated[
    Path | None, typer.Argument(metavar="[RUN]", help="A run's folder.", show_default=False)
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", help="Without a RUN: awd-lstm, …, newly initialised, or MODULE:NAME of your own."
    ),
]
DataName = Annotated[
    str | None,
    typer.Option(
        "--data", help="For --model: a corpus, or MODULE:NAME of (inputs, targets) pairs."
    ),
]
LossName = Annotated[
    str | None, typer.Option("--loss", help="For --model: MODULE:NAME; else cross-entropy.")
]
DataDir = Annotated[
    Path | None, typer.Option(help="Where the corpus is, if not where it was or would be.")
]
Batches = Annotated[int, typer.Option(min=1, help="The most batches to take.")]
Progress = Annotated[bool, typer.Option(help="Show a bar on stderr.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def subject(
    run: Path | None,
    model: str | None,
    data: str | None,
    loss: str | None,
    data_dir: Path | None,
    batches: int,
) -> Source:
    """The model and data that the options name.

    Raises:
        OptionError: if they name none, or two, or a run that is not there.
    """
    from undrop.errors import OptionError
    from undrop.lab.cli._sources import from_names, from_run

    if run is not None and model is None and not run.exists():
        raise OptionError(
            f"there is no run {run}: give a run's folder, or a model by --model and its data by --data."
        )
    if run is not None and model is None and data is None:
        return from_run(run, data_dir=data_dir, batches=batches)
    if run is None and model is not None and data is not None:
        return from_names(model, data, loss=loss, data_dir=data_dir, batches=batches)
    raise OptionError("say what to look into: a RUN, or else --model and --data.")
