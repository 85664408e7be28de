"""Compare the paper's generalization bound on the last layer of runs with the measured gap."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undrop.lab.cli import COMMANDS, Answer
from undrop.lab.cli._options import DataDir
from undrop.lab.cli._output import status_line
from undrop.report import Table


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
    import undrop
    from undrop.diagnosis import last_layer
    from undrop.lab.cli._sources import windows
    from undrop.lab.train.folder import RunFolder
    from undrop.lab.train.runs import open_run

    for folder in runs:
        RunFolder(folder).read_config()  # refuses a folder without a run before any work is done
    bounds = {}
    for folder in runs:
        with status_line(f"evaluating {folder}"):
            run = open_run(folder, data_dir=data_dir)
            train, test = (
                last_layer(run.model, windows(run.model, split, run.config, batches, logits=True))
                for split in (run.corpus.train, run.corpus.test)
            )
            bounds[str(folder)] = undrop.bound(
                train.weight,
                train.features,
                train.labels,
                bias=train.bias,
                test=(test.features, test.labels),
                truncation=truncation,
                delta=delta,
            )
    headings = ["", *(Path(folder).name for folder in bounds)]
    columns = [result.rows() for result in bounds.values()]
    rows = [(cells[0][0], *(cell for _, cell in cells)) for cells in zip(*columns, strict=True)]
    remarks = next(iter(bounds.values())).remarks()
    sentences = (remark[0].upper() + remark[1:] for remark in remarks)
    return Answer(bounds, Table(headings, rows, numbers=headings[1:]), "", *sentences)
