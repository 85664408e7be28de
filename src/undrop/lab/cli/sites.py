"""List every dropout of a model: where it is, its p and its mask."""

from __future__ import annotations

import typer

from undrop.lab.cli._output import print_json, print_table
from undrop.lab.cli._subject import (
    DataDir,
    DataName,
    Json,
    LossName,
    ModelName,
    RunFolderOrNone,
    subject,
)

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``undrop sites``."""
    app.command("sites", help=__doc__)(list_sites)


def list_sites(
    run: RunFolderOrNone = None,
    model: ModelName = None,
    data: DataName = None,
    loss: LossName = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Run the model once and list the dropouts it meets."""
    from undrop.diagnosis.measure.batches import collect
    from undrop.intercept import sites

    source = subject(run, model, data, loss, data_dir, 1)
    found = sites(source.model, collect(source.batches, 1)[0].inputs)
    if json:
        print_json(found.to_json())
        return
    head, *rows = found.table()
    print_table(head, rows, numbers={"p"})
