"""Run the paper's experiments: only what is missing; stop and resume at any time."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undrop.lab.cli import COMMANDS
from undrop.lab.cli._errors import INTERRUPTED
from undrop.lab.cli._names import experiments as experiment_names
from undrop.lab.cli._names import named
from undrop.lab.cli._output import print_table

if TYPE_CHECKING:
    from undrop.lab.reproduce import Plan, Records

RESULTS = Path("results")
"""Where results go without --results."""

_EXECUTORS = {"local": "processes on this machine", "ray": "a Ray cluster"}


def scales() -> Mapping[str, str]:
    """Return the scales of experiments."""
    from undrop.lab.reproduce.tables import SCALES

    return SCALES


@COMMANDS.register("reproduce")
def reproduce(
    experiments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of experiments.",
            show_default="all",
            **named("experiment", experiment_names),
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke, small or paper.", **named("scale", scales))
    ] = "small",
    seeds: Annotated[int, typer.Option(min=1, help="The number of seeds: 1, 2, …")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, with one thread each.")] = 1,
    executor: Annotated[
        str,
        typer.Option(help="local, or ray for a cluster.", **named("executor", lambda: _EXECUTORS)),
    ] = "local",
    results: Annotated[
        Path | None, typer.Option(help="The folder of the records.", show_default="results/SCALE")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Read corpora from this folder; do not download them.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the missing runs and their time.")
    ] = False,
) -> None:
    """Run the experiments that have no record yet, and keep every record as it comes."""
    from undrop.errors import StoppedError
    from undrop.lab.cli._progress import CampaignProgress
    from undrop.lab.reproduce import Campaign, Plan, Records, executor_named
    from undrop.report import Progress

    source = str(data_dir.absolute()) if data_dir is not None else None
    plan = Plan(experiments or list(experiment_names()), scale, seeds, source)
    folder = results or RESULTS / scale
    if dry_run:
        _show(plan, Records(folder / "records"))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Progress() as progress:
            listener = CampaignProgress(progress, jobs)
            campaign = Campaign(plan, folder, executor_named(executor, jobs), listener)
            if stale := len(campaign.records.stale):
                records = "record" if stale == 1 else "records"
                progress.print(f"left out {stale} {records} whose settings no longer exist.")
            errors = campaign.run()
    except (StoppedError, KeyboardInterrupt):
        typer.echo("stopped: the same command resumes here.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(
        f"{len(campaign.records)} records in {folder}: `undrop report {folder}` summarizes them."
    )
    if errors:
        raise typer.Exit(1)


def _show(plan: Plan, records: Records) -> None:
    from undrop.report import duration

    missing = plan.missing(records)
    estimates = plan.estimates(missing, records)
    rows = [[run.title, f"{run.cost:g}", duration(estimates[run.key])] for run in missing]
    waiting = plan.waiting(records)
    for cell, count in waiting:
        name = f"{cell.setting.name} {cell.method.name}"
        rows.append([f"{name}, the best variant, {count} more seeds", f"{cell.method.cost:g}", ""])
    print_table(["run", "cost of a step", "about"], rows, numbers={"cost of a step", "about"})
    done = len(plan.needed(records)) - len(missing)
    wanted = len(missing) + sum(count for _, count in waiting)
    left = duration(plan.remaining(records))
    typer.echo(f"{done} runs are done, {wanted} are missing: about {left} on one core.")
