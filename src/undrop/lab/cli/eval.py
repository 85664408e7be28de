"""Measure the perplexity of a run's best weights.

It is that of whole splits, also where the run itself was judged by the first data.eval_tokens of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrop.lab.cli._output import print_json, print_table, working

if TYPE_CHECKING:
    from undrop.lab.train.runs import Run

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
    from undrop.errors import UnknownNameError
    from undrop.lab.corpora import SPLITS
    from undrop.lab.train.runs import open_run

    splits = split or ["valid", "test"]
    for name in splits:
        if name not in SPLITS:
            raise UnknownNameError("split", name, SPLITS)
    opened = open_run(run, data_dir=data_dir)
    results = {name: _measured(opened, name, batch_size) for name in splits}
    judged_by = opened.config.data.eval_tokens
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


def _measured(opened: Run, split: str, batch_size: int | None) -> dict[str, Any]:
    """The figures of one split, in the precision of the run."""
    from undrop.lab.train.environment import autocast
    from undrop.lab.train.metrics import mean_loss, perplexity

    data, device = opened.config.data, next(opened.model.parameters()).device
    tokens, streams = opened.corpus.splits[split], batch_size or data.eval_batch_size
    with (
        working(f"reading {len(tokens):,} tokens of {split}"),
        autocast(opened.config.train, device),
    ):
        loss = mean_loss(opened.model, tokens, batch_size=streams, length=data.length)
    return {"loss": loss, "perplexity": perplexity(loss), "tokens": len(tokens)}
