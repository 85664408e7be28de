"""Measure the time and memory of every method on this machine, as ratios to dropout."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undrop.lab.cli import COMMANDS, Answer
from undrop.lab.cli._names import bench_methods, bench_models, check_name, one_of
from undrop.lab.cli._output import check_outputs
from undrop.report import Progress, Table, as_json

if TYPE_CHECKING:
    from undrop.lab.bench import MethodTime

_SIZES = {"small": "seconds on a laptop", "paper": "the sizes of the paper"}


@COMMANDS.register("bench")
def bench(
    model: Annotated[
        str, typer.Option(help="The model to time.", **one_of("bench model", bench_models))
    ] = "awd-lstm",
    size: Annotated[
        str, typer.Option(help="small or paper.", **one_of("bench size", _SIZES))
    ] = "small",
    rounds: Annotated[int, typer.Option(help="How many times to time each method.", min=1)] = 10,
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas; all by default.")
    ] = "",
    memory: Annotated[bool, typer.Option(help="Also measure peak memory.")] = True,
    save: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios: png, pdf or svg.")] = None,
    threads: Annotated[
        int, typer.Option(help="The number of torch threads; 0 keeps torch's default.", min=0)
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, or auto for the fastest.")] = "cpu",
) -> Answer:
    """Time the forward and backward pass of a step with each method, in turn, in one process."""
    chosen = [name.strip() for name in methods.split(",") if name.strip()]
    for name in chosen:
        check_name("bench method", name, bench_methods())
    check_outputs(files=[save], pictures=[plot])
    import torch

    from undrop.files import write_json
    from undrop.lab.bench import BASELINE, METHODS, draw_ratios
    from undrop.lab.bench import bench as time_methods
    from undrop.lab.train.environment import find_device

    device = str(find_device(device, "--device"))
    if threads:
        torch.set_num_threads(threads)
    names = list(dict.fromkeys([BASELINE, *(chosen or METHODS)]))
    total, done = len(names) * (rounds + 1 + memory), itertools.count(1)
    with Progress() as progress:
        bar = progress.bar(f"{model} {size}")
        rows = time_methods(
            *(model, size),
            rounds=rounds,
            names=names,
            memory=memory,
            device=device,
            tick=lambda name: bar.show(next(done) / total, name),
        )
    result = {"model": model, "size": size, "rows": rows}
    for row in rows:
        if memory and row.peak_mb is None:
            typer.echo(
                f"{row.name}: no peak memory, because its process died (perhaps out of memory), or "
                f"because {device} does not report it.",
                err=True,
            )
    files = (
        (save, lambda path: write_json(path, as_json(result))),
        (plot, lambda path: draw_ratios(path, f"{model}, {size}", rows)),
    )
    return Answer(result, _table(rows), files=files)


def _table(rows: list[MethodTime]) -> Table:
    baseline = next(row for row in rows if row.name == "dropout")
    headings = ["method", "× dropout", "90 % interval", "ms per step", "peak MB", "× memory"]
    cells = [
        [
            row.name,
            f"{row.ratio:.2f}",
            f"{row.low:.2f} … {row.high:.2f}",
            f"{row.seconds * 1000:.1f}",
            "" if row.peak_mb is None else f"{row.peak_mb:.0f}",
            f"{row.peak_mb / baseline.peak_mb:.2f}" if row.peak_mb and baseline.peak_mb else "",
        ]
        for row in rows
    ]
    columns = len(headings) if baseline.peak_mb is not None else len(headings) - 2
    return Table(headings[:columns], [row[:columns] for row in cells], numbers=headings[1:])
