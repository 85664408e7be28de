"""Run the paper's experiments that have no results yet; stop and resume at any time."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undrop.errors import OptionError, StoppedError
from undrop.lab.cli import COMMANDS
from undrop.lab.cli._names import experiments as experiment_names
from undrop.lab.cli._names import one_of
from undrop.lab.cli._output import INTERRUPTED
from undrop.lab.reproduce.tables import SCALES, experiments_at
from undrop.report import Progress, Table, duration

if TYPE_CHECKING:
    from undrop.lab.reproduce.records import Records
    from undrop.lab.reproduce.worklist import Worklist

SCOREBOARD = "scoreboard"
RESULTS = Path("results")
"""The folder in which results get their folders if there is no ``--results``."""

_EXECUTORS = {"local": "processes on this machine", "ray": "a Ray cluster"}


@COMMANDS.register("reproduce")
def reproduce(
    experiments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of experiments, or only `scoreboard`.",
            show_default="all at this scale",
            **one_of("experiment", lambda: {**experiment_names(), SCOREBOARD: "seven small tasks"}),
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke, small, medium or paper.", **one_of("scale", SCALES))
    ] = "small",
    seeds: Annotated[int, typer.Option(min=1, help="The number of seeds; seeds are 1, 2, …")] = 3,
    jobs: Annotated[
        int, typer.Option(min=1, help="The number of runs in parallel, with one thread each.")
    ] = 1,
    executor: Annotated[
        str, typer.Option(help="local, or ray for a cluster.", **one_of("executor", _EXECUTORS))
    ] = "local",
    results: Annotated[
        Path | None, typer.Option(help="The folder for the results.", show_default="results/SCALE")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Read corpora from this folder; do not download them.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the missing runs and their time.")
    ] = False,
    step_costs: Annotated[
        bool, typer.Option("--step-costs", help="Only measure the time of a step of each method.")
    ] = False,
) -> None:
    """Execute the runs that have no record yet, and save each record when its run ends."""
    from undrop.lab.reproduce.records import Records
    from undrop.lab.reproduce.worklist import Worklist

    if experiments == [SCOREBOARD]:
        unsupported = {"--dry-run": dry_run, "--step-costs": step_costs}
        unsupported |= {"--scale": scale != "small", "--executor": executor != "local"}
        for option in (name for name, is_used in unsupported.items() if is_used):
            raise OptionError(f"the scoreboard takes no {option}: leave it out.")
        _run_scoreboard(results or RESULTS / SCOREBOARD, data_dir, seeds, jobs)
        return
    data_folder = str(data_dir.absolute()) if data_dir is not None else None
    worklist = Worklist(experiments or experiments_at(scale), scale, seeds, data_folder)
    folder = results or RESULTS / scale
    if dry_run:
        _print_missing(worklist, Records(folder / "records"))
    elif step_costs:
        _print_step_costs(worklist, data_folder)
    else:
        _run_campaign(worklist, folder, executor, jobs)


def _run_campaign(worklist: Worklist, folder: Path, executor: str, jobs: int) -> None:
    from undrop.lab.cli._progress import CampaignProgress
    from undrop.lab.reproduce.campaign import EXECUTORS, Campaign

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Progress() as progress:
            listener = CampaignProgress(progress, jobs)
            campaign = Campaign(worklist, folder, EXECUTORS[executor](jobs), listener)
            if stale := len(campaign.records.stale):
                progress.print(f"ignored {_records(stale)} with settings that no longer exist.")
            errors = campaign.run()
    except (StoppedError, KeyboardInterrupt):
        typer.echo("stopped: run the same command again to resume.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(f"{_records(len(campaign.records))} in {folder}: see `undrop report {folder}`.")
    if errors:
        raise typer.Exit(1)


def _records(count: int) -> str:
    return f"{count} record" if count == 1 else f"{count} records"


def _run_scoreboard(folder: Path, data_dir: Path | None, seeds: int, jobs: int) -> None:
    from undrop.lab.scoreboard.board import run_board

    if data_dir is None:
        raise OptionError(
            "the scoreboard needs --data-dir: a folder with ptb, wikitext-2, tinyshakespeare and "
            "fashion-mnist."
        )
    count = run_board(
        folder,
        data_dir,
        seeds=seeds,
        jobs=jobs,
        on_record=lambda spec, record: typer.echo(f"{spec}: {record['validation']:.4f}", err=True),
    )
    typer.echo(f"{_records(count)} in {folder}: see `undrop report {folder}`.")


def _print_step_costs(worklist: Worklist, data_dir: str | None) -> None:
    """Measure the step costs of the worklist's settings, and print them as in step_costs.toml."""
    from undrop.lab.reproduce import tables
    from undrop.lab.reproduce.worker import measure_step_costs, use_one_thread

    use_one_thread()
    cells = worklist.cells.values()
    for base in dict.fromkeys(cell.setting.base for cell in cells):
        methods = {c.method.name: c.method for c in cells if c.setting.base == base}
        setting = tables.setting(base, worklist.scale)
        typer.echo(f"[{worklist.scale}.{base}]")
        costs = measure_step_costs(setting, list(methods.values()), data_dir=data_dir)
        for name, cost in costs.items():
            typer.echo(f"{name} = {cost:.2f}")


def _print_missing(worklist: Worklist, records: Records) -> None:
    missing = worklist.missing(records)
    seconds = worklist.estimated_seconds(missing, records)
    rows = [[run.title, f"{run.cost:g}", duration(seconds[run.key])] for run in missing]
    waiting = worklist.waiting(records)
    for cell, count in waiting:
        name = f"{cell.setting.name} {cell.method.name}"
        rows.append([f"{name}, the best variant, {count} more seeds", f"{cell.method.cost:g}", ""])
    headings = ("run", "cost of a step", "estimated time")
    typer.echo(Table(headings, rows, numbers=headings[1:]).text())
    done = len(worklist.needed(records)) - len(missing)
    remaining = len(missing) + sum(count for _, count in waiting)
    time_left = duration(worklist.remaining_seconds(records))
    typer.echo(f"{done} runs are done, {remaining} are missing: about {time_left} on one core.")
