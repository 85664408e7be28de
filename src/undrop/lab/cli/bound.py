"""Compare the paper's generalization bound on the last layer of runs with the measured gap."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undrop.lab.cli import COMMANDS, Answer
from undrop.lab.cli._options import DataDir
from undrop.lab.cli._output import status_line
from undrop.report import Table

if TYPE_CHECKING:
    from undrop.diagnosis import Bound


@COMMANDS.register("bound")
def bound(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="The folders of runs.")],
    batches: Annotated[
        int, typer.Option(min=1, help="The number of windows to read from each split.")
    ] = 20,
    truncation: Annotated[
        float | None,
        typer.Option(help="B, the largest value of the truncated loss.", show_default="log(words)"),
    ] = None,
    delta: Annotated[float, typer.Option(help="The probability that the bound fails.")] = 0.05,
    data_dir: DataDir = None,
) -> Answer:
    """Evaluate the bounds of Theorems 4.1 and B.1 for every run, side by side."""
    from undrop.lab.train import RunFolder

    for run in runs:
        RunFolder(run).read_config()  # refuses a folder without a run before any work is done
    bounds = {}
    for run in runs:
        with status_line(f"evaluating {run}"):
            bounds[str(run)] = _evaluate(run, batches, truncation, delta, data_dir)
    headings = ["", *(run.name for run in map(Path, bounds))]
    columns = [result.rows() for result in bounds.values()]
    rows = [(cells[0][0], *(cell for _, cell in cells)) for cells in zip(*columns, strict=True)]
    remarks = next(iter(bounds.values())).remarks()
    sentences = (remark[0].upper() + remark[1:] for remark in remarks)
    return Answer(bounds, Table(headings, rows, numbers=headings[1:]), "", *sentences)


def _evaluate(
    path: Path, batches: int, truncation: float | None, delta: float, data_dir: Path | None
) -> Bound:
    import undrop
    from undrop.diagnosis import last_layer
    from undrop.lab.cli._sources import windows
    from undrop.lab.train.runs import open_run

    run = open_run(path, data_dir=data_dir)
    train, test = (
        last_layer(
            run.model,
            itertools.islice(windows(run.model, split, run.config, batches, logits=True), batches),
        )
        for split in (run.corpus.train, run.corpus.test)
    )
    return undrop.bound(
        train.weight,
        train.features,
        train.labels,
        bias=train.bias,
        test=(test.features, test.labels),
        truncation=truncation,
        delta=delta,
    )
