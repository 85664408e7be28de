"""Compare training without regularization, with dropout and with Analytic; needs no download."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrop.lab.cli import COMMANDS, Answer
from undrop.lab.cli._options import Settings
from undrop.report import Table

if TYPE_CHECKING:
    from undrop.lab.train import Config, Summary

METHODS = {"none": "no regularization", "dropout": "dropout", "analytic": "Analytic, no dropout"}
_NO_CURVES = "no curves, because matplotlib is not installed: pip install 'undrop[plot]'."
_STOPPED = (
    "stopped: a demo can't be resumed; its runs are in {folder}. `undrop demo` starts a new one."
)


@COMMANDS.register("demo")
def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="A new folder for the runs and the figure.", show_default="temporary"),
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of all three runs.")] = 1,
    settings: Settings = None,
) -> Answer:
    """Train a small LSTM in three ways, from the same weights and on the same text.

    The text is the language reference that comes with Python.
    """
    folder = _new_folder(out)
    from undrop.lab.train import configure

    train = {"seed": seed}
    configs = {
        name: configure("demo", {"train": train, "objective": {"name": name}}, settings or [])
        for name in METHODS
    }
    rows = _rows(_train(configs, folder))
    picture = _draw(folder)
    curves = f"curves: {picture}" if picture else _NO_CURVES
    return Answer({"rows": rows, "picture": picture, "out": folder}, _table(rows), curves)


def _new_folder(out: Path | None) -> Path:
    from undrop.errors import RunError

    if out is None:
        return Path(tempfile.mkdtemp(prefix="undrop-demo-"))
    if out.is_dir() and any(out.iterdir()):
        raise RunError(f"{out} is not empty: give --out a new folder.")
    return out


def _train(configs: Mapping[str, Config], folder: Path) -> dict[str, Summary]:
    from undrop.errors import StoppedError
    from undrop.lab.cli._progress import DemoProgress
    from undrop.lab.train import train_interleaved
    from undrop.report import Progress

    with Progress(keep=True) as progress:
        progress.print("Training the same LSTM in three ways, one epoch of each in turn.")
        width = max(map(len, METHODS.values()))
        bars = {name: DemoProgress(progress, METHODS[name], width) for name in METHODS}
        try:
            return train_interleaved(configs, out=folder, callbacks=bars)
        except StoppedError:  # its message says how to resume a single run
            raise StoppedError(_STOPPED.format(folder=folder)) from None


def _rows(summaries: Mapping[str, Summary]) -> list[dict[str, Any]]:
    dropout_seconds = summaries["dropout"].seconds
    return [
        {
            "method": name,
            "best_valid_ppl": summary.best_valid_ppl,
            "best_epoch": summary.best_epoch,
            "test_ppl": summary.test_ppl,
            "seconds": summary.seconds,
            "times_dropout": summary.seconds / dropout_seconds,
        }
        for name, summary in summaries.items()
    ]


def _table(rows: list[dict[str, Any]]) -> Table:
    headings = ["method", "validation perplexity", "at epoch", "test", "seconds", "× dropout"]
    cells = [
        [
            METHODS[row["method"]],
            f"{row['best_valid_ppl']:.2f}",
            str(row["best_epoch"]),
            f"{row['test_ppl']:.2f}",
            f"{row['seconds']:.1f}",
            f"{row['times_dropout']:.2f}",
        ]
        for row in rows
    ]
    return Table(headings, cells, numbers=headings[1:])


def _draw(folder: Path) -> Path | None:
    """Draw the curves and return the path of the figure, or None if matplotlib is missing."""
    from undrop.errors import MissingExtraError
    from undrop.lab.train import RunFolder
    from undrop.lab.train.runs import plot_curves

    epochs = {title: RunFolder(folder / name).metrics.epochs() for name, title in METHODS.items()}
    try:
        plot_curves(epochs, folder / "curves.png")
    except MissingExtraError:
        return None
    return folder / "curves.png"
