"""Measure the perplexity of a run's best weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrop.lab.cli import COMMANDS, Answer
from undrop.lab.cli._names import named
from undrop.lab.cli._options import DataDir, RunFolderArgument
from undrop.lab.cli._output import status_line
from undrop.report import Table

if TYPE_CHECKING:
    from undrop.lab.train.runs import Run

_SPLITS = {"train": "training", "valid": "validation", "test": "test"}


@COMMANDS.register("eval")
def evaluate(
    run: RunFolderArgument,
    split: Annotated[
        list[str] | None,
        typer.Option(
            help="train, valid or test; repeatable.",
            show_default="valid and test",
            **named("split", _SPLITS),
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

    If data.eval_tokens is set, the run's own perplexities are of that many tokens of each split.
    """
    from undrop.lab.train.runs import open_run

    opened = open_run(run, data_dir=data_dir)
    results = {name: _measured(opened, name, batch_size) for name in split or ["valid", "test"]}
    first = opened.config.data.eval_tokens
    if first is not None and any(r["tokens"] > first for r in results.values()):
        typer.echo(
            f"These figures are of whole splits; the run's own are of the first {first:,} tokens of "
            "each (data.eval_tokens), so they differ.",
            err=True,
        )
    heads = ("split", "perplexity", "loss", "tokens")
    rows = [
        (name, f"{r['perplexity']:.2f}", f"{r['loss']:.4f}", f"{r['tokens']:,}")
        for name, r in results.items()
    ]
    return Answer(results, Table(heads, rows, numbers=heads[1:]))


def _measured(opened: Run, split: str, batch_size: int | None) -> dict[str, Any]:
    """The figures of one split, in the precision of the run."""
    from undrop.lab.train.environment import autocast
    from undrop.lab.train.metrics import mean_loss, perplexity

    data, device = opened.config.data, next(opened.model.parameters()).device
    tokens, streams = opened.corpus.splits[split], batch_size or data.eval_batch_size
    with (
        status_line(f"reading {len(tokens):,} tokens of {split}"),
        autocast(opened.config.train, device),
    ):
        loss = mean_loss(opened.model, tokens, batch_size=streams, length=data.length)
    return {"loss": loss, "perplexity": perplexity(loss), "tokens": len(tokens)}
