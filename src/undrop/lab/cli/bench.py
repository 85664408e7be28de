"""Time and memory of every method on this machine, as ratios to dropout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undrop.lab.cli._output import check_outputs, print_table

if TYPE_CHECKING:
    from rich.progress import Progress

    from undrop.lab.bench import Row

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``undrop bench``."""
    app.command("bench")(bench)


def bench(
    model: Annotated[str, typer.Option(help="awd-lstm, transformer or mlp.")] = "awd-lstm",
    size: Annotated[str, typer.Option(help="small or paper.")] = "small",
    rounds: Annotated[int, typer.Option(help="How often each method is timed.", min=1)] = 10,
    methods: Annotated[str, typer.Option(help="Which methods, with commas; all by default.")] = "",
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios to this file.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch; 0 leaves them alone.", min=0)] = 0,
) -> None:
    """Time forward and backward of one step by each method, in turns in one process."""
    import torch

    from undrop.lab.bench import METHODS
    from undrop.lab.bench import bench as run

    check_outputs(files=[json], pictures=[plot])
    if threads:
        torch.set_num_threads(threads)
    names = [m.strip() for m in methods.split(",") if m.strip()] or list(METHODS)
    names = list(dict.fromkeys(["dropout", *names]))
    total = len(names) * (rounds + 1 + memory)
    with _progress() as progress:
        task = progress.add_task(f"{model} {size}", total=total)
        rows = run(
            model,
            size,
            rounds=rounds,
            names=names,
            memory=memory,
            tick=lambda name: progress.update(task, advance=1, description=name),
        )
    _print(rows)
    for row in rows:
        if memory and row.peak_mb is None:
            typer.echo(
                f"{row.name}: no peak, its process died, likely for want of memory.", err=True
            )
    if json is not None:
        _write(json, model, size, rows)
    if plot is not None:
        _draw(plot, model, size, rows)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), transient=True)


def _print(rows: list[Row]) -> None:
    base = next(row for row in rows if row.name == "dropout")
    print_table(
        ["method", "× dropout", "90 % interval", "ms a step", "peak MB", "× memory"],
        [
            [
                row.name,
                f"{row.ratio:.2f}",
                f"{row.low:.2f} … {row.high:.2f}",
                f"{row.seconds * 1000:.1f}",
                "" if row.peak_mb is None else f"{row.peak_mb:.0f}",
                f"{row.peak_mb / base.peak_mb:.2f}" if row.peak_mb and base.peak_mb else "",
            ]
            for row in rows
        ],
        numbers=["× dropout", "90 % interval", "ms a step", "peak MB", "× memory"],
    )


def _write(path: Path, model: str, size: str, rows: list[Row]) -> None:
    from undrop.files import write_json

    write_json(path, {"model": model, "size": size, "rows": [row.to_json() for row in rows]})


def _draw(path: Path, model: str, size: str, rows: list[Row]) -> None:
    from undrop.lab.bench.plot import draw

    draw(path, f"{model}, {size}", rows)
