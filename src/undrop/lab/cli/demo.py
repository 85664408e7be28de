"""No download: none, dropout and Analytic side by side on Python's own manual."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from undrop.lab.cli._output import check_drawable, print_json, print_table
from undrop.lab.train.callbacks import Callback, RunInfo

if TYPE_CHECKING:
    from undrop.lab.train import Summary

__all__ = ["register"]

METHODS = {"none": "no regularization", "dropout": "dropout", "analytic": "Analytic, no dropout"}
_REFRESH = 0.1  # seconds
_STOPPED = "stopped: a demo does not go on, undrop demo begins a new one; its runs are in {folder}."


def register(app: typer.Typer) -> None:
    """Add ``undrop demo``."""
    app.command("demo", help=__doc__)(demo)


def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="A new folder for runs and picture.", show_default="temporary"),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same for all three.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any other setting; repeatable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Train one small LSTM in three ways, from the same weights, on the same windows."""
    from undrop.errors import StoppedError
    from undrop.lab.train import configure, train_interleaved

    check_drawable()
    folder = _new(out)
    chosen = {"train": {"seed": seed}}
    configs = {
        name: configure("demo", {**chosen, "objective": {"name": name}}, settings or [])
        for name in METHODS
    }
    show = Console(stderr=True)
    show.print("The same LSTM, weights and windows three times; an epoch of each in turn.")
    with _bars(show) as bars:
        lines = {name: _Row(bars, show, METHODS[name]) for name in METHODS}
        try:
            summaries = train_interleaved(configs, out=folder, callbacks=lines)
        except StoppedError:  # which tells how to go on with one of the three
            raise StoppedError(_STOPPED.format(folder=folder)) from None
    rows, picture = _rows(summaries), folder / "curves.png"
    if json:
        print_json({"rows": rows, "picture": str(picture), "out": str(folder)})
        _draw(folder, picture)
    else:
        _print(rows)
        _draw(folder, picture)
        typer.echo(f"curves: {picture}")


def _new(out: Path | None) -> Path:
    from undrop.errors import RunError

    if out is None:
        return Path(tempfile.mkdtemp(prefix="undrop-demo-"))
    if out.is_dir() and any(out.iterdir()):
        raise RunError(f"{out} is not empty: give --out a new folder.")
    return out


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<21}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[epoch]:>3}/{task.fields[epochs]}"),
        TextColumn("{task.fields[parts]:<42}"),
        TextColumn("validation {task.fields[valid]}"),
        console=console,
        disable=not console.is_terminal,
    )


class _Row(Callback):
    """One run's line among the bars; where there is no terminal, a line each epoch."""

    def __init__(self, bars: Progress, console: Console, title: str) -> None:
        self._bars, self._console, self._title = bars, console, title
        self._task: TaskID = bars.add_task(title, total=1.0, epoch=0, epochs=0, parts="", valid="…")
        self._shown = 0.0

    def begin(self, info: RunInfo) -> None:
        self._bars.update(self._task, epochs=info.epochs)

    def step(self, done: float, tokens: int, parts: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self._shown > _REFRESH:
            shown = "  ".join(f"{name} {value:.2f}" for name, value in parts.items())
            self._bars.update(self._task, completed=done, parts=shown)
            self._shown = now

    def record(self, record: Mapping[str, Any]) -> None:
        if record["kind"] != "epoch":
            return
        epoch, valid = record["epoch"], f"{record['valid_ppl']:.2f}"
        self._bars.update(self._task, epoch=epoch, valid=valid)
        if not self._console.is_terminal:
            self._console.print(f"{self._title}: epoch {epoch}, validation perplexity {valid}")

    def end(self, summary: Mapping[str, Any]) -> None:
        self._bars.update(self._task, completed=1.0)


def _rows(summaries: Mapping[str, Summary]) -> list[dict[str, Any]]:
    base = summaries["dropout"].seconds
    return [
        {
            "method": name,
            "best_valid_ppl": summary.best_valid_ppl,
            "best_epoch": summary.best_epoch,
            "test_ppl": summary.test_ppl,
            "seconds": summary.seconds,
            "times_dropout": summary.seconds / base,
        }
        for name, summary in summaries.items()
    ]


def _print(rows: list[dict[str, Any]]) -> None:
    print_table(
        ["method", "validation perplexity", "at epoch", "test", "seconds", "× dropout"],
        [
            [
                METHODS[row["method"]],
                f"{row['best_valid_ppl']:.2f}",
                str(row["best_epoch"]),
                f"{row['test_ppl']:.2f}",
                f"{row['seconds']:.1f}",
                f"{row['times_dropout']:.2f}",
            ]
            for row in rows
        ],
        numbers={"validation perplexity", "at epoch", "test", "seconds", "× dropout"},
    )


def _draw(folder: Path, picture: Path) -> None:
    from undrop.lab.train import RunFolder
    from undrop.lab.train.plots import curves

    records = {title: RunFolder(folder / name).metrics.read() for name, title in METHODS.items()}
    epochs = {
        title: [record for record in found if record["kind"] == "epoch"]
        for title, found in records.items()
    }
    curves(epochs, picture)
