"""Tell what dropout does in a model, site by site, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrop.lab.cli._output import check_drawable, check_outputs, print_json
from undrop.lab.cli._subject import (
    Batches,
    DataDir,
    DataName,
    Json,
    LossName,
    ModelName,
    Progress,
    RunFolderOrNone,
    subject,
)

if TYPE_CHECKING:
    from undrop.diagnosis import Diagnosis
    from undrop.lab.cli._sources import Source

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
    progress: Progress = True,
    json: Json = False,
) -> None:
    """Measure, print, and write what was asked for."""
    check_outputs(files=[save, html], pictures=[plot])
    if html is not None:
        check_drawable()
    source = subject(run, model, data, loss, data_dir, batches)
    found = _measured(
        source, implicit=implicit, seconds=seconds, max_batches=batches, seed=seed, bar=progress
    )
    if json:
        print_json(found.to_json())
    else:
        typer.echo(str(found))
    for path, write in ((save, found.save), (plot, found.plot), (html, found.html)):
        if path is not None:
            write(path)


def _measured(source: Source, *, seed: int, bar: bool, **options: Any) -> Diagnosis:
    import torch

    import undrop

    device = next((p.device for p in source.model.parameters()), torch.device("cpu"))
    return undrop.diagnose(
        source.model,
        source.batches,
        loss=source.loss,
        classes=source.classes,
        batch_dim=source.batch_dim,
        generator=torch.Generator(device).manual_seed(seed),
        progress=bar,
        **options,
    )
