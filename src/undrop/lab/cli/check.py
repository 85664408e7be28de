"""Hold the analytic terms against Monte Carlo on a batch, to see whether p is too large for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from undrop.lab.cli._output import print_json
from undrop.lab.cli._subject import (
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
    from undrop.lab.cli._sources import Source
    from undrop.objectives import Objective

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``undrop check``."""
    app.command("check", help=__doc__)(check)


def check(
    run: RunFolderOrNone = None,
    model: ModelName = None,
    data: DataName = None,
    loss: LossName = None,
    objective: Annotated[
        str | None,
        typer.Option(help="analytic, explicit, …", show_default="the run's own, or analytic"),
    ] = None,
    data_dir: DataDir = None,
    seconds: Annotated[float, typer.Option(help="The time there is.")] = 20.0,
    progress: Progress = True,
    json: Json = False,
) -> None:
    """Compare on the first batch."""
    import undrop
    from undrop.diagnosis.measure.batches import collect

    source = subject(run, model, data, loss, data_dir, 1)
    batch = collect(source.batches, 1)[0]
    found = undrop.check(
        _objective(source, objective),
        source.model,
        (batch.inputs, batch.targets),
        seconds=seconds,
        progress=progress,
    )
    if json:
        print_json(found.to_json())
    else:
        typer.echo(str(found))


def _objective(source: Source, name: str | None) -> Objective:
    """The objective that was named, or the run's own if it has an analytic part."""
    from undrop.lab.train.components import OBJECTIVES, build, complete
    from undrop.objectives import Analytic, Dropout

    supplied = {"loss": source.loss, "batch_dim": source.batch_dim}
    if name is None and source.run is not None:
        config = source.run.config.objective
        own: Objective = build(OBJECTIVES, config.name, config.options, **supplied)
        if isinstance(own, Analytic) or (isinstance(own, Dropout) and own.noise == "analytic"):
            return own
    options = complete(OBJECTIVES, {"name": name or "analytic"}, "analytic")
    chosen: Objective = build(OBJECTIVES, options.pop("name"), options, **supplied)
    return chosen
