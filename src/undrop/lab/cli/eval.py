"""Measure the perplexity of a run's best weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrop.lab.cli import COMMANDS, Answer
from undrop.lab.cli._names import one_of
from undrop.lab.cli._options import DataDir, RunFolderArgument
from undrop.lab.cli._output import status_line
from undrop.report import Table

if TYPE_CHECKING:
    from undrop.lab.train.runs import Run

_SPLITS = {"train": "training", "valid": "validation", "test": "test"}


@COMMANDS.register("eval")
def evaluate(
    folder: RunFolderArgument,
    split: Annotated[
        list[str] | None,
        typer.Option(
            help="train, valid or test; repeatable.",
            show_default="valid and test",
            **one_of("split", _SPLITS),
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The number of parallel streams; with 1, every word sees the whole text before it.",
            show_default="the run's",
        ),
    ] = None,
    data_dir: DataDir = None,
) -> Answer:
    """Evaluate whole splits, without noise; the state carries over from window to window.

    If data.eval_tokens was set, the run itself evaluated only that many tokens of each split.
    """
    from undrop.lab.train.runs import open_run

    run = open_run(folder, data_dir=data_dir)
    results = {name: _evaluate_split(run, name, batch_size) for name in split or ["valid", "test"]}
    limit = run.config.data.eval_tokens
    if limit is not None and any(result["tokens"] > limit for result in results.values()):
        typer.echo(
            f"The run evaluated only the first {limit:,} tokens of each split (data.eval_tokens), so "
            "its perplexities differ from these, which are of whole splits.",
            err=True,
        )
    headings = ("split", "perplexity", "loss", "tokens")
    rows = [
        (name, f"{result['perplexity']:.2f}", f"{result['loss']:.4f}", f"{result['tokens']:,}")
        for name, result in results.items()
    ]
    return Answer(results, Table(headings, rows, numbers=headings[1:]))


def _evaluate_split(run: Run, split: str, batch_size: int | None) -> dict[str, Any]:
    """Return the loss and the perplexity of a split, computed in the precision of the run."""
    from undrop.lab.train.environment import autocast
    from undrop.lab.train.metrics import mean_loss, perplexity

    config, device = run.config, next(run.model.parameters()).device
    tokens, length = run.corpus.splits[split], config.data.length
    streams = batch_size or config.data.eval_batch_size
    status = f"reading {len(tokens):,} tokens of {split}"
    with status_line(status), autocast(config.train, device):
        loss = mean_loss(run.model, tokens, batch_size=streams, length=length)
    return {"loss": loss, "perplexity": perplexity(loss), "tokens": len(tokens)}
