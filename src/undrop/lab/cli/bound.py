"""Evaluate the paper's generalisation bound on the last layer of runs, beside their measured gap."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undrop.lab.cli._output import print_json, print_table, working
from undrop.lab.cli._subject import DataDir, Json

if TYPE_CHECKING:
    from undrop.diagnosis import Bound

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``undrop bound``."""
    app.command("bound", help=__doc__)(bound)


def bound(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs' folders.")],
    batches: Annotated[
        int, typer.Option(min=1, help="Windows of text of each split, for features.")
    ] = 20,
    truncation: Annotated[
        float | None, typer.Option(help="B, where the loss is cut off.", show_default="log(words)")
    ] = None,
    delta: Annotated[float, typer.Option(help="The bound fails with this probability.")] = 0.05,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Evaluate every run and set them side by side."""
    from undrop.lab.train import RunFolder

    for run in runs:
        RunFolder(run).read_config()  # says so if there is no run, before the others are read
    found = {}
    for run in runs:
        with working(f"bounding {run}"):
            found[str(run)] = _bound(run, batches, truncation, delta, data_dir)
    if json:
        print_json({name: result.to_json() for name, result in found.items()})
        return
    results = list(found.values())
    print_table(
        ["", *(Path(name).name for name in found)],
        [
            [label, *(values[i] for values in map(_column, results))]
            for i, label in enumerate(_LABELS)
        ],
    )
    from undrop.diagnosis.theorem.generalization import CONSTANTS

    typer.echo()
    for assumption in results[0].assumptions[:3]:
        typer.echo(f"{assumption.what}: {_VERDICTS[assumption.holds]} ({assumption.why}).")
    typer.echo(CONSTANTS)


_VERDICTS = {True: "holds", False: "FAILS", None: "can't be told"}
_LABELS = (
    "tokens n",
    "A = ‖Wᵀ‖₂,₁",
    "θ",
    "μ(W), mean ‖Dℓ‖",
    "ν(W), mean tr D²ℓ",
    "term: gradient",
    "term: hessian",
    "term: tail",
    "term: ζ",
    "sum (Theorem 4.1)",
    "sum with τ (Theorem B.1)",
    "min over β of G",
    "sum < B: says more than ℓ ≤ B",
    "training loss, cut off",
    "test loss, cut off",
    "measured test - 1.01 · training",
)


def _column(result: Bound) -> list[str]:
    numbers = (
        result.norm,
        result.theta,
        result.mu,
        result.nu,
        *result.terms.values(),
        result.total,
        sum(result.general_terms.values()),
        result.g_minimum,
    )
    figures = (result.train_loss, result.test_loss, result.gap)
    useful = "yes" if result.total < result.truncation else "no"
    return [f"{result.examples:,}", *(f"{x:.4g}" for x in numbers), useful, *map(str, figures)]


def _bound(
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
