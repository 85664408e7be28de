"""Measure what dropout does in a model, site by site, and advise what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undrop.lab.cli import COMMANDS, Answer
from undrop.lab.cli._options import Batches, Seconds, ShowProgress, SourceOptions
from undrop.lab.cli._output import check_outputs

Validation = Annotated[
    str | None,
    typer.Option(
        help="For --model: your own validation pairs as MODULE:NAME, to measure the benefit."
    ),
]
WithBenefit = Annotated[
    bool,
    typer.Option(help="Measure each site's benefit on the validation text of a run or corpus."),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        help="The learning rate of the steps that measure the benefit.",
        show_default="the run's, or 0.001",
    ),
]
WeightDecay = Annotated[
    float | None,
    typer.Option(
        help="Also measure the benefit of this weight decay.",
        show_default="one that shrinks the weights by 1 % in 20 steps",
    ),
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="BEFORE AFTER",
        help="Compare two files written by --save, without measuring.",
        show_default=False,
    ),
]


@COMMANDS.register("diagnose")
def diagnose(
    options: SourceOptions,
    seconds: Seconds = 30.0,
    batches: Batches = 16,
    implicit: Annotated[bool, typer.Option(help="Also measure the gradient noise.")] = True,
    benefit: WithBenefit = True,
    validation: Validation = None,
    learning_rate: LearningRate = None,
    weight_decay: WeightDecay = None,
    seed: Annotated[int, typer.Option(help="The seed of the masks.")] = 0,
    save: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the plots: png, pdf or svg.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML report to this file.")] = None,
    compare: Compare = None,
    progress: ShowProgress = True,
) -> Answer:
    """Measure the explicit and the implicit effect of dropout, with standard errors."""
    if compare is not None:
        from undrop.diagnosis.report.comparison import compare_files

        comparison = compare_files(*compare)
        return Answer(comparison, str(comparison))
    check_outputs(files=[save], pictures=[plot], pages=[html])
    source = options.open(batches)
    import torch

    import undrop
    from undrop.lab.cli._sources import load_user_object

    pairs = source.validation if validation is None else load_user_object(validation)
    device = next((p.device for p in source.model.parameters()), torch.device("cpu"))
    with source.explain_user_errors():
        diagnosis = undrop.diagnose(
            source.model,
            source.batches,
            optimizer=source.optimizer,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            validation=pairs if benefit else None,
            loss=source.loss,
            implicit=implicit,
            classes=source.classes,
            seconds=seconds,
            max_batches=batches,
            batch_dim=source.batch_dim,
            generator=torch.Generator(device).manual_seed(seed),
            progress=progress,
        )
    files = ((save, diagnosis.save), (plot, diagnosis.plot), (html, diagnosis.html))
    return Answer(diagnosis, str(diagnosis), files=files)
