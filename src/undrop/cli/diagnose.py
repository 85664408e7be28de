"""Tell what dropout does in a model, site by site, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undrop.cli._output import print_json
from undrop.cli._subject import (
    Batches,
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
    """Add ``undrop diagnose``."""
    app.command("diagnose", help=__doc__)(diagnose)


def diagnose(
    run: RunFolderOrNone = None,
    model: ModelName = None,
    data: DataName = None,
    loss: LossName = None,
    data_dir: DataDir = None,
    seconds: Annotated[
        float, typer.Option(help="The time there is: more gives smaller errors.")
    ] = 60.0,
    batches: Batches = 16,
    implicit: Annotated[
        bool, typer.Option(help="Whether to measure gradient noise as well.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the masks.")] = 0,
    save: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the plots: png, pdf or svg.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one HTML page.")] = None,
    progress: Annotated[bool, typer.Option(help="Show a bar on stderr.")] = True,
    json: Json = False,
) -> None:
    """Measure, print, and write what was asked for."""
    import torch

    import undrop

    source = subject(run, model, data, loss, data_dir, batches)
    device = next((p.device for p in source.model.parameters()), torch.device("cpu"))
    found = undrop.diagnose(
        source.model,
        source.batches,
        loss=source.loss,
        implicit=implicit,
        seconds=seconds,
        max_batches=batches,
        classes=source.classes,
        batch_dim=source.batch_dim,
        generator=torch.Generator(device).manual_seed(seed),
        progress=progress,
    )
    if save is not None:
        found.save(save)
    if plot is not None:
        found.plot(plot)
    if html is not None:
        found.html(html)
    if json:
        print_json(found.to_json())
    else:
        typer.echo(str(found))
