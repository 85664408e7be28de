"""Train as undrop train does, with figures of what dropout does on the way."""

from __future__ import annotations

from typing import Annotated

import typer

from undrop.lab.cli.train import (
    Data,
    DataDir,
    Json,
    Model,
    ObjectiveName,
    Out,
    Preset,
    Resume,
    Seed,
    Settings,
    choose,
    settle,
    start,
)

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``undrop watch``."""
    app.command("watch", help=__doc__)(watch)


def watch(
    preset: Preset = None,
    model: Model = None,
    data: Data = None,
    objective: ObjectiveName = None,
    data_dir: DataDir = None,
    out: Out = None,
    seed: Seed = None,
    resume: Resume = False,
    settings: Settings = None,
    interval: Annotated[
        int, typer.Option(min=1, help="Steps between two looks; at 200 they cost 1 to 3 %.")
    ] = 200,
    implicit: Annotated[
        bool, typer.Option(help="Whether to look at the gradient noise, the dearer half.")
    ] = True,
    json: Json = False,
) -> None:
    """Add ½E[uᵀHu], each site's share and ‖ξ_approx‖ to metrics.jsonl, as lines of kind "watch".

    With --set train.loggers=tensorboard they go to TensorBoard too. Training itself is the same to
    the bit as without.
    """
    from undrop.diagnosis import Watcher
    from undrop.lab.train.callbacks import Watch

    chosen = choose(model=model, data=data, objective=objective, data_dir=data_dir, seed=seed)
    config = settle(preset, chosen, settings or [], out, resume)
    watcher = Watcher(interval=interval, implicit=implicit, seed=config.train.seed)
    start(config, out, resume, json, Watch(watcher))
