"""Run the paper's experiments: what is missing and nothing else; stop and go on at will."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undrop.lab.cli._errors import INTERRUPTED
from undrop.lab.cli._output import print_table

if TYPE_CHECKING:
    from undrop.lab.reproduce.plan import Plan
    from undrop.lab.reproduce.records import Records

__all__ = ["register"]

RESULTS = Path("results")
"""Where results go that were given no --results."""


def register(app: typer.Typer) -> None:
    """Add ``undrop reproduce``."""
    app.command("reproduce", help=__doc__)(reproduce)


def reproduce(
    experiments: Annotated[
        list[str] | None, typer.Argument(help="Names of experiments.", show_default="all")
    ] = None,
    scale: Annotated[str, typer.Option(help="smoke, small or paper.")] = "small",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds: 1, 2, …")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, with one thread each.")] = 1,
    executor: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    results: Annotated[
        Path | None, typer.Option(help="The folder of records.", show_default="results/SCALE")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Read corpora from here, do not download them.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the runs that are missing, and the time.")
    ] = False,
) -> None:
    """Run experiments, with progress on stderr."""
    from undrop.errors import StoppedError
    from undrop.lab.cli._campaign import campaign_listener
    from undrop.lab.reproduce import EXPERIMENTS, Campaign, Plan, Records, executor_named

    source = str(data_dir.absolute()) if data_dir is not None else None
    plan = Plan(experiments or EXPERIMENTS, scale, seeds, source)
    folder = results or RESULTS / scale
    if dry_run:
        _show(plan, Records(folder / "records"))
        return
    listener = campaign_listener(jobs)
    campaign = Campaign(plan, folder, executor_named(executor, jobs), listener)
    if stale := len(campaign.records.stale):
        typer.echo(f"records left out, whose settings are no more: {stale}.", err=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        errors = campaign.run()
    except (StoppedError, KeyboardInterrupt):
        typer.echo("stopped: the same command goes on where this one was.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        listener.close()
    typer.echo(
        f"{len(campaign.records)} records in {folder}: `undrop report {folder}` sums them up."
    )
    if errors:
        raise typer.Exit(1)


def _show(plan: Plan, records: Records) -> None:
    from undrop.lab.cli._progress import duration

    missing = plan.missing(records)
    estimates = plan.estimates(missing, records)
    rows = [[run.title, f"{run.cost:g}", duration(estimates[run.key])] for run in missing]
    waiting = plan.waiting(records)
    for cell, count in waiting:
        title = (
            f"{cell.setting.name} {cell.method.name}, the best of its tuning, {count} more seeds"
        )
        rows.append([title, f"{cell.method.cost:g}", ""])
    print_table(["run", "cost of a step", "about"], rows, numbers={"cost of a step", "about"})
    there = len(plan.needed(records)) - len(missing)
    wanted = len(missing) + sum(count for _, count in waiting)
    left = duration(plan.remaining(records))
    typer.echo(f"{there} runs are there; {wanted} are missing: about {left} on one core.")
