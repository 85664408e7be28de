"""Measure the perplexity of a run's best weights.

It is that of whole splits, also where the run itself was judged by the first data.eval_tokens of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undrop.cli._output import print_json, print_table, working

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``undrop eval``."""
    app.command("eval", help=__doc__)(evaluate)


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    split: Annotated[
        list[str] | None, typer.Option(help="train, valid or test; repeatable.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Streams; 1 gives every word all its context.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where its corpus is, if not where it was.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Evaluate on whole splits, without noise, the state carried on."""
    from undrop.corpora import SPLITS
    from undrop.errors import UnknownNameError
    from undrop.train.devices import autocast
    from undrop.train.evaluation import mean_loss
    from undrop.train.meters import perplexity
    from undrop.train.runs import open_run

    splits = split or ["valid", "test"]
    for name in splits:
        if name not in SPLITS:
            raise UnknownNameError("split", name, SPLITS)
    opened = open_run(run, data_dir=data_dir)
    data, device = opened.config.data, next(opened.model.parameters()).device
    results = {}
    for name in splits:
        tokens = opened.corpus.splits[name]
        streams = batch_size or data.eval_batch_size
        with (
            working(f"reading {len(tokens):,} tokens of {name}"),
            autocast(opened.config.train, device),
        ):
            loss = mean_loss(opened.model, tokens, batch_size=streams, length=data.length)
        results[name] = {"loss": loss, "perplexity": perplexity(loss), "tokens": len(tokens)}
    judged_by = data.eval_tokens
    if judged_by is not None and any(r["tokens"] > judged_by for r in results.values()):
        typer.echo(
            f"These are whole splits; the run's own figures are of the first {judged_by:,} tokens of "
            "each (data.eval_tokens), so they differ.",
            err=True,
        )
    if json:
        print_json(results)
        return
    print_table(
        ["split", "perplexity", "loss", "tokens"],
        [
            [name, f"{r['perplexity']:.2f}", f"{r['loss']:.4f}", f"{r['tokens']:,}"]
            for name, r in results.items()
        ],
        numbers={"perplexity", "loss", "tokens"},
    )
